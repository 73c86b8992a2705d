"""`plan`, `score` and `audit` on the command line: results on stdout, one line of error on stderr, right exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_scorer import memory_episode, save_model, tiny_model, write_trace

from memopd_scorer.attention import REQUESTS
from memopd_trace.cli import run
from memopd_trace.cli.teacher import AttentionName


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(model folder, trace that it sampled)."""
    folder = tmp_path_factory.mktemp("toy")
    model = tiny_model("llama", seed=5)
    data = [memory_episode(np.random.default_rng(i), f"m{i}", group="g") for i in range(2)]
    saved = save_model(model, folder / "model")
    return saved, write_trace(folder / "trace.parquet", saved, model, data)


def test_plan_prints_what_scoring_will_cost(toy: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(toy[1]), "--teacher", str(toy[0]), "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["invocations"] == 8
    assert printed["logical_tokens"] > printed["executed_tokens"]
    assert printed["targets"] == 48
    assert printed["estimated_flops"] > 2 * printed["executed_tokens"] * 3 * (32 * 96 + 3 * 32 * 64)
    assert printed["hidden_bytes_bfloat16"] == 48 * 32 * 2


def test_score_then_score_again(toy: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["score", str(toy[1]), "--teacher", str(toy[0]), "-o", str(tmp_path / "s"), "--format", "json"]
    assert run([*command, "--signal", "sampled,topk", "--topk", "5"]) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out)["shards_scored_now"], captured.err) == (1, "")
    assert run([*command, "--signal", "sampled,topk", "--topk", "5"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["shards_scored_now"] == 0
    assert captured.err == "going on: 1 of 1 shards are there\n"
    assert run(command) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "E-SCORES-OTHER-RUN" in captured.err and captured.err.count("\n") == 1


def test_a_scores_folder_that_is_unfinished_or_taken_for_a_trace_is_called_so(
    toy: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, folder = str(toy[1]), tmp_path / "s"
    assert run(["score", trace, "--teacher", str(toy[0]), "-o", str(folder), "--states", "float16"]) == 0
    printed = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert [*printed][:4] == ["scores", "logical tokens", "executed tokens", "sharing"], "the headline comes first"
    assert printed["state kl mean"].endswith(" nats")
    assert run(["validate", str(folder)]) == 3
    assert "this is a scores folder: a trace is what was scored" in capsys.readouterr().out
    (folder / "manifest.json").unlink()
    assert run(["validate", str(folder)]) == 3
    assert "this is a scores folder, and not finished" in capsys.readouterr().out
    assert run(["validate", trace, "--scores", str(folder)]) == 3
    assert "scores are unfinished: run the same `memopd-trace score` again" in capsys.readouterr().out
    (folder / "run.json").unlink()
    assert run(["validate", trace, "--scores", str(folder)]) == 3
    assert "it is no scores folder" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("attention", "said"), [("auto", "sdpa (auto: the device is 'cpu'"), ("flex", "flex (asked for)")]
)
def test_score_says_which_attention_it_used_and_why(
    attention: str, said: str, toy: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["score", str(toy[1]), "--teacher", str(toy[0]), "-o", str(tmp_path / "s"), "--attention", attention]
    assert run([*command, "--signal", "sampled", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["attention"].startswith(said)


def test_the_command_line_offers_every_attention_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert [name.value for name in AttentionName] == list(REQUESTS)
    assert run(["score", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name}:" in printed for name in REQUESTS), "each is explained"


def test_audit_gives_a_report_and_fails_over_its_limit(
    toy: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["audit", str(toy[1]), "--model", str(toy[0]), "--against", "persistent-history"]
    assert run([*command, "--max-abs", "1e-3", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["audit_version"] == "1"
    assert report["recorded"]["max_abs"] <= 1e-3 < report["against"]["max_abs"]
    other = save_model(tiny_model("llama", seed=6), tmp_path / "other")
    assert run(["audit", str(toy[1]), "--model", str(other), "--max-abs", "1e-3"]) == 1
    assert "recorded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["plan", "nowhere.parquet"], 3, "error: [E-NO-INPUT] nowhere.parquet: no such file or folder\n"),
        (["plan", "{trace}", "--layout", "rows"], 2, "rows"),
        (["plan", "{trace}", "--teacher", "{empty}"], 3, "config.json"),
        (["score", "{trace}", "--teacher", "./nowhere", "-o", "{empty}/s"], 3, "no such folder"),
        (["score", "{trace}", "--teacher", "{empty}", "-o", "{empty}/s"], 3, "E-MODEL-LOAD"),
        (["score", "{trace}", "--teacher", "{model}", "-o", "{empty}/s", "--signal", "x"], 2, "unknown signal 'x'"),
        (
            ["score", "{trace}", "--teacher", "{model}", "-o", "{empty}/s", "--view", "persistant-history"],
            2,
            "did you mean 'persistent-history'?",
        ),
        (["score", "{trace}", "--teacher", "{model}", "-o", "{empty}/s", "--dtype", "int8"], 2, "int8"),
        (
            ["score", "{trace}", "--teacher", "{model}", "-o", "{empty}/s", "--attention", "flash"],
            2,
            "'flash' cannot run",
        ),
        (["score", "{trace}", "--teacher", "{model}", "-o", "{empty}/s", "--attention", "fast"], 2, "fast"),
        (["score", "{trace}", "--teacher", "{model}", "-o", "{trace}"], 2, "is a file"),
        (["score", "{text}", "--teacher", "{model}", "-o", "{empty}/s"], 3, "E-UNREADABLE"),
        (["audit", "{trace}", "--model", "{model}", "--against", "memory"], 2, "memory"),
    ],
)
def test_bad_input_is_one_line_and_the_right_code(
    arguments: list[str],
    code: int,
    named: str,
    toy: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.parquet").write_text("not a trace")
    places = {
        "model": toy[0],
        "trace": toy[1],
        "empty": tmp_path / "empty",
        "text": tmp_path / "text.parquet",
    }
    assert run([a.format(**places) for a in arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert named in captured.err and "Traceback" not in captured.err


def test_torch_stays_out_of_the_light_parts() -> None:
    program = (
        "import sys, memopd_trace, memopd_trace.cli, memopd_scorer.plan, memopd_scorer.cost;"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
