"""Totals of a trace, against counting by hand."""

from __future__ import annotations

import json
import statistics
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_look import METADATA, Rows, row, save, traces
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_scorer.plan import plan
from memopd_trace import Episode, Invocation, Segment
from memopd_trace.invocation import group_episodes
from memopd_trace.look import stats as stats_module
from memopd_trace.look.sharing import PrefixTree
from memopd_trace.look.stats import Stats, stats
from memopd_trace.look.tallies import Lengths, Moments, Tally
from memopd_trace.metadata import Gap, Source


def totals(rows: Rows) -> dict[str, Any]:
    out = Stats("memory", METADATA)
    for invocation in rows:
        out.add(invocation)
    out.finish()
    return out.to_dict()


def visible(invocation: Invocation) -> np.ndarray:
    """bool[query, key], written out."""
    start, until = invocation.visibility()
    q = np.arange(len(invocation))[:, None]
    return (start <= q) & (q < until)


def trie_keys(invocation: Invocation) -> list[tuple[Any, ...]]:
    """One key a token: everything that must agree up to it. A token that may not be shared has a key of its own."""
    n = len(invocation)
    causal = np.tril(np.ones((n, n), bool))
    plain = (visible(invocation) == causal).all(axis=0) & (visible(invocation) == causal).all(axis=1)
    routes = invocation.routed_experts
    width = 0 if routes is None else len(routes) // max(1, n - 1)
    media = tuple((m.start, m.stop, m.sha256) for m in invocation.media or ())
    path: tuple[Any, ...] = (invocation.model_id, media, None if routes is None else width)
    keys = []
    for k in range(n):
        routed = () if routes is None else tuple(routes[k * width : (k + 1) * width])
        own = (invocation.key,) if not plain[: k + 1].all() or (routes is not None and n > 1 and k == n - 1) else ()
        path = (*path, (int(invocation.sequence_ids[k]), int(invocation.positions()[k]), routed), *own)
        keys.append(path)
    return keys


def brute(groups: list[list[Invocation]]) -> int:
    """Distinct tokens by a set of whole prefixes."""
    return sum(len({key for invocation in group for key in trie_keys(invocation)}) for group in groups)


def by_group(rows: Rows) -> list[list[Invocation]]:
    runs = groupby(group_episodes(rows), key=lambda e: e.group_key)
    return [[i for episode in run for i in episode] for _, run in runs]


@settings(max_examples=100, deadline=None)
@given(traces())
def test_distinct_tokens_are_the_nodes_of_a_trie_of_whole_prefixes(rows: Rows) -> None:
    sharing = totals(rows)["sharing"]
    assert sharing["logical"] == sum(len(i) for i in rows)
    assert sharing["within_groups"]["distinct"] == brute(by_group(rows))
    assert sharing["within_episodes"]["distinct"] == brute([list(e) for e in group_episodes(rows)])
    assert sharing["within_groups"]["parts"] == 0


@settings(max_examples=60, deadline=None)
@given(traces(plain=True))
def test_a_plan_without_a_budget_runs_just_the_distinct_tokens(rows: Rows) -> None:
    executed = sum(len(pack) for pack in plan(group_episodes(rows), max_tokens=10**9))
    assert totals(rows)["sharing"]["within_groups"]["distinct"] == executed


@settings(max_examples=60, deadline=None)
@given(traces())
def test_no_plan_runs_fewer(rows: Rows) -> None:
    executed = sum(len(pack) for pack in plan(group_episodes(rows), max_tokens=10**9))
    assert totals(rows)["sharing"]["within_groups"]["distinct"] <= executed


def test_the_example_of_the_docstring() -> None:
    tree = PrefixTree()
    for index, (prompt, output) in enumerate([([7, 8, 9], [1]), ([7, 8, 9], [2, 3]), ([7, 8, 5], [4])]):
        tree.add(row("e", index, prompt, output))
    tree.cut()
    assert (tree.logical, tree.distinct, tree.ratio) == (13, 8, 13 / 8)


def test_a_set_beyond_the_limit_is_counted_in_parts_and_never_held_whole() -> None:
    rows = [row("e", i, [5, 6, 7, 8, 9], [i % 3]) for i in range(10)]
    tree = PrefixTree(limit=13)
    for invocation in rows:
        tree.add(invocation)
        assert tree._held <= 13
    tree.cut()
    pairs = [rows[i : i + 2] for i in range(0, 10, 2)]
    assert (tree.parts, tree.distinct) == (4, brute(pairs))
    assert tree.distinct > brute([rows])
    assert tree.logical == 60


