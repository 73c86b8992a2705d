"""Tiers of stored states: as the teacher's head takes them, or in fewer bytes with scales; numpy only.

    exact     the state in the teacher's dtype
    float16   h / s in float16, one scale s a state, a power of two
    int8      h / s rounded to -127…127, one scale s for each 32 items of a state

Under the two others the state that a reader rebuilds, codes times scales in float32, is not the one that was scored.
What that costs is stored beside it, in nats, and bounds how far the stored log-probability may be from the rebuilt one.

Shape legend: M targets, D width of a state, B scales of a state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

TIERS = ("exact", "float16", "int8")
INT8_BLOCK = 32  # items that share a scale
CHECK_BYTES = 8  # of a target in a tier that is not exact: its `hidden_logsumexp` and `hidden_kl`


def block_of(tier: str, width: int) -> int:
    """How many items of a state of `width` items share a scale; the last may be fewer."""
    return INT8_BLOCK if tier == "int8" else width


def scales_of(tier: str, width: int) -> int:
    """B: scales of a state of `width` items; 0 in the tier `exact`."""
    return 0 if tier == "exact" else -(-width // block_of(tier, width))


def state_bytes(tier: str, width: int, dtype_bytes: int) -> int:
    """Uncompressed bytes of a target's state, scales and measured error; `dtype_bytes` is an item's in `exact`."""
    if tier == "exact":
        return width * dtype_bytes
    return width * {"float16": 2, "int8": 1}[tier] + 4 * scales_of(tier, width) + CHECK_BYTES


def rebuild(codes_MD: Array, scale_MB: Array, tier: str) -> NDArray[np.float32]:
    """float32 [M, D]: every code times its block's scale."""
    width = codes_MD.shape[1]
    wide: Array = np.repeat(scale_MB.astype(np.float32), block_of(tier, width), axis=1)[:, :width]
    return codes_MD.astype(np.float32) * wide


def least_kl(logprob_M: Array, rebuilt_M: Array, tolerance: float) -> NDArray[np.float64]:
    """float64 [M] nats: the least KL(scored || rebuilt) that two distributions can have which give one id these
    log-probabilities, the rebuilt one being known to `tolerance`.

    Whatever the other ids, it is that of the two events "this id" and "another": no partition can raise it.
    """
    own = np.minimum(logprob_M.astype(np.float64), 0.0)
    other = np.minimum(np.clip(own, rebuilt_M - tolerance, rebuilt_M + tolerance), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        p, rest, rest_other = np.exp(own), -np.expm1(own), -np.expm1(other)
        elsewhere = np.where(rest > 0, rest * np.log(rest / rest_other), 0.0)
    return np.asarray(np.where(own == other, 0.0, p * (own - other) + elsewhere))
