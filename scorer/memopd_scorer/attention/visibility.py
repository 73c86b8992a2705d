"""What a packed backend is handed in one attention call, read and checked: the pack's visibility and a layer's extras.

Shape legend: T packed tokens, H heads, G key/value heads, R = H / G heads a group, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
    """A pack's visibility on the device: see `memopd_scorer.plan.Pack`.

    `made` holds what a backend builds once for all layers.
    """

    path_T: Tensor
    visible_from_T: Tensor
    visible_until_T: Tensor
    spans: tuple[Span, ...]
    made: dict[Any, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.path_T)

    @property
    def is_causal(self) -> bool:
        """No recorded look-ahead or eviction: every span sees its ancestors whole and itself causally."""
        return all(s.causal for s in self.spans)

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> Visibility:
        """Copy a pack's visibility to `device`."""
        path, start, until = (
            torch.from_numpy(a.astype(np.int64)).to(device)
            for a in (pack.path_T, pack.visible_from_T, pack.visible_until_T)
        )
        return cls(path, start, until, pack.spans)


@dataclass(frozen=True, slots=True)
class Extras:
    """What a layer adds to plain attention: `window` counts along the branch and includes the query itself,
    `softcap` bounds the scores, `sinks_H` are logits of an empty key."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None


def read_call(
    module: torch.nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> tuple[Visibility, Extras]:
    """The visibility and the extras of one attention call; anything not understood is refused by name.

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
    tokens = len(visibility)
    reason = None
    if attention_mask is not None:
        reason = "a mask of the model's own"
    elif options.pop("dropout", 0.0):
        reason = "attention dropout"
    elif not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        reason = "attention that is not causal"
    elif query.shape[0] != 1 or query.shape[2] != tokens or key.shape[2] != tokens:
        reason = f"queries of shape {tuple(query.shape)} and {key.shape[2]} keys for a pack of {tokens} tokens"
    elif query.shape[1] % key.shape[1]:
        reason = f"{query.shape[1]} heads for {key.shape[1]} key heads"
    else:
        unknown = sorted(k for k, v in options.items() if v is not None and k not in _HARMLESS)
        reason = f"the attention option '{unknown[0]}'" if unknown else None
    if reason is not None:
        raise UnsupportedAttentionError(f"{name} uses {reason}")
    return visibility, Extras(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window or None,
        softcap=softcap,
        sinks_H=sinks,
    )


def grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[1, H, T, E] and twice [1, G, T, E] as three views [G, R, T, E]: the keys are repeated without a copy."""
    groups = key.shape[1]
    each = query.shape[1] // groups
    wide = [t[0][:, None].expand(groups, each, -1, -1) for t in (key, value)]
    return query[0].unflatten(0, (groups, each)), wide[0], wide[1]


def ungrouped(output: Tensor) -> Tensor:
    """[G, R, T, E] -> [1, T, H, E], as Transformers wants it."""
    return output.flatten(0, 1).transpose(0, 1).contiguous()[None]