@given(st.lists(st.integers(0, 30), min_size=1), st.sampled_from([50, 95, 99.9]))
def test_percentiles_are_by_nearest_rank(values: list[int], percent: float) -> None:
    lengths = Lengths()
    for value in values:
        lengths.add(value)
    found = lengths.percentile(percent)
    assert found == np.percentile(values, percent, method="inverted_cdf")
    assert lengths.to_dict()["mean"] == pytest.approx(statistics.mean(values))


@given(st.lists(st.floats(-1e6, 1e6), min_size=2))
def test_moments_are_the_samples(values: list[float]) -> None:
    moments = Moments()
    for value in [*values, float("nan"), float("inf")]:
        moments.add(value)
    known = moments.to_dict()
    assert known["mean"] == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert known["std"] == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-6)
    assert (known["count"], known["min"], known["max"], known["nonfinite"]) == (
        len(values),
        min(values),
        max(values),
        2,
    )


def test_values_beyond_the_limit_are_counted_together() -> None:
    tally = Tally(limit=2)
    for value in ["b", "a", "c", "a", None, "d"]:
        tally.add(value)
    assert tally.to_dict() == {"values": {"a": 2, "b": 1}, "null": 1, "others": 2}
    assert list(tally.to_dict()["values"]) == ["a", "b"], "most frequent first"


def branching() -> Rows:
    """A root with two children, one of them a rejected retry, and a rewrite below the other; then a lone root."""
    forced = {"output_sampled": [True, False], "output_logprobs": [-1.0, None], "logprob_kind": "raw"}
    start = datetime(2025, 1, 2, tzinfo=UTC)
    rejected = {"accepted": False, "output_logprobs": [-0.5, -0.75], "logprob_kind": "tempered"}
    return [
        row("a", 0, [5, 6], [7, 2], relation="root", started_at=start, ended_at=start + timedelta(seconds=2), **forced),
        row("a", 1, [5, 6], [8, 2], relation="retry", parent_index=0, output_policy_versions=[3, 5], **rejected),
        row("a", 2, [5, 6, 7, 2, 9], [2], relation="extend", parent_index=0, policy_version=5, kv_policy_version=3),
        row(
            "a",
            3,
            [5, 7, 9],
            [2],
            relation="rewrite",
            rewrite_kind="memory",
            rewrite_evidence="explicit",
            parent_index=2,
            segments=(Segment(0, 1, "task", 0, 0), Segment(1, 3, "memory")),
            reward=1.0,
            rewards={"f1": 0.5, "format": 1.0},
            terminated=True,
            policy_version=5,
        ),
        row("b", 0, [5], [2], reward=float("nan"), truncated=True, finish_reason="length"),
    ]


def test_lineage_counts_depth_and_children() -> None:
    lineage = totals(branching())["lineage"]
    assert lineage["relations"]["values"] == {"extend": 1, "retry": 1, "rewrite": 1, "root": 1}
    assert lineage["relations"]["null"] == 1
    assert lineage["rewrite_kinds"] == {"values": {"memory": 1}, "null": 0, "others": 0}
    assert (lineage["depth"]["max"], lineage["depth"]["count"], lineage["depth"]["total"]) == (2, 2, 2)
    assert (lineage["rows_with_children"], lineage["branched_rows"], lineage["most_children"]) == (2, 1, 2)
    assert lineage["rejected"] == 1


def test_tokens_logprobs_and_segments_are_counted_by_token() -> None:
    found = totals(branching())
    assert found["tokens"] == {"prompt": 2 + 2 + 5 + 3 + 1, "output": 7, "sampled": 6, "trained": 4}
    logprobs = found["logprobs"]
    assert (logprobs["rows"], logprobs["tokens"], logprobs["mean"]) == (2, 3, -0.75)
    assert (logprobs["coverage"], logprobs["trained_coverage"]) == (3 / 7, 1 / 4), "what is not trained has some too"
    assert logprobs["kinds"]["values"] == {"raw": 1, "tempered": 1}
    assert found["segments"] == {"kinds": {"values": {"memory": 2, "task": 1}, "null": 0, "others": 0}, "copied": 1}


def test_versions_are_counted_by_token_and_lag_behind_the_newest() -> None:
    policy = totals(branching())["policy"]
    assert policy["versions"] == {"values": {"5": 3, "3": 1}, "null": 3, "others": 0}
    assert (policy["oldest"], policy["newest"], policy["mean_lag"], policy["max_lag"]) == (3, 5, 2 / 4, 2)
    assert (policy["mixed_rows"], policy["mixed_episodes"]) == (1, 1)
    assert (policy["stale_kv_rows"], policy["max_kv_lag"]) == (1, 2)


