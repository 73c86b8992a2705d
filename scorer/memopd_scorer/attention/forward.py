"""Run a Transformers model on a pack, up to its output head.

The backends are registered with Transformers' attention interface, so that every causal LM there runs a packed
tree without model code of ours; the pack's visibility travels as a keyword argument of the forward. No mask is
built by the model, because Transformers knows none for these names.

Shape legend: Q tokens of a pass (all packed ones, where there is one pass), R prediction rows, D model width.
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

from memopd_scorer.attention import eager, flash, flex, sdpa
from memopd_scorer.attention.choice import Backend
from memopd_scorer.attention.past import Past
from memopd_scorer.attention.recompute import attention_of, configs_of
from memopd_scorer.attention.visibility import KWARG, UnsupportedAttentionError, Visibility
from memopd_scorer.passes import Pass, passes_of
from memopd_scorer.placement import runs_on
from memopd_scorer.plan import Pack

# Transformers reads meaning into names that hold "sdpa", "flex" or "flash"; these hold none.
_REGISTERED: dict[Backend, str] = {
    "sdpa": "memopd_by_span",
    "eager": "memopd_dense",
    "flex": "memopd_by_interval",
    "flash": "memopd_by_branch",
}
AttentionInterface.register(_REGISTERED["sdpa"], sdpa.attend)
AttentionInterface.register(_REGISTERED["eager"], eager.attend)
AttentionInterface.register(_REGISTERED["flex"], flex.attend)
AttentionInterface.register(_REGISTERED["flash"], flash.attend)


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
    (hidden_RD,) = iter_states_at_rows(model, pack, backend=backend)
    return hidden_RD


def iter_states_at_rows(
    model: PreTrainedModel, pack: Pack, *, backend: Backend = "sdpa", pass_tokens: int | None = None
) -> Iterator[Tensor]:
    """As `states_at_rows`, in passes of at most `pass_tokens` tokens (`memopd_scorer.passes`; `None` = one pass):
    each pass's part of hidden_RD, in order.

    Between passes the keys and values of one path are held, in all layers. `native` is one pass.
    """
    passes = passes_of(pack, None if backend == "native" else pass_tokens)
    past = Past() if len(passes) > 1 else None
    for number, part in enumerate(passes):
        if past is not None:
            following = passes[number + 1].kept if number + 1 < len(passes) else ()
            past.begin(part.locate(following))
        hidden_QD = _run(model, pack, part, past, backend)
        first, last = np.searchsorted(pack.rows_R, [part.start, part.stop])
        rows = torch.from_numpy(pack.rows_R[first:last].astype(np.int64) - part.start).to(hidden_QD.device)
        yield hidden_QD.index_select(0, rows)


def _run(model: PreTrainedModel, pack: Pack, part: Pass, past: Past | None, backend: Backend) -> Tensor:
    """[Q, D]: the head's input at every token of a pass."""
    device = runs_on(model.get_input_embeddings())
    tokens = slice(part.start, part.stop)
    ids_1Q = torch.from_numpy(pack.token_ids_T[tokens].astype(np.int64)).to(device)[None]
    if backend == "native":
        if not pack.is_plain:
            raise ValueError(f"the native backend runs one plain state, this pack has {len(pack.states)} states")
        hidden = _head_input(model, ids_1Q, {})
    else:
        if not _takes_positions(model):
            raise UnsupportedAttentionError(
                f"{type(model).__name__} takes no position ids, so it cannot run recorded positions or a packed tree"
            )
        positions_1Q = torch.from_numpy(pack.positions_T[tokens].astype(np.int64)).to(device)[None]
        with _use_backend(model, backend):
            visibility = Visibility.of(pack, device, part, past)
            hidden = _head_input(model, ids_1Q, {"position_ids": positions_1Q, KWARG: visibility})
    if hidden.shape[:2] != ids_1Q.shape:
        raise UnsupportedAttentionError(
            f"{type(model).__name__} hands its head states of shape {tuple(hidden.shape)} for {ids_1Q.shape[1]} tokens"
        )
    return hidden[0]


def _head_input(model: PreTrainedModel, ids_1Q: Tensor, arguments: dict[str, Any]) -> Tensor:
    """[1, Q, D]: what the model's own forward hands its output head, whatever stands between body and head."""

    def stop(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _AtHead(inputs[0])

    hook = model.get_output_embeddings().register_forward_pre_hook(stop)
    try:
        model(ids_1Q, use_cache=False, **arguments)
    except _AtHead as reached:
        return reached.hidden
    finally:
        hook.remove()
    raise UnsupportedAttentionError(f"{type(model).__name__} does not call its output head")


@contextmanager
def _use_backend(model: PreTrainedModel, backend: Backend) -> Iterator[None]:
    """Switch a model to a packed backend and back.

    Raises:
        UnsupportedAttentionError: the model does not use Transformers' attention interface.
    """
    name = _REGISTERED[backend]
    with attention_of([(config, config._attn_implementation) for config in configs_of(model)]):
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise UnsupportedAttentionError(f"{type(model).__name__} does not use Transformers' attention interface")
        yield


def _takes_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters
