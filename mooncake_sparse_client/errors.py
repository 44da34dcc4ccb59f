"""Every exception this package raises, as one tree.

::

    SparseStoreError
    ├── InvalidInputError (ValueError)     the call is wrong: change the calling code
    │   ├── InvalidLayoutError             a KVCacheLayout or a spec that cannot be
    │   ├── InvalidTokensError             token ids, LoRA, salt, multimodal items, embeddings
    │   ├── InvalidHasherError             hash algorithm, seed or hash block size
    │   ├── InvalidRetentionError          retention interval
    │   ├── InvalidKeyError                model name, ranks or another part of a store key
    │   ├── InvalidBufferError             a source's or sink's memory does not fit
    │   └── InvalidRequestError            token counts and options that contradict each other
    ├── SetupError                         the set-up is wrong: change settings or machine
    │   ├── ConfigError (ValueError)       a setting, an environment variable or a file
    │   ├── MissingLibraryError (ImportError)  a library is absent or does not load
    │   ├── ConnectError                   no store could be reached
    │   └── LocalProcessError              a local master or owner process did not serve
    ├── ClientClosedError                  the client or store is closed, or not opened yet
    ├── ForkedProcessError                 the client was opened before a fork
    ├── ProducerError                      what computes for an offline job has failed
    └── StoreError                         the store answered, or failed to answer
        ├── StoreUnavailableError          unreachable for now
        │   └── StoreDownError             not asked: it has been out of reach just now
        ├── StoreTimeoutError (TimeoutError)   no answer within the time allowed
        ├── StoreFullError                 no room for now
        ├── StoreRejectedError             the store refuses, and would refuse again
        └── StoreAnswerError               an answer that makes no sense
            └── UnknownCodeError           a code of the native store that this version does not know

The branches follow what a handler would do: mend the code, mend the machine, stop using the object, or
retry. Each class has a stable ``kind`` (a word for metrics and logs, never renamed) and ``retriable``
(whether the same call may succeed later, with nothing else changed). A miss is never an exception.
"""

from __future__ import annotations

from typing import ClassVar, Final


class SparseStoreError(Exception):
    """Root of the tree. ``str(error)`` says what was tried, on what, and what to do."""

    kind: ClassVar[str] = "error"
    retriable: ClassVar[bool] = False


class InvalidInputError(SparseStoreError, ValueError):
    """The caller passed something that can never work. Nothing was sent to the store."""

    kind = "invalid_input"


class InvalidLayoutError(InvalidInputError):
    """A layout or a spec is impossible; the message names the field."""

    kind = "invalid_layout"


class InvalidTokensError(InvalidInputError):
    """Token ids, or what else names a prefix, are unusable."""

    kind = "invalid_tokens"


class InvalidHasherError(InvalidInputError):
    """The hash algorithm, its seed or its block size is unusable."""

    kind = "invalid_hasher"


class InvalidRetentionError(InvalidInputError):
    """A retention interval that is not None, 0 or a positive multiple of the alignment."""

    kind = "invalid_retention"


class InvalidKeyError(InvalidInputError):
    """A part of a store key is missing, of a wrong type or out of range."""

    kind = "invalid_key"


class InvalidBufferError(InvalidInputError):
    """A buffer of a source or sink is missing, too short, too long, or not plain writable bytes."""

    kind = "invalid_buffer"


class InvalidRequestError(InvalidInputError):
    """Numbers or options of one call contradict each other or the sequence they speak of."""

    kind = "invalid_request"


class SetupError(SparseStoreError):
    """Settings or the machine must change before a client can work."""

    kind = "setup"


class ConfigError(SetupError, ValueError):
    """A setting is wrong; the message names the argument, variable or file it came from."""

    kind = "invalid_config"


class MissingLibraryError(SetupError, ImportError):
    """A library cannot be loaded: the native one, or one of an extra. The message has the loader's own words, and the
    line that installs it."""

    kind = "missing_library"


class ConnectError(SetupError):
    """The store could not be reached while connecting; ``step`` says how far it came, in a word.

    ``resolve``: the host's name; ``refused``, ``unreachable``: its port; ``handshake``: the port is open, but what
    listens there is no Mooncake, or does not answer; ``version``: of another version; ``sizes``: segment, buffer or
    pool; ``metadata``: the metadata server; ``setup``: anything else.
    """

    kind = "connect_failed"
    retriable = True

    def __init__(self, message: str, *, step: str = "setup") -> None:
        super().__init__(message)
        self.step = step


class LocalProcessError(SetupError):
    """A Mooncake process that we started did not come up, or went away."""

    kind = "local_process"


class ClientClosedError(SparseStoreError):
    """The object is closed, closing, or was never opened."""

    kind = "closed"

    @classmethod
    def during_a_call(cls) -> ClientClosedError:
        """For a call that was under way when its client was closed."""
        return cls("the client was closed during this call")


class ForkedProcessError(SparseStoreError):
    """A store opened before ``os.fork`` was used in the child, where its connections cannot work."""

    kind = "forked"


class ProducerError(SparseStoreError):
    """What computes KV for an offline job raised an error, which is the cause of this one, or broke its protocol."""

    kind = "producer"


class StoreError(SparseStoreError):
    """The store, or the way to it, failed."""

    kind = "store_error"


class StoreUnavailableError(StoreError):
    """The master or the owner of the memory does not answer for now."""

    kind = "unavailable"
    retriable = True


class StoreDownError(StoreUnavailableError):
    """The store was not asked, since it has been out of reach just now; whether it is back is being looked at."""

    kind = "down"


class StoreTimeoutError(StoreError, TimeoutError):
    """The call did not end within its timeout. A write may or may not have happened."""

    kind = "timeout"
    retriable = True


class StoreFullError(StoreError):
    """There is no room for now; eviction or an expiring lease may make some."""

    kind = "full"
    retriable = True


class StoreRejectedError(StoreError):
    """The store refuses this request for good."""

    kind = "rejected"


class StoreAnswerError(StoreError):
    """The store's answer breaks its own contract (a wrong length, an unknown code)."""

    kind = "bad_answer"


class UnknownCodeError(StoreAnswerError):
    """The native store answered ``code``, which this version does not know. Report it: versions may not fit."""

    kind = "unknown_code"

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


#: Of a store that nothing can be said about for now.
OUT_OF_REACH: Final = (StoreUnavailableError, StoreTimeoutError)