def test_outcome_time_and_ends() -> None:
    found = totals(branching())
    assert found["rewards"]["reward"] == {"count": 1, "mean": 1.0, "std": None, "min": 1.0, "max": 1.0, "nonfinite": 1}
    assert found["rewards"]["return"]["count"] == found["rewards"]["return"]["nonfinite"] == 1
    assert {n: p["mean"] for n, p in found["rewards"]["parts"].items()} == {"f1": 0.5, "format": 1.0}
    assert found["ends"] == {"terminated": 1, "truncated": 1}
    assert found["time"] == {
        "first": "2025-01-02T00:00:00+00:00",
        "last": "2025-01-02T00:00:02+00:00",
        "span_s": 2.0,
        "timed_rows": 1,
        "calls_s": 2.0,
    }
    assert (found["rows"], found["episodes"], found["groups"]) == (5, 2, 2)
    assert found["lengths"]["episode"]["max"] == 4


def test_features_and_gaps_are_told(tmp_path: Path) -> None:
    gap = Gap(code="no-logprobs", detail="text only")
    metadata = METADATA.model_copy(update={"source": Source(format="log", gaps=[gap])})
    path = save(tmp_path / "t.parquet", [row("e", 0, [5], [2], visible_until=[2, 2]), row("e", 1, [5])], metadata)
    found = stats(path).to_dict()
    assert found["features"]["declared"] == ["visibility"]
    assert found["features"]["used"] == {"visibility": 1, "output_slots": 0, "media": 0, "routed_experts": 0}
    assert found["gaps"] == [{"code": "no-logprobs", "detail": "text only"}] and found["source"] == "log"


def test_a_stored_trace_has_the_totals_of_its_rows(tmp_path: Path) -> None:
    path = save(tmp_path / "t.parquet", branching())
    expected = {**totals(branching()), "path": str(path)}
    assert stats(path).to_dict() == expected
    assert json.loads(stats(path).to_json()) == json.loads(json.dumps(expected))


def test_an_empty_trace_has_totals(tmp_path: Path) -> None:
    found = stats(save(tmp_path / "t.parquet", [])).to_dict()
    assert (found["rows"], found["episodes"], found["groups"]) == (0, 0, 0)
    assert found["lengths"]["prompt"] == {"count": 0, "total": 0, "mean": None, "p50": None, "p95": None, "max": None}
    assert found["sharing"]["within_groups"] == {"distinct": 0, "ratio": None, "parts": 0}


def test_rows_whose_arrays_do_not_fit_are_counted_and_not_looked_into() -> None:
    good = row("e", 0, [5, 6])
    bad = [
        row("e", 1, [5, 6], visible_until=[2]),
        row("e", 2, [5, 6], output_logprobs=[-1.0, -2.0]),
        row("e", 3, [5, 6], segments=(Segment(1, 9, "task"),)),
    ]
    found = totals([good, *bad])
    assert (found["rows"], found["rows_unsound"]) == (4, 3)
    assert found["sharing"]["logical"] == 3 and found["tokens"]["trained"] == 1
    assert found["tokens"]["prompt"] == 8, "ids are counted all the same"


def test_rewards_too_large_to_add_leave_valid_json() -> None:
    rows = [row("e", i, [5], reward=r) for i, r in enumerate([1e308, 1e308, -1e308, -1e308])]
    out = Stats("x", METADATA)
    for invocation in rows:
        out.add(invocation)
    out.finish()
    assert json.loads(out.to_json())["rewards"]["reward"]["count"] == 4


def test_every_key_of_the_mapping_is_documented() -> None:
    doc = stats_module.__doc__ or ""

    def keys(value: Any) -> set[str]:
        if not isinstance(value, dict):
            return set()
        own = {k for k in value if k not in ("name", "version")}
        return own.union(*(keys(v) for k, v in value.items() if k not in ("values", "parts", "used", "producer")))

    found = keys(totals(branching()))
    assert len(found) > 60
    assert {key for key in found if key not in doc} == set()


def test_groups_are_counted_by_name_wherever_their_episodes_stand() -> None:
    rows = [row(f"e{i}", 0, [5], group_id=g) for i, g in enumerate(["g", "h", "g"])]
    assert totals(rows)["groups"] == 2
    assert Episode("e0", (rows[0],)).group_key == ("group", "g")
