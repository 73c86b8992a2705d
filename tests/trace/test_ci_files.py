"""What others put into their CI: the pre-commit hook, the GitHub Action, the examples. Each is run, not only read."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_trace import build, changed, valid

from memopd_trace.cli import run
from memopd_trace.settings import load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "ci"
BIN = Path(sys.executable).parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
INSTALL, VALIDATE = ACTION["runs"]["steps"]
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


def step(spec: dict[str, Any], folder: Path, **inputs: str) -> tuple[int, str, dict[str, str]]:
    """Run a step of the action in `folder` as a runner does: exit code, what was printed, outputs."""
    given = {name: str(entry.get("default", "")) for name, entry in ACTION["inputs"].items()} | inputs
    env = {name: re.sub(r"\$\{\{ inputs\.([a-z-]+) \}\}", lambda m: given[m[1]], v) for name, v in spec["env"].items()}
    outputs = folder.parent / "outputs"
    outputs.write_text("")
    known = {"RUNNER_TEMP": str(folder.parent), "GITHUB_ACTION_PATH": str(ROOT), "GITHUB_OUTPUT": str(outputs)}
    script = folder.parent / "script.sh"
    script.write_text(spec["run"])
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
    done = subprocess.run(shell, cwd=folder, env={**os.environ, **known, **env}, capture_output=True, check=False)
    assert spec is INSTALL or done.stderr == b"", done.stderr  # pip may have its warnings
    return done.returncode, done.stdout.decode(), dict(line.split("=", 1) for line in outputs.read_text().splitlines())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout with a good and a bad trace, beside a runner's folder in which the command is installed."""
    bin = tmp_path / "memopd-trace" / "bin"
    bin.mkdir(parents=True)
    for name in ("memopd-trace", "python"):
        (bin / name).write_text(f'#!/bin/sh\nexec "{BIN / name}" "$@"\n')
        (bin / name).chmod(0o755)
    checkout = tmp_path / "checkout"
    (checkout / "runs of may").mkdir(parents=True)
    (checkout / ".git").mkdir()
    build(valid("train"), checkout / "runs of may", "good")
    build(changed("train", (0, {"output_logprobs": [-0.7, "NaN", -1.6]})), checkout, "bad")
    return checkout


def test_the_files_keep_their_published_schemas() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    gitlab = ["vendor.gitlab-ci", "--data-transform", "gitlab-ci", str(EXAMPLES / "gitlab-ci.yml")]
    for arguments in (
        [*check, "vendor.github-actions", str(ROOT / "action.yml")],
        [*check, "vendor.github-workflows", str(EXAMPLES / "validate.yml")],
        [*check, *gitlab],
        [sys.executable, "-m", "pre_commit", "validate-manifest", str(ROOT / ".pre-commit-hooks.yaml")],
        [sys.executable, "-m", "pre_commit", "validate-config", str(EXAMPLES / "pre-commit-config.yaml")],
    ):
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_examples_name_what_is_there() -> None:
    workflow = (EXAMPLES / "validate.yml").read_text()
    steps = yaml.safe_load(workflow)["jobs"]["validate"]["steps"]
    ours = [s for s in steps if "memopd-trace" in s["uses"]]
    assert len(ours) == 2
    for given in ours:
        assert set(given["with"]) <= set(ACTION["inputs"])
    assert set(re.findall(r"steps\.\w+\.outputs\.(\w+)", (EXAMPLES / "validate.yml").read_text())) <= set(
        ACTION["outputs"]
    )
    ((hook,),) = [r["hooks"] for r in yaml.safe_load((EXAMPLES / "pre-commit-config.yaml").read_text())["repos"]]
    assert hook["id"] == HOOK["id"] and re.search(hook["files"], "traces/today.parquet")
    config = load_config(EXAMPLES / "memopd-trace.toml")
    assert config.options["fail_on"] == "warning" and len(config.per_file_ignores) == 1


def test_the_gitlab_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "traces").mkdir()
    build(valid("train"), tmp_path / "traces", "t")
    monkeypatch.chdir(tmp_path)
    job = yaml.safe_load((EXAMPLES / "gitlab-ci.yml").read_text())["validate-traces"]
    _, *arguments = shlex.split(job["script"][-1])
    assert run([a.replace("*", "t") for a in arguments]) == 0
    assert Path(job["artifacts"]["reports"]["junit"]).read_text().startswith("<?xml")


def test_no_input_is_written_into_a_script() -> None:
    for each in (INSTALL, VALIDATE):
        assert "${{" not in each["run"] and "eval" not in each["run"]
        assert each["shell"] == "bash"
    used = re.findall(r"\$\{\{ inputs\.([a-z-]+) \}\}", json.dumps([INSTALL["env"], VALIDATE["env"]]))
    assert sorted(used) == sorted(ACTION["inputs"]), "every input is used once"


