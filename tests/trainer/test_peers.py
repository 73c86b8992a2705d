"""The view of a successful peer, and the recipe `sdpo` on its scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_models import tiny_tokenizer
from helpers_trainer import Setup, make_setup, rewarded_groups
from transformers import AutoTokenizer

from memopd_scorer.scoring import score
from memopd_trace.cli import run
from memopd_trace.errors import InputError
from memopd_trace.validate import validate
from memopd_trace.viewfile import ViewsReader
from memopd_trainer import train
from memopd_trainer.batch import load_rollouts
from memopd_trainer.packs import make_packs
from memopd_trainer.recipes.peers import AFTER, BEFORE, write_peer_view


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Two groups of three rollouts, the first of each a success; in the second group the second is one, too."""
    episodes = rewarded_groups(per_group=3)
    last = episodes[4].invocations[-1].replace(reward=1.0)
    episodes[4] = type(episodes[4])(episodes[4].episode_id, (*episodes[4].invocations[:-1], last))
    return make_setup(tmp_path_factory.mktemp("peers"), episodes)


@pytest.fixture(scope="module")
def views(setup: Setup) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(setup.student)
    # every call but those of g0e0, which is the only success of its group
    assert write_peer_view(setup.trace, setup.root / "views.parquet", tokenizer) == (10, 2)
    return setup.root / "views.parquet"


def test_the_solution_of_the_first_other_success_stands_behind_the_task(setup: Setup, views: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(setup.student)
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (BEFORE, AFTER))
    by_id = {e.episode_id: e for e in setup.episodes}
    peers = {"g0e1": "g0e0", "g0e2": "g0e0", "g1e0": "g1e1", "g1e1": "g1e0", "g1e2": "g1e0"}
    seen = 0
    for view in ViewsReader(views):
        row = by_id[view.episode_id].invocations[view.invocation_index]
        solution = np.concatenate([i.output_ids for i in by_id[peers[view.episode_id]]]).tolist()
        task, rest = row.prompt_ids[:12].tolist(), row.prompt_ids[12:].tolist()
        assert view.prompt_ids.tolist() == [*task, *before, *solution, *after, *rest]
        seen += 1
    assert seen == 10
    assert validate(setup.trace, "train", views=views).clean


def test_rows_without_a_peer_are_masked_and_the_others_train(setup: Setup, views: Path, tmp_path: Path) -> None:
    score(setup.trace, setup.student, tmp_path / "scores", dtype="float64", view="successful-peer", views=views)
    changes: dict[str, Any] = {"recipe": "sdpo", "scores": str(tmp_path / "scores"), "output": str(tmp_path / "run")}
    config = setup.config(**changes)
    assert (config.divergence.kind, config.divergence.beta, config.divergence.importance_clip) == ("jsd", 0.5, 2.0)
    how: dict[str, Any] = {"policy": True, "view": "successful-peer"}
    rollouts = load_rollouts(config.trace, config.scores, leave_out_unscored=True, **how)
    packs = list(make_packs(rollouts, rollouts.groups, {}))
    assert {e for p in packs for e in p.episode_ids} == {"g0e1", "g0e2", "g1e0", "g1e1", "g1e2"}
    assert float(sum(p.weight_M.sum() for p in packs)) == pytest.approx(1)
    with pytest.raises(InputError, match="no score") as caught:
        load_rollouts(config.trace, config.scores, **how)
    assert caught.value.code == "E-SCORES-MISSING"

    result = train(config)
    assert result.first is not None and result.last is not None and result.first.divergence and result.last.divergence
    assert result.first.trained_tokens == 10 * 6 and 0 < result.last.divergence < result.first.divergence


def test_the_command_writes_the_view(
    setup: Setup, views: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["peers", str(setup.trace), "--model", str(setup.student), "-o", str(tmp_path / "v.parquet")]
    assert run(command) == 0
    assert capsys.readouterr().out == "10 calls with a successful peer, 2 without\n"
    assert [v.prompt_ids.tolist() for v in ViewsReader(tmp_path / "v.parquet")] == [
        v.prompt_ids.tolist() for v in ViewsReader(views)
    ]
    assert run(command) == 2 and "exists already" in capsys.readouterr().err
    assert run([*command[:-1], str(tmp_path / "w.parquet"), "--threshold", "2"]) == 3
    assert "no call has a peer" in capsys.readouterr().err and not (tmp_path / "w.parquet").exists()


def test_another_tokenizer_is_refused(setup: Setup, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its ids are of tokenizer"):
        write_peer_view(setup.trace, tmp_path / "v.parquet", tiny_tokenizer())
