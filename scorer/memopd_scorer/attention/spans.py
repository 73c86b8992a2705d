"""`sdpa`: span by span (the tokens one state added), its queries against the keys of its ancestors and itself.

No T x T mask exists: a span whose branch starts with it runs without a mask, any other in blocks of at most
MASK_CELLS cells, whose masks are made once for all layers.

The keys of a span, concatenated in path order, are its branch from the first token on: key j has path index j.
So a sliding window counts along the branch, whatever the position ids are.

Shape legend: T packed tokens, Q queries of a block, J keys of a branch, G key/value heads, R heads a group,
E head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memopd_scorer.attention.dense import explicit
from memopd_scorer.attention.visibility import Extras, Visibility, grouped, read_call, ungrouped
from memopd_scorer.plan import Span

MASK_CELLS = 2**22  # of one block: 4 MiB
KEPT_CELLS = 2**26  # of all blocks of a pack that are kept for the next layer


class _Block(NamedTuple):
    """Queries `[start, stop)` (packed) against keys `[low, high)` (path) of a span's branch; no mask = causal."""

    start: int
    stop: int
    low: int
    high: int
    mask_QJ: Tensor | None


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, E]
    key: Tensor,  # [1, G, T, E]
    value: Tensor,  # [1, G, T, E']
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over a pack, span by span. Returns ([1, T, H, E'], None)."""
    visibility, extras = read_call(module, query, key, attention_mask, options)
    query, key, value = grouped(query, key, value)
    outputs: list[Tensor] = []
    for span in visibility.spans:
        key_J, value_J = _branch(span, key), _branch(span, value)
        for block in _blocks(span, visibility, extras.window):
            arguments = (query[:, :, block.start : block.stop], key_J[:, :, block.low : block.high])
            outputs.append(_run(block, *arguments, value_J[:, :, block.low : block.high], extras))
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
    depth = sum(b - a for a, b in span.ancestors)  # path index of the span's first token
    branch = depth + span.stop - span.start
    if span.causal and depth == 0 and (window is None or window >= branch):
        yield _Block(span.start, span.stop, 0, branch, None)
        return
    size = max(1, MASK_CELLS // branch)
    for start in range(span.start, span.stop, size):
        stop = min(start + size, span.stop)
        # causal queries see nothing after themselves; a window lets them forget the far past
        high = depth + stop - span.start if span.causal else branch
        low = 0 if window is None else max(0, depth + start - span.start - window + 1)
        yield _Block(start, stop, low, high, _mask(span, (start, stop), (low, high), depth, visibility, window))


def _mask(
    span: Span,
    queries: tuple[int, int],
    keys: tuple[int, int],
    depth: int,
    visibility: Visibility,
    window: int | None,
) -> Tensor:
    """bool [Q, J]: may packed query queries[0]+i see key keys[0]+j of its branch?"""
    device = visibility.path_T.device
    (start, stop), (low, high) = queries, keys
    path_Q = torch.arange(depth + start - span.start, depth + stop - span.start, device=device)[:, None]
    path_J = torch.arange(low, high, device=device)[None]
    if span.causal:
        mask_QJ = path_J <= path_Q
    else:
        mask_QJ = torch.ones(stop - start, high - low, dtype=torch.bool, device=device)
        own = slice(max(0, depth - low), None)  # ancestors are seen whole, own tokens as recorded
        query_Q = torch.arange(start, stop, device=device)[:, None]
        those = slice(span.start + max(0, low - depth), span.stop)
        mask_QJ[:, own] = (visibility.visible_from_T[None, those] <= query_Q) & (
            query_Q < visibility.visible_until_T[None, those]
        )
    if window is not None:
        mask_QJ &= path_J > path_Q - window
    return mask_QJ
