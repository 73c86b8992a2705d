"""What the recorder refuses: exactly what the validator would find, and calls that contradict themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_recorder import VOCAB, call, extended, memory_run, metadata, start
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_trace import Invocation, Sampling, Segment, validate
from memopd_trace.errors import UsageError
from memopd_trace.record import EpisodeRecorder, Prompt, TraceRecorder
from memopd_trace.rules.registry import Profile
from memopd_trace.storage import write


@pytest.fixture
def recorder(tmp_path: Path) -> TraceRecorder:
    return TraceRecorder(tmp_path / "trace.parquet", metadata())


REFUSALS: dict[str, tuple[Callable[[EpisodeRecorder], Any], str]] = {
    "fewer logprobs than ids": (
        lambda e: call(e, [5], [7, 2], logprobs=[-1.0]),
        r"E-LENGTH-OUTPUT.* has 1 items.* is 2",
    ),
    "a NaN": (lambda e: call(e, [5], [7, 2], logprobs=[-1.0, np.nan]), r"E-LOGPROB-NAN.*output_logprobs\[1\] is NaN"),
    "an impossible token": (
        lambda e: call(e, [5], [7, 2], logprobs=[-np.inf, -1.0]),
        r"E-LOGPROB-INF.*output_logprobs\[0\] is -inf",
    ),
    "a probability above 1": (
        lambda e: call(e, [5], [7, 2], logprobs=[-1.0, 0.5]),
        r"E-LOGPROB-POSITIVE.*\[1\] is positive.* got 0\.5",
    ),
    "a hole on a sampled token": (
        lambda e: call(e, [5], [7, 2], logprobs=[None, -1.0]),
        r"E-LOGPROB-NULL.*\[0\] is null",
    ),
    "an id that the model lacks": (lambda e: call(e, [5, VOCAB], [2]), r"E-ID-RANGE.*prompt_ids\[1\].* got 100"),
    "a negative id": (lambda e: call(e, [5, -1], [2]), r"id -1 at index 1"),
    "an id too large for the column": (lambda e: call(e, [5, 2**31], [2]), "id 2147483648 at index 1"),
    "text": (lambda e: call(e, "hello", [2]), "flat list of token ids"),
    "ids with fractions": (lambda e: call(e, [5.0], [2]), "flat list of token ids"),
    "a batch": (lambda e: call(e, [[5, 6]], [2]), r"shape \(1, 2\)"),
    "no prompt": (lambda e: call(e, Prompt(), [2]), "E-NO-CONTEXT.*prompt_ids is empty"),
    "an unknown column": (lambda e: call(e, [5], [2], colour="red"), "no column 'colour'"),
    "a column that is not the caller's": (lambda e: call(e, [5], [2], invocation_index=7), "invocation_index is the"),
    "an unknown finish reason": (
        lambda e: e.record([5], [2], finish_reason="done"),
        "E-CATEGORY.*finish_reason.* got 'done'",
    ),
    "a relation that does not exist": (
        lambda e: call(e, [5], [2], relation="child"),
        "E-CATEGORY.*relation.* got 'child'",
    ),
    "a rewrite of nothing": (lambda e: call(e, [5], [2], rewrite_kind="memory"), "E-PARENT-MISSING.*no parent_index"),
    "positions of another length": (
        lambda e: call(e, [5], [2], position_ids=[0]),
        "E-LENGTH-SEQUENCE.*position_ids has 1 items",
    ),
    "no output": (lambda e: call(e, [5], []), "E-OUTPUT-EMPTY"),
    "a mask that trains what was not sampled": (
        lambda e: call(e, [5], [7, 2], output_sampled=[True, False], output_loss_mask=[True, True]),
        "E-LOSS-UNSAMPLED",
    ),
    "a switched-off top-k by a filler": (
        lambda e: e.record([5], [2], sampling=Sampling(temperature=1.0, top_k=-1)),
        "E-SAMPLING-RANGE.* got -1",
    ),
    "an unknown model": (lambda e: call(e, [5], [2], model_id="n"), "E-MODEL-UNKNOWN.* got 'n'"),
    "another group": (lambda e: call(e, [5], [2], group_id="other"), "group_id is the recorder's"),
    "an attempt that is no number": (
        lambda e: call(e, [5], [2], attempt="first"),
        "invocation 0: a value does not fit",
    ),
    "a feature that the metadata does not declare": (
        lambda e: call(e, [5, 6], [2], visible_until=[3, 3, 3]),
        "E-FEATURE-UNDECLARED",
    ),
    "an infinite reward": (lambda e: call(e, [5], [2], reward=np.inf), "E-REWARD-NONFINITE.* got inf"),
}
AFTER_ONE: dict[str, tuple[Callable[[EpisodeRecorder, Invocation], Any], str]] = {
    "an undeclared rewrite": (
        lambda e, p: call(e, [5, 6, 9, 2, 8], [2]),
        r"E-DISCONTINUITY.* invocation 0 at index 2.* \[2:\] 7, 2, got \[2:\] 9",
    ),
    "an undeclared cut": (
        lambda e, p: call(e, [5, 6], [2]),
        "E-DISCONTINUITY.*cut_short: the prompt ends 2 ids before",
    ),
    "an extension in name": (lambda e, p: call(e, [5, 9], [2], relation="extend"), "E-DISCONTINUITY.* at index 1"),
    "an extension at other positions": (
        lambda e, p: call(e, [5, 6, 7, 2, 8], [2], position_ids=[1, 2, 3, 4, 5, 6]),
        "E-EXTEND-STATE.*position_ids",
    ),
    "a rewrite without a kind": (
        lambda e, p: call(e, [9], [2], relation="rewrite"),
        "E-REWRITE-UNDECLARED.*without rewrite_kind",
    ),
    "a rewrite of an unknown kind": (
        lambda e, p: call(e, [9], [2], rewrite_kind="magic"),
        "E-CATEGORY.*rewrite_kind.* got 'magic'",
    ),
    "a fork that shares nothing": (lambda e, p: call(e, [9], [2], relation="fork"), "E-FORK-PREFIX.* no first token"),
    "a retry of another prompt": (lambda e, p: call(e, [5, 7], [2], relation="retry"), "E-RETRY-PROMPT.* at index 1"),
    "a root with a parent": (
        lambda e, p: call(e, [9], [2], relation="root", parent=p),
        "E-ROOT-PARENT.*a root has no parent",
    ),
    "a copy that is none": (
        lambda e, p: call(e, [5, 7], [2], rewrite_kind="memory", segments=[Segment(0, 2, "task", 0, 0)]),
        "E-SEGMENT-COPY.* at offset 1",
    ),
    "a copy of a later call": (
        lambda e, p: call(e, [5, 7], [2], rewrite_kind="memory", segments=[Segment(0, 1, "task", 1, 0)]),
        "E-SEGMENT-SOURCE.*no earlier row",
    ),
    "half a source": (
        lambda e, p: call(e, [5, 7], [2], rewrite_kind="memory", segments=[Segment(0, 1, "task", 0)]),
        "E-SEGMENT-SOURCE.*half a source",
    ),
    "segments that overlap": (
        lambda e, p: call(e, [5, 7], [2], segments=[Segment(0, 2, "a"), Segment(1, 2, "b")], rewrite_kind="memory"),
        "E-SEGMENT-ORDER",
    ),
    "a fork that says how it was rewritten": (
        lambda e, p: call(e, [5], [2], relation="fork", rewrite_kind="memory"),
        "relation 'fork' and rewrite_kind 'memory'",
    ),
    "segments beside a Prompt": (
        lambda e, p: call(e, Prompt().add("task", [5]), [2], segments=[Segment(0, 1, "a")]),
        "segments given twice",
    ),
    "a stretch past the end": (lambda e, p: Prompt().copy("memory", p, 2, 9), r"\[2, 9\).* 4 tokens"),
    "a stretch before the output": (lambda e, p: Prompt().copy_output("memory", p, -1), "before the output"),
    "an amended id": (lambda e, p: e.amend(p, output_ids=[3]), "'output_ids' cannot be amended"),
    "an amended mask of another length": (
        lambda e, p: e.amend(p, output_loss_mask=[True]),
        "E-LENGTH-OUTPUT.* has 1 items",
    ),
}


@pytest.mark.parametrize("mistake", REFUSALS)
def test_a_mistake_is_refused_at_once_and_nothing_is_recorded(recorder: TraceRecorder, mistake: str) -> None:
    episode = start(recorder, "q1/0")
    act, message = REFUSALS[mistake]
    with pytest.raises(UsageError, match=message):
        act(episode)
    assert episode.invocations == ()


@pytest.mark.parametrize("mistake", AFTER_ONE)
def test_a_mistake_in_a_later_call_is_refused_at_once(recorder: TraceRecorder, mistake: str) -> None:
    episode = start(recorder, "q1/0")
    first = extended(episode)
    act, message = AFTER_ONE[mistake]
    with pytest.raises(UsageError, match=message):
        act(episode, first)
    assert episode.invocations == (first,)


def test_ids_of_another_episode_are_no_source(recorder: TraceRecorder) -> None:
    one, other = start(recorder, "a"), start(recorder, "b")
    first, foreign = extended(one), extended(other)
    with pytest.raises(UsageError, match="copies from episode 'b'"):
        call(one, Prompt().copy("memory", foreign), [2])
    with pytest.raises(UsageError, match="copied from episode 'b', others from 'a'"):
        Prompt().copy("task", first).copy("memory", foreign)
    with pytest.raises(UsageError, match="parent is of another episode: .*'b'"):
        call(one, [5], [2], parent=foreign, relation="fork")


def test_building_on_a_rejected_attempt_is_refused(recorder: TraceRecorder) -> None:
    episode = start(recorder, "e")
    rejected = episode.amend(extended(episode), accepted=False)
    with pytest.raises(UsageError, match="E-PARENT-REJECTED.*extend of invocation 0, which was rejected"):
        call(episode, Prompt().copy("history", rejected).add("user", [8]), [2])


@pytest.mark.parametrize(
    ("profile", "finish", "code"),
    [
        ("train", {}, "E-NEEDS-REWARD"),
        ("train", {"reward": 1.0}, None),
        ("train", {"reward": 0.0, "truncated": True}, None),
        ("policy", {}, None),
        ("core", {}, None),
    ],
)
def test_an_episode_that_would_not_validate_is_refused_when_it_ends(
    tmp_path: Path, profile: Profile, finish: dict[str, Any], code: str | None
) -> None:
    path = tmp_path / "t.parquet"
    with TraceRecorder(path, metadata(), profile=profile) as recorder:
        episode = start(recorder, "e")
        memory_run(episode)
        if code is not None:
            with pytest.raises(UsageError) as caught:
                episode.finish(**finish)
            assert caught.value.code == code
            finish = {"reward": 0.0}  # it stayed open, so the mistake can be mended
        episode.finish(**finish)
    assert validate(path, profile).errors == 0


def test_a_run_without_logprobs_is_recorded_under_core_alone(tmp_path: Path) -> None:
    for profile, code in (("train", "E-NEEDS-LOGPROBS"), ("core", None)):
        with TraceRecorder(tmp_path / f"{profile}.parquet", metadata(), profile=profile) as recorder:  # type: ignore[arg-type]
            episode = start(recorder, "e")
            episode.record([5], [7, 2])
            if code is None:
                episode.finish()
                continue
            with pytest.raises(UsageError) as caught:
                episode.finish(reward=0.0)
            assert caught.value.code == code
            episode.discard()


LOGPROBS = st.sampled_from([-0.5, 0.0, 1e-6, None, -np.inf, 0.5, -9999.0, np.nan])
MASSES = st.sampled_from([-0.1, 1e-6, None, 0.5, -np.inf])
IDS = st.lists(st.sampled_from([5, 6, 7, VOCAB]), max_size=3)
SPANS = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda s: Segment(s[0], s[1], "user"))


def lists_of(items: st.SearchStrategy[Any], length: int) -> st.SearchStrategy[Any]:
    return st.lists(items, min_size=length, max_size=length)


CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "prompt_ids": IDS,
    "output_ids": IDS,
    "output_logprobs": lists_of(LOGPROBS, 2) | lists_of(LOGPROBS, 3),
    "logprob_kind": st.sampled_from([None, "tempered", "processed", "nonsense"]),
    "output_kept_logmass": lists_of(MASSES, 2),
    "output_sampled": lists_of(st.booleans(), 2),
    "output_loss_mask": lists_of(st.booleans(), 2),
    "position_ids": lists_of(st.integers(-1, 9), 4),
    "sampling": st.builds(Sampling, st.sampled_from([0.0, 0.7, 1.0, -1.0]), top_k=st.integers(-1, 1)),
    "segments": st.lists(SPANS, min_size=1, max_size=2),
    "finish_reason": st.sampled_from(["stop", "abort"]),
    "accepted": st.just(False),
    "reward": st.sampled_from([1.0, np.inf]),
}


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """The columns of a call that is right but for up to three changes, which may do no harm."""
    good = {
        "prompt_ids": [5, 6],
        "output_ids": [7, 2],
        "output_logprobs": [-0.5, -0.25],
        "logprob_kind": "raw",
        "segments": None,
    }
    changed = draw(st.lists(st.sampled_from(list(CHANGES)), unique=True, max_size=3))
    return good | {name: draw(CHANGES[name]) for name in changed}


def test_record_refuses_exactly_what_the_validator_finds(tmp_path: Path) -> None:
    seen = {True: 0, False: 0}

    @given(calls())
    @settings(max_examples=100, deadline=None)
    def check(fields: dict[str, Any]) -> None:
        names = {"output_logprobs": "logprobs", "output_kept_logmass": "kept_logmass"}
        arguments = {names.get(name, name): value for name, value in fields.items()}
        prompt, output = arguments.pop("prompt_ids"), arguments.pop("output_ids")
        if fields["segments"] is not None and output:
            fields["segments"].append(Segment(len(prompt), len(prompt) + len(output), "action"))
            arguments["segments"] = fields["segments"][:-1]
        whole = {"episode_id": "e", "invocation_index": 0, "model_id": "m", "relation": "root"}
        write(tmp_path / "t.parquet", metadata(), [Invocation(**whole, **fields)], overwrite=True)
        report = validate(tmp_path / "t.parquet")
        with TraceRecorder(tmp_path / "r.parquet", metadata(), overwrite=True) as recorder:
            episode = start(recorder, "e")
            try:
                episode.record(prompt, output, relation="root", **arguments)
            except UsageError as error:
                assert error.code in report.codes, (error, report.to_text())
            else:
                assert report.errors == 0, report.to_text()
            seen[report.errors == 0] += 1
            episode.discard()

    check()
    assert min(seen.values()) > 20, "both kinds were seen"


@pytest.mark.parametrize(
    "columns",
    [
        {"logprobs": [1e-6, -1.0]},
        {"logprobs": [-np.inf, -1.0], "output_sampled": [False, True]},
        {"logprobs": [None, -1.0], "output_loss_mask": [False, True]},
        {"logprobs": [-1.0, -1.0], "kept_logmass": [None, 5e-4]},
        {"segments": [Segment(0, 0, "user"), Segment(0, 1, "task")]},
    ],
    ids=["a rounding above 0", "a forced token", "an untrained token", "masses", "an empty segment"],
)
def test_what_validates_is_recorded(tmp_path: Path, columns: dict[str, Any]) -> None:
    with TraceRecorder(tmp_path / "t.parquet", metadata()) as recorder:
        episode = start(recorder, "e")
        call(episode, [5], [7, 2], **columns)
        episode.finish(reward=0.0)
    assert validate(tmp_path / "t.parquet", "train").errors == 0
