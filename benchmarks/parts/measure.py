"""Time, memory, and what the machine could do: measured in one run, interleaved."""

from __future__ import annotations

import ctypes
import gc
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
PACKAGES = ("memopd-trace", "torch", "transformers", "numpy", "pyarrow", "trl", "flash-attn")
SQUARE = {"cpu": 1536, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeats of one measurement: their median, least and largest."""

    median: float
    least: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        half = len(ordered) // 2
        middle = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
        return cls(middle, ordered[0], ordered[-1])


def timed(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """(result, seconds), with the device idle before and after."""
    wait(device)
    began = time.perf_counter()
    result = work()
    wait(device)
    return result, time.perf_counter() - began


def peak_of(work: Callable[[], Result], device: torch.device) -> tuple[Result, int | None]:
    """(result, most bytes that were held beyond those held before); `None` where the system does not tell."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        return work(), torch.cuda.max_memory_allocated(device) - before
    _return_freed_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is held now
        before = status_bytes("VmRSS")
    except (OSError, KeyError):
        return work(), None
    result = work()
    return result, max(0, status_bytes("VmHWM") - before)


def gemm_peak(
    device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, int, int]], repeats: int = 5
) -> float:
    """The most FLOP/s of a matrix product [m, k] x [k, n] among a large square and the model's own `shapes`."""
    side = SQUARE[device.type]
    best = 0.0
    for m, k, n in [(side, side, side), *shapes]:
        left, right = (torch.randn(*shape, device=device).to(dtype) for shape in ((m, k), (n, k)))
        rounds = max(1, round((2e12 if device.type == "cuda" else 2e9) / (2 * m * k * n)))  # long enough for the clock

        def products(left: torch.Tensor = left, right: torch.Tensor = right, rounds: int = rounds) -> None:
            for _ in range(rounds):
                torch.mm(left, right.T)

        products()
        seconds = min(timed(products, device)[1] for _ in range(repeats))
        best = max(best, 2 * m * k * n * rounds / seconds)
    return best


def layer_shapes(config: Any, tokens: int) -> list[tuple[int, int, int]]:
    """[m, k, n] of a decoder's largest products over `tokens` tokens: up, down, and the head."""
    width, inner = config.hidden_size, config.intermediate_size
    return [(tokens, width, inner), (tokens, inner, width), (min(tokens, 512), width, config.vocab_size)]


def machine(device: torch.device) -> dict[str, Any]:
    """What kind of machine this is, and which versions run on it."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    described = {"processor": _processor(), "threads": torch.get_num_threads(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    if device.type == "cuda":
        described["device"] = torch.cuda.get_device_name(device)
        versions["cuda"] = str(torch.version.cuda)
    return described | {"versions": versions}


def wait(device: torch.device) -> None:
    """Until a CUDA device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def status_bytes(field: str, process: int | str = "self") -> int:
    """A size that a process holds (`VmRSS`) or has held at most (`VmHWM`), on Linux.

    Raises:
        OSError, KeyError: the system does not tell, or the process is gone.
    """
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def _return_freed_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()
