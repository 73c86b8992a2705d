"""Tinker cookbook: turns of its token database, whose observations are stored as what they add."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_convert import converted
from helpers_trainers import PROMPT, changed, tinker_rows

from memopd_trace import read
from memopd_trace.convert import convert

MAPS = {"metrics": pa.float32(), "attrs": pa.string(), "token_metrics": pa.list_(pa.float32())}


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows with the types of the database's schema, version 2."""
    columns = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name in MAPS:
            columns[name] = pa.array([list(v.items()) for v in values], pa.map_(pa.string(), MAPS[name]))
        elif name == "ts":
            columns[name] = pa.array([datetime(2026, 8, 1, tzinfo=UTC)] * len(rows), pa.timestamp("us", tz="UTC"))
        elif name.endswith("_tokens"):
            columns[name] = pa.array(values, pa.list_(pa.int32()))
        elif name == "ac_logprobs":
            columns[name] = pa.array(values, pa.list_(pa.float32()))
        else:
            columns[name] = pa.array(values)
    pq.write_table(pa.table(columns), path)
    return path


def test_observations_that_go_on_are_put_together_with_what_they_go_on_from(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "tinker", tinker_rows())
    assert [r.prompt_ids.tolist() for r in rows] == [
        PROMPT, [*PROMPT, 7, 2, 60, 61], [*PROMPT[:20], 62, 63], PROMPT[::-1],
    ]  # fmt: skip
    assert [r.output_ids.tolist() for r in rows] == [[7, 2], [8, 2], [9, 2], [7, 2]]
    assert [r.relation for r in rows] == ["root", "extend", "rewrite", "root"]
    assert [r.episode_id for r in rows] == ["r/train/2/0/0"] * 3 + ["r/train/2/0/1"]
    assert {r.group_id for r in rows} == {"r/train/2/0"} and {r.policy_version for r in rows} == {3}
    assert result.exit_code() == 0 and rows[2].terminated


def test_parquet_says_the_same_as_json(tmp_path: Path) -> None:
    _, plain = converted(tmp_path, "tinker", tinker_rows())
    file = write_parquet(tmp_path / "segment.parquet", tinker_rows())
    result = convert("tinker", file, tmp_path / "t.parquet")
    rows = list(read(tmp_path / "t.parquet").iter_invocations())
    assert result.exit_code() == 0 and len(rows) == len(plain) == 4
    for a, b in zip(plain, rows, strict=True):
        assert a.key == b.key and a.relation == b.relation and a.extra is not None and b.extra is not None
        np.testing.assert_array_equal(a.prompt_ids, b.prompt_ids)
        np.testing.assert_array_equal(a.output_logprobs, b.output_logprobs)
        assert {n: v for n, v in a.extra.items() if n != "ts"} == {n: v for n, v in b.extra.items() if n != "ts"}


def test_the_rewards_of_calls_add_up_to_the_total(tmp_path: Path) -> None:
    _, rows = converted(tmp_path, "tinker", tinker_rows())
    assert [r.reward for r in rows] == [None, None, 1.0, 1.5]  # all of it at the end; a turn's 0.5 and a final 1.0
    assert (rows[3].extra or {})["step_reward"] == "0.5"


def test_a_turn_that_goes_on_from_a_missing_one_is_lost_and_the_next_whole_one_is_not(tmp_path: Path) -> None:
    rows = tinker_rows()
    del rows[0]
    result, found = converted(tmp_path, "tinker", rows)
    assert [r.prompt_ids.tolist() for r in found] == [[*PROMPT[:20], 62, 63], PROMPT[::-1]]
    assert "lost_calls" in result.losses.gaps


def test_a_broken_row_is_reported_alone(tmp_path: Path) -> None:
    rows = tinker_rows()
    rows[1]["ac_tokens"] = "x"
    result, found = converted(tmp_path, "tinker", rows)
    assert len(found) == 3 and result.losses.broken == 1
    assert result.losses.issues[0].place.endswith("log0.jsonl:2")


@pytest.mark.parametrize("with_images", [True, False])
def test_turns_with_images_are_left_out(tmp_path: Path, with_images: bool) -> None:
    rows = [changed(row, has_images=with_images) for row in tinker_rows()]
    result, found = converted(tmp_path, "tinker", rows)
    assert len(found) == (0 if with_images else 4) and result.losses.calls == 4


def test_a_torn_file_is_reported(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "segment.parquet", tinker_rows())
    file.write_bytes(file.read_bytes()[:-9])
    result = convert("tinker", file, tmp_path / "t.parquet")
    assert result.exit_code() == 3 and result.losses.broken == 1
