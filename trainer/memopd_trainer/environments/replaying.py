"""Replay: single calls after prefixes of recorded trajectories, as ReOPD collects a student's actions (arXiv
2607.04763).

A task is one call of an episode of another trace, the teacher's: its prompt holds all that came before, as it was
recorded. The policy is asked for one action there, which is not executed: the episode ends with it, without a reward.
Prompts with positions or visibility of their own are refused: a call would not see what the row saw.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memopd_trace.errors import UsageError
from memopd_trace.invocation import IDS, Invocation
from memopd_trace.record import Prompt
from memopd_trace.storage import TraceReader
from memopd_trainer.environments import Outcome, Turn
from memopd_trainer.recipes.drawing import replay_probabilities


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """The prompt of a recorded call."""

    task_id: str
    prompt_ids: IDS


class ReplayEnvironment:
    """One call, and the end."""

    def reset(self, task: ReplayTask) -> Turn:
        """Ask for an action after the prefix."""
        return Turn(Prompt().add("prefix", task.prompt_ids))

    def step(self, invocation: Invocation) -> Outcome:
        """The action is recorded, not executed."""
        return Outcome(None, truncated=True)


def replay_tasks(trace: str | os.PathLike[str], count: int, *, kappa: float = 0.6, seed: int = 0) -> list[ReplayTask]:
    """`count` different prefixes of a valid trace at most: for each an episode is drawn evenly, and of its accepted
    calls step t with a probability proportional to kappa^t. A prefix drawn again is left out.

    Raises:
        InputError: the trace cannot be read.
        UsageError: it holds no accepted call, or one with positions or visibility of its own.
    """
    episodes = [[i for i in e if i.accepted is not False] for e in TraceReader(trace).iter_episodes()]
    episodes = [calls for calls in episodes if calls]
    if not episodes:
        raise UsageError(f"{trace}: holds no accepted call to replay")
    tasks: dict[str, ReplayTask] = {}
    for call in draw_calls(episodes, count, kappa=kappa, seed=seed):
        if call.position_ids is not None or call.visible_from is not None or call.visible_until is not None:
            raise UsageError(f"{call.name}: has positions or visibility of its own, so it cannot be asked again")
        name = f"{call.episode_id}@{call.invocation_index}"
        tasks.setdefault(name, ReplayTask(name, call.prompt_ids))
    return list(tasks.values())


def draw_calls(
    episodes: Sequence[Sequence[Invocation]], count: int, *, kappa: float, seed: int
) -> Iterator[Invocation]:
    """`count` calls: each of an episode drawn evenly, its step t with a probability proportional to kappa^t."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        calls = episodes[int(rng.integers(len(episodes)))]
        yield calls[int(rng.choice(len(calls), p=replay_probabilities(len(calls), kappa)))]
