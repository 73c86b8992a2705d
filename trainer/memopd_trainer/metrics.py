"""What a run reports: the metrics of a step, summed over its packs, and the file they go to.

Shape legend: M trained targets of a pack.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memopd_trace.disk import atomic_file
from memopd_trace.errors import InputError, printable

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step. `loss`, `divergence` (nats per token, before its weight), `ppo` (with the weights of its advantage),
    `value_loss`, `entropy` and `ratio` are means with the token weights; what a term that is off would give is
    `None`. `measured` is what a recipe measures (`memopd_trainer.recipes.measures`)."""

    step: int
    loss: float
    divergence: float | None
    ppo: float | None
    ratio: float | None
    ratio_min: float | None
    ratio_max: float | None
    clip_fraction: float | None  # share of the step's trained tokens
    value_loss: float | None
    entropy: float
    grad_norm: float  # before clipping
    lr: float
    trained_tokens: int
    logical_tokens: int
    executed_tokens: int
    seconds: float
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class StepSums:
    """A step's metrics while its packs pass by."""

    loss: float = 0.0
    entropy: float = 0.0
    divergence: float | None = None
    ppo: float | None = None
    value_loss: float | None = None
    ratio: float | None = None
    ratio_min: float | None = None
    ratio_max: float | None = None
    clipped: int = 0
    trained_tokens: int = 0
    logical_tokens: int = 0
    executed_tokens: int = 0
    teacher_gap: float | None = None
    overlap: float | None = None
    teacher_weight: float | None = None
    effective: list[int] = field(default_factory=list)

    def add_divergence(self, weight_M: Tensor, divergence_M: Tensor) -> None:
        """Count the distillation term of a pack."""
        self.divergence = (self.divergence or 0.0) + _mean(weight_M, divergence_M)

    def add_gap(self, weight_M: Tensor, gap_M: Tensor) -> None:
        """Count how far the sampled tokens' log-probabilities are from the teacher's."""
        self.teacher_gap = (self.teacher_gap or 0.0) + _mean(weight_M, gap_M)

    def add_overlap(self, weight_M: Tensor, overlap_M: Tensor, kept_M: Tensor, effective: list[int]) -> None:
        """Count what a pack's tokens are pruned by; `effective` are the lengths of its outputs."""
        self.overlap = (self.overlap or 0.0) + _mean(weight_M, overlap_M)
        self.teacher_weight = (self.teacher_weight or 0.0) + _mean(weight_M, kept_M)
        self.effective += effective

    def add_policy(self, weight_M: Tensor, ratio_M: Tensor, loss_M: Tensor, clipped_M: Tensor) -> None:
        """Count the policy term of a pack."""
        ratio_M = ratio_M.detach()
        self.ppo = (self.ppo or 0.0) + _mean(weight_M, loss_M)
        self.ratio = (self.ratio or 0.0) + _mean(weight_M, ratio_M)
        self.ratio_min = min(math.inf if self.ratio_min is None else self.ratio_min, float(ratio_M.min()))
        self.ratio_max = max(-math.inf if self.ratio_max is None else self.ratio_max, float(ratio_M.max()))
        self.clipped += int(clipped_M.sum())

    def add_value(self, weight_M: Tensor, loss_M: Tensor) -> None:
        """Count the value term of a pack."""
        self.value_loss = (self.value_loss or 0.0) + _mean(weight_M, loss_M)

    def add_pack(self, loss: Tensor, weight_M: Tensor, entropy_M: Tensor, logical: int, executed: int) -> None:
        """Count what every pack has."""
        self.loss += float(loss.detach())
        self.entropy += _mean(weight_M, entropy_M)
        self.trained_tokens += len(weight_M)
        self.logical_tokens += logical
        self.executed_tokens += executed

    @classmethod
    def plus(cls, parts: Sequence[StepSums]) -> StepSums:
        """Those of all ranks together: sums, but for the extremes and the list of lengths."""
        merges: dict[str, Any] = {"ratio_min": min, "ratio_max": max, "effective": lambda lists: [*chain(*lists)]}
        merged: dict[str, Any] = {}
        for each in fields(cls):
            values = [v for part in parts if (v := getattr(part, each.name)) is not None]
            merged[each.name] = merges.get(each.name, sum)(values) if values else None
        return cls(**merged)

    def finish(
        self, *, step: int, grad_norm: float, lr: float, seconds: float, measured: dict[str, Any] | None = None
    ) -> StepMetrics:
        """The step's metrics."""
        return StepMetrics(
            step=step,
            loss=self.loss,
            divergence=self.divergence,
            ppo=self.ppo,
            ratio=self.ratio,
            ratio_min=self.ratio_min,
            ratio_max=self.ratio_max,
            clip_fraction=None if self.ratio is None else self.clipped / self.trained_tokens,
            value_loss=self.value_loss,
            entropy=self.entropy,
            grad_norm=grad_norm,
            lr=lr,
            trained_tokens=self.trained_tokens,
            logical_tokens=self.logical_tokens,
            executed_tokens=self.executed_tokens,
            seconds=seconds,
            measured=measured or {},
        )


class MetricsFile:
    """One JSON object a line. Opening drops lines of steps after `start` (made, but not checkpointed).

    Raises:
        InputError: a line is not a JSON object with a step.
    """

    def __init__(self, path: Path, start: int) -> None:
        self.path = path
        self.lines = [line for line in _read(path) if line["step"] <= start]
        with atomic_file(path) as out:
            out.write("".join(json.dumps(line) + "\n" for line in self.lines).encode())

    def write(self, line: dict[str, Any]) -> None:
        """Append one line."""
        self.lines.append(line)
        with self.path.open("a") as out:
            out.write(json.dumps(line) + "\n")

    def held_out(self, step: int, data: str) -> dict[str, float] | None:
        """The held-out values of the data (named by digest) at a step, if they are in the file."""
        for line in self.lines:
            if line["step"] == step and line.get("held_out_data") == data:
                return dict(line["held_out"])
        return None

    def write_held_out(self, step: int, data: str, values: dict[str, float]) -> None:
        """Append held-out values."""
        self.write({"step": step, "held_out_data": data, "held_out": values})


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # a killed run may have left its last line unfinished; it belongs to a step that was not checkpointed
    return [_line(path, text) for text in path.read_bytes().split(b"\n")[:-1]]


def _line(path: Path, text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
        fits = isinstance(line, dict) and type(line.get("step")) is int
        if fits and "held_out_data" in line:
            fits = all(math.isfinite(line["held_out"][name]) for name in ("reverse_kl", "forward_kl", "tokens"))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        fits = False
    if not fits:
        shown = printable(text.decode(errors="replace"), 80)
        raise InputError(f"{path}: not a line of metrics: {shown}", hint="remove the line, or the file")
    return dict(line)


def _mean(weight_M: Tensor, values_M: Tensor) -> float:
    return float((weight_M * values_M.detach()).sum(dtype=torch.float64))
