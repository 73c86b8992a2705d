"""All contenders on one workload in one run: checked against the oracle, then timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from memopd_scorer.cost import ModelCost

from .contenders import Bench, Contender, Outcome, oracle
from .measure import Spread, peak_of, timed
from .workloads import Workload

REFERENCE = "tree"


def race(
    bench: Bench,
    work: Workload,
    contenders: Mapping[str, Contender],
    *,
    repeats: int,
    cost: ModelCost,
    peak: float,
    on_step: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """One workload's rows, as plain data: contender -> what was measured.

    The first turn of each contender is the warm-up: its memory is measured, and its error, the largest |difference| of
    a log-probability from the oracle in nats. `repeats` timed rounds follow; in each all contenders run in turn, and
    `times_tree` is a contender's seconds over the tree's of the same round.
    """
    on_step("oracle")
    truth = oracle(bench, work)
    rows: dict[str, dict[str, Any]] = {}
    targets = sum(map(len, truth))
    for name, run in contenders.items():
        on_step(f"{name}, warm-up")
        try:
            outcome, held = peak_of(partial(run, bench, work), bench.device)
        except torch.OutOfMemoryError:
            rows[name] = {"failed": "out of memory"}
            continue
        if name == "vllm" and bench.server is not None:
            held = bench.server.peak_bytes()
        rows[name] = _checked(outcome, truth, targets) | {"peak_bytes": held}
    running = {name: run for name, run in contenders.items() if "failed" not in rows[name]}
    rounds: list[dict[str, float]] = []
    for number in range(repeats):
        taken: dict[str, float] = {}
        for name, run in running.items():
            on_step(f"round {number + 1} of {repeats}, {name}")
            taken[name] = timed(partial(run, bench, work), bench.device)[1]
        rounds.append(taken)
    for name in running:
        row = rows[name]
        seconds = Spread.of(taken[name] for taken in rounds)
        row["seconds"] = asdict(seconds)
        row["flops"] = cost.flops(row["executed"], row["pairs"], row["rows"])
        row["utilisation"] = row["flops"] / seconds.median / peak
        if REFERENCE in running:
            row["times_tree"] = asdict(Spread.of(taken[name] / taken[REFERENCE] for taken in rounds))
    plan = work.plan(bench.max_tokens)
    return {
        "invocations": plan.invocations,
        "logical": plan.logical_tokens,
        "executed": plan.executed_tokens,
        "sharing": plan.sharing,
        "targets": targets,
        "contenders": rows,
    }


def _checked(outcome: Outcome, truth: list[np.ndarray], targets: int) -> dict[str, Any]:
    shapes = [found.shape == true.shape for found, true in zip(outcome.logprobs, truth, strict=True)]
    if not all(shapes):
        return {"failed": "not the targets that were asked for"}
    differences = np.concatenate([np.abs(f - t) for f, t in zip(outcome.logprobs, truth, strict=True)])
    size = 4 * targets if outcome.bytes is None else outcome.bytes
    return {
        "executed": outcome.tokens,
        "pairs": outcome.pairs,
        "rows": outcome.rows,
        "max_error": float(differences.max()),  # NaN stays NaN, and is within no contract
        "mean_error": float(differences.mean()),
        "bytes_per_target": size / targets,
    }
