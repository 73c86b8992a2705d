"""An audit's report: its numbers are a brute-force recomputation's, and what it leaves out is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers_audit import CALLS, TOKENS, changed, make_folder, make_student, make_trace  # noqa: F401 - the fixtures
from helpers_scorer import (
    SIZE,
    memory_episode,
    metadata_for,
    oracle_logprobs,
    tiny_model,
)
from rich.console import Console

from memopd_scorer import audit_report, auditing
from memopd_scorer.audit_tally import RESOLUTION, Comparison
from memopd_scorer.audit_text import print_audit
from memopd_scorer.auditing import CLIP_EPSILON, audit
from memopd_scorer.teacher import LoadedModel
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Invocation, Sampling
from memopd_trace.storage import read, write

COMPARISON = set(Comparison.__slots__)
EVIDENCE = {"pairs", "mean_abs", "mean_abs_as_recorded", "times_closer", "sigmas"}


def test_every_number_of_the_report_is_a_brute_force_recomputations(
    trace: Path, student: LoadedModel, tmp_path: Path
) -> None:
    rng = np.random.default_rng(9)

    def spoil(row: Invocation) -> Invocation:
        assert row.output_logprobs is not None
        noise = rng.normal(0, 0.3, len(row.output_ids)).astype(np.float32)
        return row.replace(output_logprobs=row.output_logprobs + noise, policy_version=row.invocation_index % 2)

    path = changed(trace, tmp_path / "t.parquet", spoil)
    report = audit(path, student, epsilon=0.3, worst=5)
    rows = list(read(path).iter_invocations())
    true = oracle_logprobs(tiny_model("llama", seed=5), list(read(path).iter_episodes()))
    delta = {r.key: true[r.key].astype(np.float64) - np.ma.getdata(r.output_logprobs) for r in rows}

    def agree(found: Comparison, wanted: list[np.ndarray]) -> None:
        flat = np.concatenate(wanted)
        assert found.tokens == len(flat)
        assert found.max_abs == pytest.approx(np.abs(flat).max(), abs=1e-5)
        assert found.mean_abs == pytest.approx(np.abs(flat).mean(), abs=1e-5)
        assert found.mean_signed == pytest.approx(flat.mean(), abs=1e-5)
        assert found.kl == pytest.approx(np.mean(np.exp(flat) - 1 - flat), abs=1e-5)
        assert found.false_clip_rate == np.mean(np.abs(np.exp(flat) - 1) > 0.3)
        for share, value in ((0.5, found.p50_abs), (0.99, found.p99_abs), (0.999, found.p999_abs)):
            exact = np.quantile(np.abs(flat), share, method="inverted_cdf")
            assert exact - 1e-5 <= value <= exact * (1 + RESOLUTION) + 1e-5

    agree(report.recorded, list(delta.values()))
    assert report.recorded.false_clip_rate > 0.2, "the noise shows"
    assert list(report.by_policy_version) == ["0", "1"]
    for version, found in report.by_policy_version.items():
        agree(found, [delta[r.key] for r in rows if str(r.policy_version) == version])
    depth = {"0": 0, "1": 1, "2": 2, "3": 3}
    assert report.tables["by_depth"].keys() == depth.keys()
    for label, found in report.tables["by_depth"].items():
        fork = ("grown", 3)  # goes back to the first call
        at = {r.key: 1 if r.key == fork else r.invocation_index for r in rows}
        agree(found, [delta[r.key] for r in rows if at[r.key] == depth[label]])
    assert report.tables["by_relation"].keys() == {"root", "extend", "fork", "rewrite/memory"}
    agree(report.tables["by_relation"]["rewrite/memory"], [delta[r.key] for r in rows if r.relation == "rewrite"])
    assert report.tables["by_segment_kind"].keys() == {"after observation", "none"}
    agree(report.tables["by_segment_kind"]["none"], [delta[r.key] for r in rows if r.episode_id == "grown"])
    assert list(report.tables["by_output_index"]) == ["0", "1", "2-3", "4-7"]
    agree(report.tables["by_output_index"]["2-3"], [d[2:4] for d in delta.values()])

    every = sorted(((-abs(d), key, i) for key, ds in delta.items() for i, d in enumerate(ds)), key=lambda t: t[0])
    assert [((t.episode_id, t.invocation_index), t.output_index) for t in report.worst] == [t[1:] for t in every[:5]]
    worst, row = report.worst[0], next(r for r in rows if r.key == every[0][1])
    assert worst.token_id == row.output_ids[worst.output_index]
    assert row.output_logprobs is not None
    assert worst.recorded == pytest.approx(row.output_logprobs[worst.output_index])
    assert worst.recomputed == pytest.approx(true[row.key][worst.output_index], abs=1e-5)


def test_the_difference_of_two_views_holds_no_rounding_of_the_recording(
    trace: Path, student: LoadedModel, tmp_path: Path
) -> None:
    noisy = changed(trace, tmp_path / "t.parquet", lambda r: r.replace(output_logprobs=r.output_logprobs - 0.5))
    clean, spoilt = (audit(path, student, against="persistent-history") for path in (trace, noisy))
    assert clean.difference is not None and clean.against is not None and spoilt.against is not None
    assert clean.difference == spoilt.difference
    assert clean.top1_flips == spoilt.top1_flips and clean.top1_flips
    assert clean.difference.max_abs == pytest.approx(clean.against.max_abs, abs=1e-5)
    assert clean.against.mean_abs != pytest.approx(spoilt.against.mean_abs, abs=0.01)
    assert clean.other_view is not None
    assert clean.other_view.tables["by_depth"]["0"].max_abs <= 1e-5, "a first call has no other history"


def test_what_is_left_out_is_named(trace: Path, student: LoadedModel, tmp_path: Path) -> None:
    reader = read(trace)
    models = {**reader.metadata.models, "planner": reader.metadata.models["m"]}

    def change(row: Invocation) -> Invocation:
        if row.invocation_index == 0:
            return row.replace(model_id="planner")
        if row.invocation_index == 1:
            return row.replace(output_logprobs=None, logprob_kind=None)
        if row.invocation_index == 2:
            return row.replace(logprob_kind="tempered", sampling=Sampling(temperature=0.0))
        return row.replace(accepted=False)

    rows = [change(i) for i in reader.iter_invocations()]
    write(tmp_path / "t.parquet", reader.metadata.model_copy(update={"models": models}), rows)
    report = audit(tmp_path / "t.parquet", student, model_id="m")
    each = 3 * TOKENS + 5
    assert report.recorded.tokens == each, "rejected attempts were sampled like any other"
    assert report.recorded.max_abs <= 1e-5
    assert report.other_models == {"planner": each}
    assert sorted(report.left_out.values()) == [each, each]
    assert any("temperature 0" in reason for reason in report.left_out)
    assert report.tables["by_depth"].keys() == {"1", "3"}, "ancestors of other models count"


def test_another_model_of_the_trace_may_have_another_tokenizer_unless_its_tokens_are_run(
    trace: Path, student: LoadedModel, tmp_path: Path
) -> None:
    reader = read(trace)
    mine = reader.metadata.models["m"]
    theirs = mine.model_copy(update={"tokenizer": mine.tokenizer.model_copy(update={"fingerprint": "0" * 64})})
    metadata = reader.metadata.model_copy(update={"models": {"m": mine, "planner": theirs}})
    rows = [i.replace(model_id="m" if i.episode_id == "grown" else "planner") for i in reader.iter_invocations()]
    write(tmp_path / "t.parquet", metadata, rows)
    report = audit(tmp_path / "t.parquet", student, model_id="m")
    assert report.recorded.tokens == 4 * 5
    assert report.recorded.max_abs <= 1e-5
    assert report.other_models == {"planner": 3 * CALLS * TOKENS}
    for model_id, against in (("planner", None), ("m", "persistent-history")):
        with pytest.raises(InputError, match="E-TOKENIZER-MISMATCH"):
            audit(tmp_path / "t.parquet", student, model_id=model_id, against=against)


def test_rows_generated_in_place_are_compared_and_have_no_flattened_history(
    folder: Path, student: LoadedModel, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    slots = Invocation(
        episode_id="slots",
        invocation_index=0,
        model_id="m",
        prompt_ids=rng.integers(3, SIZE, 12),
        output_ids=rng.integers(3, SIZE, 3),
        output_slots=[4, 5, 9],
        output_logprobs=[-1.0, -1.0, -1.0],
        logprob_kind="raw",
    )
    plain = memory_episode(rng, "plain", calls=2)
    rows = [i.replace(output_logprobs=[-1.0] * TOKENS, logprob_kind="raw") for i in plain]
    write(tmp_path / "t.parquet", metadata_for(folder, features=("output_slots",)), [slots, *rows])
    report = audit(tmp_path / "t.parquet", student, against="persistent-history")
    assert report.recorded.tokens == 3 + 2 * TOKENS
    assert report.against is not None and report.other_view is not None
    assert report.against.tokens == 2 * TOKENS
    assert report.other_view.left_out == {auditing.IN_PLACE: 3}
    write(tmp_path / "u.parquet", metadata_for(folder, features=("output_slots",)), [slots])
    alone = audit(tmp_path / "u.parquet", student, against="persistent-history")
    assert (alone.against, alone.difference, alone.top1_flips) == (None, None, None)
    assert json.loads(json.dumps(alone.to_json()))["against"]["tokens"] == 0
    print_audit(alone, Console(quiet=True))


def test_the_json_has_the_described_names_and_no_other(trace: Path, student: LoadedModel) -> None:
    report = json.loads(json.dumps(audit(trace, student, against="persistent-history").to_json(), allow_nan=False))
    tables = set(audit_report.TABLES)
    assert report["audit_version"] == "1"
    assert set(report) == tables | {
        "audit_version", "model", "model_id", "weights", "probe", "attention", "clip_epsilon", "resolution",
        "recorded", "lag", "lags", "readings", "explanation", "worst", "skipped_tokens", "left_out", "other_models",
        "against", "difference", "top1_flips", "limits", "failed",
    }  # fmt: skip
    assert set(report["recorded"]) == set(report["difference"]) == COMPARISON
    assert set(report["against"]) == COMPARISON | {"view", "left_out", "by_depth", "by_output_index"}
    assert all(set(c) == COMPARISON for name in tables for c in report[name].values())
    assert set(report["lags"]) == {"-1", "1"}
    assert all(set(e) == EVIDENCE for e in [*report["lags"].values(), *report["readings"].values()])
    assert set(report["explanation"]) == {"kind", "text"}
    assert set(report["worst"][0]) == {
        "abs_delta", "episode_id", "invocation_index", "output_index", "token_id", "recorded", "recomputed",
    }  # fmt: skip
    documented = audit_report.__doc__ or ""
    names = {n for part in (report, report["recorded"], report["lags"]["1"], report["worst"][0]) for n in part}
    assert [n for n in names if n not in documented] == []
    assert report["clip_epsilon"] == CLIP_EPSILON


def test_an_epsilon_of_nothing_is_refused(trace: Path, student: LoadedModel) -> None:
    with pytest.raises(UsageError, match="epsilon 0"):
        audit(trace, student, epsilon=0)
