"""What a packed backend is handed in one attention call, read and checked: the visibility, a layer's keys and values
with those kept of earlier passes, and its extras.

Shape legend: Q queries, K keys of which the last Q are the queries' own (all packed tokens where one pass runs them),
H heads, G key/value heads, R = H / G heads a group, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopd_scorer.attention.past import Past
from memopd_scorer.passes import Pass
from memopd_scorer.plan import Pack, Span
from memopd_trace.errors import InputError

KWARG = "memopd_visibility"
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
    """The model's attention needs something that the packed backend does not compute; the message names it."""

    def __init__(self, message: str, **options: Any) -> None:
        super().__init__(message, **{"code": "E-MODEL-UNSUPPORTED", **options})


@dataclass(frozen=True, slots=True, eq=False)
class Visibility:
    """How a pass's queries see its keys, by indices of keys: see `memopd_scorer.plan.Pack` and `Pass.spans`.

    The first `before` keys are those of earlier passes, which `past` holds. `made` is what a backend builds once for
    all layers.
    """

    path_K: Tensor
    visible_from_K: Tensor
    visible_until_K: Tensor
    spans: tuple[Span, ...]
    before: int = 0
    past: Past | None = None
    made: dict[Any, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.path_K)

    def queries(self) -> Tensor:
        """[Q]: the queries' indices among the keys."""
        return torch.arange(self.before, len(self), device=self.path_K.device)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Visibility:
        """The same on another device, made once: Accelerate asks for it where layers are on several."""
        if torch.device(device) == self.path_K.device:
            return self
        if ("on", str(device)) not in self.made:
            path, start, until = (
                tensor.to(device, non_blocking=non_blocking)
                for tensor in (self.path_K, self.visible_from_K, self.visible_until_K)
            )
            self.made["on", str(device)] = Visibility(path, start, until, self.spans, self.before, self.past)
        there: Visibility = self.made["on", str(device)]
        return there

    @property
    def is_causal(self) -> bool:
        """No recorded look-ahead or eviction: every span sees its ancestors whole and itself causally."""
        return all(s.causal for s in self.spans)

    @classmethod
    def of(cls, pack: Pack, device: torch.device, part: Pass | None = None, past: Past | None = None) -> Visibility:
        """Copy a pack's visibility to `device`, all of it or that of one pass."""
        part = Pass(0, len(pack), ()) if part is None else part
        packed_K = np.concatenate([np.arange(a, b) for a, b in part.keys])
        shift = part.start - part.tokens_kept
        path, start, until = (
            torch.from_numpy(a[packed_K].astype(np.int64) - by).to(device)
            for a, by in ((pack.path_T, 0), (pack.visible_from_T, shift), (pack.visible_until_T, shift))
        )
        return cls(path, start, until, part.spans(pack), part.tokens_kept, past)


@dataclass(frozen=True, slots=True)
class Extras:
    """What a layer adds to plain attention: `window` counts along the branch and includes the query itself,
    `softcap` bounds the scores, `sinks_H` are logits of an empty key."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None


def read_call(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Visibility, Extras, Tensor, Tensor]:
    """The visibility and the extras of one attention call, and its keys and values, both [1, G, K, E]; anything not
    understood is refused by name.

    Raises:
        UnsupportedAttentionError: naming the layer and what it uses.
    """
    visibility = options.pop(KWARG, None)
    name = type(module).__name__
    if visibility is None:
        raise UnsupportedAttentionError(
            f"{name} was not handed the pack's visibility: the model drops unknown keyword arguments"
        )
    window = options.pop("sliding_window", None)
    softcap, sinks = options.pop("softcap", None), options.pop("s_aux", None)
    scaling = options.pop("scaling", None)
    is_causal = options.pop("is_causal", None)
    tokens = len(visibility) - visibility.before
    reason = None
    if attention_mask is not None:
        reason = "a mask of the model's own"
    elif options.pop("dropout", 0.0):
        reason = "attention dropout"
    elif not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        reason = "attention that is not causal"
    elif query.shape[0] != 1 or query.shape[2] != tokens or key.shape[2] != tokens:
        reason = f"queries of shape {tuple(query.shape)} and {key.shape[2]} keys for {tokens} tokens"
    elif query.shape[1] % key.shape[1]:
        reason = f"{query.shape[1]} heads for {key.shape[1]} key heads"
    else:
        unknown = sorted(k for k, v in options.items() if v is not None and k not in _HARMLESS)
        reason = f"the attention option '{unknown[0]}'" if unknown else None
    if reason is not None:
        raise UnsupportedAttentionError(f"{name} uses {reason}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    extras = Extras(scaling=scaling, window=window or None, softcap=softcap, sinks_H=sinks)
    if visibility.past is None:
        return visibility, extras, key, value
    return visibility, extras, *visibility.past.join(key, value)


def grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[1, H, Q, E] and twice [1, G, K, E] as three views [G, R, …, E]: the keys are repeated without a copy."""
    groups = key.shape[1]
    each = query.shape[1] // groups
    wide = [t[0][:, None].expand(groups, each, -1, -1) for t in (key, value)]
    return query[0].unflatten(0, (groups, each)), wide[0], wide[1]


def ungrouped(output: Tensor) -> Tensor:
    """[G, R, Q, E] -> [1, Q, H, E], as Transformers wants it."""
    return output.flatten(0, 1).transpose(0, 1).contiguous()[None]
