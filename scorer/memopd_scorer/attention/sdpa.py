"""`sdpa`: span by span (the tokens one state added), its queries against the keys of its ancestors and itself.

No T x T mask exists: a span whose branch starts with it runs without a mask, any other in blocks of at most
MASK_CELLS cells, whose masks are made once for all layers.

The keys of a span, concatenated in path order, are its branch from the first token on: key j has path index j.
So a sliding window counts along the branch, whatever the position ids are. Only recorded visibility leaves holes there,
where an earlier pass let go of a key; its masks are made from the rule itself.

Shape legend: K keys of a pass, Q queries (of a block), J keys of a branch, G key/value heads, R heads a group,
E head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memopd_scorer.attention.eager import explicit
from memopd_scorer.attention.visibility import Extras, Visibility, grouped, read_call, ungrouped
from memopd_scorer.plan import Span

MASK_CELLS = 2**24  # of one block: 16 MiB
KEPT_CELLS = 2**26  # of all blocks of a pack that are kept for the next layer


class _Block(NamedTuple):
    """Queries `[start, stop)` (indices of keys) against keys `[low, high)` of a span's branch; no mask = causal."""

    start: int
    stop: int
    low: int
    high: int
    mask_QJ: Tensor | None


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, Q, E]
    key: Tensor,  # [1, G, Q, E]
    value: Tensor,  # [1, G, Q, E']
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over a pass, span by span. Returns ([1, Q, H, E'], None)."""
    visibility, extras, key, value = read_call(module, query, key, value, attention_mask, options)
    query, key, value = grouped(query, key, value)
    outputs: list[Tensor] = []
    for span in visibility.spans:
        key_J, value_J = _branch(span, key), _branch(span, value)
        for block in _blocks(span, visibility, extras.window):
            query_Q = query[:, :, block.start - visibility.before : block.stop - visibility.before]
            keys = slice(block.low, block.high)
            outputs.append(_run(block, query_Q, key_J[:, :, keys], value_J[:, :, keys], extras))
    return ungrouped(torch.cat(outputs, dim=2)), None


def _branch(span: Span, states: Tensor) -> Tensor:
    """[G, R, J, E]: a span's keys or values from its branch's first token on; no copy where they lie side by side."""
    ranges = [*span.ancestors, (span.start, span.stop)]
    if all(a[1] == b[0] for a, b in pairwise(ranges)):
        return states[:, :, ranges[0][0] : span.stop]
    one_G = states[:, :1]  # the heads of a group share their keys
    return torch.cat([one_G[:, :, a:b] for a, b in ranges], dim=2).expand(-1, states.shape[1], -1, -1)


def _run(block: _Block, query_Q: Tensor, key_J: Tensor, value_J: Tensor, extras: Extras) -> Tensor:
    if extras.softcap is None and extras.sinks_H is None:
        return F.scaled_dot_product_attention(
            query_Q,
            key_J,
            value_J,
            attn_mask=block.mask_QJ,
            is_causal=block.mask_QJ is None,
            scale=extras.scaling,
        )
    mask = block.mask_QJ
    if mask is None:
        mask = torch.ones(query_Q.shape[2], key_J.shape[2], dtype=torch.bool, device=query_Q.device).tril()
    return explicit(query_Q, key_J, value_J, mask, extras)


def _blocks(span: Span, visibility: Visibility, window: int | None) -> list[_Block]:
    """A span's blocks; kept from layer to layer as long as their masks are few."""
    at = ("spans", span.start, window)
    if at not in visibility.made:
        blocks = list(_make_blocks(span, visibility, window))
        cells = sum(b.mask_QJ.numel() for b in blocks if b.mask_QJ is not None)
        if visibility.made.get("cells", 0) + cells > KEPT_CELLS:
            return blocks
        visibility.made["cells"] = visibility.made.get("cells", 0) + cells
        visibility.made[at] = blocks
    kept: list[_Block] = visibility.made[at]
    return kept


def _make_blocks(span: Span, visibility: Visibility, window: int | None) -> Iterator[_Block]:
    depth = sum(b - a for a, b in span.ancestors)  # index of the span's first token among the keys of its branch
    branch = depth + span.stop - span.start
    if span.causal and depth == 0 and (window is None or window >= branch):
        yield _Block(span.start, span.stop, 0, branch, None)
        return
    size = max(1, MASK_CELLS // branch)
    for start in range(span.start, span.stop, size):
        stop = min(start + size, span.stop)
        # causal queries see nothing after themselves; a window lets them forget the far past
        high = depth + stop - span.start if span.causal else branch
        low = 0
        if window is not None and span.causal:
            low = max(0, depth + start - span.start - window + 1)
        if span.causal:
            mask = _causal(depth + start - span.start, depth + stop - span.start, low, high, visibility, window)
        else:
            mask = _recorded(span, start, stop, visibility, window)
        yield _Block(start, stop, low, high, mask)


def _causal(first: int, last: int, low: int, high: int, visibility: Visibility, window: int | None) -> Tensor:
    """bool [Q, J]: does the query with path index first+i see the key with path index low+j?"""
    device = visibility.path_K.device
    path_Q1 = torch.arange(first, last, device=device)[:, None]
    path_J = torch.arange(low, high, device=device)[None]
    mask_QJ = path_J <= path_Q1
    return mask_QJ if window is None else mask_QJ & (path_J > path_Q1 - window)


def _recorded(span: Span, start: int, stop: int, visibility: Visibility, window: int | None) -> Tensor:
    """bool [Q, J]: does query start+i see key j of the span's branch?"""
    path_K, from_K, until_K = visibility.path_K, visibility.visible_from_K, visibility.visible_until_K
    ranges = [*span.ancestors, (span.start, span.stop)]
    key_J = torch.cat([torch.arange(a, b, device=path_K.device) for a, b in ranges])
    query_Q1 = torch.arange(start, stop, device=path_K.device)[:, None]
    mask_QJ = (from_K[None, key_J] <= query_Q1) & (query_Q1 < until_K[None, key_J])
    return mask_QJ if window is None else mask_QJ & (path_K[None, key_J] > path_K[query_Q1] - window)
