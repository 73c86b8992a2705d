"""What a model does to the output of its last linear layer: a scale, a softcap, or something that is refused.

It is measured, not read from a list of names: the model's own forward is given chosen inputs of that layer, small ones
and ones large enough for any softcap, and the logits that come out tell. Configs only supply the exact digits.

Shape legend: N chosen inputs, V vocabulary, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memopd_scorer.placement import runs_on
from memopd_scorer.precision import in_float32
from memopd_trace.errors import InputError, TraceError, first_line

# Largest |logit| before scale and softcap, for which a row each is chosen; two are beyond all softcaps.
_MAGNITUDES = (0.01, 1.0, 10.0, 100.0, 1e6, 1e8)
TOLERANCE = 1e-4  # of a row's logits, relative to its largest
_DIGITS = 1e-4  # a measured scale this near (relative) to a number of the config is that number


@torch.no_grad()
def finish_of(model: PreTrainedModel, layer: nn.Linear) -> tuple[float, float | None]:
    """(scale, softcap) such that the model's logits are softcap(scale * (weight h + bias)).

    Raises:
        InputError: `E-MODEL-UNSUPPORTED` when the model cannot be run on token ids alone, or its logits are made in
            another way.
    """
    raw_NV, logits_NV = _measure(model, layer)
    cap = _softcap(logits_NV)
    scale = _exact_digits(_scale(raw_NV, logits_NV, cap), model.config)
    expected = raw_NV * scale
    expected = expected if cap is None else torch.tanh(expected / cap) * cap
    error = ((expected - logits_NV).abs().amax(1) / logits_NV.abs().amax(1)).max()
    if not float(error) <= TOLERANCE:  # NaN is not within it
        raise InputError(
            f"{type(model).__name__}: its logits are not scale and softcap on the linear layer that makes them "
            f"({type(layer).__name__}): they differ by {float(error):.1e} (relative)",
            code="E-MODEL-UNSUPPORTED",
        )
    return scale, cap


def _measure(model: PreTrainedModel, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """Twice [N, V], at least float32: what the linear layer is to give for chosen inputs, and what the model makes."""
    weight = layer.weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    noise = torch.randn(len(_MAGNITUDES), weight.shape[1], generator=torch.Generator().manual_seed(0), dtype=wide)
    chosen_ND = noise.to(weight.device)
    largest = (chosen_ND @ weight.to(wide).T).abs().amax(1, keepdim=True)
    chosen_ND *= torch.tensor(_MAGNITUDES, dtype=wide, device=weight.device)[:, None] / largest

    def replace(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (chosen_ND.expand(inputs[0].shape), *inputs[1:])

    ids = torch.zeros(1, len(chosen_ND), dtype=torch.long, device=runs_on(model.get_input_embeddings()))
    with in_float32(layer):
        hook = layer.register_forward_pre_hook(replace)
        try:
            logits = model(ids, use_cache=False).logits
        except TraceError:
            raise
        except Exception as fault:  # modelling code of any kind
            raise InputError(
                f"{type(model).__name__} cannot be run on token ids alone: {type(fault).__name__}: {first_line(fault)}",
                code="E-MODEL-UNSUPPORTED",
            ) from fault
        finally:
            hook.remove()
    raw_NV = nn.functional.linear(chosen_ND, weight.to(wide), None if layer.bias is None else layer.bias.to(wide))
    if logits.shape[1:] != raw_NV.shape:
        raise InputError(
            f"{type(model).__name__} makes logits of shape {tuple(logits.shape)} of {len(ids[0])} tokens",
            code="E-MODEL-UNSUPPORTED",
        )
    return raw_NV, logits[0].to(raw_NV)


def _softcap(logits_NV: Tensor) -> float | None:
    """The bound that the two largest inputs both reach."""
    less, more = (float(row.abs().max()) for row in logits_NV[-2:])
    return more if math.isclose(less, more, rel_tol=1e-6) else None


def _scale(raw_NV: Tensor, logits_NV: Tensor, cap: float | None) -> float:
    """logits / raw, before the softcap, where it is the largest below saturation."""
    straight = logits_NV if cap is None else torch.atanh(logits_NV / cap) * cap
    raw, made = raw_NV[0], straight[0]
    at = int(raw.abs().argmax())
    return float(made[at] / raw[at])


def _exact_digits(scale: float, config: Any) -> float:
    """1, or the number of the config, or its inverse, that a measured scale is."""
    found = [1.0, *(x for v in _numbers(config.to_dict()) for x in (v, 1 / v))]
    nearest = min(found, key=lambda x: abs(x - scale))
    return nearest if abs(nearest - scale) <= _DIGITS * abs(scale) else scale


def _numbers(value: Any) -> Iterator[float]:
    """All numbers of a config, but 0."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value and math.isfinite(value):
        yield float(value)
