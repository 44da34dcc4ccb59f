"""Settings: which place wins, and what a wrong one says."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mooncake_sparse_client import FROM_ENV, Limits, MooncakeConfig, load_config
from mooncake_sparse_client.config import (
    DEFAULT_LOCAL_BUFFER,
    DEFAULT_POOL,
    DEFAULT_SEGMENT,
    RETENTION_VARIABLES,
    Retention,
    load_retention,
)
from mooncake_sparse_client.config_values import MIN_POOL_BYTES, MIN_SEGMENT_BYTES, parse_size
from mooncake_sparse_client.errors import ConfigError
from mooncake_sparse_client.replication import Replication

MASTER = {"MOONCAKE_MASTER": "env-host:1"}
MIB = 1 << 20


def write(folder: Path, content: Any) -> str:
    """A config file; text is written as it is."""
    path = folder / "mooncake.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def refused(words: list[str], *arguments: Any, **options: Any) -> str:
    """``load_config`` raises a ConfigError with all ``words``; returns the message."""
    with pytest.raises(ConfigError) as caught:
        load_config(*arguments, **{"environ": {}, **options})
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


# Precedence

#: Setting, its variable, and values in the file, the environment and the argument, as given and as understood.
PLACES: list[tuple[str, str, list[Any], list[Any], Any]] = [
    (
        "master_server_address",
        "MOONCAKE_MASTER",
        ["file:1", "env:2", "arg:3"],
        ["file:1", "env:2", "arg:3"],
        None,
    ),
    (
        "metadata_server",
        "MOONCAKE_TE_META_DATA_SERVER",
        ["etcd://file:1", "http://env:2", "http://arg:3"],
        ["etcd://file:1", "http://env:2", "http://arg:3"],
        "P2PHANDSHAKE",
    ),
    ("protocol", "MOONCAKE_PROTOCOL", ["tcp", "TCP", "Tcp"], ["tcp", "tcp", "tcp"], "tcp"),
    ("device_name", "MOONCAKE_DEVICE", ["file0", "env0", "arg0"], ["file0", "env0", "arg0"], ""),
    (
        "global_segment_size",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE",
        ["32MB", "48 MiB", 64 * MIB],
        [32 * MIB, 48 * MIB, 64 * MIB],
        DEFAULT_SEGMENT,
    ),
    (
        "local_buffer_size",
        "MOONCAKE_LOCAL_BUFFER_SIZE",
        [20 * MIB, "21mb", "22MB"],
        [20 * MIB, 21 * MIB, 22 * MIB],
        DEFAULT_LOCAL_BUFFER,
    ),
    ("tenant_id", "MOONCAKE_TENANT_ID", ["file", "env", "arg"], ["file", "env", "arg"], "default"),
    (
        "pool_size",
        "MOONCAKE_SPARSE_POOL_SIZE",
        ["1MB", "2 MiB", 3 * MIB],
        [MIB, 2 * MIB, 3 * MIB],
        DEFAULT_POOL,
    ),
    ("owner_address", "MOONCAKE_CLIENT", ["file:1", "env:2", "arg:3"], ["file:1", "env:2", "arg:3"], ""),
    ("local_hostname", "MOONCAKE_LOCAL_HOSTNAME", ["file", "env", "arg"], ["file", "env", "arg"], ""),
]


@pytest.mark.parametrize(("name", "variable", "given", "expected", "default"), PLACES, ids=[p[0] for p in PLACES])
def test_argument_then_environment_then_file_then_default(
    tmp_path: Path, name: str, variable: str, given: list[Any], expected: list[Any], default: Any
) -> None:
    master = {} if name == "master_server_address" else {"master_server_address": "any:9"}
    path = write(tmp_path, {**master, name: given[0]})
    from_file = {"MOONCAKE_CONFIG_PATH": path}
    from_env = {**from_file, variable: str(given[1])}
    found = [
        load_config("embedded", environ=from_file),
        load_config("embedded", environ=from_env),
        load_config("embedded", environ=from_env, **{name: given[2]}),
        # The file as an argument still comes after the environment.
        load_config("embedded", environ={variable: str(given[1])}, config=path),
    ]
    assert [getattr(config, name) for config in found] == [*expected, expected[1]]
    if default is not None:
        assert getattr(load_config("embedded", environ=MASTER), name) == default


def test_the_mode_follows_the_same_order(tmp_path: Path) -> None:
    path = write(tmp_path, {"mode": "embedded", "master_server_address": "any:9"})
    environ = {"MOONCAKE_CONFIG_PATH": path}
    assert load_config(environ=environ).mode == "embedded"
    assert load_config(environ={**environ, "MOONCAKE_MODE": "remote"}).mode == "remote"
    assert load_config("embedded", environ={**environ, "MOONCAKE_MODE": "remote"}).mode == "embedded"
    assert load_config(environ=MASTER).mode == "remote"


def test_the_lease_is_a_number_of_seconds() -> None:
    assert load_config(environ=MASTER).lease_seconds == 5.0
    assert load_config(environ=MASTER, lease_seconds=10).lease_seconds == 10.0
    assert load_config(environ=MASTER, lease_seconds="7.5").lease_seconds == 7.5
    assert load_config(environ={**MASTER, "MOONCAKE_SPARSE_LEASE_SECONDS": "8"}).lease_seconds == 8.0
    for lease in (0, -1, "soon", True, float("nan"), float("inf")):
        refused(["lease_seconds", "positive", repr(lease)], environ=MASTER, lease_seconds=lease)


def test_a_named_file_wins_over_the_variable_that_names_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    named, other = write(tmp_path / "a", {"master_server_address": "a:1"}), write(tmp_path, {"mode": "nonsense"})
    environ = {"MOONCAKE_CONFIG_PATH": other}
    assert load_config(environ=environ, config=Path(named)).master_server_address == "a:1"
    assert load_config(environ=environ, config=named).master_server_address == "a:1"


def test_a_ready_config_takes_the_place_of_file_and_environment(tmp_path: Path) -> None:
    ready = MooncakeConfig("ready:1", mode="embedded", global_segment_size=32 * MIB, tenant_id="t", lease_seconds=2.0)
    unread = {"MOONCAKE_CONFIG_PATH": str(tmp_path / "absent.json")}
    assert load_config(config=ready, environ=unread) == ready
    # It says all there is to say: the environment is left aside, arguments are not.
    found = load_config(config=ready, environ={**MASTER, **unread}, tenant_id="u")
    assert (found.master_server_address, found.tenant_id, found.lease_seconds) == ("ready:1", "u", 2.0)
    refused(["config.master_server_address", "'bad'"], config=MooncakeConfig("bad"))


def test_empty_text_in_environment_or_file_is_unset(tmp_path: Path) -> None:
    path = write(tmp_path, {"master_server_address": "file:1", "protocol": "", "tenant_id": None, "device_name": ""})
    environ = {"MOONCAKE_CONFIG_PATH": path, "MOONCAKE_MASTER": "", "MOONCAKE_PROTOCOL": "", "MOONCAKE_MODE": ""}
    found = load_config(environ=environ)
    assert found == MooncakeConfig("file:1")


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    monkeypatch.setenv("MOONCAKE_MASTER", "process:7")
    monkeypatch.setenv("MOONCAKE_TENANT_ID", "process-tenant")
    found = load_config()
    assert (found.master_server_address, found.tenant_id) == ("process:7", "process-tenant")


# Sizes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("123B", 123),
        ("4GB", 4 << 30),
        ("4gb", 4 << 30),
        ("4G", 4 << 30),
        ("4 GiB", 4 << 30),
        ("0.5 GiB", 1 << 29),
        ("64mb", 64 * MIB),
        ("16KB", 16 << 10),
        ("16k", 16 << 10),
        ("1TB", 1 << 40),
        (" 2 MB ", 2 * MIB),
    ],
)
def test_sizes(text: int | str, expected: int) -> None:
    assert parse_size(text, "x") == expected


@pytest.mark.parametrize(
    "value", ["", "GB", "-1", "1.5.2GB", "4XB", "4 G B", "1e9", "0x10", "four", -1, True, "nan", "9" * 400 + "GB"]
)
def test_bad_sizes_name_their_place(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(value, "THE_VARIABLE")
    for word in ("THE_VARIABLE", "512MB"):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["global_segment_size", "local_buffer_size", "pool_size"])
@pytest.mark.parametrize("value", ["big", 1.5, True, [1], {"GB": 1}])
def test_bad_sizes_anywhere(tmp_path: Path, name: str, value: Any) -> None:
    path = write(tmp_path, {"master_server_address": "a:1", name: value})
    refused([f"{name} in {path}", repr(value), "4GB"], "embedded", config=path)
    refused([f"argument {name}", repr(value), "4GB"], "embedded", environ=MASTER, **{name: value})


def test_a_bad_size_in_the_environment_names_the_variable() -> None:
    environ = {**MASTER, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "lots"}
    refused(["MOONCAKE_GLOBAL_SEGMENT_SIZE", "'lots'"], "embedded", environ=environ)
    environ = {**MASTER, "MOONCAKE_LOCAL_BUFFER_SIZE": "-5"}
    refused(["MOONCAKE_LOCAL_BUFFER_SIZE", "'-5'"], environ=environ)


def test_a_segment_is_large_enough_and_only_for_those_who_lend() -> None:
    refused(["argument global_segment_size", str(MIN_SEGMENT_BYTES)], "embedded", environ=MASTER, global_segment_size=1)
    message = refused(
        ["MOONCAKE_GLOBAL_SEGMENT_SIZE", str(MIN_SEGMENT_BYTES), str(15 * MIB)],
        "embedded",
        environ={**MASTER, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "15MB"},
    )
    assert "at least" in message
    config = load_config("embedded", environ=MASTER, global_segment_size=MIN_SEGMENT_BYTES)
    assert config.global_segment_size == MIN_SEGMENT_BYTES
    refused(
        ["argument global_segment_size", "'remote'", "embedded"], "remote", environ=MASTER, global_segment_size="1GB"
    )
    # A shared file or environment may name one for others.
    shared = {**MASTER, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "1GB"}
    assert load_config("remote", environ=shared).global_segment_size == 0


def test_a_pool_is_large_enough() -> None:
    assert load_config(environ=MASTER, pool_size=MIN_POOL_BYTES).pool_size == MIB
    refused(["argument pool_size", "1048575", "1048576"], environ=MASTER, pool_size=MIN_POOL_BYTES - 1)
    refused(["MOONCAKE_SPARSE_POOL_SIZE", "0 bytes"], environ={**MASTER, "MOONCAKE_SPARSE_POOL_SIZE": "0"})


# Shared mode

OWNER = {"MOONCAKE_CLIENT": "127.0.0.1:50052"}


def test_shared_mode_needs_an_owner_and_no_master() -> None:
    for config in (
        load_config("shared", environ=OWNER),
        load_config(environ={**OWNER, "MOONCAKE_MODE": "shared"}),
        load_config("shared", environ={}, owner_address="127.0.0.1:50052"),
        load_config(config=MooncakeConfig(mode="shared", owner_address="127.0.0.1:50052")),
    ):
        assert config == MooncakeConfig(mode="shared", owner_address="127.0.0.1:50052")
        assert config.where == "127.0.0.1:50052"
    words = ["owner_address=", "MOONCAKE_CLIENT", "MOONCAKE_CONFIG_PATH", "this host"]
    refused([*words, "`python -m mooncake_sparse_client serve`"], "shared")
    refused(words, "shared", environ=MASTER)


def test_where_is_the_master_in_the_other_modes() -> None:
    both = {**MASTER, **OWNER}
    assert load_config("remote", environ=both).where == "env-host:1"
    assert load_config("embedded", environ=both).where == "env-host:1"
    assert load_config("shared", environ=both).where == "127.0.0.1:50052"


@pytest.mark.parametrize("address", ["50052", "localhost:", "unix:/run/owner", "localhost:70000", "http://a:1"])
def test_bad_owner_addresses_name_the_place_and_show_a_good_one(address: str) -> None:
    words = [repr(address), "host:port", "the owner's"]
    refused(["argument owner_address", *words], "shared", owner_address=address)
    refused(["MOONCAKE_CLIENT", *words], "shared", environ={"MOONCAKE_CLIENT": address})
    assert load_config("remote", environ={**MASTER, "MOONCAKE_CLIENT": address}).where == "env-host:1"  # not used


def test_what_only_the_owner_needs_is_not_checked_in_shared_mode(tmp_path: Path) -> None:
    environ = {
        **OWNER,
        "MOONCAKE_MASTER": "etcd://a:1;b:2",
        "MOONCAKE_PROTOCOL": "RDMA",
        "MOONCAKE_TE_META_DATA_SERVER": "redis://host:6379",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "4GB",
        "MOONCAKE_TENANT_ID": "the owner's",
    }
    config = load_config("shared", environ=environ)
    assert (config.where, config.global_segment_size) == ("127.0.0.1:50052", 0)
    path = write(tmp_path, {"master_server_address": 5})
    refused([f"master_server_address in {path}", "5"], "shared", environ=OWNER, config=path)


def test_arguments_that_shared_mode_cannot_heed_are_errors() -> None:
    words = ["argument global_segment_size", "'shared'", "mode='embedded'"]
    refused(words, "shared", environ=OWNER, global_segment_size="1GB")
    assert load_config("shared", environ=OWNER, global_segment_size=0).global_segment_size == 0
    refused(["argument tenant_id", "'shared'", "--tenant_id=mine"], "shared", environ=OWNER, tenant_id="mine")
    assert load_config("shared", environ=OWNER, tenant_id="default").tenant_id == "default"


def test_an_owner_without_a_mode_is_not_taken_for_a_master(tmp_path: Path) -> None:
    refused(["MOONCAKE_CLIENT", "'127.0.0.1:50052'", "mode='shared'", "MOONCAKE_MODE=shared"], environ=OWNER)
    path = write(tmp_path, {"standalone_storage": True, "client_server_address": "a:1"})
    refused([f"client_server_address in {path}", "'a:1'", "mode='shared'"], config=path)


def test_a_file_may_use_sglang_s_name_for_the_owner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, {"client_server_address": "theirs:1", "standalone_storage": True})
    with caplog.at_level(logging.WARNING):
        assert load_config("shared", environ={}, config=path).owner_address == "theirs:1"
        assert load_config("shared", environ=OWNER, config=path).owner_address == "127.0.0.1:50052"
    assert not caplog.records
    both = write(tmp_path, {"owner_address": "ours:1", "client_server_address": "theirs:1"})
    assert load_config("shared", environ={}, config=both).owner_address == "ours:1"
    bad = write(tmp_path, {"client_server_address": "theirs"})
    refused([f"client_server_address in {bad}", "'theirs'"], "shared", config=bad)


# Files


def test_a_file_written_for_vllm_is_understood(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(
        tmp_path,
        {
            "mode": "standalone-store",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": "127.0.0.1:50051",
            "global_segment_size": "4GB",
            "local_buffer_size": 1 << 27,
            "device_name": "",
            "enable_offload": False,
            "transfer_timeout": 1,
        },
    )
    with caplog.at_level(logging.WARNING):
        found = load_config(environ={"MOONCAKE_CONFIG_PATH": path})
    assert found == MooncakeConfig("127.0.0.1:50051", mode="remote", protocol="tcp", local_buffer_size=1 << 27)
    assert not caplog.records


def test_an_unknown_key_is_mentioned_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, {"master_server_address": "a:1", "colour": "blue"})
    with caplog.at_level(logging.WARNING):
        load_config(config=path, environ={})
    (record,) = caplog.records
    assert "'colour'" in record.getMessage()
    assert path in record.getMessage()


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("master_server_adress", "master_server_address"),
        ("Metadata_server", "metadata_server"),
        ("protocoll", "protocol"),
        ("global_segmentsize", "global_segment_size"),
        ("local_buffer_sizes", "local_buffer_size"),
        ("tenantid", "tenant_id"),
        ("device_nam", "device_name"),
        ("owner_adress", "owner_address"),
        ("client_server_adress", "client_server_address"),
        ("poolsize", "pool_size"),
    ],
)
def test_a_typo_in_a_file_is_an_error_with_a_suggestion(tmp_path: Path, typo: str, meant: str) -> None:
    path = write(tmp_path, {"master_server_address": "a:1", typo: "x"})
    refused([path, f"'{typo}'", f"did you mean '{meant}'"], config=path)


@pytest.mark.parametrize("typo", ["master_server_adress", "segment_size", "timeout"])
def test_an_unknown_argument_is_an_error(typo: Any) -> None:
    options: dict[str, Any] = {typo: "x:1"}
    with pytest.raises((ConfigError, TypeError), match=typo):
        load_config(environ=MASTER, **options)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["no JSON"]),
        ("{", ["no JSON"]),
        ("{'mode': 'remote'}", ["no JSON"]),
        ("mode = remote", ["no JSON"]),
        ("[]", ["one JSON object", "list"]),
        ('"text"', ["one JSON object", "str"]),
        ("null", ["one JSON object", "NoneType"]),
        ("3", ["one JSON object", "int"]),
    ],
)
def test_malformed_files_name_the_file(tmp_path: Path, content: str, words: list[str]) -> None:
    path = write(tmp_path, content)
    refused([path, *words], config=path)
    refused([path, *words], environ={"MOONCAKE_CONFIG_PATH": path})


def test_files_that_cannot_be_read_name_the_file(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.json")
    refused([absent, "No such file", "MOONCAKE_CONFIG_PATH"], environ={"MOONCAKE_CONFIG_PATH": absent})
    refused([str(tmp_path)], config=tmp_path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe{}")
    refused([str(binary)], config=binary)


@pytest.mark.parametrize(
    "name",
    [
        *("master_server_address", "metadata_server", "protocol", "device_name", "tenant_id", "local_hostname"),
        *("mode", "owner_address"),
    ],
)
@pytest.mark.parametrize("value", [5, ["a:1"], {"a": 1}, True])
def test_wrong_types_name_the_place(tmp_path: Path, name: str, value: Any) -> None:
    content = {"master_server_address": "a:1", name: value}
    path = write(tmp_path, content)
    refused([f"{name} in {path}", repr(value)], config=path)
    options = {"environ": MASTER, name: value}
    refused([name, repr(value)], **options)


# Values


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("localhost:50051", "localhost", 50051),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[::1]:50051", "::1", 50051),
        ("a-b.example.org:80", "a-b.example.org", 80),
    ],
)
def test_addresses(address: str, host: str, port: int) -> None:
    config = load_config(environ={}, master_server_address=address)
    assert (config.master_host, config.master_port) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        "localhost",
        "localhost:",
        ":50051",
        "localhost:0",
        "localhost:65536",
        "localhost:-1",
        "localhost:port",
        "local host:1",
        "http://localhost:1",
        "::1:50051",
        "[::1]",
        "[::1:50051",
        "a:1,b:2",
        "a:1:2",
        "etcd://a:1/x",
    ],
)
def test_bad_addresses_name_the_place_and_show_a_good_one(address: str) -> None:
    refused(["MOONCAKE_MASTER", repr(address), "host:port"], environ={"MOONCAKE_MASTER": address})
    refused(["argument master_server_address", repr(address)], master_server_address=address)


def test_no_address_says_the_three_ways_to_give_one() -> None:
    refused(["master_server_address=", "MOONCAKE_MASTER", "MOONCAKE_CONFIG_PATH", "serve"])


@pytest.mark.parametrize("protocol", ["nvlink", "ascend", "tcp6", "NVLINK"])
def test_other_protocols_are_refused_with_the_reason(tmp_path: Path, protocol: str) -> None:
    words = [repr(protocol), "'tcp'", "fall back"]
    refused(["argument protocol", *words], environ=MASTER, protocol=protocol)
    refused(["MOONCAKE_PROTOCOL", *words], environ={**MASTER, "MOONCAKE_PROTOCOL": protocol})
    path = write(tmp_path, {"master_server_address": "a:1", "protocol": protocol})
    refused([f"protocol in {path}", *words], config=path)


@pytest.mark.parametrize("protocol", ["rdma", "RDMA", " tcp "])
def test_rdma_and_tcp_are_protocols(protocol: str) -> None:
    """Whether this machine has a device for it is looked at when connecting."""
    assert load_config("remote", environ=MASTER, protocol=protocol).protocol == protocol.strip().lower()


@pytest.mark.parametrize("spelling", ["P2PHANDSHAKE", "p2phandshake", "P2pHandshake", " P2PHANDSHAKE "])
def test_the_handshake_has_one_spelling_for_the_native_library(spelling: str) -> None:
    assert load_config(environ=MASTER, metadata_server=spelling).metadata_server == "P2PHANDSHAKE"


@pytest.mark.parametrize("server", ["redis://host:6379", "REDIS://host:6379"])
def test_redis_is_refused_before_it_ends_the_process(server: str) -> None:
    refused(["metadata_server", "redis", "end the process", "P2PHANDSHAKE"], environ=MASTER, metadata_server=server)


def test_a_bad_metadata_server_names_its_place(tmp_path: Path) -> None:
    refused(["MOONCAKE_TE_META_DATA_SERVER"], environ={**MASTER, "MOONCAKE_TE_META_DATA_SERVER": "redis://host:6379"})
    path = write(tmp_path, {"master_server_address": "a:1", "metadata_server": "redis://host:6379"})
    refused([path], config=path)
    refused(["metadata_server", "empty", "P2PHANDSHAKE"], environ=MASTER, metadata_server="")


@pytest.mark.parametrize("mode", ["Remote", "shared-memory", "local", "standalone", 3])
def test_bad_modes_name_the_place_and_the_choices(mode: Any) -> None:
    words = ["'remote'", "'embedded'", "'shared'"]
    refused(["argument mode", repr(mode), *words], mode, environ=MASTER)
    refused(["MOONCAKE_MODE", repr(str(mode)), *words], environ={**MASTER, "MOONCAKE_MODE": str(mode)})


# Retention

OURS, THEIRS = RETENTION_VARIABLES


def test_retention_comes_from_the_argument_then_our_variable_then_vllm_s() -> None:
    assert (OURS, THEIRS) == ("MOONCAKE_SPARSE_RETENTION_INTERVAL", "VLLM_PREFIX_CACHE_RETENTION_INTERVAL")
    both = {OURS: "512", THEIRS: "1024"}
    assert load_retention(64, both) == Retention(64, "argument")
    assert load_retention(None, both) == Retention(None, "argument")
    assert load_retention(0, both) == Retention(0, "argument")
    assert load_retention(FROM_ENV, both) == Retention(512, OURS)
    assert load_retention(environ={THEIRS: "1024"}) == Retention(1024, THEIRS)
    assert load_retention(environ={OURS: "0", THEIRS: "1024"}) == Retention(0, OURS)
    assert load_retention(environ={OURS: " 16 "}) == Retention(16, OURS)
    assert load_retention(environ={}) == Retention(None, "default")


def test_retention_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THEIRS, raising=False)
    monkeypatch.setenv(OURS, "96")
    assert load_retention() == Retention(96, OURS)
    monkeypatch.delenv(OURS)
    assert load_retention() == Retention(None, "default")


@pytest.mark.parametrize("variable", RETENTION_VARIABLES)
@pytest.mark.parametrize("text", ["", " ", "-1", "-512", "None", "16K", "1.5", "1e3", "+5", "1_000", "٣", "0x10"])
def test_bad_retention_names_the_variable(variable: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_retention(environ={variable: text})
    for word in (variable, repr(text), "number of tokens", "unset"):
        assert word in str(caught.value)


def test_a_bad_variable_that_is_not_used_is_no_error() -> None:
    assert load_retention(environ={OURS: "16", THEIRS: "nonsense"}) == Retention(16, OURS)
    assert load_retention(0, {OURS: "nonsense"}) == Retention(0, "argument")


def test_from_env_shows_its_name() -> None:
    assert repr(FROM_ENV) == "FROM_ENV"


# Limits

LIMITS = (
    *("max_batch_bytes", "max_batch_chunks", "max_batch_keys", "concurrency"),
    *("max_bytes_in_flight", "staging_bytes", "requests_per_second", "bytes_per_second"),
)
OPTIONAL = ("requests_per_second", "bytes_per_second")


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, float("inf")])
def test_bad_limits_name_the_field(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Limits(**{name: value})
    for word in (f"Limits.{name}", "must be", repr(value)):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", LIMITS)
def test_no_limit_is_only_for_rates(name: str) -> None:
    if name in OPTIONAL:
        assert getattr(Limits(**{name: None}), name) is None
    else:
        with pytest.raises(ConfigError, match=rf"Limits\.{name}.*None"):
            Limits(**{name: None})  # type: ignore[arg-type]
    if name != "staging_bytes":
        assert getattr(Limits(**{name: 1}), name) == 1


def test_staging_memory_holds_a_batch_with_its_headers() -> None:
    assert Limits().staging_bytes == 64 * MIB
    assert Limits(max_batch_bytes=63 * MIB).max_batch_bytes == 63 * MIB
    assert Limits(max_batch_bytes=1, staging_bytes=MIB + 1).staging_bytes == MIB + 1
    for limits in ({"max_batch_bytes": 63 * MIB + 1}, {"staging_bytes": 17 * MIB - 1}):
        with pytest.raises(
            ConfigError, match=r"Limits\.staging_bytes is \d+.*max_batch_bytes=\d+.*at least \d+"
        ) as caught:
            Limits(**limits)
        for value in limits.values():
            assert str(value) in str(caught.value)


# Replication


def test_the_default_asks_for_nothing() -> None:
    assert load_config(environ=MASTER).replication == Replication()
    wanted = Replication(2, soft_pin=True, preferred_segments=("a:1",))
    assert load_config(environ=MASTER, replication=wanted).replication is wanted
    ready = MooncakeConfig("a:1", replication=wanted)
    assert load_config(config=ready, environ={}).replication == wanted


@pytest.mark.parametrize("value", [2, {"replica_num": 2}, "default"])
def test_replication_is_typed(value: Any) -> None:
    refused(["argument replication", "Replication", repr(value)], environ=MASTER, replication=value)


def test_replication_is_set_in_code_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, {"master_server_address": "a:1", "replication": {"replica_num": 2}})
    with caplog.at_level(logging.WARNING):
        assert load_config(config=path, environ={}).replication == Replication()
    (record,) = caplog.records
    assert "'replication'" in record.getMessage()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("replica_num", 0, ["at least 1"]),
        ("replica_num", -1, ["-1"]),
        ("replica_num", 1.0, ["int"]),
        ("replica_num", True, ["int"]),
        ("soft_pin", 1, ["True, False or None"]),
        ("soft_pin", "yes", ["'yes'"]),
        ("hard_pin", 1, ["True or False"]),
        ("hard_pin", None, ["None"]),
        ("preferred_segments", "a:1", ["list or tuple"]),
        ("preferred_segments", ["a:1", ""], ["[1]", "empty"]),
        ("preferred_segments", [1], ["[0]", "text"]),
        ("group_id", 7, ["text"]),
        ("group_id", "\ud800", ["UTF-8"]),
        ("soft_pin_ttl_seconds", 5, ["soft_pin is None", "soft_pin=True"]),
    ],
)
def test_replication_that_the_store_would_refuse(field: str, value: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Replication(**{field: value})
    for word in (f"Replication.{field}", *words):
        assert word in str(caught.value)


def test_a_pin_that_ends_is_set_and_ends_within_a_day() -> None:
    assert Replication(soft_pin=True, soft_pin_ttl_seconds=24 * 3600).soft_pin_ttl_seconds == 86400
    for seconds in (0, -1, 86400.1, float("inf"), float("nan"), True, "soon"):
        with pytest.raises(ConfigError, match=r"Replication\.soft_pin_ttl_seconds"):
            Replication(soft_pin=True, soft_pin_ttl_seconds=seconds)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="soft_pin is False"):
        Replication(soft_pin=False, soft_pin_ttl_seconds=1)


def test_segments_become_a_tuple() -> None:
    segments: Any = ["a:1", "b:2"]
    assert Replication(preferred_segments=segments).preferred_segments == ("a:1", "b:2")
    assert hash(Replication(preferred_segments=segments)) == hash(Replication(preferred_segments=("a:1", "b:2")))
