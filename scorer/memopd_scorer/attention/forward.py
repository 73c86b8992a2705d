"""Run a Transformers model on a pack, up to its output head.

The backends are registered with Transformers' attention interface, so that every causal LM there runs a packed
tree without model code of ours; the pack's visibility travels as a keyword argument of the forward. No mask is
built by the model, because Transformers knows none for these names.

Shape legend: T packed tokens, R prediction rows, D model width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from memopd_scorer.attention import dense, flex, spans, varlen
from memopd_scorer.attention.choice import Backend
from memopd_scorer.attention.visibility import KWARG, UnsupportedAttentionError, Visibility
from memopd_scorer.plan import Pack

# Transformers reads meaning into names that hold "sdpa", "flex" or "flash"; these hold none.
_REGISTERED: dict[Backend, str] = {
    "sdpa": "memopd_by_span",
    "eager": "memopd_dense",
    "flex": "memopd_by_interval",
    "flash": "memopd_by_branch",
}
AttentionInterface.register(_REGISTERED["sdpa"], spans.attend)
AttentionInterface.register(_REGISTERED["eager"], dense.attend)
AttentionInterface.register(_REGISTERED["flex"], flex.attend)
AttentionInterface.register(_REGISTERED["flash"], varlen.attend)


class _AtHead(Exception):
    """Carries the input of the output head out of a forward, which ends there: no logits are computed."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def states_at_rows(model: PreTrainedModel, pack: Pack, *, backend: Backend = "sdpa") -> Tensor:
    """Run a causal LM on a pack up to its output head: hidden_RD, the head's input at the prediction rows.

    Differentiable (but `flex` on a CPU); the dtype is the model's. The caller decides about `torch.no_grad()` and
    `model.eval()`.

    Raises:
        UnsupportedAttentionError: the model or the pack needs something that the backend does not compute, or the
            model does not take position ids or does not call its output head.
        ValueError: `native` for a pack that is not one plain state.
    """
    device = model.get_input_embeddings().weight.device
    ids_1T = torch.from_numpy(pack.token_ids_T.astype(np.int64)).to(device)[None]
    if backend == "native":
        if not pack.is_plain:
            raise ValueError(f"the native backend runs one plain state, this pack has {len(pack.states)} states")
        hidden = _head_input(model, ids_1T, {})
    else:
        if not _takes_positions(model):
            raise UnsupportedAttentionError(
                f"{type(model).__name__} takes no position ids, so it cannot run recorded positions or a packed tree"
            )
        positions_1T = torch.from_numpy(pack.positions_T.astype(np.int64)).to(device)[None]
        with use_backend(model, backend):
            hidden = _head_input(model, ids_1T, {"position_ids": positions_1T, KWARG: Visibility.of(pack, device)})
    if hidden.shape[:2] != ids_1T.shape:
        raise UnsupportedAttentionError(
            f"{type(model).__name__} hands its head states of shape {tuple(hidden.shape)} for {len(pack)} tokens"
        )
    rows_R = torch.from_numpy(pack.rows_R.astype(np.int64)).to(hidden.device)
    return hidden[0].index_select(0, rows_R)


def _head_input(model: PreTrainedModel, ids_1T: Tensor, arguments: dict[str, Any]) -> Tensor:
    """[1, T, D]: what the model's own forward hands its output head, whatever stands between body and head."""

    def stop(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _AtHead(inputs[0])

    hook = model.get_output_embeddings().register_forward_pre_hook(stop)
    try:
        model(ids_1T, use_cache=False, **arguments)
    except _AtHead as reached:
        return reached.hidden
    finally:
        hook.remove()
    raise UnsupportedAttentionError(f"{type(model).__name__} does not call its output head")


@contextmanager
def use_backend(model: PreTrainedModel, backend: Backend) -> Iterator[None]:
    """Switch a model to a packed backend and back.

    Raises:
        UnsupportedAttentionError: the model does not use Transformers' attention interface.
    """
    name = _REGISTERED[backend]
    # the outermost first: setting it on a config sets it on those inside
    configs = [model.config, *(m.config for m in model.modules() if isinstance(m, PreTrainedModel))]
    before = [(config, config._attn_implementation) for config in configs]
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise UnsupportedAttentionError(f"{type(model).__name__} does not use Transformers' attention interface")
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def _takes_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters
