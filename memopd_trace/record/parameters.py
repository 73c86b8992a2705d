"""The values of a model's parameters, wherever they are: on a device, in parts on several ranks, or offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.errors import InputError


def iter_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, detached values) of every parameter, sorted by name, one in memory at a time; tied ones once.

    Of a model that ranks share, all must walk through this at the same time.

    Raises:
        InputError: `E-MODEL-UNSUPPORTED` for a parameter that was offloaded in a way that is not known.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())  # offloaded, they are not the same object any more
    named = dict(model.named_parameters())
    for name in sorted(named):
        if name in tied and named[name].is_meta:
            continue
        prefix, _, own = name.rpartition(".")
        yield name, whole_parameter(model.get_submodule(prefix), own).detach()


def whole_parameter(module: Any, name: str) -> Any:
    """A module's own parameter: itself where it is whole and in place, else its detached values, gathered from the
    ranks that hold parts of it (all of them call this), or read from where Accelerate has put it, onto the device where
    the module runs.

    Raises:
        InputError: `E-MODEL-UNSUPPORTED` for one that was offloaded in a way that is not known.
    """
    parameter = getattr(module, name)
    if hasattr(parameter, "full_tensor"):  # a DTensor
        return parameter.detach().full_tensor()
    if not parameter.is_meta:
        return parameter
    from accelerate.utils import align_module_device

    with align_module_device(module):
        loaded = getattr(module, name).detach()
        if loaded.is_meta:
            raise InputError(
                f"{type(module).__name__}: its parameter '{name}' is offloaded, and cannot be read",
                code="E-MODEL-UNSUPPORTED",
            )
        return loaded.clone()
