"""Rules about rewards and the end of an episode."""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

import math
from collections.abc import Iterator

from memopd_trace.rules.episode import Run
from memopd_trace.rules.registry import Hit, rule


@rule(
    "E-REWARD-NONFINITE",
    "a reward that is no number",
    phase="episode",
    clause="`reward` and the values of `rewards` MUST be finite or null.",
    columns=("reward", "rewards"),
    hint="one NaN makes every advantage of its group NaN; null means not scored",
)
def reward_nonfinite(run: Run) -> Iterator[Hit]:
    for at, invocation in enumerate(run.invocations):
        if invocation.reward is not None and not math.isfinite(invocation.reward):
            yield Hit(at, "reward is not finite", "reward", "a number or null", str(invocation.reward))
        for name, value in (invocation.rewards or {}).items():
            if value is not None and not math.isfinite(value):
                yield Hit(at, f"rewards['{name}'] is not finite", "rewards", "a number or null", str(value))
                break


@rule(
    "E-END-EARLY",
    "an episode goes on after its end",
    phase="episode",
    clause="`terminated` and `truncated` MUST NOT be true before the episode's last row.",
    columns=("terminated", "truncated"),
    hint="rows of two runs under one episode_id, or a row added after the end",
)
def end_early(run: Run) -> Iterator[Hit]:
    for at, invocation in enumerate(run.invocations[:-1]):
        for name in ("terminated", "truncated"):
            if getattr(invocation, name):
                behind = len(run.invocations) - at - 1
                yield Hit(
                    at,
                    f"{name} is true and {behind} rows of the episode follow",
                    name,
                    "on the last row",
                    "true",
                )
