"""`eager`: a dense mask from the visibility rule, an explicit softmax, float32 at least: the readable reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopd_scorer.attention.visibility import Extras, grouped, read_call, ungrouped


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, Q, E]
    key: Tensor,  # [1, G, Q, E]
    value: Tensor,  # [1, G, Q, E']
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over a pass. Returns ([1, Q, H, E'], None)."""
    visibility, extras, key, value = read_call(module, query, key, value, attention_mask, options)
    query_Q1 = visibility.queries()[:, None]
    mask_QK = (visibility.visible_from_K[None] <= query_Q1) & (query_Q1 < visibility.visible_until_K[None])
    if extras.window is not None:
        mask_QK &= visibility.path_K[None] > visibility.path_K[query_Q1] - extras.window
    wide = torch.promote_types(query.dtype, torch.float32)
    query_Q, key_K, value_K = (t.to(wide) for t in grouped(query, key, value))
    return ungrouped(explicit(query_Q, key_K, value_K, mask_QK, extras)).to(query.dtype), None


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
