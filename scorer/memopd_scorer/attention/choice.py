"""Which backend runs a model's packs, and why."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import torch

from memopd_scorer.precision import HALF, dtype_name
from memopd_trace.errors import UsageError

Backend = Literal["sdpa", "flex", "flash", "eager", "native"]
REQUESTS = ("auto", "sdpa", "flex", "flash", "eager")


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend for packs of plain causal branches, the one for packs with recorded visibility, and the reason.

    `with_visibility` is `None` where such a pack is to be refused.
    """

    backend: Backend
    with_visibility: Backend | None
    reason: str

    def for_pack(self, is_causal: bool) -> Backend:
        """The backend of one pack. The wanted one itself names what it refuses."""
        return self.backend if is_causal or self.with_visibility is None else self.with_visibility


def choose(wanted: str, device: torch.device, dtype: torch.dtype) -> list[Choice]:
    """The backends to try, best first; the model's probe decides whether one is exact.

    `auto` takes `sdpa` on a CPU, where it was measured to be the fastest. On a CUDA device nothing has been measured
    here: it takes `flash` for half precision (`sdpa` for packs with recorded visibility), else `sdpa`. It never takes
    `flex`: others measured that FlexAttention pays from about 2,000 packed tokens on and costs below (2.34 times the
    speed of sdpa at 8,192 tokens, 1.31 at 2,048, 0.72 at 512, on one H200), but a threshold for this one is not known.

    Raises:
        UsageError: an unknown name, or a backend that this device or dtype does not have.
    """
    if wanted not in REQUESTS:
        raise UsageError(f"unknown attention backend '{wanted}'", hint=f"one of {', '.join(REQUESTS)}")
    if wanted == "auto":
        sdpa = Choice("sdpa", "sdpa", f"auto: {_why_sdpa(device, dtype)}")
        if device.type != "cuda" or dtype not in HALF:
            return [sdpa]
        reason = f"auto: {dtype_name(dtype)} on a CUDA device, {_flash_kernel()}; sdpa under recorded visibility"
        return [Choice("flash", "sdpa", reason), sdpa]
    if wanted == "flash":
        if device.type != "cuda" or dtype not in HALF:
            raise UsageError(
                f"the attention backend 'flash' cannot run {dtype_name(dtype)} on '{device}'",
                hint="it needs a CUDA device and bfloat16 or float16",
            )
        return [Choice("flash", None, f"asked for; {_flash_kernel()}")]
    backend: Any = wanted
    return [Choice(backend, backend, "asked for")]


def _why_sdpa(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cuda":
        return f"{dtype_name(dtype)} on a CUDA device, for which flash has no kernel"
    return f"the device is '{device.type}', where sdpa is the fastest backend"


def _flash_kernel() -> str:
    return "kernel of flash-attn" if importlib.util.find_spec("flash_attn") else "torch's own kernel"
