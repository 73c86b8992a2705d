"""Records out of files that are damaged, huge, packed, or in another encoding."""

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_trace.convert import records
from memopd_trace.convert.losses import Issue
from memopd_trace.convert.records import Record, find_files, from_json, json_in, json_records
from memopd_trace.errors import InputError

GOOD = [{"a": 1}, {"é": ['"]', {"b": [1.5, None]}]}, {"c": '\\"'}]
LINES = b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in GOOD)


def of(path: Path, data: bytes, limit: int = 2**24) -> list[tuple[str, Any]]:
    """(the place behind the file's name, the value or the reason) of each record."""
    path.write_bytes(data)
    return [
        (r.place.removeprefix(str(path)), r.value if isinstance(r, Record) else r.reason)
        for r in json_records([path], limit)
    ]


def values(path: Path, data: bytes) -> list[Any]:
    return [value for _, value in of(path, data)]


@pytest.mark.parametrize("name", ["log.jsonl", "log.json"])
def test_lines_have_their_number(name: str, tmp_path: Path) -> None:
    assert of(tmp_path / name, LINES) == [(":1", GOOD[0]), (":2", GOOD[1]), (":3", GOOD[2])]
    assert of(tmp_path / name, b'{"a":1}\n\n\n{"a":2}') == [(":1", {"a": 1}), (":4", {"a": 2})]


def test_a_document_over_several_lines_is_one_record(tmp_path: Path) -> None:
    assert of(tmp_path / "log.json", json.dumps(GOOD[1], indent=1).encode()) == [("", GOOD[1])]


def test_an_array_gives_its_items(tmp_path: Path) -> None:
    expected = [(f"[{i}]", value) for i, value in enumerate(GOOD)]
    assert of(tmp_path / "log.json", json.dumps(GOOD).encode()) == expected
    assert of(tmp_path / "log.json", b"\n " + json.dumps(GOOD, indent=2).encode() + b"\n") == expected
    assert of(tmp_path / "log.json", b"[]") == []


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_read(encoding: str, tmp_path: Path) -> None:
    assert values(tmp_path / "log.jsonl", LINES.decode().encode(encoding)) == GOOD


def test_packed_files_are_read_and_a_cut_one_says_so(tmp_path: Path) -> None:
    import pyarrow as pa

    assert values(tmp_path / "log.jsonl.gz", gzip.compress(LINES)) == GOOD
    assert values(tmp_path / "log.jsonl.zst", pa.compress(LINES, "zstd", asbytes=True)) == GOOD
    noise = json.dumps({"a": random.Random(0).randbytes(3000).hex()}).encode() + b"\n"
    found = values(tmp_path / "log.jsonl.gz", gzip.compress(LINES + noise)[:-40])
    assert "cannot be read to its end" in found[-1]


BROKEN = [
    (b'{"a": 1', "is no JSON"),
    (b"\0\0\0\0\0\0", "zero bytes"),
    (b'{"a": "\xff"}', "is not UTF-8"),
    (b"[" * 10**6, "nested too deeply"),
    (b'{"a":' * 10**6 + b"1" + b"}" * 10**6, "nested too deeply"),
    (b'{"a": ' + b"9" * 10**5 + b"}", "is no JSON"),
    (b"}", "is no JSON"),
]


@pytest.mark.parametrize(("line", "reason"), BROKEN)
def test_a_broken_line_is_reported_and_the_rest_goes_on(line: bytes, reason: str, tmp_path: Path) -> None:
    found = of(tmp_path / "log.jsonl", LINES + line + b"\n" + LINES)
    assert [v for _, v in found[:3]] == GOOD and [v for _, v in found[4:]] == GOOD
    place, told = found[3]
    assert place == ":4" and reason in told and "\n" not in told


def test_what_programs_write_and_json_forbids_is_read(tmp_path: Path) -> None:
    (value,) = values(
        tmp_path / "log.jsonl", b'{"a": NaN, "b": -Infinity, "c": "\\ud83d x \\\\ud83d \\ud83d\\ude00"}\n'
    )
    assert value["a"] != value["a"] and value["b"] == float("-inf")
    assert value["c"] == "� x \\ud83d 😀"  # a half of a pair, an escaped backslash, a whole pair


