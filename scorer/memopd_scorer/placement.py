"""Where a teacher's weights are: on one device, layer by layer on several or offloaded (`device_map`, Accelerate's), or
each layer in parts on the ranks of torchrun (`tp_plan`, Transformers')."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from memopd_trace.errors import MissingExtraError, UsageError, first_line
from memopd_trace.record.parameters import whole_parameter

DeviceMap = str | dict[str, Any]


def load_arguments(device_map: DeviceMap | None, tp_plan: str | None) -> dict[str, Any]:
    """What `from_pretrained` needs to be told.

    Raises:
        UsageError: both, a plan that is not "auto", or a Transformers without tensor parallelism by a plan.
        MissingExtraError: a device map without Accelerate.
    """
    if device_map is not None and tp_plan is not None:
        raise UsageError("a device map and a tensor-parallel plan", hint="one of --device-map and --tp-plan")
    if device_map is not None:
        try:
            import accelerate  # noqa: F401 - or Transformers says so in a long text
        except ModuleNotFoundError:
            raise MissingExtraError("a device map needs 'accelerate'", hint="pip install accelerate") from None
        return {"device_map": device_map}
    if tp_plan is None:
        return {}
    if tp_plan != "auto":
        raise UsageError(f"tensor-parallel plan '{tp_plan}'", hint="auto: the plan that the model's own code declares")
    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    except (ImportError, TypeError):
        raise UsageError("this Transformers has no tensor-parallel plans", hint="a newer transformers") from None


def put(model: PreTrainedModel, device: str, device_map: DeviceMap | None, tp_plan: str | None) -> PreTrainedModel:
    """A loaded model where it is to run; a device map or plan has put it there already.

    Raises:
        UsageError: the device is not there, or tensor parallelism has taken another kind.
    """
    if device_map is not None:
        return model
    try:
        wanted = torch.device(device)
        if tp_plan is None:
            model.to(wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device '{device}': {first_line(error)}") from None
    if model.device.type != wanted.type:
        raise UsageError(
            f"tensor parallelism has put the teacher on '{model.device.type}', and '{device}' was asked for",
            hint=f"--device {model.device.type}",
        )
    return model


def runs_on(module: nn.Module) -> torch.device:
    """The device to hand a layer's input to; of an offloaded one that to which its weights are brought."""
    device: torch.device = next(module.parameters()).device
    hook = getattr(module, "_hf_hook", None)
    if device.type == "meta" and hook is not None:
        return torch.device(hook.execution_device)
    return device


@contextmanager
def whole_head(model: PreTrainedModel, layer: nn.Linear) -> Iterator[nn.Linear]:
    """The output layer with all its weights in this process: `layer` itself where they are, else a copy, which the
    model runs in its place while this is open."""
    weight = whole_parameter(layer, "weight")
    if weight is layer.weight:
        yield layer
        return
    copy = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None, device="meta")
    copy.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        copy.bias = nn.Parameter(whole_parameter(layer, "bias"), requires_grad=False)
    model.set_output_embeddings(copy)
    try:
        yield copy
    finally:
        model.set_output_embeddings(layer)
