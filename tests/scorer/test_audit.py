"""The audit gives back recorded log-probabilities under the recorded state, and tells what is wrong when it cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_scorer import (
    SIZE,
    growing_episode,
    memory_episode,
    metadata_for,
    oracle,
    oracle_logprobs,
    save_model,
    tiny_model,
    write_trace,
)

from memopd_scorer.auditing import audit
from memopd_scorer.head import head_of
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Episode, Invocation, Sampling, Segment
from memopd_trace.storage import read, write
from memopd_trace.views import persistent_history


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(student folder, trace of memory-rewriting episodes it sampled)."""
    folder = tmp_path_factory.mktemp("toy")
    model = tiny_model("llama", seed=5)
    rng = np.random.default_rng(2)
    data = [memory_episode(rng, f"m{i}", group="g") for i in range(3)]
    student = save_model(model, folder / "student")
    return student, write_trace(folder / "trace.parquet", student, model, data)


def rewritten(toy: tuple[Path, Path], path: Path, change: object) -> Path:
    """The trace with `change(invocation) -> invocation` applied to every row."""
    reader = read(toy[1])
    write(path, reader.metadata, [change(i) for i in reader.iter_invocations()])  # type: ignore[operator]
    return path


def test_the_recorded_state_gives_the_recorded_logprobs_and_the_flattened_history_does_not(
    toy: tuple[Path, Path],
) -> None:
    student, trace = toy
    report = audit(trace, student, against="persistent-history")
    assert report.recorded.tokens == 3 * 4 * 6
    assert report.recorded.max_abs <= 1e-5
    assert report.recorded.false_clip_rate == 0.0
    assert report.lag == 0
    assert report.against is not None and report.top1_flips is not None
    assert report.against.max_abs > 0.1
    assert report.against.false_clip_rate > 0.05
    assert report.top1_flips > 0
    assert set(report.by_policy_version) == {"0"}


def test_an_episode_that_only_grows_has_no_mismatch_at_all(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=5)
    student = save_model(model, tmp_path / "student")
    episode = growing_episode(np.random.default_rng(0), "g", calls=2)  # two calls: no fork at the end
    trace = write_trace(tmp_path / "t.parquet", student, model, [episode])
    report = audit(trace, student, against="persistent-history")
    assert report.against is not None
    assert report.against.max_abs <= 1e-5
    assert report.top1_flips == 0


def test_an_off_by_one_in_the_log_is_named(toy: tuple[Path, Path], tmp_path: Path) -> None:
    def shift(row: Invocation) -> Invocation:
        assert row.output_logprobs is not None
        return row.replace(output_logprobs=np.r_[row.output_logprobs[1:], -1.0])

    report = audit(rewritten(toy, tmp_path / "t.parquet", shift), toy[0])
    assert report.lag == -1
    assert report.recorded.max_abs > 0.1


def test_a_state_that_was_not_the_true_one_is_found(toy: tuple[Path, Path], tmp_path: Path) -> None:
    def drop_memory(row: Invocation) -> Invocation:
        return row.replace(prompt_ids=np.delete(row.prompt_ids, 13), segments=None)

    report = audit(rewritten(toy, tmp_path / "t.parquet", drop_memory), toy[0])
    assert report.recorded.max_abs > 0.1
    assert report.lag == 0, "a mismatch is no off-by-one unless the shift explains it"


