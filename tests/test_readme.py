"""The README's Python example runs as it stands and does what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import typer
import yaml
from helpers_look import row, save
from helpers_scorer import memory_episode, save_model, tiny_model, write_trace
from helpers_trace import build, valid

from memopd_trace.cli import app, run
from memopd_trace.storage import TraceReader
from memopd_trainer.config import parse_config

ROOT = Path(__file__).parents[1]


def test_the_python_example_runs(tmp_path: Path) -> None:
    example, _, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    run = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "17 -> 14 tokens, 5 targets" in run.stdout
    assert "error[" not in run.stdout and "warning[" not in run.stdout


def test_scores_are_read_back_as_the_readme_reads_them(tmp_path: Path) -> None:
    _, example, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    model = tiny_model("llama", seed=5)
    folder = save_model(model, tmp_path / "model")
    episode = memory_episode(np.random.default_rng(0), "m", calls=2)
    trace = write_trace(tmp_path / "train.parquet", folder, model, [episode])
    assert run(["score", str(trace), "--teacher", str(folder), "-o", str(tmp_path / "my-scores")]) == 0
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size = TraceReader(trace).metadata.models["m"].tokenizer.size
    shapes = [f"({len(call.output_ids)}, {size})" for call in episode]
    assert [line.endswith(shape) for line, shape in zip(done.stdout.splitlines(), shapes, strict=True)] == [True, True]


def test_every_make_target_of_the_docs_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"^make ([\w-]+)", (ROOT / document).read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (document, target)


def test_the_training_configuration_is_one() -> None:
    _, example = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    config = parse_config(yaml.safe_load(example))
    assert config.steps == 100 and config.held_out is not None


def test_the_examples_for_ci_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text()
    hooks, _ = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (hook,) = yaml.safe_load(hooks)["repos"][0]["hooks"]
    assert hook["id"] in [h["id"] for h in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())]
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "memopd-trace.toml").write_text(toml)
    (tmp_path / "traces").mkdir()
    build(valid("train"), tmp_path / "traces", "t")
    monkeypatch.chdir(tmp_path)
    section = text.split("## In CI")[1].split("\n## ")[0]
    lines = re.findall(r"^memopd-trace (validate .*?)(?:  +#.*)?$", section, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        assert run(shlex.split(line.replace("*", "t"))) == 0
    assert (tmp_path / "traces.xml").exists() and (tmp_path / "traces.sarif").exists()


def test_the_picture_of_an_episode_is_what_show_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"group_id": "g", "finish_reason": "stop"}
    rows = [
        row("e0", 0, [5, 6, 7], [8, 9, 2], relation="root", **facts),
        row("e0", 1, [5, 6, 7, 8, 9, 2, 10, 11], [12, 2], relation="extend", parent_index=0, **facts),
        row("e0", 2, [5, 6, 20, 21, 22], [23, 24, 2], relation="rewrite", parent_index=1, rewrite_kind="memory",
            rewrite_evidence="explicit", reward=1.0, terminated=True, **facts),
    ]  # fmt: skip
    assert run(["show", str(save(tmp_path / "t.parquet", rows))]) == 0
    picture = re.findall(r"```\n(episode .*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(picture) == 1
    assert [line.rstrip() for line in picture[0].splitlines()] == [
        line.rstrip() for line in capsys.readouterr().out.strip().splitlines()
    ]


def test_every_extra_is_in_the_table_of_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "README.md").read_text().split("| extra | brings | for |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(extras)


def test_every_command_line_of_the_readme_is_known() -> None:
    lines = re.findall(r"memopd-trace (\w+) ", (ROOT / "README.md").read_text())
    commands = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback is not None}
    assert len(lines) > 5
    assert set(lines) <= commands


def test_every_option_of_the_readme_is_one() -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", (ROOT / "README.md").read_text()))
    group = typer.main.get_command(app)
    known = {name for command in group.commands.values() for p in command.params for name in p.opts}  # type: ignore[attr-defined]
    assert len(named) > 10
    assert named <= known
