"""What differs between two traces: exactly what was changed, and nothing else."""

from __future__ import annotations

import json
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers_look import METADATA, Rows, row, save, traces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memopd_trace import Invocation, Media, Sampling, Segment, TraceWriter, read
from memopd_trace.errors import InputError, UsageError
from memopd_trace.look.diff import CONTEXT, KEY, Diff, diff
from memopd_trace.schema import COLUMN

NOON = datetime(2025, 1, 1, 12, tzinfo=UTC)


def full(index: int = 0, episode: str = "e") -> Invocation:
    """A row that has something in every column."""
    return row(
        episode,
        index,
        [5, 6, 7],
        [8, 2],
        parent_index=0,
        relation="rewrite",
        rewrite_kind="memory",
        rewrite_evidence="explicit",
        segments=(Segment(0, 2, "task", 0, 0), Segment(2, 3, "memory")),
        group_id="g",
        task_id="t",
        agent_id="a",
        attempt=1,
        accepted=True,
        position_ids=[0, 1, 3],
        visible_from=[0, 1, 1],
        visible_until=[2, 3, 3],
        output_slots=[2, 1],
        media=(Media(0, 1, b"x" * 32, "image/png", "u"),),
        output_logprobs=[-1.0, None],
        logprob_kind="raw",
        output_kept_logmass=[-0.5, -0.25],
        output_sampled=[True, False],
        output_loss_mask=[True, False],
        sampling=Sampling(temperature=1.0),
        policy_version=3,
        output_policy_versions=[3, 3],
        kv_policy_version=2,
        routed_experts=[1, 2, 3, 4],
        finish_reason="stop",
        token_source="engine",
        reward=0.5,
        rewards={"f1": 0.5, "format": 1.0},
        terminated=True,
        truncated=False,
        prompt_text="p",
        output_text="o",
        messages="[]",
        started_at=NOON,
        ended_at=NOON,
        extra={"k": "v"},
    )


OTHER: dict[str, Any] = {
    "model_id": "other",
    "prompt_ids": [5, 6, 9],
    "output_ids": [8, 3],
    "parent_index": 1,
    "relation": "extend",
    "rewrite_kind": "summary",
    "rewrite_evidence": "inferred",
    "segments": (Segment(0, 2, "task", 0, 0), Segment(2, 3, "thought")),
    "group_id": "h",
    "task_id": "",
    "agent_id": "b",
    "attempt": 0,
    "accepted": False,
    "position_ids": [0, 1, 4],
    "visible_from": [0, 0, 1],
    "visible_until": [3, 3, 3],
    "output_slots": [1, 2],
    "media": (Media(0, 1, b"y" * 32, "image/png", "u"),),
    "state_digest": b"z" * 32,
    "output_logprobs": [-1.0, 0.0],
    "logprob_kind": "tempered",
    "output_kept_logmass": [-0.5, None],
    "output_sampled": [True, True],
    "output_loss_mask": [False, False],
    "sampling": Sampling(temperature=1.0, top_k=0),
    "policy_version": 2**53 + 1,
    "output_policy_versions": [3, 4],
    "kv_policy_version": 0,
    "routed_experts": [1, 2, 3],
    "finish_reason": "length",
    "token_source": "retokenized",
    "reward": 0.5000000000000001,
    "rewards": {"f1": 0.5},
    "terminated": False,
    "truncated": True,
    "prompt_text": "",
    "output_text": "o\0",
    "messages": "{}",
    "started_at": datetime(2025, 1, 1, 12, 0, 0, 1, tzinfo=UTC),
    "ended_at": datetime(2025, 1, 2, tzinfo=UTC),
    "extra": {"k": "w"},
}


def compare(folder: Path, a: Rows, b: Rows, **options: Any) -> Diff:
    return diff(save(folder / "a.parquet", a), save(folder / "b.arrow", b), **options)


def test_every_column_is_mutated_below() -> None:
    assert set(OTHER) == set(COLUMN) - set(KEY)
    assert all(getattr(full(), name) is not None for name in COLUMN if name != "state_digest")


@pytest.mark.parametrize("name", sorted(OTHER))
def test_one_mutated_cell_is_named_and_no_other(name: str, tmp_path: Path) -> None:
    rows = [full(0), full(1), full(2), full(0, "f")]
    changed = [*rows[:1], rows[1].replace(**{name: OTHER[name]}), *rows[2:]]
    found = compare(tmp_path, rows, changed)
    assert dict(found.columns) == {name: 1}
    (only,) = found.rows
    assert (only.episode_id, only.invocation_index, only.row_a, only.row_b) == ("e", 1, 1, 1)
    assert [cell.column for cell in only.cells] == [name]
    in_state = name in ("prompt_ids", "output_ids", *CONTEXT)
    assert only.other_state is in_state
    assert (found.other_state, found.other_columns) == (int(in_state), int(not in_state))
    assert (found.same, found.matched, found.equal) == (3, 4, False)
    assert (found.a.only, found.b.only, found.metadata) == (0, 0, [])


