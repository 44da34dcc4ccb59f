"""What ``precompute`` and ``verify`` share: which corpus, which cache, which store."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast, get_args

from ..client import SparseStoreClient
from ..config import Limits, load_retention
from ..config_values import Mode, parse_size
from ..core.layout import KVCacheLayout
from ..core.masks import check_retention_interval
from ..core.presets import PRESETS, layout_for
from ..errors import ConfigError
from ..identity import Identity, Profile, resolve_identity
from ..jobs.options import DEFAULT_OPTIONS
from ..jobs.producers import Producer, load_object, load_producer
from ..jobs.prompts import Tokenizer
from ..replication import Replication
from ..settings import ConnectSettings
from ..stores.memory import MemoryStore
from .arguments import interval_of, naming
from .demo import number

AnyProducer: TypeAlias = Producer[object]
#: The store of this process, which goes with it: to try things out.
MEMORY = "memory"
_NUMPY, _TRANSFORMERS = "numpy", "transformers"
#: Tokens. So much of a long prompt is computed again at most after a kill, and whoever parts from it elsewhere than the
#: corpus's own prompts do loses no more.
_DEFAULT_RETENTION = 16384


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Which prompts, and which cache their KV belongs to."""
    parser.add_argument(
        "corpus",
        type=Path,
        help='JSONL (also .gz) or Parquet: one prompt a line or row, {"token_ids": [...]} or {"text": ...}',
    )
    cache = parser.add_argument_group("the cache: what the serving side says too, or it finds nothing")
    cache.add_argument("--layout", choices=sorted(PRESETS), help="a preset; default: the producer's own")
    cache.add_argument("--scale", type=number, default=1.0, help="factor on a preset's page sizes, to try things out")
    cache.add_argument(
        "--producer",
        metavar="WHAT",
        help=f"what computes: {_NUMPY} (made-up bytes, to try things out), {_TRANSFORMERS} (with --model), or "
        "module:factory",
    )
    cache.add_argument("--model", metavar="PATH", help="of the transformers producer: a model's folder or hub name")
    cache.add_argument("--device", help="that the model runs on; default: a GPU if PyTorch finds one, else the CPU")
    cache.add_argument("--block-size", type=int, default=16, metavar="N", help="of that model's layout; default: 16")
    cache.add_argument(
        "--tokenizer", metavar="WHAT", help="for text: module:function, text to token ids; default: that of --model"
    )
    cache.add_argument(
        "--model-name", metavar="NAME", help="in the keys; default: the layout's, or the name of --model"
    )
    cache.add_argument("--revision", default="", help="of the weights; default: none is said")
    cache.add_argument("--dtype", help="of the cached numbers; default: the model's, else bfloat16")
    cache.add_argument("--profile", choices=get_args(Profile), default="native", help="default: %(default)s")
    cache.add_argument(
        "--retention",
        metavar="N",
        help="interval in tokens between boundaries that are kept besides ends and junctions; 0 for no others, 'none' "
        f"for every one; default: what the environment says, else {_DEFAULT_RETENTION}",
    )


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the cache lies."""
    store = parser.add_argument_group("the store")
    store.add_argument(
        "--store",
        metavar="WHERE",
        help=f"HOST:PORT of a master (of an owner process in mode shared), or {MEMORY}: this process's own, to try "
        "things out; default: as the environment says",
    )
    store.add_argument("--mode", choices=get_args(Mode), help="default: as the environment says, else remote")
    store.add_argument("--requests-per-second", type=int, metavar="N", help="at most so many, beside serving")
    store.add_argument("--bytes-per-second", metavar="SIZE", help="of values, such as 200MB")
    store.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="of a call to the store; default: 120"
    )
    store.add_argument(
        "--patience",
        type=float,
        default=DEFAULT_OPTIONS.patience_seconds,
        metavar="SECONDS",
        help="for a store that is out of reach or full; default: %(default)s",
    )


def add_writing_arguments(parser: argparse.ArgumentParser) -> None:
    """How the store is to keep what is written."""
    writing = parser.add_argument_group("what must stay")
    writing.add_argument("--replicas", type=int, default=1, metavar="N", help="copies of each value; default: 1")
    writing.add_argument(
        "--soft-pin",
        type=float,
        nargs="?",
        const=math.inf,
        metavar="SECONDS",
        help="evict it only when nothing else is left; for so long, or as long as the store says",
    )
    writing.add_argument("--hard-pin", action="store_true", help="never evict it; it can fill the store for good")


@dataclass(frozen=True, slots=True)
class Cache:
    """What the arguments say of the cache."""

    layout: KVCacheLayout
    model_name: str
    dtype: str
    revision: str
    profile: Profile
    retention: int | None
    retention_origin: str

    @property
    def identity(self) -> Identity:
        """Its hashes and keys, without a store."""
        return resolve_identity(
            self.layout, model_name=self.model_name, dtype=self.dtype, revision=self.revision, profile=self.profile
        )


def cache_of(arguments: argparse.Namespace, layout: KVCacheLayout, dtype: str | None = None) -> Cache:
    """``dtype``: what the producer says of its numbers. Raises ``ConfigError``."""
    retention = load_retention()
    interval, origin = retention.interval, retention.origin
    if origin == "default":
        interval = max(layout.align(_DEFAULT_RETENTION), layout.alignment)
    with naming("--retention" if arguments.retention is not None else origin):
        if arguments.retention is not None:
            interval, origin = interval_of(arguments.retention), "--retention"
        check_retention_interval(layout, interval)
    return Cache(
        layout,
        model_name=_model_name(arguments),
        dtype=arguments.dtype or dtype or "bfloat16",
        revision=arguments.revision,
        profile=arguments.profile,
        retention=interval,
        retention_origin=origin,
    )


def _model_name(arguments: argparse.Namespace) -> str:
    if arguments.model_name or arguments.layout:
        return str(arguments.model_name or arguments.layout)
    if arguments.model is None:
        raise ConfigError("--model-name is missing: what the keys call the model, as the serving side does")
    # However a folder is written, it is one model.
    folder = Path(arguments.model)
    return folder.resolve().name if folder.is_dir() else str(arguments.model)


def preset_of(arguments: argparse.Namespace) -> KVCacheLayout | None:
    """The layout that ``--layout`` and ``--scale`` name."""
    if arguments.layout is None:
        return None
    with naming("--scale"):
        return layout_for(arguments.layout, scale=arguments.scale)


def producer_of(arguments: argparse.Namespace) -> tuple[AnyProducer, str | None]:
    """What ``--producer`` names, made, and the type of its numbers if it says so. Loads models. Raises
    ``ConfigError``."""
    preset = preset_of(arguments)
    if arguments.producer is None:
        raise ConfigError(f"--producer is missing: {_NUMPY}, {_TRANSFORMERS} or module:factory")
    if arguments.producer == _NUMPY:
        from ..jobs.numpy_producer import NumpyProducer

        if preset is None:
            raise ConfigError(f"--producer {_NUMPY} wants a --layout: one of {', '.join(sorted(PRESETS))}")
        return cast(AnyProducer, NumpyProducer(preset)), None
    if arguments.producer == _TRANSFORMERS:
        from ..integrations.model_producer import ModelProducer, usual_device

        _check_model(arguments)
        made = ModelProducer.from_pretrained(
            arguments.model, arguments.block_size, dtype=arguments.dtype, device=arguments.device or usual_device()
        )
        return cast(AnyProducer, made), made.kv.dtype
    return load_producer(arguments.producer, preset), None


def layout_of(arguments: argparse.Namespace) -> tuple[KVCacheLayout, str | None]:
    """The layout alone, and the type of the numbers if a model says so; loads no weights. Raises ``ConfigError``."""
    if arguments.producer == _TRANSFORMERS:
        from ..integrations.model_producer import model_kv_of

        _check_model(arguments)
        kv = model_kv_of(arguments.model, arguments.block_size, dtype=arguments.dtype)
        return kv.layout, kv.dtype
    preset = preset_of(arguments)
    if preset is not None:
        return preset, None
    if arguments.producer is None:
        raise ConfigError("--layout is missing, or --producer transformers with a --model")
    return load_producer(arguments.producer, None).layout, None


def _check_model(arguments: argparse.Namespace) -> None:
    if arguments.model is None:
        raise ConfigError(f"--producer {_TRANSFORMERS} wants a --model: its folder, or its name on the hub")
    if arguments.layout is not None:
        raise ConfigError(f"--layout is for presets; --producer {_TRANSFORMERS} has the layout of its model")


def tokenizer_for(arguments: argparse.Namespace) -> Tokenizer | None:
    """Of ``--tokenizer``, else of ``--model``; None where there is neither. Raises ``ConfigError``."""
    if arguments.tokenizer is not None:
        made = load_object(arguments.tokenizer, "--tokenizer")
        if not callable(made):
            raise ConfigError(f"--tokenizer {arguments.tokenizer!r} is no function, but {made!r}")
        return cast("Callable[[str], Sequence[int]]", made)
    if arguments.model is None:
        return None
    from ..integrations.model_producer import tokenizer_of

    model, found = arguments.model, list[Tokenizer]()

    def tokenizer(text: str) -> Sequence[int]:
        if not found:  # a corpus of ids wants none, and a model may have none
            found.append(tokenizer_of(model))
        return found[0](text)

    return tokenizer


def client_of(arguments: argparse.Namespace, cache: Cache) -> SparseStoreClient:
    """A client of the store that the arguments name, to be entered. Raises ``ConfigError``."""
    settings: ConnectSettings = {
        "dtype": cache.dtype,
        "revision": cache.revision,
        "profile": cache.profile,
        "retention_interval": cache.retention,
        "limits": _limits(arguments),
        "timeout": arguments.timeout,
    }
    replication = _replication(arguments)
    if arguments.store == MEMORY:
        if arguments.mode is not None or replication is not None:
            what = "--replicas, --soft-pin and --hard-pin" if arguments.mode is None else f"--mode {arguments.mode}"
            raise ConfigError(f"{what} is for a Mooncake, and --store {MEMORY} is none")
        return SparseStoreClient(MemoryStore(), cache.layout, model_name=cache.model_name, **settings)  # type: ignore[misc]
    if arguments.store is not None:
        key = "owner_address" if arguments.mode == "shared" else "master_server_address"
        settings[key] = arguments.store  # type: ignore[literal-required]
    if replication is not None:
        settings["replication"] = replication
    with naming("--store"):
        return SparseStoreClient.connect(cache.layout, model_name=cache.model_name, mode=arguments.mode, **settings)


def _limits(arguments: argparse.Namespace) -> Limits:
    size = arguments.bytes_per_second
    return Limits(
        requests_per_second=arguments.requests_per_second,
        bytes_per_second=None if size is None else parse_size(size, "--bytes-per-second"),
    )


def _replication(arguments: argparse.Namespace) -> Replication | None:
    """None where nothing is said: the environment's may say something."""
    pin = getattr(arguments, "soft_pin", None)
    replicas, hard = getattr(arguments, "replicas", 1), getattr(arguments, "hard_pin", False)
    if pin is None and replicas == 1 and not hard:
        return None
    with naming("--replicas, --soft-pin or --hard-pin"):
        return Replication(
            replica_num=replicas,
            soft_pin=None if pin is None else True,
            soft_pin_ttl_seconds=None if pin is None or math.isinf(pin) else pin,
            hard_pin=hard,
        )
