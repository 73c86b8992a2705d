"""States in fewer bytes: encoding them on the device, and measuring what that costs (`memopd_trace.tiers`).

Shape legend: R prediction rows, D width of a state, B scales of a state, V vocabulary (real ids).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from memopd_trace.errors import UsageError
from memopd_trace.tiers import TIERS, block_of, scales_of

SMALLEST = torch.finfo(torch.float32).tiny  # a scale below it could be flushed to 0


def check_tier(tier: str) -> None:
    """Refuse an unknown tier.

    Raises:
        UsageError: naming it.
    """
    if tier not in TIERS:
        raise UsageError(f"unknown tier of states '{tier}'", hint=f"one of {', '.join(TIERS)}")


def encode(hidden_RD: Tensor, tier: str) -> tuple[Tensor, Tensor]:
    """(codes [R, D] of float16 or int8, scales float32 [R, B]) of states, in a tier other than `exact`.

    A scale of float16 is the power of two that takes the largest item below 2^15: the division is exact, and an item
    keeps its 11 bits down to 2^-29 of the largest, where a bfloat16 state loses nothing. One of int8 is a 127th of
    the largest item of its block.
    """
    blocks_RBX = _blocks(hidden_RD.to(torch.float32), tier)
    largest_RB = blocks_RBX.abs().amax(-1)
    if tier == "float16":
        exponent = (torch.frexp(largest_RB).exponent - 15).clamp(-126, 127)
        scale_RB = torch.ldexp(torch.ones_like(largest_RB), exponent)
        codes = (blocks_RBX / scale_RB[..., None]).to(torch.float16)
    else:
        scale_RB = (largest_RB / 127).clamp_min(SMALLEST)
        codes = (blocks_RBX / scale_RB[..., None]).round().clamp(-127, 127).to(torch.int8)
    return codes.flatten(1)[:, : hidden_RD.shape[1]], scale_RB


def rebuild(codes_RD: Tensor, scale_RB: Tensor, tier: str) -> Tensor:
    """float32 [R, D]: every code times its block's scale, as `memopd_trace.tiers.rebuild` on a device."""
    blocks = _blocks(codes_RD.to(torch.float32), tier) * scale_RB[..., None]
    return blocks.flatten(1)[:, : codes_RD.shape[1]]


def kl_divergence(exact_RV: Tensor, rebuilt_RV: Tensor) -> Tensor:
    """float64 [R] nats: KL(softmax(exact) || softmax(rebuilt)) of logits. In float64, because it is a small difference
    of large sums; what rounding leaves below 0 is 0."""
    exact, rebuilt = (z.double().log_softmax(-1) for z in (exact_RV, rebuilt_RV))
    p = exact.exp()
    terms = torch.where(p > 0, p * (exact - rebuilt), 0.0)
    return terms.sum(-1).clamp_min(0.0)


def _blocks(values_RD: Tensor, tier: str) -> Tensor:
    """[R, B, items of a block], the last block filled with zeros."""
    rows, width = values_RD.shape
    count, block = scales_of(tier, width), block_of(tier, width)
    return pad(values_RD, (0, count * block - width)).reshape(rows, count, block)
