"""The configuration of a loop: where rollouts come from, who scores them, and how each iteration trains."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from memopd_trace.errors import UsageError, printable
from memopd_trace.schema import RECORDED
from memopd_trace.views import PERSISTENT_HISTORY
from memopd_trainer.config import TrainConfig, parse_as, parse_config, read_settings, refuse_unknown
from memopd_trainer.recipes.sections import Count, Place, Section

SET_BY_LOOP = ("student", "trace", "scores", "output", "continues", "policy_version")


class WindowConfig(Section):
    """Calls forget while they write: all but the `first` and the `latest` tokens (`memopd_trainer.eviction`)."""

    first: int = Field(4, ge=0)
    latest: Count


class RolloutConfig(Section):
    """`environment` and its `options`: see `memopd_trainer.environments.suites`. `tasks` an iteration, null = all;
    `per_task` rollouts of each, which are compared with each other."""

    environment: str
    options: dict[str, Any] = Field(default_factory=dict)
    tasks: Count | None = None
    per_task: Count = 4
    temperature: float = Field(1.0, ge=0)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    max_new_tokens: Count = 256
    batch_size: Count = 32
    eviction: WindowConfig | None = None


class ScoreConfig(Section):
    """The teacher, a local folder, and how it scores (`memopd_scorer.scoring.score`). Signals and view are what the
    training takes."""

    teacher: Place
    topk: Count = 64
    states: Literal["exact", "float16", "int8"] = "exact"
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    device: str = "cpu"
    max_tokens: Count = 8192


class LoopConfig(Section):
    """`iterations` of rollouts, validation, scores and training, in the folder `output`. `train` is a training
    configuration without what the loop sets; its `steps` are made in each iteration, and `max_staleness` is 0 unless
    given. `score` null = no teacher. `on_bad`: what to do about episodes that do not validate or that an
    environment failed in: `stop`, or `quarantine` them and go on with the others."""

    student: Place
    output: Place
    iterations: Count
    rollouts: RolloutConfig
    score: ScoreConfig | None = None
    train: dict[str, Any]
    on_bad: Literal["stop", "quarantine"] = "stop"
    seed: int = Field(0, ge=0, lt=2**64)

    @property
    def has_scores(self) -> bool:
        """Whether the training takes a teacher's scores."""
        return self.training(0, self.student, "trace", "scores", "policy").divergence.weight > 0

    def training(self, iteration: int, student: str, trace: str, scores: str | None, output: str) -> TrainConfig:
        """The training of one iteration, whose student is policy version `iteration`; its last step is one of the whole
        loop's, so that warm-up and curricula go on.

        Raises:
            UsageError: as `memopd_trainer.config.parse_config`.
        """
        per_iteration = self.train.get("steps")
        steps = per_iteration * (iteration + 1) if type(per_iteration) is int else per_iteration
        given = {"seed": self.seed, "max_staleness": 0, **self.train}
        places = {"student": student, "trace": trace, "scores": scores, "output": output, "steps": steps}
        return parse_config({**given, **places, "continues": iteration > 0, "policy_version": iteration}, where="train")


def load_loop_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> LoopConfig:
    """Read a YAML or JSON file and apply `key=value` overrides.

    Raises:
        InputError, UsageError: as `memopd_trainer.config.load_config`.
    """
    return parse_loop_config(read_settings(path, overrides), where=os.fspath(path))


def parse_loop_config(data: Mapping[str, Any], *, where: str = "configuration") -> LoopConfig:
    """Check a mapping, and the training configuration in it.

    Raises:
        UsageError: an unknown key, a missing one, a value that does not fit, a key of `train` that is the loop's to
            set, or a training that takes scores where there is no teacher.
    """
    train = data.get("train")
    if isinstance(train, Mapping):
        refuse_unknown(train, TrainConfig, "train.", where)
        for key in SET_BY_LOOP:
            if key in train:
                raise UsageError(f"{where}: train.{key} is set by the loop", hint="leave it out")
        if "steps" not in train:
            raise UsageError(f"{where}: missing train.steps", hint="the steps of one iteration")
    config = parse_as(LoopConfig, data, where, hint="docs/loop.md shows a whole configuration")
    if config.has_scores and config.score is None:
        raise UsageError(
            f"{where}: the training takes a teacher's scores and there is no teacher",
            hint="give score.teacher, or set train.divergence.weight=0",
        )
    view = config.training(0, config.student, "trace", "scores", "policy").view
    if config.has_scores and view not in (RECORDED, PERSISTENT_HISTORY):
        raise UsageError(
            f"{where}: the loop makes no view '{printable(view)}'", hint=f"{RECORDED} or {PERSISTENT_HISTORY}"
        )
    return config
