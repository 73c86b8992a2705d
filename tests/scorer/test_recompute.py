"""Layers that are run again in the backward pass see what they saw: same gradients, fewer kept states."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers_attention import model_of, pack_of
from torch import Tensor
from torch.utils.checkpoint import CheckpointError
from transformers import PreTrainedModel

from memopd_scorer.attention import UnsupportedAttentionError, recompute, recompute_layers, states_at_rows
from memopd_scorer.plan import Pack

KINDS = ["llama", "gpt2", "gemma3", "mixtral"]


def gradients(model: PreTrainedModel, pack: Pack) -> tuple[dict[str, Tensor], int]:
    """(gradient of a fixed scalar by each parameter, cells kept for the backward pass)."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = states_at_rows(model, pack, backend="sdpa")
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    total = sum(size for place, size in kept.items() if place not in weights)
    model.zero_grad()
    (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).reshape(hidden.shape)).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, total


@pytest.mark.parametrize("visibility", [False, True], ids=["tree", "evicted"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_gradients_are_the_same_bits_and_less_is_kept(kind: str, visibility: bool) -> None:
    model, pack = model_of(kind), pack_of(visibility=visibility)
    expected, whole = gradients(model, pack)
    assert recompute_layers(model) == model.config.num_hidden_layers
    found, kept = gradients(model, pack)
    assert expected.keys() == found.keys() and len(expected) > 10
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert kept < whole / 2
    assert not model.training


def test_without_the_attention_of_the_first_run_there_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens when a model checkpoints itself: the backward pass finds it on its usual attention."""
    model, pack = model_of("llama"), pack_of(visibility=False)
    monkeypatch.setattr(recompute, "attention_of", lambda configs: nullcontext())
    recompute_layers(model)
    with pytest.raises(CheckpointError):
        gradients(model, pack)


def test_nothing_is_kept_or_run_again_without_gradients() -> None:
    model, pack = model_of("llama"), pack_of(visibility=True)
    runs: list[int] = []
    layer = next(m for m in model.modules() if type(m).__name__.endswith("DecoderLayer"))
    recompute_layers(model)
    layer.register_forward_hook(lambda *_: runs.append(1))
    with torch.no_grad():
        states_at_rows(model, pack, backend="sdpa")
    assert len(runs) == 1


def test_a_model_without_layers_to_run_again_is_refused() -> None:
    class Plain:
        def named_modules(self) -> list[tuple[str, Any]]:
            return [("", torch.nn.Linear(2, 2))]

    with pytest.raises(UnsupportedAttentionError, match="Plain has no layers"):
        recompute_layers(Plain())  # type: ignore[arg-type]
