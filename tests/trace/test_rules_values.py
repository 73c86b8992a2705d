"""Rules about values: where each begins and, as important, where it keeps silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers_trace import VECTORS, changed, judge, valid
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_trace import Invocation, TraceMetadata
from memopd_trace.conform import conform_batch
from memopd_trace.invocation import batch_from_invocations
from memopd_trace.pieces import load_pieces
from memopd_trace.rules import RULES
from memopd_trace.rules.batch import Batch, ragged_arange
from memopd_trace.rules.registry import Inputs

METADATA = TraceMetadata.model_validate(valid("train")["metadata"])


def codes(folder: Path, *changes: tuple[int, dict[str, Any]], base: str = "train", profile: str = "core") -> set[str]:
    return judge(changed(base, *changes), folder, profile).codes


def lp(folder: Path, values: list[Any], **more: Any) -> set[str]:
    """The codes of one call with these logprobs."""
    cells = {"output_ids": [8] * len(values), "output_logprobs": values, **more}
    return codes(folder, (0, cells), base="plain")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (-999.0, None),
        (-1000.0, "E-LOGPROB-SENTINEL"),
        (0.0, None),
        (0.0009, "W-LOGPROB-ROUNDING"),
        (0.0011, "E-LOGPROB-POSITIVE"),
        ("Infinity", "E-LOGPROB-POSITIVE"),
        ("-Infinity", "E-LOGPROB-INF"),
        ("NaN", "E-LOGPROB-NAN"),
        (None, "E-LOGPROB-NULL"),
    ],
)
def test_each_way_to_say_no_value_has_its_own_code(value: Any, code: str | None, tmp_path: Path) -> None:
    assert lp(tmp_path, [-0.5, value]) == ({code} if code else set())


def test_a_forced_token_may_be_impossible_or_without_a_logprob(tmp_path: Path) -> None:
    assert lp(tmp_path, [-0.5, "-Infinity"], output_sampled=[True, False]) == set()
    assert lp(tmp_path, [-0.5, None], output_sampled=[True, False]) == set()


@pytest.mark.parametrize("cells", [{"output_loss_mask": [True, False]}, {"accepted": False}])
def test_a_token_that_is_not_trained_needs_no_logprob(cells: dict[str, Any], tmp_path: Path) -> None:
    assert lp(tmp_path, [-0.5, None], **cells) == set()


@pytest.mark.parametrize(
    ("count", "kind", "sampling", "warned"),
    [
        (7, "raw", {"temperature": 1.0}, False),
        (8, "raw", {"temperature": 1.0}, True),
        (8, "raw", {"temperature": 0.0}, True),
        (8, "tempered", {"temperature": 0.0}, False),
        (8, "raw", {"temperature": 1.0, "top_k": 1}, True),
    ],
)
def test_zeros_are_reported_where_sampling_left_a_choice(
    count: int, kind: str, sampling: dict[str, Any], warned: bool, tmp_path: Path
) -> None:
    found = lp(tmp_path, [0.0] * count, logprob_kind=kind, sampling=sampling)
    assert found == ({"W-LOGPROB-ZERO"} if warned else set())


def test_half_precision_is_recognised_by_its_missing_bits(tmp_path: Path) -> None:
    full = -np.random.default_rng(0).exponential(2, 40).astype(np.float32) - 0.01
    half = full.astype(np.float16).astype(float).tolist()
    brain = (full.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(float).tolist()
    assert lp(tmp_path, full.astype(float).tolist()) == set()
    assert lp(tmp_path, half) == lp(tmp_path, brain) == {"W-LOGPROB-QUANTISED"}
    assert lp(tmp_path, half[:31]) == set(), "too few to tell"
    assert lp(tmp_path, half[:4] * 10) == set(), "four round values are no pattern"
    sure = [-(k + 1) * 2.0**-23 for k in range(40)]
    assert lp(tmp_path, sure) == set(), "float32 itself is this coarse next to 0"


@pytest.mark.parametrize(
    ("kind", "sampling", "code"),
    [
        (None, {"temperature": 1.0}, None),
        (None, None, None),
        (None, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, None),
        (None, {"temperature": 0.5}, "E-LOGPROB-KIND"),
        ("unknown", {"top_k": 50}, "E-LOGPROB-KIND"),
        ("unknown", {"min_p": 0.05}, "E-LOGPROB-KIND"),
        ("unknown", {"repetition_penalty": 1.1}, "E-LOGPROB-KIND"),
        ("raw", {"temperature": 0.5, "top_p": 0.9}, None),
        ("tempered", {"temperature": 0.5, "top_p": 0.9}, None),
        ("processed", {"temperature": 0.5}, None),
        ("processed", {"temperature": 0.5, "top_p": 0.9}, "E-SUPPORT-UNKNOWN"),
        ("raw", {"top_p": "NaN"}, "E-SAMPLING-RANGE"),
        ("raw", {"temperature": "Infinity"}, "E-SAMPLING-RANGE"),
        ("raw", {"min_p": 1.5}, "E-SAMPLING-RANGE"),
        ("raw", {"top_k": -1}, "E-SAMPLING-RANGE"),
        ("raw", {"repetition_penalty": 0.0}, "E-SAMPLING-RANGE"),
        ("raw", {"temperature": 0.0}, None),
    ],
)
def test_the_kind_is_asked_for_where_sampling_changed_the_distribution(
    kind: str | None, sampling: dict[str, Any] | None, code: str | None, tmp_path: Path
) -> None:
    found = lp(tmp_path, [-0.5, -0.25], logprob_kind=kind, sampling=sampling)
    assert found == ({code} if code else set())


def test_settings_matter_only_where_there_are_logprobs(tmp_path: Path) -> None:
    cells = {"sampling": {"temperature": 0.5}, "logprob_kind": "unknown"}
    assert codes(tmp_path, (0, cells), base="plain") == set()


@pytest.mark.parametrize(
    ("mass", "bad"), [(-0.1, False), (0.0005, False), (0.002, True), ("NaN", True), ("-Infinity", True)]
)
def test_a_kept_mass_is_the_log_of_a_probability(mass: Any, bad: bool, tmp_path: Path) -> None:
    found = lp(tmp_path, [-0.5, -0.5], output_kept_logmass=[mass, None])
    assert found == ({"E-KEPT-MASS"} if bad else set())


@pytest.mark.parametrize(
    ("cells", "code"),
    [
        ({"output_ids": [8, 9, 4]}, "W-STOP-MISSING"),
        ({"output_ids": [8, 9, 4], "finish_reason": "length"}, None),
        ({"output_ids": [8, 9, 4], "finish_reason": "tool_calls"}, None),
        ({"output_ids": [2, 9, 2]}, "W-IDS-AFTER-STOP"),
        ({"prompt_ids": [5, 2, 7]}, None),
    ],
)
def test_stop_ids_stand_at_the_end_of_an_output(cells: dict[str, Any], code: str | None, tmp_path: Path) -> None:
    alone = changed("train", (0, cells))
    alone["rows"] = [alone["rows"][0]]
    assert judge(alone, tmp_path, "core").codes == ({code} if code else set())


def test_in_place_generation_has_no_last_token(tmp_path: Path) -> None:
    assert (
        codes(
            tmp_path,
            (0, {"finish_reason": "stop", "output_ids": [2, 9]}),
            (1, {"prompt_ids": [5, 9, 6, 2, 99]}),
            base="slots",
        )
        == set()
    )


@pytest.mark.parametrize(
    ("cells", "code"),
    [
        ({"kv_policy_version": 3}, None),
        ({"kv_policy_version": 2}, "W-KV-STALE"),
        ({"kv_policy_version": 4}, "E-KV-VERSION"),
        ({"output_policy_versions": [3, 3, 3]}, None),
        ({"output_policy_versions": [2, 3, 3], "kv_policy_version": 2}, None),
        ({"output_policy_versions": [2, 3, 3], "kv_policy_version": 3}, "E-KV-VERSION"),
        ({"output_policy_versions": [3, 3, 2]}, "E-POLICY-VERSION+W-VERSION-DECREASES"),
        ({"output_policy_versions": [1, 2, 3], "policy_version": None}, None),
        ({"policy_version": None, "kv_policy_version": 9}, None),
    ],
)
def test_versions_agree_with_each_other(cells: dict[str, Any], code: str | None, tmp_path: Path) -> None:
    assert codes(tmp_path, (0, cells)) == (set(code.split("+")) if code else set())


def test_each_row_is_judged_by_its_own_model(tmp_path: Path) -> None:
    vector = valid("plain")
    small = {"fingerprint": "s", "size": 9, "vocab_size": 10, "bos_id": 5}
    vector["metadata"]["models"]["small"] = {"name": "small", "tokenizer": small}
    vector["rows"][0].update(model_id="small", prompt_ids=[5, 5, 7], output_ids=[10])
    report = judge(vector, tmp_path)
    assert {(f.code, f.row) for f in report.findings} == {("E-ID-RANGE", 0), ("W-DOUBLE-BOS", 0)}
    vector["rows"][0].update(output_ids=[9], prompt_ids=[5])
    vector["rows"][1].update(prompt_ids=[5, 5, 99])
    assert judge(vector, tmp_path).codes == {"W-ID-PADDED"}


def test_an_unknown_model_is_reported_once_and_its_ids_are_not_judged(tmp_path: Path) -> None:
    assert codes(tmp_path, (0, {"model_id": "n", "prompt_ids": [999999]}), base="plain") == {"E-MODEL-UNKNOWN"}


def test_a_forced_first_token_needs_no_context(tmp_path: Path) -> None:
    cells = {"prompt_ids": [], "output_sampled": [False, True]}
    assert codes(tmp_path, (0, cells), base="plain") == set()


@pytest.mark.parametrize(
    "cells", [{"finish_reason": "abort"}, {"finish_reason": "content_filter"}, {"accepted": False}]
)
def test_a_call_may_end_before_its_first_token_if_it_says_so(cells: dict[str, Any], tmp_path: Path) -> None:
    assert codes(tmp_path, (1, {"output_ids": [], **cells}), base="plain") == set()
    assert codes(tmp_path, (1, {"output_ids": [], "finish_reason": "length"}), base="plain") == {"E-OUTPUT-EMPTY"}


@pytest.mark.parametrize(
    ("cells", "bad"),
    [
        ({"visible_from": [0, 0, 0, 0, 0], "visible_until": None}, False),
        ({"visible_from": None, "visible_until": [1, 2, 3, 4, 5]}, False),
        ({"visible_from": [0, 2, 2, 3, 4], "visible_until": None}, True),
        ({"visible_from": [-1, 1, 2, 3, 4], "visible_until": None}, True),
        ({"visible_from": None, "visible_until": [0, 2, 3, 4, 5]}, True),
        ({"visible_from": None, "visible_until": [6, 5, 5, 5, 5]}, True),
    ],
)
def test_a_token_sees_itself_and_nothing_behind_the_end(cells: dict[str, Any], bad: bool, tmp_path: Path) -> None:
    alone = changed("visibility", (0, cells))
    alone["rows"] = [alone["rows"][0]]
    assert judge(alone, tmp_path).codes == ({"E-VISIBILITY"} if bad else set())


def test_two_rows_may_fill_the_same_slot(tmp_path: Path) -> None:
    free = {"relation": None, "parent_index": None}
    rows = ((0, {**free, "output_slots": [1, 3]}), (1, {**free, "output_ids": [10], "output_slots": [1]}))
    assert codes(tmp_path, *rows, base="slots") == set()


def test_a_private_rewrite_kind_is_the_only_private_word(tmp_path: Path) -> None:
    assert codes(tmp_path, (2, {"rewrite_kind": "x_mine"})) == set()
    assert codes(tmp_path, (0, {"finish_reason": "x_mine"})) == {"E-CATEGORY"}


@pytest.mark.parametrize("profile", ["policy", "train"])
def test_a_row_that_trains_nothing_needs_nothing_for_training(profile: str, tmp_path: Path) -> None:
    bare = {
        "output_logprobs": None, "logprob_kind": None, "sampling": None, "policy_version": None, "token_source": None,
    }  # fmt: skip
    assert len(codes(tmp_path, (0, bare), profile=profile)) == 5
    for reason in ({"output_loss_mask": [False] * 3}, {"output_sampled": [False] * 3}):
        assert codes(tmp_path, (0, {**bare, **reason}), profile=profile) == set()


def test_an_episode_that_trains_nothing_needs_no_reward(tmp_path: Path) -> None:
    bare = {"reward": None, "truncated": None, "terminated": None, "group_id": None, "task_id": None}
    assert codes(tmp_path, (3, bare), profile="train") == {"E-NEEDS-REWARD", "E-NEEDS-END", "E-NEEDS-GROUP"}
    assert codes(tmp_path, (3, {**bare, "output_loss_mask": [False, False]}), profile="train") == set()


def test_a_task_stands_in_for_a_group(tmp_path: Path) -> None:
    assert codes(tmp_path, (3, {"group_id": None}), profile="train") == set()


def test_consistency_is_judged_alike_under_every_profile(tmp_path: Path) -> None:
    fault = (0, {"output_logprobs": [-0.7, "NaN", -1.6]})
    assert {frozenset(codes(tmp_path, fault, profile=p)) for p in ("core", "lineage", "policy", "train")} == {
        frozenset({"E-LOGPROB-NAN"})
    }


tokens = st.integers(0, 5)


@st.composite
def calls(draw: st.DrawFn) -> Invocation:
    """A call with any mixture of present, absent and masked per-token columns."""
    output = draw(st.lists(tokens, max_size=4))

    def maybe(item: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(item, min_size=len(output), max_size=len(output)))

    return Invocation(
        episode_id="e",
        invocation_index=0,
        model_id="m",
        prompt_ids=draw(st.lists(tokens, max_size=3)),
        output_ids=output,
        output_logprobs=maybe(st.none() | st.floats(-5, 0, width=32)),
        output_sampled=maybe(st.booleans()),
        output_loss_mask=maybe(st.booleans()),
        accepted=draw(st.none() | st.booleans()),
    )


@given(st.lists(calls(), min_size=1, max_size=5), st.integers(0, 2))
@settings(max_examples=80, deadline=None)
def test_the_batch_view_says_of_each_token_what_the_row_says(rows: list[Invocation], skip: int) -> None:
    batch, misfits = conform_batch(batch_from_invocations([*rows[:1] * skip, *rows]).slice(skip))
    assert not misfits
    view = Batch(batch, METADATA)
    for number, row in enumerate(rows):
        own = view.row_of_output == number
        assert view.index_of_output[own].tolist() == list(range(len(row.output_ids)))
        assert view.sampled[own].tolist() == row.sampled().tolist()
        assert view.trained[own].tolist() == (row.sampled() & row.loss_mask()).tolist()
        given_lp = view.output("output_logprobs").given[own]
        expected = [] if row.output_logprobs is None else (~np.ma.getmaskarray(row.output_logprobs)).tolist()
        assert given_lp.tolist() == (expected or [False] * len(row.output_ids))


@given(st.lists(st.integers(0, 4), max_size=6))
def test_ragged_arange_counts_in_each_row(lengths: list[int]) -> None:
    expected = [i for n in lengths for i in range(n)]
    assert ragged_arange(np.array(lengths, np.int64)).tolist() == expected


def test_no_batch_rule_chokes_on_an_empty_batch_or_on_nulls() -> None:
    one = Invocation(episode_id="e", invocation_index=0, model_id="m", prompt_ids=[5], output_ids=[])
    batch, _ = conform_batch(batch_from_invocations([one]))
    given = Inputs(tokenizer=load_pieces(VECTORS / "toy-tokenizer"))
    for rows in (batch, batch.slice(0, 0)):
        assert isinstance(rows, pa.RecordBatch)
        for rule in RULES.values():
            if rule.phase in ("shape", "batch") and rule.check is not None:
                found = [h.row for h in rule.check(Batch(rows, METADATA, given))]
                expected = rule.code in ("E-OUTPUT-EMPTY", "E-NEEDS-RELATION") and len(rows)
                assert found == ([0] if expected else []), rule.code
