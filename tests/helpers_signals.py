"""A small pack, output heads of every kind that the scorer claims, and what a dense float64 head gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_scorer import PADDED, SIZE, growing_episode, memory_episode, sibling

from memopd_scorer.head import Head
from memopd_scorer.plan import Pack, plan

HEADS = [
    pytest.param({}, id="plain"),
    pytest.param({"bias": True}, id="bias"),
    pytest.param({"scale": 0.25}, id="scale"),
    pytest.param({"softcap": 5.0}, id="softcap"),
    pytest.param({"bias": True, "scale": 2.0, "softcap": 7.0}, id="all"),
]


def a_pack() -> Pack:
    """Three episodes in one pack, of which some rows serve several targets."""
    rng = np.random.default_rng(0)
    rollout = memory_episode(rng, "m", group="group")
    (pack,) = plan([rollout, sibling(rollout, "n"), growing_episode(rng, "g")])
    counts = np.bincount(pack.target_row_M)
    assert counts.max() > 1, "no row serves two targets"
    return pack


def a_head(*, bias: bool = False, scale: float = 1.0, softcap: float | None = None, width: int = 16) -> Head:
    """A random head with padded rows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(PADDED, width, generator=generator)
    return Head(weight, torch.randn(PADDED, generator=generator) if bias else None, scale, softcap, SIZE)


def reference_logits(hidden: torch.Tensor, head: Head, *, padded: bool = False) -> torch.Tensor:
    """float64 logits, written out; of the real ids, or with the `padded` ones behind them."""
    bias = 0 if head.bias_V is None else head.bias_V.double()
    logits = head.logit_scale * (hidden.double() @ head.weight_VD.double().T + bias)
    if head.softcap:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return logits if padded else logits[:, : head.size]
