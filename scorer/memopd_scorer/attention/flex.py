"""`flex`: FlexAttention under the interval rule `visible_from[k] <= q < visible_until[k]`, one kernel a layer.

The block mask is built from the least and the largest interval ends of each block of tokens, never from single
cells. On a CUDA device the kernel is compiled (once, for all lengths); on a CPU torch runs it uncompiled and forward
only, which is for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from memopd_scorer.attention.visibility import Visibility, read_call
from memopd_trace.errors import UsageError

BLOCK = 128


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, Q, E]
    key: Tensor,  # [1, G, Q, E]
    value: Tensor,  # [1, G, Q, E']
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over a pass. Returns ([1, Q, H, E'], None).

    Raises:
        UsageError: gradients are asked for on a CPU.
    """
    visibility, extras, key, value = read_call(module, query, key, value, attention_mask, options)
    if query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad:
        raise UsageError("the attention backend 'flex' has no backward on a CPU", hint="use sdpa to train there")
    at = ("flex", extras.window)
    if at not in visibility.made:
        visibility.made[at] = block_mask(visibility, extras.window)
    output, aux = _kernel(query.device.type)(
        query,
        key,
        value,
        score_mod=None if extras.softcap is None else _softcapped(extras.softcap),
        block_mask=visibility.made[at],
        scale=extras.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if extras.sinks_H is not None:
        # an empty key of logit s takes exp(s) / (exp(s) + exp(lse)) of the weight
        kept = torch.sigmoid(aux.lse - extras.sinks_H[None, :, None].to(aux.lse.dtype))
        output = (output * kept[..., None]).to(output.dtype)
    return output.transpose(1, 2).contiguous(), None


@cache
def _kernel(device: str) -> Callable[..., Any]:
    kernel: Any = flex_attention
    if device != "cpu":
        kernel = torch.compile(flex_attention, dynamic=True)
    run: Callable[..., Any] = kernel
    return run


def _softcapped(cap: float) -> Callable[..., Tensor]:
    def score(scores: Tensor, *_: Tensor) -> Tensor:
        return torch.tanh(scores / cap) * cap

    return score


def block_mask(visibility: Visibility, window: int | None) -> BlockMask:
    """Which blocks of keys each block of queries visits, and which of them need no look at single tokens."""
    start, until, path = visibility.visible_from_K, visibility.visible_until_K, visibility.path_K
    query = visibility.queries()

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (start[k] <= query[q]) & (query[q] < until[k])
        return seen if window is None else seen & (path[k] > path[query[q]] - window)

    (from_low, from_high), (until_low, until_high), (path_low, path_high) = (_bounds(x) for x in (start, until, path))
    (first, last), (first_path, last_path) = _bounds(query), _bounds(path[query])
    some_BC = (from_low[None] <= last[:, None]) & (first[:, None] < until_high[None])
    all_BC = (from_high[None] <= first[:, None]) & (last[:, None] < until_low[None])
    if window is not None:
        some_BC &= path_high[None] > first_path[:, None] - window
        all_BC &= path_low[None] > last_path[:, None] - window
    lengths = len(query), len(visibility)
    for dim, tokens in enumerate(lengths):  # the kernel looks at single tokens in a block that is not whole
        if tokens % BLOCK:
            all_BC.select(dim, -1).fill_(False)
    partial, full = (_listed(x) for x in (some_BC & ~all_BC, all_BC))
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=lengths)


def _bounds(values_T: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest value of each block."""
    short = -len(values_T) % BLOCK
    blocks = torch.cat([values_T, values_T[-1:].expand(short)]).view(-1, BLOCK)
    return blocks.amin(1), blocks.amax(1)


def _listed(blocks_BC: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, B] and indices [1, 1, B, C] (the marked ones first) of a matrix of blocks."""
    order = torch.argsort((~blocks_BC).to(torch.int8), dim=1, stable=True).to(torch.int32)
    return blocks_BC.sum(1, dtype=torch.int32)[None, None], order[None, None].contiguous()
