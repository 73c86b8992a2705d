"""One visibility, several backends: how a pack's tokens see each other inside a Transformers model.

The backends are registered with Transformers' attention interface, so that every causal LM there runs a packed
tree without model code of ours; the pack's visibility travels as a keyword argument of the forward. No mask is
built by the model, because Transformers knows none for these names.

    sdpa    per span (the tokens one state added): its queries against the keys of its ancestors and itself;
            no T x T mask exists, a span's mask is made in blocks of at most MASK_CELLS cells
    eager   one dense T x T mask and explicit softmax: the readable reference, for tests
    native  the model's own attention, for a pack of one plain state

The keys of a span, concatenated in path order, are its branch from the first token on: key j has path index j.
So a sliding window counts along the branch, whatever the position ids are.

Shape legend: T packed tokens, Q queries of a block, J keys of a branch, H heads, G key/value heads, E head size,
R prediction rows, D model width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from memopd_scorer.plan import Pack, Span
from memopd_trace.errors import InputError

Backend = Literal["sdpa", "eager", "native"]
MASK_CELLS = 2**22
_KWARG = "memopd_visibility"
# Transformers reads meaning into names that hold "sdpa" or "flash"; these hold neither.
_REGISTERED = {"sdpa": "memopd_by_span", "eager": "memopd_dense"}
# Keyword arguments that models hand to their attention and that change nothing here.
_HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "layer_idx",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class UnsupportedAttentionError(InputError):
    """The model's attention needs something that the packed backends do not compute; the message names it."""


@dataclass(frozen=True, slots=True, eq=False)
class Visibility:
    """A pack's visibility on the device: see `memopd_scorer.plan.Pack`."""

    path_T: Tensor
    visible_from_T: Tensor
    visible_until_T: Tensor
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> Visibility:
        """Copy a pack's visibility to `device`."""
        path, start, until = (
            torch.from_numpy(a.astype(np.int64)).to(device)
            for a in (pack.path_T, pack.visible_from_T, pack.visible_until_T)
        )
        return cls(path, start, until, pack.spans)


def states_at_rows(model: PreTrainedModel, pack: Pack, *, backend: Backend = "sdpa") -> Tensor:
    """Run the body of a causal LM on a pack: hidden_RD, the input of its output head at the prediction rows.

    Differentiable; the dtype is the model's. The caller decides about `torch.no_grad()` and `model.eval()`.

    Raises:
        UnsupportedAttentionError: the model needs something the backend does not compute, or does not take
            position ids that the pack has.
        ValueError: `native` for a pack that is not one plain state.
    """
    device = model.get_input_embeddings().weight.device
    ids_1T = torch.from_numpy(pack.token_ids_T.astype(np.int64)).to(device)[None]
    arguments: dict[str, Any] = {"use_cache": False}
    if _takes_positions(model):
        arguments["position_ids"] = torch.from_numpy(pack.positions_T.astype(np.int64)).to(device)[None]
    elif not pack.is_plain:
        raise UnsupportedAttentionError(
            f"{type(model).__name__} takes no position ids, so it cannot run recorded positions or a packed tree",
            code="E-MODEL-UNSUPPORTED",
        )
    if backend == "native":
        if not pack.is_plain:
            raise ValueError(f"the native backend runs one plain state, this pack has {len(pack.states)} states")
        hidden = model.base_model(ids_1T, **arguments).last_hidden_state
    else:
        arguments[_KWARG] = Visibility.of(pack, device)
        with use_backend(model, backend):
            hidden = model.base_model(ids_1T, **arguments).last_hidden_state
    rows_R = torch.from_numpy(pack.rows_R.astype(np.int64)).to(hidden.device)
    return hidden[0].index_select(0, rows_R)


@contextmanager
def use_backend(model: PreTrainedModel, backend: Literal["sdpa", "eager"]) -> Iterator[None]:
    """Switch a model to a packed backend and back."""
    before = model.config._attn_implementation
    name = _REGISTERED[backend]
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise UnsupportedAttentionError(
            f"{type(model).__name__} does not use Transformers' attention interface",
            code="E-MODEL-UNSUPPORTED",
        )
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _takes_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(model.base_model.forward).parameters


