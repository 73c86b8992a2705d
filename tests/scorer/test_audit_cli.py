"""The audit on the command line: limits and exit codes, text, plots."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_audit import changed, make_folder, make_student, make_trace  # noqa: F401 - the fixtures
from helpers_scorer import save_model, tiny_model

from memopd_scorer import auditing
from memopd_scorer.audit_report import Limits
from memopd_scorer.audit_tally import Comparison
from memopd_scorer.auditing import audit
from memopd_scorer.teacher import LoadedModel, load
from memopd_trace.cli import run
from memopd_trace.metadata import Model, Policy
from memopd_trace.record.fingerprint import weights_digest
from memopd_trace.storage import read, write


def test_each_limit_that_does_not_hold_is_named_and_the_exit_code_is_1(
    trace: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = changed(trace, tmp_path / "t.parquet", lambda r: r.replace(output_logprobs=r.output_logprobs - 0.5))
    command = ["audit", str(noisy), "--model", str(folder), "--format", "json"]
    limits = ["--max-abs", "1", "--max-p99", "0.1", "--max-false-clips", "0.05"]
    assert run([*command, *limits]) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert [f["limit"] for f in report["failed"]] == ["max_p99", "max_false_clips"]
    assert report["limits"] == {"max_abs": 1.0, "max_p99": 0.1, "max_false_clips": 0.05}
    assert "--max-p99 0.1" in captured.err and "--max-false-clips 0.05" in captured.err
    assert "--max-abs" not in captured.err
    assert run([*command, *limits, "--max-p99", "0.6", "--epsilon", "0.7"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == []
    assert run([*command, "--max-false-clips", "5"]) == 2


def test_the_attention_backend_is_chosen_and_said(
    trace: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["audit", str(trace), "--model", str(folder), "--format", "json"]
    found = []
    for options, said in (([], "sdpa (auto: the device is 'cpu'"), (["--attention", "eager"], "eager (asked for)")):
        assert run([*command, *options]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["attention"].startswith(said)
        found.append(report["recorded"]["max_abs"])
    assert max(found) <= 1e-5
    assert run([*command, "--attention", "flash"]) == 2
    assert "the attention backend 'flash' cannot run float32 on 'cpu'" in capsys.readouterr().err
    assert run([*command, "--attention", "fast"]) == 2


def test_a_nan_holds_no_limit() -> None:
    nan = Comparison(1, *(float("nan"),) * 8)
    assert len(Limits(1, 1, 1).failed(nan)) == 3
    assert Limits().failed(nan) == []


def test_the_text_says_what_the_json_says(
    trace: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = changed(trace, tmp_path / "t.parquet", lambda r: r.replace(output_logprobs=np.roll(r.output_logprobs, 1)))
    assert run(["audit", str(path), "--model", str(folder), "--against", "persistent-history", "--worst", "3"]) == 0
    captured = capsys.readouterr()
    assert "off by one" in captured.out and "best lag: 1" in captured.out
    assert "rewrite/memory" in captured.out and "depth 3" in captured.out and "output index 4-7" in captured.out
    assert "persistent-history: another most likely token at" in captured.out
    assert len(captured.out.split("worst tokens")[1].strip().splitlines()) == 1 + 3
    assert "KL estimate" in captured.out and "epsilon 0.2" in captured.out
    assert "shifted by 1" in captured.err


def of_weights(trace: Path, path: Path, **described: object) -> Path:
    """The trace, with more said of its model."""
    reader = read(trace)
    model = reader.metadata.models["m"].model_copy(update=described)
    write(path, reader.metadata.model_copy(update={"models": {"m": model}}), list(reader.iter_invocations()))
    return path


def test_the_wrong_model_is_called_so_and_limits_alone_judge(
    trace: Path, folder: Path, student: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = weights_digest(student.model), save_model(tiny_model("llama", seed=6), tmp_path / "other")
    named = of_weights(trace, tmp_path / "named.parquet", weights_digest=own, dtype="float32")
    command = ["audit", str(named), "--model", str(other)]
    assert run(command) == 0, "no limit was given"
    captured = capsys.readouterr()
    assert "not the weights that the trace records for 'm'" in captured.err
    assert "weights: not those that the trace records" in captured.out
    assert "nothing was judged: no limit was given (--max-abs, --max-p99, --max-false-clips)" in captured.out
    assert run([*command, "--max-false-clips", "0.01"]) == 1
    assert "nothing was judged" not in capsys.readouterr().out
    assert run([*command, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == "other"
    assert run(["audit", str(named), "--model", str(folder), "--format", "json"]) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out)["weights"], captured.err) == ("same", "")


def test_weights_are_compared_in_the_recorded_dtype(student: LoadedModel, folder: Path) -> None:
    half, stranger = load(folder, dtype="bfloat16").model, tiny_model("llama", seed=6)
    tokenizer, full = student.tokenizer, weights_digest(student.model)
    in_half = Model(name="m", tokenizer=tokenizer, dtype="bfloat16", weights_digest=weights_digest(half))
    in_full = Model(name="m", tokenizer=tokenizer, dtype="float32", weights_digest=full)
    for model, described, verdict in (
        (student.model, in_full, "same"),
        (student.model, in_half, "same"),
        (half, in_half, "same"),
        (half, in_full, "unknown"),
        (stranger, in_half, "other"),
        (stranger, in_full, "other"),
    ):
        assert auditing.weights_of(model, described) == verdict
    policies = {"0": Policy(weights_digest="0" * 64), "1": Policy(weights_digest=full)}
    of_a_policy = in_full.model_copy(update={"weights_digest": None, "policies": policies})
    assert auditing.weights_of(student.model, of_a_policy) == "same"
    for digest in (None, "v7"):
        assert auditing.weights_of(student.model, in_full.model_copy(update={"weights_digest": digest})) == "unknown"


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_a_plot_is_written_whole(name: str, begins: bytes, trace: Path, folder: Path, tmp_path: Path) -> None:
    command = ["audit", str(trace), "--model", str(folder), "--against", "persistent-history"]
    assert run([*command, "--plot", str(tmp_path / name)]) == 0
    content = (tmp_path / name).read_bytes()
    assert content.startswith(begins) and len(content) > 10_000
    assert [p.name for p in tmp_path.iterdir()] == [name], "no temporary file is left"


def test_a_plot_shows_all_tokens_of_both_views_in_nats(trace: Path, student: LoadedModel) -> None:
    from matplotlib.patches import StepPatch

    from memopd_scorer.audit_plot import draw

    sizes, by_index, by_depth = draw(audit(trace, student, against="persistent-history")).axes
    bars = [p for p in sizes.patches if isinstance(p, StepPatch)]
    assert len(bars) == 2
    assert all(b.get_data().values.sum() == pytest.approx(1) for b in bars)
    assert bars[0].get_edgecolor() != bars[1].get_edgecolor() and bars[0].get_linestyle() != bars[1].get_linestyle()
    assert [len(axes.lines) for axes in (by_index, by_depth)] == [4, 4]
    assert [t.get_text() for t in by_depth.get_xticklabels()] == ["0", "1", "2", "3"]
    assert "nats" in sizes.get_xlabel() and "nats" in by_index.get_ylabel() and "nats" in by_depth.get_ylabel()


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_model_is_run(
    trace: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "audit", None)  # it would be called, and fail otherwise
    command = ["audit", str(trace), "--model", str(folder), "--plot"]
    assert run([*command, str(tmp_path / "a.pdf")]) == 2
    assert ".png or an .svg" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "memopd_scorer.audit_plot")
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run([*command, str(tmp_path / "a.png")]) == 2
    captured = capsys.readouterr().err
    assert "memopd-trace[plot]" in captured and captured.count("\n") == 1
