"""An audit tells a shift, another temperature, another kept mass, another state and rounding from each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers_audit import CALLS, TOKENS, changed, make_folder, make_student, make_trace, resampled  # noqa: F401 - the fixtures
from helpers_scorer import (
    memory_episode,
    tiny_model,
    write_trace,
)

from memopd_scorer import auditing
from memopd_scorer.audit_report import explain
from memopd_scorer.auditing import audit
from memopd_scorer.teacher import LoadedModel
from memopd_trace.invocation import Episode, Invocation, Sampling
from memopd_trace.storage import read


def explanation(trace: Path, student: LoadedModel) -> tuple[str, str]:
    return explain(audit(trace, student))


@pytest.mark.parametrize("lag", [-1, 1])
def test_a_shifted_trace_is_named_with_its_lag_and_the_evidence(
    lag: int, trace: Path, student: LoadedModel, tmp_path: Path
) -> None:
    path = changed(trace, tmp_path / "t.parquet", lambda r: r.replace(output_logprobs=np.roll(r.output_logprobs, lag)))
    report = audit(path, student)
    assert report.lag == lag
    assert explain(report)[0] == "lag"
    evidence = report.lags[lag]
    assert evidence.pairs == 3 * CALLS * (TOKENS - 1) + 4 * 4
    assert evidence.sum_abs / evidence.pairs <= 1e-5 < 0.1 < evidence.sum_abs_recorded / evidence.pairs
    assert not report.lags[-lag].convinces(2.0)


@pytest.mark.parametrize(("tokens", "lag"), [(1, None), (2, 1)])
def test_the_lag_of_short_outputs_is_told_from_what_there_is(
    tokens: int, lag: int | None, folder: Path, student: LoadedModel, tmp_path: Path
) -> None:
    episode = memory_episode(np.random.default_rng(1), "m", calls=6)
    short = [i.replace(output_ids=i.output_ids[:tokens], segments=None) for i in episode]
    path = write_trace(tmp_path / "t.parquet", folder, tiny_model("llama", seed=5), [Episode("m", tuple(short))])
    assert audit(path, student).lag == (None if lag is None else 0), "an exact log has no lag"

    def shift(row: Invocation) -> Invocation:
        assert row.output_logprobs is not None
        return row.replace(output_logprobs=np.r_[np.float32(-2.5), row.output_logprobs[:-1]])

    shifted = changed(path, tmp_path / "u.parquet", shift)
    assert audit(shifted, student).lag == lag


def test_tokens_on_both_sides_of_a_gap_are_no_neighbours(trace: Path, student: LoadedModel, tmp_path: Path) -> None:
    def gap(row: Invocation) -> Invocation:
        logprobs = np.ma.array(np.roll(row.output_logprobs, 1), mask=np.arange(len(row.output_ids)) == 2)
        return row.replace(output_logprobs=logprobs, output_loss_mask=~np.ma.getmaskarray(logprobs))

    report = audit(changed(trace, tmp_path / "t.parquet", gap), student)
    assert report.lag == 1
    assert report.lags[1].pairs == 3 * CALLS * (TOKENS - 3) + 4 * 2
    assert report.lags[1].sum_abs / report.lags[1].pairs <= 1e-5
    assert report.left_out == {auditing.NO_LOGPROB: 3 * CALLS + 4}


def test_a_wrong_temperature_is_named(trace: Path, student: LoadedModel, tmp_path: Path) -> None:
    half = Sampling(temperature=0.5)
    taken_for_raw = resampled(trace, tmp_path / "a.parquet", 0.5, logprob_kind="raw", sampling=half)
    assert explanation(taken_for_raw, student)[0] == "reading"
    assert "'temperature 0.5'" in explanation(taken_for_raw, student)[1]
    taken_for_tempered = resampled(trace, tmp_path / "b.parquet", 1.0, logprob_kind="tempered", sampling=half)
    assert "'temperature 1'" in explanation(taken_for_tempered, student)[1]
    truth = resampled(trace, tmp_path / "c.parquet", 0.5, logprob_kind="tempered", sampling=half)
    assert explanation(truth, student)[0] == "exact"
    never_said = resampled(trace, tmp_path / "d.parquet", 0.7, logprob_kind="tempered", sampling=half)
    assert "'temperature 0.7'" in explanation(never_said, student)[1]


def test_a_log_probability_divided_by_the_temperature_is_named(
    trace: Path, student: LoadedModel, tmp_path: Path
) -> None:
    path = changed(
        trace,
        tmp_path / "t.parquet",
        lambda r: r.replace(
            output_logprobs=r.output_logprobs / 0.5, logprob_kind="tempered", sampling=Sampling(temperature=0.5)
        ),
    )
    assert auditing.DIVIDED in explanation(path, student)[1]


def test_a_kept_mass_that_is_no_part_of_the_numbers_is_named(trace: Path, student: LoadedModel, tmp_path: Path) -> None:
    said = {"logprob_kind": "processed", "sampling": Sampling(temperature=1.0, top_k=5)}
    truth = resampled(trace, tmp_path / "a.parquet", 1.0, kept=True, **said)
    assert explanation(truth, student)[0] == "exact"
    whole = {i.key: i.output_logprobs for i in read(trace).iter_invocations()}
    wrong = changed(truth, tmp_path / "b.parquet", lambda r: r.replace(output_logprobs=whole[r.key]))
    assert auditing.KEPT_MASS in explanation(wrong, student)[1]


def test_a_wrong_state_is_no_shift_and_no_temperature(trace: Path, student: LoadedModel, tmp_path: Path) -> None:
    def drop(row: Invocation) -> Invocation:
        return row.replace(prompt_ids=np.delete(row.prompt_ids, 5), segments=None, relation=None, parent_index=None,
                           rewrite_kind=None, rewrite_evidence=None)  # fmt: skip

    report = audit(changed(trace, tmp_path / "t.parquet", drop), student)
    assert explain(report)[0] == "unexplained"
    assert report.lag == 0
    assert report.tables["by_depth"].keys() == {"none"}


def test_a_wrong_state_of_some_rows_is_found_by_the_tables(trace: Path, student: LoadedModel, tmp_path: Path) -> None:
    def drop(row: Invocation) -> Invocation:
        if row.relation != "fork":
            return row
        return row.replace(prompt_ids=np.delete(row.prompt_ids, 16))

    report = audit(changed(trace, tmp_path / "t.parquet", drop), student)
    assert explain(report)[0] == "part"
    by_relation = report.tables["by_relation"]
    assert by_relation["fork"].max_abs > 0.1
    assert max(c.max_abs for label, c in by_relation.items() if label != "fork") <= 1e-5
    assert {(t.episode_id, t.invocation_index) for t in report.worst[:5]} == {("grown", 3)}


def test_half_precision_is_told_from_a_wrong_state(trace: Path, folder: Path) -> None:
    report = audit(trace, folder, dtype="bfloat16")
    assert 1e-3 < report.recorded.max_abs < 1
    assert explain(report)[0] == "rounding"
    assert report.lag == 0


def test_other_readings_are_tried_on_the_first_tokens_only(
    trace: Path, student: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "READING_TOKENS", 16)
    report = audit(trace, student)
    assert {e.pairs for e in report.readings.values()} == {16}
    assert report.recorded.tokens == 3 * CALLS * TOKENS + 4 * 5
