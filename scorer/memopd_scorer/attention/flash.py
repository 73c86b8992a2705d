"""`flash`: one variable-length FlashAttention call a layer, on a CUDA device in half precision.

Each span is a sequence of its own: its tokens are the queries, its whole branch the keys, gathered once a layer.
The kernel aligns a causal mask to the end of the keys, so that a branch of a tree needs no mask either.
The kernel is flash-attn's where that is installed, else torch's own. Recorded look-ahead or eviction, sinks and (with
torch's kernel) softcaps are refused by name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopd_scorer.attention.visibility import Extras, UnsupportedAttentionError, Visibility, read_call


class Call(NamedTuple):
    """Causal attention of many sequences: q [Tq, H, E], k and v [Tk, G, E] -> [Tq, H, E].

    Sequence i has queries `ends_q[i]:ends_q[i+1]` and keys `ends_k[i]:ends_k[i+1]` (int32, from 0 on); its last query
    sees all its keys, each earlier one a key less, and with `window` only the last `window` of those. `longest_q` and
    `longest_k` are the lengths of the longest sequence. `softcap` bounds the scores, after `scale`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    ends_q: Tensor
    ends_k: Tensor
    longest_q: int
    longest_k: int
    scale: float
    window: int | None
    softcap: float | None


Kernel = Callable[[Call], Tensor]


class _Branches(NamedTuple):
    """Every span as one sequence. `index_K` = the packed keys of all branches, one after another."""

    index_K: Tensor | None  # None: the keys as they are
    ends_q: Tensor
    ends_k: Tensor
    longest_q: int
    longest_k: int


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
    _refuse(module, query, value, visibility, extras)
    if "flash" not in visibility.made:
        visibility.made["flash"] = branches(visibility)
    of: _Branches = visibility.made["flash"]
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if of.index_K is not None:
        k, v = k.index_select(0, of.index_K), v.index_select(0, of.index_K)
    q, k, v = (t.contiguous() for t in (q, k, v))
    output = kernel()(Call(q, k, v, *of[1:], extras.scaling, extras.window, extras.softcap))
    return output[None], None


def _refuse(module: torch.nn.Module, query: Tensor, value: Tensor, visibility: Visibility, extras: Extras) -> None:
    reason = None
    if not visibility.is_causal:
        reason = "recorded visibility"
    elif extras.sinks_H is not None:
        reason = "attention sinks"
    elif extras.softcap is not None and kernel() is torch_kernel:
        reason = "a softcap, which torch's own kernel does not know (flash-attn's does)"
    elif query.shape[-1] != value.shape[-1]:
        reason = f"keys of size {query.shape[-1]} with values of size {value.shape[-1]}"
    if reason is not None:
        raise UnsupportedAttentionError(f"{type(module).__name__}: the attention backend 'flash' cannot run {reason}")


def branches(visibility: Visibility) -> _Branches:
    """The sequences of a pass whose spans are all causal."""
    device = visibility.path_K.device
    ranges = [[*s.ancestors, (s.start, s.stop)] for s in visibility.spans]
    index = [torch.arange(a, b, device=device) for branch in ranges for a, b in branch]
    lengths_q = [s.stop - s.start for s in visibility.spans]
    lengths_k = [sum(b - a for a, b in branch) for branch in ranges]

    def ends(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)

    index_K = None if lengths_q == lengths_k else torch.cat(index)
    return _Branches(index_K, ends(lengths_q), ends(lengths_k), max(lengths_q), max(lengths_k))


@cache
def kernel() -> Kernel:
    """flash-attn's kernel where the package is installed, else torch's own."""
    return flash_attn_kernel if importlib.util.find_spec("flash_attn") else torch_kernel


def flash_attn_kernel(call: Call) -> Tensor:
    """`Kernel` by flash-attn 2.6 or later."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    output: Tensor = flash_attn_varlen_func(
        *call[:7],
        softmax_scale=call.scale,
        causal=True,
        window_size=(-1, -1) if call.window is None else (call.window - 1, 0),  # keys before the query's own
        softcap=call.softcap or 0.0,
    )
    return output


def torch_kernel(call: Call) -> Tensor:
    """`Kernel` by `torch.nn.attention.varlen`; it knows no softcap."""
    from torch.nn.attention.varlen import varlen_attn

    assert call.softcap is None
    output = varlen_attn(
        *call[:7],
        scale=call.scale,
        window_size=(-1 if call.window is None else call.window - 1, 0),
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )
    assert isinstance(output, Tensor)  # a pair only where more is asked for
    return output
