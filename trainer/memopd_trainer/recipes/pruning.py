"""Less weight for the teacher once student and teacher have drifted apart (Prune-OPD, arXiv 2605.07804).

    O_t = |top-k of the student ∩ top-k of the teacher| / k        of token t of an invocation's output
    b_t = 1 where O_t < gamma, else 0
    w_t = clip(1 - w_drop * (b_0 + … + b_t), 0, 1)
    the teacher's term of token t is multiplied by w_t + w_base

The effective length of an output is the number of its tokens with w_t > 0.

Shape legend: M trained targets of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memopd_trainer.recipes.sections import LengthConfig, PruneConfig

GONE = 1e-8  # a weight of at most this is none


class Length(NamedTuple):
    """The budget of the next rollouts, and how often in a row the last ones did not use it."""

    tokens: int
    misses: int = 0


def prune_weights(
    overlap_M: NDArray[np.float64], state_M: NDArray[np.int64], output_M: NDArray[np.int64], config: PruneConfig
) -> NDArray[np.float64]:
    """w of each target; those of a state are one output, in the order of `output_M`."""
    weight_M = np.empty(len(overlap_M))
    for state in np.unique(state_M):
        own = np.flatnonzero(state_M == state)
        own = own[np.argsort(output_M[own])]
        weight_M[own] = np.clip(1 - config.w_drop * np.cumsum(overlap_M[own] < config.gamma), 0, 1)
    return weight_M


def effective_lengths(weight_M: NDArray[np.float64], state_M: NDArray[np.int64]) -> list[int]:
    """Tokens of each output whose w is above 0."""
    return [int((weight_M[state_M == state] > GONE).sum()) for state in np.unique(state_M)]


def next_length(now: Length, effective: Sequence[int], config: LengthConfig) -> Length:
    """The length after a step whose outputs had these effective lengths.

    It grows by `step` where the share of outputs that come within `margin` of it (or have `minimum`) is at least
    `hit_ratio`, and shrinks by `step` after `patience` steps in a row in which it is not.
    """
    near = max(config.minimum, now.tokens - config.margin)
    hit = sum(length >= near for length in effective) / max(1, len(effective))
    if hit >= config.hit_ratio:
        return Length(min(now.tokens + config.step, config.maximum))
    if now.misses + 1 < config.patience:
        return Length(now.tokens, now.misses + 1)
    return Length(max(now.tokens - config.step, config.minimum))
