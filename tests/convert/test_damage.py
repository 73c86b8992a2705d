"""Damaged logs: never a crash, exit code 0, 1 or 3, everything counted, and what is written is a valid trace."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_convert import LOGS, converted

from memopd_trace.cli import run
from memopd_trace.convert.formats import find
from memopd_trace.convert.run import FAULT

JUNK = [None, [], {}, "", "x", -1, 0, 1, 1.5, True, 10**30, 2**31, [[]], [None], {"a": None}, "é\n\0", "1", -0.0, ["x"],
        {"id": 1}, [{}], "9" * 50, [10**30], 1e308]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


def bent(record: Any, rng: random.Random) -> Any:
    """The record with one to three values replaced, removed, doubled or swapped."""
    record = copy.deepcopy(record)
    for _ in range(rng.randint(1, 3)):
        found = list(places(record))
        if not found:
            break
        container, key = rng.choice(found)
        kind = rng.randrange(4)
        if kind == 0:
            container[key] = copy.deepcopy(rng.choice(JUNK))
        elif kind == 1:
            del container[key]
        elif kind == 2:
            container[key] = [container[key], copy.deepcopy(container[key])]
        else:
            container[key] = copy.deepcopy(rng.choice(found)[0])
    return record


def torn(record: Any, rng: random.Random) -> bytes:
    """The record's bytes cut, or with some bytes replaced."""
    data = bytearray(json.dumps(record).encode())
    if rng.random() < 0.5:
        return bytes(data[: rng.randrange(len(data))])
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data).replace(b"\n", b" ")


def options(name: str, tokenizer: Path) -> dict[str, Any]:
    """A tokenizer for a format that needs one."""
    return {"tokenizer": tokenizer} if find(name).exactness == "text" else {}


def convert_bent(name: str, seed: int, copies: int, folder: Path, tokenizer: Path) -> tuple[int, int]:
    """(rows, what was dropped) of a log many times over, half of its records bent."""
    rng = random.Random(f"{name} {seed}")
    records = [bent(r, rng) if rng.random() < 0.5 else r for _ in range(copies) for r in LOGS[name]]
    result, rows = converted(folder, name, records, **options(name, tokenizer))
    told = f"seed {seed}: {result.to_text()}"
    assert result.exit_code() in (0, 1, 3), told
    assert not [i for i in result.losses.issues if i.reason.startswith(FAULT)], told
    assert result.report is None or result.valid, told
    return len(rows), result.losses.broken + result.losses.dropped_calls.total


@pytest.mark.parametrize("name", LOGS)
def test_bent_records_never_crash_and_never_give_an_invalid_trace(name: str, tmp_path: Path, tokenizer: Path) -> None:
    counts = [convert_bent(name, seed, copies, tmp_path, tokenizer) for seed, copies in enumerate((1, 1, 5, 20))]
    assert all(sum(kind) > 0 for kind in zip(*counts, strict=True))  # rows and faults, there were both


@pytest.mark.slow
@pytest.mark.parametrize("name", LOGS)
def test_many_bent_records(name: str, tmp_path: Path, tokenizer: Path) -> None:
    for seed in range(100, 150):
        (tmp_path / str(seed)).mkdir()
        convert_bent(name, seed, 1 + seed % 4, tmp_path / str(seed), tokenizer)


@pytest.mark.parametrize("name", LOGS)
def test_a_record_nested_as_deep_as_json_is_read_is_kept_or_reported(
    name: str, tmp_path: Path, tokenizer: Path
) -> None:
    marked = [json.dumps({**LOGS[name][0], "deep": "@"}).encode() for _ in range(3)]
    records = [m.replace(b'"@"', b"[" * n + b"]" * n) for m, n in zip(marked, (100, 260, 1000), strict=True)]
    result, rows = converted(tmp_path, name, [*LOGS[name], *records], **options(name, tokenizer))
    assert rows and result.valid and result.losses.broken == 2
    assert all("nested" in issue.reason for issue in result.losses.issues)


@pytest.mark.parametrize("name", LOGS)
def test_torn_lines_are_reported_and_the_rest_is_converted(name: str, tmp_path: Path, tokenizer: Path) -> None:
    rng = random.Random(name)
    lines = [torn(rng.choice(LOGS[name]), rng) for _ in range(60)]
    records = [*LOGS[name], *lines, *LOGS[name]]
    result, rows = converted(tmp_path, name, records, **options(name, tokenizer))
    assert rows and result.valid and 20 < result.losses.broken <= 60
    known = {f"{tmp_path / 'log0.jsonl'}:{len(LOGS[name]) + i}" for i in range(1, 61)}
    assert {i.place for i in result.losses.issues} <= known


def test_the_command_gives_one_line_and_its_exit_codes(tmp_path: Path, capsys: Any) -> None:
    rng, codes = random.Random(0), set()
    for number in range(8):
        log = tmp_path / f"log{number}.json"
        log.write_bytes(torn([bent(r, rng) for r in LOGS["vllm"]], rng))
        codes.add(run(["convert", "vllm", str(log), "-o", str(tmp_path / f"t{number}.parquet")]))
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err and err == ""
    assert codes <= {0, 1, 3} and len(codes) > 1