def test_the_action_annotates_and_fails(folder: Path) -> None:
    code, out, outputs = step(VALIDATE, folder, paths="bad.parquet\n**/*good.parquet\n", profile="train")
    assert code == 1
    first, *annotations, totals = out.splitlines()
    assert first.startswith("::stop-commands::") and annotations.pop(0) == f"::{first.split('::')[2]}::"
    assert [a.split("%3A")[0] for a in annotations] == ["::error file=bad.parquet,title=E-LOGPROB-NAN"]
    assert "; 8 rows, 4 episodes; profile train" in totals, "the folder with spaces was found"
    assert outputs["exit-code"] == "1" and Path(outputs["report"]).read_text().splitlines() == [*annotations, totals]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"paths": "runs of may/good.parquet"}, 0),
        ({"paths": "bad.parquet", "exit-zero": "true"}, 0),
        ({"paths": "none/*.parquet", "exit-zero": "true"}, 3),
        ({"paths": ""}, 2),
        ({"paths": "bad.parquet", "profile": "strict"}, 2),
        ({"paths": "bad.parquet", "config": "other.toml"}, 0),
    ],
)
def test_the_actions_exit_code_is_the_commands(inputs: dict[str, str], expected: int, folder: Path) -> None:
    (folder / "other.toml").write_text('[validate]\nignore = ["E-LOGPROB-NAN"]\n')
    code, _, outputs = step(VALIDATE, folder, **inputs)
    assert (code, outputs["exit-code"]) == (expected, str(expected))


def test_the_action_writes_a_report_for_code_scanning(folder: Path) -> None:
    code, _, outputs = step(VALIDATE, folder, paths="bad.parquet", format="sarif", **{"exit-zero": "true"})
    assert code == 0
    (result,) = json.loads(Path(outputs["report"]).read_text())["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "bad.parquet"


EVIL = '"; touch hacked; $(touch hacked) `touch hacked`\n-o\nhacked.parquet'


@pytest.mark.parametrize("name", ["paths", "profile", "format", "fail-on", "exit-zero", "config"])
def test_an_input_cannot_run_a_command_or_give_an_option(name: str, folder: Path) -> None:
    _, _, outputs = step(VALIDATE, folder, **({"paths": "runs of may/good.parquet"} | {name: EVIL}))
    assert outputs["exit-code"] in ("0", "2", "3")
    assert {p.name for p in folder.iterdir()} == {".git", "bad.parquet", "runs of may"}


def test_a_hostile_file_name_gives_the_runner_no_command(folder: Path) -> None:
    (folder / "bad.parquet").rename(folder / "##[add-mask]x\n::add-mask::y")
    for format in ("github", "text"):
        _, out, _ = step(VALIDATE, folder, paths="*mask*", format=format)
        start, stop = out.index("::stop-commands::"), out.index(f"\n::{out.splitlines()[0].split('::')[2]}::\n")
        heard = out[:start] + out[stop:]
        assert "add-mask" in out and "\n::add-mask" not in heard
        assert all(line.startswith("::error file=") for line in heard.splitlines() if "add-mask" in line)


def test_the_hooks_entry_judges_the_files_that_it_is_given(folder: Path) -> None:
    assert HOOK["require_serial"] and HOOK["language"] == "python"
    assert [bool(re.search(HOOK["files"], n)) for n in ("a.parquet", "a/b.arrow", "parquet.md")] == [True, True, False]
    _, *arguments = shlex.split(HOOK["entry"])
    assert run([*arguments, str(folder / "runs of may" / "good.parquet")]) == 0
    assert run([*arguments, "--profile", "train", str(folder / "bad.parquet")]) == 1


def test_the_entry_is_a_script_of_the_package() -> None:
    assert (BIN / shlex.split(HOOK["entry"])[0]).exists()


def copy_of_the_project(target: Path) -> Path:
    """What a build of the package needs, as it stands in the work tree."""
    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".pre-commit-hooks.yaml"):
        shutil.copy(ROOT / name, target / name)
    for name in ("memopd_trace", "scorer", "trainer"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def git(folder: Path, *arguments: str) -> str:
    who = [x for k in ("name", "email") for x in ("-c", f"user.{k}=test@example.org")]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(["git", *who, *arguments], cwd=folder, env=clean, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.slow
def test_pre_commit_installs_the_hook_and_runs_it(folder: Path, tmp_path: Path) -> None:
    project = copy_of_the_project(tmp_path / "project")
    for place in (project, folder):
        shutil.rmtree(place / ".git", ignore_errors=True)
        git(place, "init", "-q")
        git(place, "add", "-A")
    git(project, "commit", "-qm", "all")
    hooks = [{"id": HOOK["id"], "args": ["--profile", "train"]}]
    repos = [{"repo": str(project), "rev": git(project, "rev-parse", "HEAD"), "hooks": hooks}]
    (folder / ".pre-commit-config.yaml").write_text(yaml.safe_dump({"repos": repos}))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "run", "--all-files"],
        cwd=folder,
        env={**clean, "PRE_COMMIT_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "bad.parquet:0: error[E-LOGPROB-NAN]" in done.stdout
    assert "8 rows, 4 episodes; profile train" in done.stdout, "both files in one process"


@pytest.mark.slow
def test_the_action_installs_itself(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.rmtree(folder.parent / "memopd-trace")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", copy_of_the_project(tmp_path / "project"))
    code, out, _ = step(INSTALL, folder, python=sys.executable)
    assert code == 0, out
    code, out, _ = step(VALIDATE, folder, paths="bad.parquet")
    assert code == 1 and "::error file=bad.parquet" in out