@dataclass(frozen=True, slots=True)
class _Extras:
    """What a layer adds to plain attention; `sinks_H` are GPT-OSS's per-head logits of the empty key."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None


def _checked(
    module: torch.nn.Module, query: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> tuple[Visibility, _Extras]:
    """The visibility and the extras of one attention call; anything not understood is refused by name."""
    visibility = options.pop(_KWARG, None)
    name = type(module).__name__
    if visibility is None:
        raise UnsupportedAttentionError(
            f"{name} was not handed the pack's visibility: the model drops unknown keyword arguments",
            code="E-MODEL-UNSUPPORTED",
        )
    window = options.pop("sliding_window", None)
    softcap, sinks = options.pop("softcap", None), options.pop("s_aux", None)
    scaling = options.pop("scaling", None)
    is_causal = options.pop("is_causal", None)
    reason = None
    if attention_mask is not None:
        reason = "a mask of the model's own"
    elif options.pop("dropout", 0.0):
        reason = "attention dropout"
    elif not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        reason = "attention that is not causal"
    elif query.shape[0] != 1 or query.shape[2] != len(visibility.path_T):
        reason = f"queries of shape {tuple(query.shape)} for a pack of {len(visibility.path_T)} tokens"
    else:
        unknown = sorted(k for k, v in options.items() if v is not None and k not in _HARMLESS)
        reason = f"the attention option '{unknown[0]}'" if unknown else None
    if reason is not None:
        raise UnsupportedAttentionError(f"{name} uses {reason}", code="E-MODEL-UNSUPPORTED")
    return visibility, _Extras(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window or None,
        softcap=softcap,
        sinks_H=sinks,
    )


def _sdpa_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, E]
    key: Tensor,  # [1, G, T, E]
    value: Tensor,  # [1, G, T, E']
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over a pack, span by span. Returns ([1, T, H, E'], None)."""
    visibility, extras = _checked(module, query, attention_mask, options)
    key, value = (_repeat(t, query.shape[1]) for t in (key, value))
    outputs: list[Tensor] = []
    for span in visibility.spans:
        ranges = [*span.ancestors, (span.start, span.stop)]
        key_J = torch.cat([key[:, :, a:b] for a, b in ranges], dim=2)
        value_J = torch.cat([value[:, :, a:b] for a, b in ranges], dim=2)
        outputs.extend(_span_blocks(span, query, key_J, value_J, visibility, extras))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _span_blocks(
    span: Span, query: Tensor, key_J: Tensor, value_J: Tensor, visibility: Visibility, extras: _Extras
) -> Iterator[Tensor]:
    """The outputs of a span's queries, [1, H, Q, E'] a block."""
    branch = key_J.shape[2]
    depth = branch - (span.stop - span.start)  # path index of the span's first token
    plain = span.causal and extras.window is None and extras.softcap is None and extras.sinks_H is None
    if plain and depth == 0:
        own_query = query[:, :, span.start : span.stop]
        yield F.scaled_dot_product_attention(own_query, key_J, value_J, is_causal=True, scale=extras.scaling)
        return
    block = max(1, MASK_CELLS // branch)
    for start in range(span.start, span.stop, block):
        stop = min(start + block, span.stop)
        # causal queries see nothing after themselves; a window lets them forget the far past
        high = depth + stop - span.start if span.causal else branch
        low = 0 if extras.window is None else max(0, depth + start - span.start - extras.window + 1)
        mask_QJ = _span_mask(span, start, stop, depth, low, high, visibility, extras.window)
        query_Q = query[:, :, start:stop]
        if extras.softcap is None and extras.sinks_H is None:
            yield F.scaled_dot_product_attention(
                query_Q,
                key_J[:, :, low:high],
                value_J[:, :, low:high],
                attn_mask=mask_QJ,
                scale=extras.scaling,
            )
        else:
            yield _explicit(query_Q, key_J[:, :, low:high], value_J[:, :, low:high], mask_QJ, extras)


def _span_mask(
    span: Span,
    start: int,
    stop: int,
    depth: int,
    low: int,
    high: int,
    visibility: Visibility,
    window: int | None,
) -> Tensor:
    """bool [Q, high-low]: may packed query start+i see key low+j of its branch?"""
    device = visibility.path_T.device
    path_Q = torch.arange(depth + start - span.start, depth + stop - span.start, device=device)[:, None]
    path_J = torch.arange(low, high, device=device)[None]
    if span.causal:
        mask_QJ = path_J <= path_Q
    else:
        mask_QJ = torch.ones(stop - start, high - low, dtype=torch.bool, device=device)
        own = slice(max(0, depth - low), None)  # ancestors are seen whole, own tokens as recorded
        query_Q = torch.arange(start, stop, device=device)[:, None]
        keys = slice(span.start + max(0, low - depth), span.stop)
        mask_QJ[:, own] = (visibility.visible_from_T[None, keys] <= query_Q) & (
            query_Q < visibility.visible_until_T[None, keys]
        )
    if window is not None:
        mask_QJ &= path_J > path_Q - window
    return mask_QJ


def _eager_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The reference: one dense mask from the visibility rule itself. Shapes as in `_sdpa_attention`."""
    visibility, extras = _checked(module, query, attention_mask, options)
    key, value = (_repeat(t, query.shape[1]) for t in (key, value))
    packed_T = torch.arange(len(visibility.path_T), device=query.device)
    mask_TT = (visibility.visible_from_T[None] <= packed_T[:, None]) & (
        packed_T[:, None] < visibility.visible_until_T[None]
    )
    if extras.window is not None:
        mask_TT &= visibility.path_T[None] > visibility.path_T[:, None] - extras.window
    return _explicit(query, key, value, mask_TT, extras).transpose(1, 2).contiguous(), None


def _explicit(query: Tensor, key: Tensor, value: Tensor, mask_QJ: Tensor, extras: _Extras) -> Tensor:
    """softmax(softcap(q k^T s) + mask) v with optional sinks; the softmax runs in float32 at least."""
    scores = (query @ key.transpose(2, 3)) * extras.scaling
    if extras.softcap is not None:
        scores = torch.tanh(scores / extras.softcap) * extras.softcap
    scores = scores.masked_fill(~mask_QJ, -torch.inf)
    wide = torch.promote_types(scores.dtype, torch.float32)
    if extras.sinks_H is None:
        weights = scores.softmax(-1, dtype=wide)
    else:
        sinks = extras.sinks_H.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1, dtype=wide)[..., :-1]
    return weights.to(value.dtype) @ value


def _repeat(states: Tensor, heads: int) -> Tensor:
    """[1, G, T, E] -> [1, H, T, E] for grouped-query attention."""
    groups = states.shape[1]
    return states if groups == heads else states.repeat_interleave(heads // groups, dim=1)


AttentionInterface.register(_REGISTERED["sdpa"], _sdpa_attention)
AttentionInterface.register(_REGISTERED["eager"], _eager_attention)
