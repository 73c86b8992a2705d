"""JSON Lines hold a trace whole: what comes back is the same, or the line that is damaged is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers_testing import differences
from hypothesis import HealthCheck, Phase, given, settings

from memopd_trace import read, validate, write
from memopd_trace.errors import InputError
from memopd_trace.export import export, read_jsonl
from memopd_trace.testing import traces
from memopd_trace.testing.strategies import Trace


@settings(
    max_examples=15,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(trace=traces("core"))
def test_a_trace_comes_back_as_it_was(trace: Trace, tmp_path: Path) -> None:
    metadata, rows = trace
    path, out, again = (tmp_path / name for name in ("trace.parquet", "out.jsonl", "again.parquet"))
    write(path, metadata, rows, overwrite=True)
    made = export("jsonl", path, out, overwrite=True)
    assert not made.losses.any and made.losses.written == len(rows)
    head, found = read_jsonl(out)
    assert head == read(path).metadata
    for before, after in zip(read(path).iter_invocations(), found, strict=True):
        assert differences(before, after) == []
    write(again, *read_jsonl(out), overwrite=True)
    assert validate(again).clean
    assert out.read_bytes().count(b"\n") == len(rows) + 1, "one line a call, and the metadata"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    from test_export import call, trace

    export("jsonl", trace(tmp_path, call(0), call(1)), tmp_path / "out.jsonl")
    return tmp_path / "out.jsonl"


def test_a_line_leaves_out_nulls_and_keeps_empty_lists(lines: Path) -> None:
    row = json.loads(lines.read_text().splitlines()[1])
    assert "group_id" not in row and row["output_logprobs"] == [-0.5, -1.0, -0.25]
    assert len(row["state_digest"]) == 64


@pytest.mark.parametrize(
    "damage",
    ["{", "[1]", '{"episode_id": "e"}', '{"state_digest": 1}', '{"segments": [{"start": 0}]}', "[" * 100_000, "\xff"],
)
def test_a_damaged_line_is_named(damage: str, lines: Path) -> None:
    head, first, _ = lines.read_text().splitlines()
    lines.write_bytes("\n".join([head, first, damage]).encode("latin-1"))
    _, rows = read_jsonl(lines)
    assert next(rows).invocation_index == 0
    with pytest.raises(InputError, match=r"out\.jsonl:3: "):
        next(rows)


@pytest.mark.parametrize("head", ["", "{", "[]", '{"other": {}}', '{"memopd_trace": 3}', '{"memopd_trace": {}}'])
def test_a_file_without_metadata_is_refused(head: str, lines: Path) -> None:
    lines.write_text(head)
    with pytest.raises(InputError):
        read_jsonl(lines)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_jsonl(tmp_path / "none.jsonl")


def test_columns_of_a_newer_minor_version_are_passed_over(lines: Path) -> None:
    head, first, second = lines.read_text().splitlines()
    lines.write_text("\n".join([head, first[:-1] + ',"x_new":1}', second]))
    assert len(list(read_jsonl(lines)[1])) == 2
