"""Credit without a critic: each episode's return against its group's mean, and what one token weighs.

    advantage of an episode   A = R - mean of the group's R   (over the group's standard deviation, if asked)
    weight of a token         w = 1 / (G * E_g * N_e)

with G groups in the step, E_g episodes of group g and N_e trained tokens of episode e. Every trained token
of an episode has the episode's advantage, so an episode counts once, however many invocations or packed rows
its tokens were cut into. Episodes (and groups) without any trained token are not counted, so a step's weights
sum to 1.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memopd_scorer.states import predicted
from memopd_trace.errors import InputError
from memopd_trace.invocation import Episode, Invocation

STD_FLOOR = 1e-6  # keeps rounding noise in equal returns from being blown up to an advantage


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantage per episode id; `alone` counts episodes that nothing was compared with (they have 0)."""

    by_episode: Mapping[str, float]
    alone: int


def group_advantages(groups: Sequence[Sequence[Episode]], *, normalise_std: bool = False) -> Advantages:
    """Group-relative advantages of the episodes of each group.

    The standard deviation is the population's. A group of one gives 0; so does a group of equal returns. An
    episode with neither a reward nor a trained token is not compared with.

    Raises:
        InputError: `E-NEEDS-REWARD` for an episode to be trained with no reward at all (null is not zero).
    """
    by_episode: dict[str, float] = {}
    alone = 0
    for episodes in groups:
        episodes = [e for e in episodes if e.episode_return is not None or any(trained_mask(i).any() for i in e)]
        returns = np.array([_return_of(e) for e in episodes], np.float64)
        if not len(returns):
            continue
        advantage = returns - returns.mean()
        if normalise_std:
            advantage = advantage / (returns.std() + STD_FLOOR)
        alone += len(episodes) == 1
        by_episode.update(zip((e.episode_id for e in episodes), advantage.tolist(), strict=True))
    return Advantages(by_episode, alone)


def trained_mask(invocation: Invocation) -> NDArray[np.bool_]:
    """bool[len(output)]: tokens that get a loss: sampled by the policy, not masked out, of an attempt that
    was not rejected, and predicted by some row of the state."""
    return invocation.loss_mask() & invocation.sampled() & predicted(invocation)


def token_weights(
    groups: Sequence[Sequence[Episode]], chosen: Container[tuple[str, int]] | None = None
) -> dict[str, float]:
    """Weight of one trained token of each episode, by episode id; 0 for an episode without any. With `chosen`, those
    of other invocations are not counted."""

    def tokens(episode: Episode) -> int:
        return sum(int(trained_mask(i).sum()) for i in episode if chosen is None or i.key in chosen)

    counts = [{e.episode_id: tokens(e) for e in group} for group in groups]
    live_groups = sum(any(group.values()) for group in counts)
    weights: dict[str, float] = {}
    for group in counts:
        live = sum(n > 0 for n in group.values())
        weights.update({key: 1 / (live_groups * live * n) if n else 0.0 for key, n in group.items()})
    return weights


def _return_of(episode: Episode) -> float:
    value = episode.episode_return
    if value is None:
        raise InputError(
            f"episode '{episode.episode_id}': no invocation has a reward, so it has no advantage",
            code="E-NEEDS-REWARD",
            hint="score the rollouts, leave the episode out, or set ppo.weight=0",
        )
    return value
