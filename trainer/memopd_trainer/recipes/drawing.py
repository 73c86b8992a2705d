"""What a step draws: groups, their episodes, and which of their invocations are trained.

All of it follows from the seed and the step's number alone, so that every process draws the same and a run that goes on
draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from memopd_trace.errors import UsageError, printable
from memopd_trace.invocation import Episode
from memopd_trainer.advantages import trained_mask
from memopd_trainer.recipes.sections import OneShotConfig, TcodConfig

if TYPE_CHECKING:
    from memopd_trainer.config import TrainConfig  # it reads recipes

Group = Sequence[Episode]
Key = tuple[str, int]  # (episode_id, invocation_index)
_REPLAY = 1  # keeps the draw of turns apart from that of groups


def draw(groups: Sequence[Group], step: int, config: TrainConfig) -> list[Group]:
    """The groups of step `step` (1, 2…): each epoch is a new permutation of them, or of the one task's rollouts, cut
    into whole steps.

    Raises:
        UsageError: as `one_task`.
    """
    if config.one_shot is None:
        return [groups[g] for g in draw_groups(len(groups), config.groups_per_step, step, config.seed)]
    task = one_task(groups, config.one_shot)
    wanted = min(config.one_shot.rollouts or len(task), len(task))
    return [tuple(task[e] for e in draw_groups(len(task), wanted, step, config.seed))]


def draw_groups(count: int, per_step: int | None, step: int, seed: int) -> list[int]:
    """Indices of the groups of step `step` (1, 2…) out of `count`, without repetition; `per_step` `None` = all."""
    per_step = per_step or count
    epoch, place = divmod(step - 1, count // per_step)
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return [int(g) for g in order[place * per_step : (place + 1) * per_step]]


def one_task(groups: Sequence[Group], config: OneShotConfig) -> Group:
    """The rollouts of the one task.

    Raises:
        UsageError: it is not there, or none is named and there are several.
    """
    named = {group[0].group_key[1]: group for group in groups}
    if config.task is None and len(groups) == 1:
        return groups[0]
    if config.task not in named:
        what = "one_shot trains on one task" if config.task is None else f"no task '{printable(config.task)}'"
        some = ", ".join(f"'{printable(name)}'" for name in list(named)[:3])
        raise UsageError(f"{what}: the trace has {len(groups)} ({some}…)", hint="name one: one_shot.task=ID")
    return named[config.task]


def chosen_turns(groups: Sequence[Group], step: int, config: TrainConfig) -> frozenset[Key] | None:
    """The invocations that step `step` trains on; `None` = all."""
    if config.tcod is None and config.reopd is None:
        return None
    rng = np.random.default_rng([config.seed, step, _REPLAY])
    chosen: list[Key] = []
    for episode in (e for group in groups for e in group):
        turns = [i.key for i in episode if trained_mask(i).any()]
        if config.tcod is not None:
            chosen.extend(curriculum(turns, step, config.tcod))
        elif config.reopd is not None and turns:
            chosen.append(turns[rng.choice(len(turns), p=replay_probabilities(len(turns), config.reopd.kappa))])
    return frozenset(chosen)


def curriculum_depth(step: int, config: TcodConfig) -> int:
    """k of step `step` (1, 2…)."""
    return config.k_start + (step - 1) // config.eta


def curriculum(turns: Sequence[Key], step: int, config: TcodConfig) -> Sequence[Key]:
    """The first or the last k of an episode's turns."""
    k = curriculum_depth(step, config)
    return turns[:k] if config.order == "f2b" else turns[-k:]


def replay_probabilities(turns: int, kappa: float) -> np.ndarray:
    """float64[turns]: kappa^t over their sum, t = 0, 1…"""
    weight_T = kappa ** np.arange(turns)
    return weight_T / weight_T.sum()
