"""The README's Python example runs as it stands and does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from memopd_trace.cli import app
from memopd_trainer.config import parse_config

ROOT = Path(__file__).parents[1]


def test_the_python_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    run = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "17 -> 14 tokens, 5 targets" in run.stdout
    assert "error[" not in run.stdout and "warning[" not in run.stdout


def test_every_make_target_of_the_docs_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"^make ([\w-]+)", (ROOT / document).read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (document, target)


def test_the_training_configuration_is_one() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    config = parse_config(yaml.safe_load(example))
    assert config.steps == 100 and config.held_out is not None


def test_every_command_line_of_the_readme_is_known() -> None:
    lines = re.findall(r"memopd-trace (\w+) ", (ROOT / "README.md").read_text())
    commands = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback is not None}
    assert len(lines) > 5
    assert set(lines) <= commands