@pytest.mark.parametrize(
    "name", sorted(set(OTHER) - {"model_id", "prompt_ids", "output_ids", "state_digest", "output_slots"})
)
def test_a_null_is_not_a_value(name: str, tmp_path: Path) -> None:
    found = compare(tmp_path, [full()], [full().replace(**{name: None})])
    assert dict(found.columns) == {name: 1}
    assert found.rows[0].cells[0].a is not None and found.rows[0].cells[0].b is None


@pytest.mark.parametrize(
    ("column", "a", "b", "index", "items"),
    [
        ("prompt_ids", [5, 6, 7], [5, 9, 7], 1, (6, 9)),
        ("prompt_ids", [5, 6], [5, 6, 7], 2, (None, 7)),
        ("output_logprobs", [-1.0, None], [-1.0, -0.5], 1, (None, -0.5)),
        ("output_logprobs", [-1.0, float("nan")], [-1.0, None], 1, ("NaN", None)),
        ("output_logprobs", [float("nan"), -1.0], [float("nan"), float("-inf")], 1, (-1.0, "-Infinity")),
        ("output_sampled", [True, True], [True, False], 1, (True, False)),
    ],
)
def test_the_first_item_that_differs_is_told(
    column: str, a: list[Any], b: list[Any], index: int, items: tuple[Any, Any], tmp_path: Path
) -> None:
    base = row("e", 0, [5, 6], [8, 2])
    found = compare(tmp_path, [base.replace(**{column: a})], [base.replace(**{column: b})])
    (cell,) = found.rows[0].cells
    assert (cell.column, cell.index, (cell.a, cell.b)) == (column, index, items)
    assert (cell.length_a, cell.length_b) == (len(a), len(b))
    assert json.loads(found.to_json())["rows"][0]["cells"][0]["a"] == items[0]


@pytest.mark.parametrize(
    ("name", "explicit"),
    [("position_ids", [0, 1, 2, 3]), ("visible_from", [0, 1, 2, 3]), ("visible_until", [4, 4, 4, 4]), ("media", ())],
)
def test_a_default_written_out_is_the_same_state_in_another_column(name: str, explicit: Any, tmp_path: Path) -> None:
    base = row("e", 0, [5, 6], [8, 2])
    written = base.replace(**{name: explicit})
    assert written.compute_digest() == base.compute_digest()
    found = compare(tmp_path, [base], [written])
    assert (found.other_state, found.other_columns, dict(found.columns)) == (0, 1, {name: 1})


def test_where_media_came_from_is_not_the_state(tmp_path: Path) -> None:
    found = compare(tmp_path, [full()], [full().replace(media=(Media(0, 1, b"x" * 32, "image/jpeg", None),))])
    assert (found.other_state, dict(found.columns)) == (0, {"media": 1})


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces(), st.randoms(use_true_random=False))
def test_a_trace_equals_itself_in_any_order_of_its_episodes(tmp_path: Path, rows: Rows, random: Any) -> None:
    episodes = sorted({r.episode_id for r in rows}, key=lambda _: random.random())
    shuffled = [r for e in episodes for r in rows if r.episode_id == e]
    found = compare(tmp_path, rows, shuffled)
    assert found.equal and not found.rows and found.same == len(rows) == found.b.rows
    assert found.same_order is ([r.key for r in rows] == [r.key for r in shuffled])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces(), traces())
def test_states_are_judged_as_their_digests_are(tmp_path: Path, a: Rows, b: Rows) -> None:
    found = compare(tmp_path, a, b, shown=2)
    states = [{r.key: r.compute_digest() for r in rows} for rows in (a, b)]
    both = states[0].keys() & states[1].keys()
    assert found.other_state == sum(states[0][key] != states[1][key] for key in both)
    assert (found.matched, found.a.only, found.b.only) == (len(both), len(a) - len(both), len(b) - len(both))
    assert len(found.a.only_first) == min(2, found.a.only)
    assert set(found.a.only_first) <= states[0].keys() - states[1].keys()
    assert len(found.rows) == min(2, found.other_state) + min(2, found.other_columns)


def test_nan_equals_nan_and_minus_zero_zero_and_the_order_of_a_map_does_not_matter(tmp_path: Path) -> None:
    nan = float("nan")
    a = row("e", 0, [5], [6, 2], reward=nan, output_logprobs=[nan, -0.0], rewards={"x": nan, "y": 0.0})
    b = row("e", 0, [5], [6, 2], reward=nan, output_logprobs=[nan, 0.0], rewards={"y": -0.0, "x": nan})
    assert compare(tmp_path, [a], [b]).equal
    other = np.array([0xFFC00123, 0], np.uint32).view(np.float32)  # another bit pattern that is no number
    assert np.isnan(other[0])
    assert compare(tmp_path, [a], [b.replace(output_logprobs=other)]).equal


