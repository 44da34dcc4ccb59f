"""Prompts of a corpus, read one at a time from JSONL or Parquet.

A line of JSONL is an object, and a row of Parquet has columns: either ``token_ids`` (ints) or ``text``, and perhaps a
``cache_salt``. Whatever else is there is ignored, and a null is as good as absent. Prompts and salts may be secret: no
reason and no error shows them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..checks import plain_text
from ..core.hashing import TokenIds, token_array
from ..errors import ConfigError, InvalidTokensError, MissingLibraryError

#: Text to token ids.
Tokenizer: TypeAlias = Callable[[str], Sequence[int]]

_LINES: Final = (".jsonl", ".ndjson", ".json")
_PACKED_LINES: Final = tuple(f"{suffix}.gz" for suffix in _LINES)
_ROWS: Final = ".parquet"
_KNOWN: Final = (*_LINES, *_PACKED_LINES, _ROWS)
_BOM: Final = b"\xef\xbb\xbf"
_COLUMNS: Final = ("token_ids", "text", "cache_salt")
#: Rows of Parquet in memory at once: few, since one prompt may have a million tokens.
_ROWS_AT_ONCE: Final = 64
#: Bytes of each column that are read at once; a whole row group may not fit into memory.
_READ_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a corpus."""

    token_ids: TokenIds
    #: As in ``client.sequence``: prompts with different salts share nothing.
    cache_salt: str | None = None
    #: Its line or row in the file, from 1; 0 where there is none.
    line: int = 0


@dataclass(frozen=True, slots=True)
class WrongLine:
    """A line or row that is no prompt."""

    line: int
    reason: str


def read_prompts(path: Path, tokenizer: Tokenizer | None = None) -> Iterator[Prompt | WrongLine]:
    """The prompts of a file, in its order, each read when it is asked for; what is no prompt is a ``WrongLine``.

    The suffix tells the format: ``.jsonl``, ``.ndjson`` or ``.json``, one object a line, also with ``.gz`` behind it;
    or ``.parquet``. Empty lines are passed over, and count as lines. Token ids are ints from 0 to 2^63 - 1, in a NumPy
    array of the prompt's own. Reading blocks.

    Raises ``ConfigError`` for another suffix, for a file that cannot be read or turns out to be damaged (after what
    lies before the damage), for columns of wrong types, and at the first text if there is no ``tokenizer``;
    ``MissingLibraryError`` for Parquet without pyarrow.
    """
    name = path.name.lower()
    if name.endswith(_LINES):
        return _read_lines(path, tokenizer, packed=False)
    if name.endswith(_PACKED_LINES):
        return _read_lines(path, tokenizer, packed=True)
    if name.endswith(_ROWS):
        return _read_rows(path, tokenizer, _load_pyarrow())
    raise ConfigError(f"the name of the prompts' file {path} must end in one of {', '.join(_KNOWN)}")


def _read_lines(path: Path, tokenizer: Tokenizer | None, *, packed: bool) -> Iterator[Prompt | WrongLine]:
    with _open(path) as file, gzip.GzipFile(fileobj=file) if packed else file as lines:
        number = 0
        try:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(_BOM)
                if line and not line.isspace():
                    yield _from_line(line, f"{path}:{number}", number, tokenizer)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(
                f"the prompts' file {path} cannot be read behind line {number}: {_words_of(error)}"
            ) from error


