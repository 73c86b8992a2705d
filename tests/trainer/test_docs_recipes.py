"""The page on recipes: every configuration on it is run, every command taken."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from helpers_trainer import make_setup, rewarded_groups

from memopd_scorer.scoring import score
from memopd_trace.cli import run
from memopd_trainer.recipes import ORDER

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text(encoding="utf-8")
SECTIONS = {part.split("`")[0]: part for part in PAGE.split("\n## `")[1:]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the page names, made by its own commands."""
    root = tmp_path_factory.mktemp("docs")
    (root / "models").mkdir()
    made = make_setup(root / "models", rewarded_groups(), dtype="float32")
    made.trace.rename(root / "train.parquet")
    made.scores.rename(root / "scores")
    score(root / "train.parquet", made.teacher, root / "scores-flat", view="persistent-history")
    return root


def test_every_recipe_has_a_section_that_says_what_is_unknown() -> None:
    assert list(SECTIONS) == list(ORDER)
    for name, text in SECTIONS.items():
        assert all(f"**{word}**" in text for word in ("Here", "Unknown")) and "**The paper**" in text, name
        assert len(re.findall(r"^```yaml$", text, re.MULTILINE)) == 1, name


@pytest.mark.parametrize("name", ORDER)
def test_the_configuration_of_a_section_trains(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (block,) = re.findall(r"```yaml\n(.*?)```", SECTIONS[name], re.DOTALL)
    assert yaml.safe_load(block)["recipe"] == name
    if name == "sdpo":
        commands = re.findall(r"^memopd-trace (.*)$", SECTIONS[name], re.MULTILINE)
        assert len(commands) == 2
        for command in commands:
            assert run(command.split()) == 0, capsys.readouterr().err
        capsys.readouterr()
    (tmp_path / "run.yaml").write_text(block)
    options = ["--format", "json", "steps=1", f"output={tmp_path / 'policy'}"]
    assert run(["train", str(tmp_path / "run.yaml"), *options]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["last"]["grad_norm"] > 0


def test_what_is_not_there_yet_is_no_recipe() -> None:
    late = PAGE.split("## Not yet")[1]
    assert not set(re.findall(r"`(\w+)`", late)) & set(ORDER)
