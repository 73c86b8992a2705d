"""Half precision: its dtypes, and running a model that is kept in it in float32, without a second copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """While this is open, every module's half-precision weights are float32 as long as the module runs.

    The largest part that is float32 at a time is one layer, or the embedding, or the head. What a module reads of
    another that is not running stays in half precision; torch then mostly refuses to mix the two. Offloaded weights
    come in the dtype of the placeholder that stands for them, which is what is changed then.
    """
    layers = {id(layer) for layer in _layers(model)}
    with ExitStack() as stack:
        for module in model.modules():
            widened = _Widened(deep=id(module) in layers)
            stack.callback(widened.narrow)
            stack.callback(module.register_forward_pre_hook(widened.widen).remove)
            stack.callback(module.register_forward_hook(widened.narrow, always_call=True).remove)
        yield


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


class _Widened:
    """The weights of one module (`deep`: and of all in it) that were turned to float32, and what they were before."""

    def __init__(self, *, deep: bool) -> None:
        self.deep = deep
        self.undo: list[Callable[[], None]] = []

    def widen(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for owner in module.modules() if self.deep else (module,):
            for name, tensor in chain(owner.named_parameters(recurse=False), owner.named_buffers(recurse=False)):
                if tensor.dtype in HALF:  # not so where a module around this one has done it
                    self.undo.append(_widen(owner, name, tensor))
        # some code turns its states to the dtype of weights that do not run yet
        return tuple(x.float() if isinstance(x, Tensor) and x.dtype in HALF else x for x in inputs)

    def narrow(self, *_: Any) -> None:
        while self.undo:
            self.undo.pop()()


def _widen(owner: nn.Module, name: str, tensor: Tensor) -> Callable[[], None]:
    """Turn a module's own tensor to float32; what is returned turns it back."""
    if hasattr(tensor, "full_tensor"):  # a DTensor: setting its data leaves the part that this rank holds
        setattr(owner, name, nn.Parameter(tensor.detach().float(), requires_grad=False))
        return partial(setattr, owner, name, tensor)
    data = tensor.data
    tensor.data = data.float()

    def narrow() -> None:
        getattr(owner, name).data = data  # the same tensor, or another placeholder

    return narrow
