"""Replaying prefixes of recorded trajectories, and the recipe `reopd` on what the student did there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_models import tiny_tokenizer
from helpers_scorer import tiny_model
from transformers import PreTrainedModel

from memopd_scorer.scoring import score
from memopd_trace.errors import UsageError
from memopd_trace.invocation import Episode, Invocation, Sampling
from memopd_trace.metadata import Producer, TraceMetadata
from memopd_trace.record.transformers import model_metadata
from memopd_trace.storage import read, write
from memopd_trace.validate import validate
from memopd_trainer import parse_config, train
from memopd_trainer.environments.replaying import ReplayEnvironment, draw_calls, replay_tasks
from memopd_trainer.rollout import collect

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Teacher and student folders, and the teacher's trajectories of three steps each."""
    root = tmp_path_factory.mktemp("replay")
    for n, name in enumerate(("teacher", "student")):
        tiny_model(vocab_size=len(TOKENIZER) + 7, seed=n).save_pretrained(root / name)
        TOKENIZER.save_pretrained(root / name)
    write(root / "pool.parquet", metadata(tiny_model(vocab_size=len(TOKENIZER) + 7)), rows_of(trajectories()))
    return {name: root / name for name in ("teacher", "student", "pool.parquet")}


def metadata(model: PreTrainedModel) -> TraceMetadata:
    described = model_metadata(model, TOKENIZER, name="m", stop_ids=[2])
    return TraceMetadata(producer=Producer(name="test", version="1"), models={"m": described})


def trajectories(count: int = 4, steps: int = 3) -> list[Episode]:
    rng = np.random.default_rng(3)
    made = []
    for n in range(count):
        history = rng.integers(3, 300, 8)
        rows: list[Invocation] = []
        for index in range(steps):
            action = rng.integers(3, 300, 4)
            rows.append(
                Invocation(
                    episode_id=f"pool{n}", invocation_index=index, model_id="m", prompt_ids=history, output_ids=action,
                    parent_index=index - 1 if index else None, relation="extend" if index else "root",
                )
            )  # fmt: skip
            history = np.concatenate([history, action, rng.integers(3, 300, 5)])
        made.append(Episode(f"pool{n}", tuple(rows)))
    return made


def rows_of(episodes: list[Episode]) -> list[Invocation]:
    return [i for e in episodes for i in e]


def test_prefixes_are_the_recorded_prompts_early_ones_more_often(models: dict[str, Path]) -> None:
    episodes = [list(e) for e in trajectories()]
    drawn = list(draw_calls(episodes, 2000, kappa=0.6, seed=0))
    share = np.bincount([c.invocation_index for c in drawn], minlength=3) / 2000
    assert share == pytest.approx(np.array([1, 0.6, 0.36]) / 1.96, abs=0.04)  # 3.6 standard deviations
    assert np.bincount([int(c.episode_id[-1]) for c in drawn]) == pytest.approx([500] * 4, abs=80)
    prompts = {f"{i.episode_id}@{i.invocation_index}": i.prompt_ids.tolist() for i in rows_of(trajectories())}
    several = replay_tasks(models["pool.parquet"], 200)
    assert len({t.task_id for t in several}) == len(several) == 12  # each prefix once, however often it was drawn
    assert all(t.prompt_ids.tolist() == prompts[t.task_id] for t in several)


def test_the_recipe_trains_on_actions_that_were_not_executed(models: dict[str, Path], tmp_path: Path) -> None:
    student = tiny_model(vocab_size=len(TOKENIZER) + 7, seed=1)
    tasks = replay_tasks(models["pool.parquet"], 12)
    settings: dict[str, Any] = {"rollouts_per_task": 2, "sampling": Sampling(temperature=1.0), "max_new_tokens": 5}
    settings["profile"] = "policy"  # no reward
    collect(student, TOKENIZER, ReplayEnvironment, tasks, out_path=tmp_path / "replay.parquet", **settings)
    assert not [f for f in validate(tmp_path / "replay.parquet", "core").findings if f.severity == "error"]
    episodes = list(read(tmp_path / "replay.parquet").iter_episodes())
    assert {len(e) for e in episodes} == {1} and len(episodes) == 2 * len(tasks)
    assert all(e.episode_return is None and e.invocations[0].truncated for e in episodes)  # no reward, not 0

    score(tmp_path / "replay.parquet", models["teacher"], tmp_path / "scores", signals=("sampled",))
    places = {"student": models["student"], "trace": tmp_path / "replay.parquet", "scores": tmp_path / "scores"}
    told = {key: str(path) for key, path in (places | {"output": tmp_path / "run"}).items()}
    result = train(parse_config({"recipe": "reopd", "steps": 2, "lr": 1e-3, **told}))
    assert result.first is not None and result.last is not None
    assert result.first.ratio == pytest.approx(1, abs=1e-4) and result.first.clip_fraction == 0
    assert result.first.trained_tokens == sum(len(e.invocations[0].output_ids) for e in episodes)
    assert result.last.divergence is not None and result.last.loss != result.first.loss


def test_what_would_not_see_the_same_is_not_asked_again(models: dict[str, Path], tmp_path: Path) -> None:
    shifted = [i.replace(position_ids=i.positions() + 3) for i in rows_of(trajectories(1))]
    write(tmp_path / "p.parquet", metadata(tiny_model(vocab_size=len(TOKENIZER) + 7)), shifted)
    with pytest.raises(UsageError, match="positions or visibility"):
        replay_tasks(tmp_path / "p.parquet", 1)
