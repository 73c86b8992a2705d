"""Scores that were changed by hand, under names with the right hash: what training on them must refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_scores import rewritten as with_other_scores
from helpers_trainer import Setup, code_of, make_setup

from memopd_scorer.scoring import score
from memopd_trace.errors import InputError
from memopd_trainer.batch import load_rollouts
from memopd_trainer.student import evaluate_kl
from memopd_trainer.train import train


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(tmp_path_factory.mktemp("forged"))


def turn_behind_the_first(row: dict[str, Any]) -> None:
    first, second, *more = row["hidden"]
    row["hidden"] = [first, *more, second]


def lose_a_state(row: dict[str, Any]) -> None:
    row["hidden"][2] = [0.0] * len(row["hidden"][2])


def swap_outputs(row: dict[str, Any]) -> None:
    row["output_index"][2:4] = row["output_index"][3], row["output_index"][2]


def add_a_state(row: dict[str, Any]) -> None:
    row["hidden"].append(row["hidden"][0])


def drop_a_number(row: dict[str, Any]) -> None:
    row["logsumexp"][2] = None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (turn_behind_the_first, "E-SCORES-CHECK"),
        (lose_a_state, "E-SCORES-CHECK"),
        (swap_outputs, "E-SCORES-DAMAGED"),
        (add_a_state, "E-SCORES-DAMAGED"),
        (drop_a_number, "E-SCORES-DAMAGED"),
    ],
)
def test_what_was_changed_behind_the_first_token_of_a_row_is_refused(
    change: Callable[[dict[str, Any]], None], code: str, setup: Setup, tmp_path: Path
) -> None:
    """Under a name with the right hash."""
    unchanged = with_other_scores(setup.scores, tmp_path / "same", lambda row: None, row=0)
    load_rollouts(setup.trace, unchanged, policy=False)
    changed = with_other_scores(setup.scores, tmp_path / "changed", change, row=0)
    assert code_of(setup.trace, changed, policy=False) == code


def test_a_row_that_is_scored_twice_is_refused(setup: Setup, tmp_path: Path) -> None:
    shutil.copytree(setup.scores, tmp_path / "s")
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    first = manifest["files"][0]
    again = f"shard-{len(manifest['files']):06d}{first['name'][len('shard-000000') :]}"
    shutil.copy(tmp_path / "s" / first["name"], tmp_path / "s" / again)
    manifest["files"].append({**first, "name": again})
    (tmp_path / "s" / "manifest.json").write_text(json.dumps(manifest))
    assert code_of(setup.trace, tmp_path / "s", policy=False) == "E-SCORES-DUPLICATE"


def forge_a_state_of_a_tier(row: dict[str, Any]) -> None:
    """Its sampled id cannot tell: whatever divergence is claimed allows any state."""
    row["hidden"][2] = [-code for code in row["hidden"][2]]
    row["hidden_kl"] = [1e9] * len(row["hidden_kl"])


def test_a_forged_state_is_refused_when_it_is_trained_on(setup: Setup, tmp_path: Path) -> None:
    score(setup.trace, setup.teacher, tmp_path / "s", dtype="float64", states="int8")
    forged = with_other_scores(tmp_path / "s", tmp_path / "forged", forge_a_state_of_a_tier, row=0)
    load_rollouts(setup.trace, forged, policy=False)  # the whole vocabulary of the third token is not looked at yet
    for run in (
        lambda: train(setup.config(scores=str(forged), output=str(tmp_path / "run"), steps=1)),
        lambda: evaluate_kl(setup.student, setup.trace, forged),
    ):
        with pytest.raises(InputError, match="do not give their log-sum-exp") as refused:
            run()
        assert refused.value.code == "E-SCORES-CHECK"


def test_a_tolerance_that_allows_anything_is_refused(setup: Setup, tmp_path: Path) -> None:
    shutil.copytree(setup.scores, tmp_path / "s")
    run = json.loads((tmp_path / "s" / "run.json").read_text())
    (tmp_path / "s" / "run.json").write_text(json.dumps({**run, "tolerance": 1e9}))
    assert code_of(setup.trace, tmp_path / "s", policy=False) == "E-META-INVALID"