def test_another_order_is_seen_from_part_to_part(tmp_path: Path) -> None:
    rows = [row(f"e{i}", 0, [5]) for i in range(20)]
    for name, order in (("a", rows), ("b", [*rows[10:], *rows[:10]])):
        with TraceWriter(tmp_path / name, METADATA, rows_per_part=10) as writer:
            for invocation in order:
                writer.write(invocation)
    assert len(read(tmp_path / "b").files) == 2
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.equal and not found.same_order
    assert diff(tmp_path / "a", tmp_path / "a").same_order


def test_an_absent_column_is_a_null_one_and_undeclared_columns_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "a.parquet", [row("e", 0, [5])])
    table = pq.read_table(path)
    fewer = table.select([n for n in table.schema.names if n in (*KEY, "model_id", "prompt_ids", "output_ids")])
    pq.write_table(fewer.append_column("x_mine", [[1]]), tmp_path / "b.parquet")
    found = diff(path, tmp_path / "b.parquet", ignore=["state_digest"])
    assert found.equal and found.b.not_compared == ["x_mine"] and found.a.not_compared == []


def test_only_chosen_columns_are_compared(tmp_path: Path) -> None:
    a, b = [full()], [full().replace(reward=9.0, extra={"k": "w"})]
    assert dict(compare(tmp_path, a, b).columns) == {"reward": 1, "extra": 1}
    assert dict(compare(tmp_path, a, b, ignore=["extra"]).columns) == {"reward": 1}
    assert dict(compare(tmp_path, a, b, columns=["extra", "prompt_ids"]).columns) == {"extra": 1}
    with pytest.raises(UsageError, match="no column 'rewrd'.*did you mean reward"):
        compare(tmp_path, a, b, ignore=["rewrd"])


def test_metadata_differences_are_told_by_key_and_may_be_left_out(tmp_path: Path) -> None:
    other = METADATA.model_copy(update={"producer": METADATA.producer.model_copy(update={"version": "2"})})
    a, b = save(tmp_path / "a.parquet", [row("e", 0, [5])]), save(tmp_path / "b.parquet", [row("e", 0, [5])], other)
    assert diff(a, b).metadata == [("producer.version", None, "2")] and not diff(a, b).equal
    assert diff(a, b, metadata=False).equal


def test_rows_that_share_a_key_are_matched_in_order(tmp_path: Path) -> None:
    """Keys must be unique; a trace in which they are not is compared all the same."""
    path = save(tmp_path / "one.parquet", [row("e", 0, [5])])
    other = save(tmp_path / "other.parquet", [row("e", 0, [6])])
    tables = [pq.read_table(p) for p in (path, other)]
    for name, order in (("a", [0, 0, 1]), ("b", [0, 1, 1, 1])):
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", tables[0].schema) as writer:
            for number in order:
                writer.write_table(tables[number])
    found = diff(tmp_path / "a.parquet", tmp_path / "b.parquet")
    assert (found.matched, found.same, found.other_state, found.a.only, found.b.only) == (3, 2, 1, 0, 1)
    assert diff(tmp_path / "a.parquet", tmp_path / "a.parquet").equal


def test_an_empty_trace_is_compared(tmp_path: Path) -> None:
    assert compare(tmp_path, [], []).equal
    found = compare(tmp_path, [], [row("e", 0, [5])])
    assert (found.b.only, found.b.only_first, found.equal) == (1, [("e", 0)], False)
    assert compare(tmp_path, [row("e", 0, [5])], []).a.only_first == [("e", 0)]


def test_either_side_may_be_unreadable(tmp_path: Path) -> None:
    good = save(tmp_path / "a.parquet", [row("e", 0, [5])])
    for pair in ((good, tmp_path / "gone"), (tmp_path / "gone", good)):
        with pytest.raises(InputError, match="E-NO-INPUT"):
            diff(*pair)


def test_memory_grows_with_rows_and_not_with_tokens(tmp_path: Path) -> None:
    def peak(rows: int, tokens: int) -> int:
        made = [row(f"e{i}", 0, np.full(tokens, i % 90), reward=1.0) for i in range(rows)]
        path = save(tmp_path / "t.parquet", made)
        del made
        diff(path, path)  # whatever is imported or cached
        tracemalloc.start()
        assert diff(path, path).equal
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    few, many, long = peak(1000, 8), peak(5000, 8), peak(1000, 2000)
    columns = 6  # model, prompt, output, state digest, reward, and what is counted of the state
    assert (many - few) / 4000 < 200 + 16 * columns
    assert long - few < 1000 * 2000 * 4 / 10, "a tenth of the trace's ids"
