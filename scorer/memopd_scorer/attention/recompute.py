"""Gradient checkpointing that keeps a pack's visibility: layers are run again in the backward pass.

A model's own checkpointing is on in training mode only, where dropout would be on as well; and its backward pass runs
when the model is back on its usual attention, so that the layers run again would see another mask than the first time.
Here a layer is run again under the attention that it was run with, in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from memopd_scorer.attention.visibility import UnsupportedAttentionError


def recompute_layers(model: PreTrainedModel) -> int:
    """From now on keep only the inputs of a model's layers for the backward pass; returns how many layers.

    Raises:
        UnsupportedAttentionError: the model names no layers that can be run again.
    """
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in layers)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            layers[name] = module
    if not layers:
        raise UnsupportedAttentionError(f"{type(model).__name__} has no layers that Transformers can run again")
    for layer in layers.values():
        layer.forward = _recomputed(model, layer.forward)
    return len(layers)


def configs_of(model: PreTrainedModel) -> list[Any]:
    """Every configuration that names an attention, the outermost first: setting it there sets it on those inside."""
    return [model.config, *(m.config for m in model.modules() if isinstance(m, PreTrainedModel))]


@contextmanager
def attention_of(configs: list[tuple[Any, Any]]) -> Iterator[None]:
    """Each configuration with an attention, for the time of the context."""
    before = [(config, config._attn_implementation) for config, _ in configs]
    try:
        for config, implementation in configs:
            config._attn_implementation = implementation
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def _recomputed(model: PreTrainedModel, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        now = [(config, config._attn_implementation) for config in configs_of(model)]

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), attention_of(now)

        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    return run
