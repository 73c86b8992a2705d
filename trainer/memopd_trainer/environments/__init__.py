"""Environments: what an agent is asked, call by call, in Gymnasium's words (reset, step, reward).

An environment is one run at a time; many runs side by side are many environments. It deals in token ids: every
prompt is a `Prompt` of new ids and copies of earlier calls, so nothing that was sampled is ever decoded and encoded
again. Anything with these two methods is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from memopd_trace.invocation import Invocation
from memopd_trace.record import Prompt


class Task(Protocol):
    """What an episode is about; rollouts of one task form a group."""

    @property
    def task_id(self) -> str:
        """Unique among the tasks of a collection."""


TaskType = TypeVar("TaskType", bound=Task, contravariant=True)


@dataclass(frozen=True, slots=True)
class Turn:
    """The next call to make.

    `rewrite_kind` says what was done to the context where the prompt does not simply extend the call before;
    `output_kind` is the segment kind of what will be sampled; `reward` is credited at the call just made.
    """

    prompt: Prompt
    rewrite_kind: str | None = None
    output_kind: str = "action"
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an episode: `reward` is credited at its last call (`None` = it has none), `rewards` are named parts
    of it. `truncated`: a limit cut it, so it has no natural end."""

    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False


class Environment(Protocol[TaskType]):
    """One run of a task at a time."""

    def reset(self, task: TaskType) -> Turn:
        """Begin a run: the first call to make."""

    def step(self, invocation: Invocation) -> Turn | Outcome:
        """Take in the call that was asked for, as it was recorded: the next one, or the end."""
