"""`eager`: one dense T x T mask from the visibility rule itself, and an explicit softmax. The readable reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopd_scorer.attention.visibility import Extras, grouped, read_call, ungrouped


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, E]
    key: Tensor,  # [1, G, T, E]
    value: Tensor,  # [1, G, T, E']
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over a pack. Returns ([1, T, H, E'], None)."""
    visibility, extras = read_call(module, query, key, attention_mask, options)
    packed_T = torch.arange(len(visibility), device=query.device)
    mask_TT = (visibility.visible_from_T[None] <= packed_T[:, None]) & (
        packed_T[:, None] < visibility.visible_until_T[None]
    )
    if extras.window is not None:
        mask_TT &= visibility.path_T[None] > visibility.path_T[:, None] - extras.window
    return ungrouped(explicit(*grouped(query, key, value), mask_TT, extras)), None


def explicit(query: Tensor, key: Tensor, value: Tensor, mask_QJ: Tensor, extras: Extras) -> Tensor:
    """softmax(softcap(q k^T s) + mask) v with optional sinks, on [G, R, …, E]; the softmax runs in float32 at least."""
    scores = (query @ key.transpose(2, 3)) * extras.scaling
    if extras.softcap is not None:
        scores = torch.tanh(scores / extras.softcap) * extras.softcap
    scores = scores.masked_fill(~mask_QJ, -torch.inf)
    wide = torch.promote_types(scores.dtype, torch.float32)
    if extras.sinks_H is None:
        weights = scores.softmax(-1, dtype=wide)
    else:
        groups, each = scores.shape[:2]
        sinks = extras.sinks_H.view(groups, each, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1, dtype=wide)[..., :-1]
    return weights.to(value.dtype) @ value