def _from_line(line: bytes, where: str, number: int, tokenizer: Tokenizer | None) -> Prompt | WrongLine:
    try:
        # Bytes would be taken for UTF-16 if they look like it.
        entry = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return WrongLine(number, f"no UTF-8: {error.reason} at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return WrongLine(number, f"no JSON: {error.msg.removesuffix(' at')} at column {error.pos + 1}")
    except (ValueError, RecursionError):
        return WrongLine(number, "no JSON that can be read: a number is too long, or too much is nested")
    if not isinstance(entry, dict):
        return WrongLine(number, f"not a JSON object, but of type {type(entry).__name__}")
    try:
        return _prompt(entry.get("token_ids"), entry.get("text"), entry.get("cache_salt"), where, number, tokenizer)
    except InvalidTokensError as error:
        return WrongLine(number, str(error))


def _read_rows(path: Path, tokenizer: Tokenizer | None, pyarrow: ModuleType) -> Iterator[Prompt | WrongLine]:
    number = 0
    with _open(path) as raw:
        try:
            file = pyarrow.parquet.ParquetFile(raw, buffer_size=_READ_AT_ONCE, page_checksum_verification=True)
            columns = _columns_of(file.schema_arrow, path, pyarrow)
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False):
                cells = [batch.column(name) if name in columns else None for name in _COLUMNS]
                for row in range(batch.num_rows):
                    number += 1
                    yield _from_row(cells, row, f"{path}, row {number}", number, tokenizer)
            # Some damage looks like an early end.
            if number != file.metadata.num_rows:
                raise EOFError(f"it ends there, and should have {file.metadata.num_rows} rows")
        except (OSError, EOFError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise ConfigError(
                f"the prompts' file {path} cannot be read behind row {number}: {_words_of(error)}"
            ) from error


def _columns_of(schema: Any, path: Path, pyarrow: ModuleType) -> list[str]:
    """Those that have prompts; a whole column of a wrong type is one error, not a wrong row each."""
    found = []
    for name in _COLUMNS:
        fields = [schema.field(place) for place in schema.get_all_field_indices(name)]
        if len(fields) > 1:
            raise ConfigError(f"the prompts' file {path} has {len(fields)} columns named {name}")
        if not fields or pyarrow.types.is_null(fields[0].type):
            continue
        fits = _has_ids if name == "token_ids" else _has_text
        if not fits(fields[0].type, pyarrow.types):
            wanted = "lists of ints" if name == "token_ids" else "text"
            raise ConfigError(f"the column {name} of {path} must hold {wanted}, not {fields[0].type}")
        found.append(name)
    if not {"token_ids", "text"}.intersection(found):
        raise ConfigError(f"the prompts' file {path} must have a column token_ids or text")
    return found


def _has_ids(kind: Any, types: ModuleType) -> bool:
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(listed and types.is_integer(kind.value_type))


def _has_text(kind: Any, types: ModuleType) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _from_row(
    cells: Sequence[Any], row: int, where: str, number: int, tokenizer: Tokenizer | None
) -> Prompt | WrongLine:
    ids, text, salt = (None if column is None else column[row] for column in cells)
    try:
        return _prompt(
            None if ids is None or not ids.is_valid else _ids_of(ids.values),
            None if text is None else text.as_py(),
            None if salt is None else salt.as_py(),
            where,
            number,
            tokenizer,
        )
    except UnicodeDecodeError as error:
        return WrongLine(number, f"no UTF-8: {error.reason} at byte {error.start + 1}")
    except InvalidTokensError as error:
        return WrongLine(number, str(error))


def _ids_of(values: Any) -> NDArray[np.integer]:
    """A copy, since one prompt that is kept must not keep its neighbours' memory."""
    if values.null_count:
        raise InvalidTokensError("a null is among the token_ids")
    return np.array(values.to_numpy())


def _prompt(
    token_ids: object, text: object, cache_salt: object, where: str, number: int, tokenizer: Tokenizer | None
) -> Prompt:
    """Raises ``InvalidTokensError`` with the reason why this is none."""
    if (token_ids is None) == (text is None):
        found = "neither token_ids nor text" if text is None else "both token_ids and text"
        raise InvalidTokensError(f"{found}; a prompt has one of them")
    salt = None if cache_salt is None else plain_text(cache_salt, "cache_salt", InvalidTokensError, secret=True)
    ids = _checked_ids(token_ids) if text is None else _tokenized(text, where, tokenizer)
    if not len(ids):
        raise InvalidTokensError("an empty prompt: it has no token")
    return Prompt(ids, salt, number)


def _checked_ids(token_ids: object) -> TokenIds:
    if isinstance(token_ids, np.ndarray):
        return token_array(token_ids)
    if not isinstance(token_ids, list):
        raise InvalidTokensError(f"token_ids must be a list of ints, not of type {type(token_ids).__name__}")
    # A bool in the middle would pass for an int, and NumPy gives each item the room of the longest text.
    if set(map(type, token_ids)) - {int}:
        place = next(place for place, value in enumerate(token_ids) if type(value) is not int)
        raise InvalidTokensError(f"token_ids[{place}] must be an int, not of type {type(token_ids[place]).__name__}")
    return token_array(token_ids)


def _tokenized(text: object, where: str, tokenizer: Tokenizer | None) -> TokenIds:
    text = plain_text(text, "text", InvalidTokensError, may_be_empty=True, secret=True)
    if tokenizer is None:
        raise ConfigError(f"{where}: this prompt is text; give a tokenizer, or prompts as token_ids")
    try:
        answer = tokenizer(text)
    except Exception as error:
        # Its words may have the prompt's text.
        raise InvalidTokensError(f"the tokenizer raised {type(error).__name__}") from None
    try:
        return token_array(answer)
    except InvalidTokensError as error:
        raise InvalidTokensError(f"of the tokenizer's answer, {error}") from None


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot open the prompts' file {path}: {error.strerror}") from error


def _words_of(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _load_pyarrow() -> ModuleType:
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError as error:
        raise MissingLibraryError(
            f"pyarrow is needed to read prompts from Parquet, and did not load: {error}; "
            "install it with: pip install 'mooncake-sparse-client[parquet]'"
        ) from error
