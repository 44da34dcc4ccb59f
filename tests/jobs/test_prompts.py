"""Prompts from JSONL and Parquet: what is one, what is none and why, and what ends the reading."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_sparse_client.errors import ConfigError, MissingLibraryError
from mooncake_sparse_client.jobs.prompts import Prompt, WrongLine, read_prompts

SECRET = "sesame"  # noqa: S105 - no password


def letters(text: str) -> list[int]:
    return list(text.encode())


def write(path: Path, *lines: str | bytes | object) -> Path:
    """JSONL of these lines; what is neither text nor bytes becomes JSON."""
    parts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    path.write_bytes(b"".join((part.encode() if isinstance(part, str) else part) + b"\n" for part in parts))
    return path


def plain(found: Prompt | WrongLine) -> tuple[object, ...]:
    if isinstance(found, WrongLine):
        return (found.line, found.reason)
    assert isinstance(found.token_ids, np.ndarray)
    return (found.line, found.token_ids.tolist(), found.cache_salt)


def read(path: Path, tokenizer: Callable[[str], Sequence[int]] | None = None) -> list[tuple[object, ...]]:
    return [plain(found) for found in read_prompts(path, tokenizer)]


def reason_of(tmp_path: Path, line: str | bytes | object) -> str:
    """Why this line is none; those around it must be read."""
    good = {"token_ids": [1]}
    first, found, last = read_prompts(write(tmp_path / "prompts.jsonl", good, line, good), letters)
    assert (plain(first), plain(last)) == ((1, [1], None), (3, [1], None))
    assert isinstance(found, WrongLine)
    assert found.line == 2
    assert SECRET not in found.reason
    return found.reason


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.json", "A.JSONL", "a.b.jsonl.gz", "a.ndjson.gz", "a.json.gz"]
)
def test_prompts_of_lines(tmp_path: Path, name: str) -> None:
    path = write(
        tmp_path / name,
        {"token_ids": [5, 2**32 - 1, 0]},
        {"text": "ab", "cache_salt": "s", "id": "x7", "meta": {"a": [1]}},
        "",
        " \t\r",
        {"token_ids": [2**63 - 1], "text": None, "cache_salt": None},
    )
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert read(path, letters) == [
        (1, [5, 2**32 - 1, 0], None),
        (2, [97, 98], "s"),
        (5, [2**63 - 1], None),
    ]


def test_a_byte_order_mark_crlf_and_a_last_line_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"token_ids": [1]}\r\n{"token_ids": [2]}')
    assert read(path) == [(1, [1], None), (2, [2], None)]
    path.write_bytes(b"\xef\xbb\xbf\n")
    assert read(path) == []
    path.write_bytes(b"")
    assert read(path) == []


@given(st.lists(st.lists(st.integers(0, 2**63 - 1), min_size=1)))
def test_ids_come_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> None:
    path = write(tmp_path_factory.getbasetemp() / "ids.jsonl", *({"token_ids": ids} for ids in prompts))
    assert read(path) == [(line, ids, None) for line, ids in enumerate(prompts, 1)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "sesame', "no JSON: Invalid control character at column 17"),
        ("sesame", "no JSON: Expecting value at column 1"),
        ('{"token_ids": [1]} sesame', "no JSON: Extra data at column 20"),
        (b'{"text": "sesame\xff"}', "no UTF-8: invalid start byte at byte 17"),
        (json.dumps({"text": "x"}).encode("utf-16-le"), "no JSON"),
        ('{"token_ids": [' + "9" * 5000 + "]}", "a number is too long"),
        ('{"a": ' + "[" * 200_000, "too much is nested"),
        ([1, 2], "not a JSON object, but of type list"),
        ("null", "not a JSON object, but of type NoneType"),
        ('"sesame"', "not a JSON object, but of type str"),
        ({"prompt": "sesame"}, "neither token_ids nor text"),
        ({"token_ids": None, "text": None}, "neither token_ids nor text"),
        ({"token_ids": [1], "text": "sesame"}, "both token_ids and text"),
        ({"token_ids": "sesame"}, "token_ids must be a list of ints, not of type str"),
        ({"token_ids": {"1": 1}}, "token_ids must be a list of ints, not of type dict"),
        ({"token_ids": 7}, "token_ids must be a list of ints, not of type int"),
        ({"token_ids": [1, 2.0]}, "token_ids[1] must be an int, not of type float"),
        ('{"token_ids": [1, NaN]}', "token_ids[1] must be an int, not of type float"),
        ({"token_ids": [1, True]}, "token_ids[1] must be an int, not of type bool"),
        ({"token_ids": [1, None]}, "token_ids[1] must be an int, not of type NoneType"),
        ({"token_ids": [1, "sesame"]}, "token_ids[1] must be an int, not of type str"),
        ({"token_ids": [[1], [2]]}, "token_ids[0] must be an int, not of type list"),
        ({"token_ids": [*range(100_000), SECRET * 10_000]}, "token_ids[100000] must be an int"),
        ({"token_ids": [1, -1]}, "token_ids[1] is -1"),
        ({"token_ids": [2**63]}, f"token_ids[0] is {2**63}"),
        ({"token_ids": [1, 2**64]}, f"token_ids[1] is {2**64}"),
        ({"token_ids": []}, "an empty prompt"),
        ({"text": ""}, "an empty prompt"),
        ({"text": ["sesame"]}, "text must be text, not of type list"),
        ({"text": "sesame\ud800"}, "text is no text that can be written as UTF-8"),
        ({"text": "a", "cache_salt": 5}, "cache_salt must be text, not of type int"),
        ({"text": "a", "cache_salt": ""}, "cache_salt must not be empty"),
        ({"text": "a", "cache_salt": "sesame\udfff"}, "cache_salt is no text that can be written"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_prompt_says_why_and_no_secret(
    tmp_path: Path, line: str | bytes | object, reason: str
) -> None:
    assert reason in reason_of(tmp_path, line)


def test_a_tokenizer_that_fails_makes_a_wrong_line_without_the_text(tmp_path: Path) -> None:
    def failing(text: str) -> list[int]:
        raise OSError(f"cannot tokenize {text}")

    def strange(text: str) -> Any:
        return {"a": [0.5], "b": text, "c": [-1], "d": [text], "e": None}[text[0]]

    path = write(tmp_path / "a.jsonl", {"text": SECRET}, {"token_ids": [1]})
    assert read(path, failing) == [(1, "the tokenizer raised OSError"), (2, [1], None)]
    found = read(write(path, *({"text": letter + SECRET} for letter in "abcdef")), strange)
    assert [line for line, *_ in found] == [1, 2, 3, 4, 5, 6]
    assert all(isinstance(reason, str) and SECRET not in reason for _, reason in found)
    assert found[-1] == (6, "the tokenizer raised KeyError")
    assert found[2][1] == f"of the tokenizer's answer, token_ids[0] is -1; token ids are ints from 0 to {2**63 - 1}"


def test_text_without_a_tokenizer_ends_the_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"token_ids": [1]}, {"text": SECRET}, {"text": "b"})
    prompts = read_prompts(path)
    assert plain(next(prompts)) == (1, [1], None)
    with pytest.raises(ConfigError, match=f"{path}:2: this prompt is text; give a tokenizer") as raised:
        next(prompts)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.zst", "a.parquet.gz", "jsonl", "a"])
def test_another_suffix_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must end in one of \.jsonl, .*\.jsonl\.gz, .*\.parquet"):
        read_prompts(tmp_path / name)


def test_a_file_that_cannot_be_opened_or_read(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz"):
        with pytest.raises(ConfigError, match=rf"cannot open the prompts' file .*/{name}: No such file or directory"):
            next(read_prompts(tmp_path / name))
    folder = tmp_path / "folder.jsonl"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"folder.jsonl: Is a directory"):
        next(read_prompts(folder))


def test_prompts_come_one_at_a_time(tmp_path: Path) -> None:
    """A corpus larger than what may be allocated here."""
    path = tmp_path / "a.jsonl.gz"
    line, number = json.dumps({"text": "a" * 100_000}).encode() + b"\n", 300
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(number):
            file.write(line)
    tracemalloc.start()
    try:
        assert sum(isinstance(found, Prompt) for found in read_prompts(path, lambda text: [len(text)])) == number
        assert tracemalloc.get_traced_memory()[1] < 4 << 20 < number * len(line)
    finally:
        tracemalloc.stop()


def prompts_before(path: Path, words: str) -> int:
    """How many right prompts there are before the error with these words."""
    number, message = 0, ""
    try:
        for number, found in enumerate(read_prompts(path), 1):
            assert plain(found) == (number, [number] * 100, None)
    except ConfigError as error:
        message = str(error)
    assert f"{path} cannot be read behind {words} {number}: " in message
    return number


def test_damaged_gzip_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", *({"token_ids": [number] * 100} for number in range(1, 2001)))
    packed = gzip.compress(path.read_bytes())
    path.write_bytes(packed[: len(packed) // 2])
    assert 0 < prompts_before(path, "line") < 2000
    path.write_bytes(packed + packed[:10] + b"\xff" * 50)  # a second member, of a kind of block that there is not
    assert prompts_before(path, "line") == 2000
    path.write_bytes(packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:])  # the checksum
    assert prompts_before(path, "line") == 2000
    path.write_bytes(packed + b"something else")
    assert prompts_before(path, "line") == 2000
    path.write_bytes(b"no gzip at all")
    assert prompts_before(path, "line") == 0


class TestParquet:
    """Skipped where pyarrow is absent."""

    @pytest.fixture
    def arrow(self) -> Any:
        pytest.importorskip("pyarrow.parquet")
        return pytest.importorskip("pyarrow")

    @staticmethod
    def table(arrow: Any, path: Path, columns: dict[str, object], **options: object) -> Path:
        arrow.parquet.write_table(arrow.table(columns), path, **options)
        return path

    def test_rows(self, arrow: Any, tmp_path: Path) -> None:
        columns = {
            "id": arrow.array(["a", "b", "c", "d", "e", "f"]),
            "token_ids": arrow.array([[1, 2], None, [], [3, None], None, [7]], arrow.list_(arrow.int32())),
            "text": arrow.array([None, "ab", None, None, None, SECRET]),
            "cache_salt": arrow.array(["s", None, None, None, SECRET, None]),
        }
        found = read(self.table(arrow, tmp_path / "a.parquet", columns), letters)
        assert found[:2] == [(1, [1, 2], "s"), (2, [97, 98], None)]
        assert [(line, str(reason).split(";")[0]) for line, reason in found[2:]] == [
            (3, "an empty prompt: it has no token"),
            (4, "a null is among the token_ids"),
            (5, "neither token_ids nor text"),
            (6, "both token_ids and text"),
        ]

    @pytest.mark.parametrize("width", ["int8", "uint16", "int32", "uint32", "int64", "uint64"])
    @pytest.mark.parametrize("kind", ["list", "large", "fixed"])
    def test_lists_of_ints(self, arrow: Any, tmp_path: Path, kind: str, width: str) -> None:
        value = getattr(arrow, width)()
        listed = {"list": arrow.list_(value), "large": arrow.large_list(value), "fixed": arrow.list_(value, 2)}[kind]
        most = min(np.iinfo(width).max, 2**63 - 1)
        ids = [[number % 100, most] for number in range(200)]
        path = self.table(arrow, tmp_path / "a.parquet", {"token_ids": arrow.array(ids, listed)}, row_group_size=70)
        assert read(path) == [(row, entry, None) for row, entry in enumerate(ids, 1)]

    def test_ids_out_of_range(self, arrow: Any, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        self.table(arrow, path, {"token_ids": arrow.array([[1], [2, -3]], arrow.list_(arrow.int64()))})
        assert read(path)[1] == (2, f"token_ids[1] is -3; token ids are ints from 0 to {2**63 - 1}")
        self.table(arrow, path, {"token_ids": arrow.array([[2**63], [1]], arrow.list_(arrow.uint64()))})
        assert read(path)[0] == (1, f"token_ids[0] is {2**63}; token ids are ints from 0 to {2**63 - 1}")

    def test_a_prompt_is_its_own(self, arrow: Any, tmp_path: Path) -> None:
        ids = arrow.array([[1, 2], [3]], arrow.list_(arrow.int64()))
        first, second = read_prompts(self.table(arrow, tmp_path / "a.parquet", {"token_ids": ids}))
        for prompt in (first, second):
            assert isinstance(prompt, Prompt)
            assert isinstance(prompt.token_ids, np.ndarray)
            assert prompt.token_ids.flags.writeable
            assert not isinstance(prompt.token_ids.base, arrow.Buffer)

    def test_texts(self, arrow: Any, tmp_path: Path) -> None:
        for texts in (
            arrow.array(["ab", None], arrow.large_string()),
            arrow.array(["ab", None]).dictionary_encode(),
        ):
            path = self.table(arrow, tmp_path / "a.parquet", {"text": texts, "cache_salt": arrow.nulls(2)})
            first, second = read(path, letters)
            assert first == (1, [97, 98], None)
            assert second[0] == 2
            with pytest.raises(ConfigError, match=r"a\.parquet, row 1: this prompt is text; give a tokenizer"):
                read(path)

    def test_text_that_is_no_utf8(self, arrow: Any, tmp_path: Path) -> None:
        texts = arrow.array([b"ab", b"a\xff", b"b"]).view(arrow.string())
        found = read(self.table(arrow, tmp_path / "a.parquet", {"text": texts}), letters)
        assert found == [(1, [97, 98], None), (2, "no UTF-8: invalid start byte at byte 2"), (3, [98], None)]

    @pytest.mark.parametrize(
        ("columns", "words"),
        [
            ({"prompt": ["a"]}, "must have a column token_ids or text"),
            ({"text": [None]}, "must have a column token_ids or text"),
            ({"token_ids": [[0.5]]}, "the column token_ids of .* must hold lists of ints, not list<"),
            ({"token_ids": [1]}, "the column token_ids of .* must hold lists of ints, not int64"),
            ({"token_ids": [[1]], "cache_salt": [5]}, "the column cache_salt of .* must hold text, not int64"),
            ({"text": [b"a"]}, "the column text of .* must hold text, not binary"),
        ],
    )
    def test_wrong_columns_end_the_reading(
        self, arrow: Any, tmp_path: Path, columns: dict[str, object], words: str
    ) -> None:
        with pytest.raises(ConfigError, match=words):
            read(self.table(arrow, tmp_path / "a.parquet", columns), letters)

    def test_a_column_that_is_there_twice(self, arrow: Any, tmp_path: Path) -> None:
        twice = arrow.Table.from_arrays([arrow.array(["a"])] * 2, names=["text", "text"])
        arrow.parquet.write_table(twice, tmp_path / "a.parquet")
        with pytest.raises(ConfigError, match="has 2 columns named text"):
            read(tmp_path / "a.parquet", letters)

    def test_damage(self, arrow: Any, tmp_path: Path) -> None:
        ids = [[number] * 100 for number in range(1, 2001)]
        path = tmp_path / "a.parquet"
        options = {"row_group_size": 500, "write_page_checksum": True, "use_dictionary": False, "compression": "none"}
        self.table(arrow, path, {"token_ids": ids}, **options)
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[len(whole) // 3] ^= 0xFF  # a token id, of which nothing but the checksum tells
        path.write_bytes(damaged)
        assert 0 < prompts_before(path, "row") < 1000
        for wrong in (whole[: len(whole) // 2], b"", b"no Parquet"):
            path.write_bytes(wrong)
            assert prompts_before(path, "row") == 0

    def test_rows_that_pyarrow_leaves_out_are_missed(
        self, arrow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As it does for some changed bytes in a page's header."""
        path = self.table(arrow, tmp_path / "a.parquet", {"token_ids": [[row] * 100 for row in range(1, 201)]})
        whole = arrow.parquet.ParquetFile.iter_batches

        def cut(*args: object, **options: object) -> Iterator[Any]:
            return itertools.islice(whole(*args, **options), 2)

        monkeypatch.setattr(arrow.parquet.ParquetFile, "iter_batches", cut)
        assert 0 < prompts_before(path, "row") < 200

    def test_damaged_names_of_columns(self, arrow: Any, tmp_path: Path) -> None:
        path = self.table(arrow, tmp_path / "a.parquet", {"token_ids": [[1]], "another": [1]}, store_schema=False)
        path.write_bytes(path.read_bytes().replace(b"another", b"an\xffther"))
        assert prompts_before(path, "row") == 0

    def test_a_file_that_is_not_there(self, arrow: Any, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"a\.parquet: No such file or directory"):
            next(read_prompts(tmp_path / "a.parquet"))


def test_parquet_without_pyarrow_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingLibraryError, match=r"did not load: .*pip install 'mooncake-sparse-client\[parquet\]'"):
        read_prompts(tmp_path / "a.parquet")