@pytest.mark.parametrize("kind", ["raw", "tempered", "processed"])
def test_each_kind_of_logprob_is_recomputed_as_it_was_recorded(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama", seed=5)
    student = save_model(model, tmp_path / "student")
    data = [memory_episode(np.random.default_rng(4), "m")]
    head, temperature, rows = head_of(model, SIZE), 0.7, []
    for pack, hidden in oracle(model, data):
        row = data[0].invocations[pack.states[0].invocation_index]
        logits = head.logits(hidden).detach() / (1.0 if kind == "raw" else temperature)
        logprobs, ids = logits.log_softmax(-1), torch.from_numpy(row.output_ids).long()
        chosen, kept = logprobs.gather(1, ids[:, None])[:, 0], None
        if kind == "processed":  # the kept set: the sampled id and the five best
            mask = torch.zeros_like(logprobs, dtype=torch.bool).scatter(1, logprobs.topk(5).indices, True)
            mask = mask.scatter(1, ids[:, None], True)
            kept = logprobs.masked_fill(~mask, -torch.inf).logsumexp(-1)
            chosen = chosen - kept
        rows.append(
            row.replace(
                output_logprobs=chosen.numpy(),
                logprob_kind=kind,
                output_kept_logmass=None if kept is None else kept.numpy(),
                sampling=Sampling(temperature=temperature, top_k=5 if kept is not None else None),
            )
        )
    write(tmp_path / "t.parquet", metadata_for(student), rows)
    assert audit(tmp_path / "t.parquet", student).recorded.max_abs <= 1e-5
    if kind == "processed":
        write(tmp_path / "u.parquet", metadata_for(student), [r.replace(output_kept_logmass=None) for r in rows])
        with pytest.raises(InputError, match="E-SUPPORT-UNKNOWN"):  # the kept set is unknown
            audit(tmp_path / "u.parquet", student)


def test_nulls_are_skipped_and_counted(toy: tuple[Path, Path], tmp_path: Path) -> None:
    def hide_first(row: Invocation) -> Invocation:
        assert row.output_logprobs is not None
        masked = [False, True, True, True, True, True]  # a token that is trained must have a log-probability
        return row.replace(output_logprobs=[None, *row.output_logprobs[1:].tolist()], output_loss_mask=masked)

    report = audit(rewritten(toy, tmp_path / "t.parquet", hide_first), toy[0])
    assert report.skipped_tokens == 3 * 4
    assert report.recorded.tokens == 3 * 4 * 5
    assert report.recorded.max_abs <= 1e-5


def test_other_weights_are_seen_and_another_tokenizer_is_refused(toy: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_model(tiny_model("llama", seed=6), tmp_path / "other")
    assert audit(toy[1], other).recorded.max_abs > 0.1
    with pytest.raises(InputError, match="E-TOKENIZER-MISMATCH"):
        audit(toy[1], save_model(tiny_model("llama"), tmp_path / "x", words="x"))
    with pytest.raises(UsageError, match="unknown view"):
        audit(toy[1], toy[0], against="flattened")


def test_segment_kinds_split_the_comparison(toy: tuple[Path, Path], tmp_path: Path) -> None:
    def label(row: Invocation) -> Invocation:
        p = len(row.prompt_ids)
        return row.replace(segments=[Segment(p, p + 2, "thought\0"), Segment(p + 2, p + 6, "[/]")])

    report = audit(rewritten(toy, tmp_path / "t.parquet", label), toy[0])
    assert {k: c.tokens for k, c in report.by_segment_kind.items()} == {"thought\0": 24, "[/]": 48}


def test_the_persistent_history_forgets_nothing_and_repeats_nothing() -> None:
    row = {"episode_id": "e", "model_id": "m"}
    first = Invocation(**row, invocation_index=0, prompt_ids=[1, 2, 10], output_ids=[20])
    segments = [{"start": 2, "stop": 3, "kind": "memory", "source_index": 0, "source_start": 3}]
    second = Invocation(
        **row,
        invocation_index=1,
        prompt_ids=[1, 2, 20, 11],
        output_ids=[21],
        segments=[Segment(**s) for s in segments],  # type: ignore[arg-type]
    )
    third = Invocation(**row, invocation_index=2, prompt_ids=[1, 2, 20, 11, 21, 12], output_ids=[22])
    views = persistent_history(Episode("e", (first, second, third)))
    assert views[0].tolist() == [1, 2, 10]
    assert views[1].tolist() == [1, 2, 10, 20, 11]
    assert views[2].tolist() == [1, 2, 10, 20, 11, 21, 12]  # it extends the second call, so only 12 is new


def test_oracle_and_trace_agree(toy: tuple[Path, Path]) -> None:
    reader = read(toy[1])
    expected = oracle_logprobs(tiny_model("llama", seed=5), list(reader.iter_episodes()))
    for row in reader.iter_invocations():
        assert row.output_logprobs is not None
        np.testing.assert_allclose(row.output_logprobs, expected[row.key], atol=1e-6)


def test_numbers_that_no_softmax_gives_are_said_to_be_none(toy: tuple[Path, Path], tmp_path: Path) -> None:
    greedy = Sampling(temperature=0.0)
    trace = rewritten(toy, tmp_path / "t.parquet", lambda r: r.replace(logprob_kind="tempered", sampling=greedy))
    with pytest.raises(InputError, match="E-AUDIT-NO-LOGPROBS.*temperature 0"):
        audit(trace, toy[0])


def test_only_the_rows_of_one_model_are_compared_with_it(toy: tuple[Path, Path], tmp_path: Path) -> None:
    reader = read(toy[1])
    two = reader.metadata.model_copy(
        update={"models": {**reader.metadata.models, "planner": reader.metadata.models["m"]}}
    )
    rows = [i if i.invocation_index % 2 else i.replace(model_id="planner") for i in reader.iter_invocations()]
    write(tmp_path / "t.parquet", two, rows)
    with pytest.raises(UsageError, match="m, planner"):
        audit(tmp_path / "t.parquet", toy[0])
    report = audit(tmp_path / "t.parquet", toy[0], model_id="m", against="persistent-history")
    assert report.recorded.tokens == 3 * 2 * 6
    assert report.recorded.max_abs <= 1e-5


def test_a_trace_that_is_not_valid_is_refused_by_its_code(toy: tuple[Path, Path], tmp_path: Path) -> None:
    broken = rewritten(toy, tmp_path / "t.parquet", lambda r: r.replace(visible_until=[1]))
    with pytest.raises(InputError, match="E-LENGTH-SEQUENCE"):
        audit(broken, toy[0])


def test_a_copy_of_a_rejected_attempt_is_new_to_the_history() -> None:
    row = {"episode_id": "e", "model_id": "m"}
    rejected = Invocation(**row, invocation_index=0, prompt_ids=[1, 2], output_ids=[9], accepted=False)
    after = Invocation(
        **row, invocation_index=1, prompt_ids=[1, 9, 3], output_ids=[4], segments=[Segment(1, 2, "memory", 0, 2)]
    )
    assert persistent_history(Episode("e", (rejected, after)))[1].tolist() == [1, 9, 3]
    accepted = rejected.replace(accepted=None)
    assert persistent_history(Episode("e", (accepted, after)))[1].tolist() == [1, 2, 9, 3]


def test_in_place_rows_have_no_flattened_history() -> None:
    slots = Invocation(
        episode_id="e", invocation_index=0, model_id="m", prompt_ids=[1, 0], output_ids=[5], output_slots=[1]
    )
    with pytest.raises(UsageError, match="generated in place"):
        persistent_history(Episode("e", (slots,)))


def test_forced_tokens_are_not_counted_and_padded_ones_are_skipped(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=5)
    student = save_model(model, tmp_path / "student")
    episode = memory_episode(np.random.default_rng(0), "m", calls=2)
    first, second = episode.invocations
    padded = first.replace(
        output_ids=[*first.output_ids[:-1], SIZE + 2], output_logprobs=[-1.0] * 6, logprob_kind="raw"
    )
    forced = second.replace(
        output_sampled=[False] * 2 + [True] * 4, output_logprobs=[None] * 2 + [-1.0] * 4, logprob_kind="raw"
    )
    write(tmp_path / "t.parquet", metadata_for(student), [padded, forced.replace(segments=None)])
    report = audit(tmp_path / "t.parquet", student)
    assert (report.recorded.tokens, report.skipped_tokens) == (5 + 4, 1)