def test_a_text_that_may_be_json_is_read_or_kept() -> None:
    assert json_in('{"a": NaN}')["a"] != json_in('{"a": NaN}')["a"] and json_in("\ud800") is json_in("") is None
    assert json_in("null", "x") is None and json_in("{", "x") == "x"
    assert [from_json(v) for v in (' ["a"]', '"b"', "[b", "12", None, 1)] == [["a"], "b", "[b", "12", None, 1]


def test_a_record_beyond_the_limit_is_left_out(tmp_path: Path) -> None:
    long = b'{"a": "' + b"x" * 200 + b'"}\n'
    found = of(tmp_path / "log.jsonl", LINES + long + LINES, limit=100)
    assert len(found) == 7 and "more than 100 bytes" in found[3][1] and found[4] == (":5", GOOD[0])
    assert "more than 100 bytes" in of(tmp_path / "log.json", b'{"a":\n' + long + b"}", limit=100)[0][1]
    found = of(tmp_path / "log.json", b"[" + long + b',{"a":1},' + b'{"b":"' + b"x" * 2 * records.CHUNK, limit=100)
    assert ["more than 100 bytes" in str(v) for _, v in found] == [True, False, True] and found[1][0] == "[1]"


def test_an_array_that_is_cut_off_gives_what_is_whole(tmp_path: Path) -> None:
    data = json.dumps(GOOD).encode()
    for cut in range(1, len(data)):
        found = of(tmp_path / "log.json", data[:cut])
        assert [v for _, v in found[:-1]] == GOOD[: len(found) - 1]
        assert found[-1] == (f"[{len(found) - 1}]", "the file ends inside the array")


@pytest.mark.parametrize("data", [b'[1, {"a": 1}]', b'[{"a": 1}, "x", {"a": 2}]', b'[{"a": 1}, 5]'])
def test_an_array_of_something_else_says_so(data: bytes, tmp_path: Path) -> None:
    assert "neither an object nor a list" in of(tmp_path / "log.json", data)[-1][1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(items=st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=4), max_size=5), chunk=st.integers(1, 40))
def test_an_array_is_cut_alike_whatever_the_buffer(items: list[Any], chunk: int) -> None:
    before, records.CHUNK = records.CHUNK, chunk
    try:
        splitter = records._Splitter(io.BufferedReader(io.BytesIO(json.dumps(items).encode())), 2**20)
        found = [json.loads(item) for item in splitter]
    finally:
        records.CHUNK = before
    assert (found, splitter.fault) == (items, "")


@settings(deadline=None)
@given(data=st.binary(max_size=60) | st.text('{}[]",:\\1a\n ', max_size=40).map(str.encode))
def test_no_bytes_crash_the_reader(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    for name in ("log.json", "log.jsonl", "log.json.gz"):
        (folder / name).write_bytes(data)
        for found in json_records([folder / name]):
            assert isinstance(found, Record | Issue)


def test_memory_is_that_of_a_record_not_of_the_file(tmp_path: Path) -> None:
    import tracemalloc

    item = json.dumps({"a": "x" * 40_000}).encode()
    path = tmp_path / "log.json"
    path.write_bytes(b"[" + b",".join([item] * 400) + b"]")
    tracemalloc.start()
    assert sum(isinstance(r, Record) for r in json_records([path])) == 400
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 15 * 2**20 and peak < 6 * 2**20


def test_folders_and_globs_give_their_files_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json", "deep/c.jsonl.gz", "note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    names = [f.relative_to(tmp_path).as_posix() for f in find_files([tmp_path, tmp_path / "a.json"])]
    assert names == ["a.json", "b.jsonl", "deep/c.jsonl.gz"]
    assert [f.name for f in find_files([f"{tmp_path}/*.jsonl"])] == ["b.jsonl"]
    assert [f.name for f in find_files([tmp_path / "note.txt"])] == ["note.txt"]  # named, so it is meant
    for wrong in ("none", "none*", "deep\0"):
        with pytest.raises(InputError, match="E-NO-INPUT"):
            find_files([tmp_path / wrong])
