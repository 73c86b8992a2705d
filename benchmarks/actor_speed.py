"""What a training step of the actor costs, forward and backward, in each layout, on the same work in one run.

Run: OMP_NUM_THREADS=2 python benchmarks/actor_speed.py [--only memory group] [--repeats 3] [--scale 0.5] [--json]
     python benchmarks/actor_speed.py --write docs/benchmarks.md    (no measuring: the table of the last --json)

    padded  a batch of Transformers, padded on the right, through the model's own attention
    packed  this project's variable-length packing, nothing shared
    tree    this project's prefix tree

All have the same objective, the mean of -log pi over the targets with the head on their rows alone, and the same
gradient: the largest difference from the tree's, relative to the largest entry of each parameter's, stands beside the
time. `times the tree's` compares seconds of one round. The paper (arXiv 2608.07068) reports up to 1.63x of actor
compute by packing; what is shared decides, so each workload says what its tree could save at most.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from parts.contenders import batches
from parts.measure import Spread, machine, peak_of, timed
from parts.model import DEFAULT_MODEL, unpack
from parts.tables import add_options, aligned, kept, markdown, save, spread, write_between_markers
from parts.workloads import MAX_TOKENS, Workload, rollouts, synthetic, text_pieces
from score import tell
from torch import Tensor
from transformers import AutoTokenizer

from memopd_scorer.plan import Layout, plan_states
from memopd_scorer.teacher import LoadedModel, load
from memopd_trainer.losses import row_losses

WORKLOADS = ("memory", "history", "group", "rollouts")
PAPER = 1.63
HEADER = ["workload", "layout", "executed", "seconds (least-most)", "times the tree's", "peak MiB", "gradient off by"]


def main() -> None:
    options = parse()
    if options.write:
        write_between_markers(options.write, "actor", as_markdown(kept("actor_speed")))
        return
    unpack(options.model)
    result = measure(options)
    print("\n".join([about(result), *aligned(rows_of(result))]))
    if options.json:
        print(f"\nwritten to {save(options.json, result)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.5, help="of all lengths")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a Transformers folder with a tokenizer")
    add_options(parser, "actor_speed")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All workloads, as plain data."""
    tell("loading the model")
    student = load(options.model)
    student.model.requires_grad_(True)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    result: dict[str, Any] = {
        "model": f"{options.model.name}, float32",
        "machine": machine(student.head.weight_VD.device),
        "repeats": options.repeats,
        "scale": options.scale,
        "paper": PAPER,
        "workloads": {},
    }
    works = [work for work in synthetic(text_pieces(tokenizer), options.scale) if work.name in options.only]
    if "rollouts" in options.only:
        tell("recording rollouts")
        with TemporaryDirectory() as scratch:
            works.append(rollouts(student.model, tokenizer, Path(scratch) / "r.parquet", options.scale))
    for work in works:
        result["workloads"][work.name] = race(student, work, options.repeats)
    tell("")
    return result


def race(student: LoadedModel, work: Workload, repeats: int) -> dict[str, Any]:
    """One workload: the first turn of each layout gives memory and gradient, then all are timed in turns."""
    device = student.head.weight_VD.device
    contenders: dict[str, Callable[[], int]] = {
        "tree": partial(in_packs, student, work, "tree"),
        "packed": partial(in_packs, student, work, "packed"),
        "padded": partial(padded, student, work),
    }
    rows: dict[str, dict[str, Any]] = {}
    truth: dict[str, Tensor] = {}
    for name, run in contenders.items():
        tell(f"{work.name}: {name}, warm-up")
        student.model.zero_grad(set_to_none=True)
        executed, held = peak_of(run, device)
        found = {n: p.grad for n, p in student.model.named_parameters() if p.grad is not None}
        truth = truth or {n: g.clone() for n, g in found.items()}
        off = max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in truth.items())
        rows[name] = {"executed": executed, "peak_bytes": held, "gradient_error": off, "seconds": []}
    for number in range(repeats):
        for name, run in contenders.items():
            tell(f"{work.name}: {name}, round {number + 1}")
            student.model.zero_grad(set_to_none=True)
            rows[name]["seconds"].append(timed(run, device)[1])
    tree = list(rows["tree"]["seconds"])
    for row in rows.values():
        row["times_tree"] = asdict(Spread.of(a / b for a, b in zip(row["seconds"], tree, strict=True)))
        row["seconds"] = asdict(Spread.of(row["seconds"]))
    plan = work.plan()
    return {"logical": plan.logical_tokens, "sharing": plan.logical_tokens / plan.executed_tokens, "layouts": rows}


def in_packs(student: LoadedModel, work: Workload, layout: Layout) -> int:
    """Forward and backward of every pack; returns how many tokens ran."""
    targets = sum(len(state.target_ids) for state in work.states)
    executed = 0
    for pack in plan_states(work.groups, layout=layout, max_tokens=MAX_TOKENS):
        hidden_RD = student.states(pack)
        rows, ids = (torch.from_numpy(a.astype(np.int64)) for a in (pack.target_row_M, pack.target_ids_M))
        backward(student, hidden_RD[rows.to(hidden_RD.device)], ids, targets)
        executed += len(pack)
    return executed


def padded(student: LoadedModel, work: Workload) -> int:
    """The same through padded batches; returns how many tokens ran, padding included."""
    states, executed = work.states, 0
    targets = sum(len(state.target_ids) for state in states)
    for batch in batches(states, MAX_TOKENS):
        longest = max(len(states[n]) for n in batch)
        ids_BL = torch.zeros(len(batch), longest, dtype=torch.long)
        mask_BL = torch.zeros_like(ids_BL)
        for row, n in enumerate(batch):
            ids_BL[row, : len(states[n])] = torch.from_numpy(states[n].ids)
            mask_BL[row, : len(states[n])] = 1
        device = student.head.weight_VD.device
        arguments = {"input_ids": ids_BL.to(device), "attention_mask": mask_BL.to(device)}
        hidden_BLD = student.model.base_model(**arguments, use_cache=False).last_hidden_state
        rows = np.concatenate([row * longest + states[n].row_of_target for row, n in enumerate(batch)])
        ids = torch.from_numpy(np.concatenate([states[n].target_ids for n in batch]).astype(np.int64))
        backward(student, hidden_BLD.flatten(0, 1)[torch.from_numpy(rows.astype(np.int64)).to(device)], ids, targets)
        executed += ids_BL.numel()
    return executed


def backward(student: LoadedModel, hidden_MD: Tensor, ids_M: Tensor, targets: int) -> None:
    """Of this part of the objective."""
    loss = -row_losses(student.head, hidden_MD, ids_M.to(hidden_MD.device)).logprob_M.sum() / targets
    loss.backward()


def about(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{result['model']}; {machine.get('device', machine['processor'])}, {machine['threads']} threads; "
        f"{machine['date']}; {result['repeats']} rounds, scale {result['scale']:g}; {versions}"
    )


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """The cells of the table, header first."""
    rows = [HEADER]
    for name, work in result["workloads"].items():
        for layout, row in work["layouts"].items():
            rows.append(
                [
                    f"{name} ({work['sharing']:.2f}x)",
                    layout,
                    f"{row['executed']:,}",
                    spread(row["seconds"]),
                    spread(row["times_tree"]),
                    "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}",
                    f"{row['gradient_error']:.1e}",
                ]
            )
    return rows


def as_markdown(result: dict[str, Any]) -> Iterator[str]:
    """Lines for a page."""
    yield about(result)
    yield ""
    yield from markdown(rows_of(result))
    yield ""
    yield f"The paper's figure for actor compute is {result['paper']}x; it is of its own work and machines."


if __name__ == "__main__":
    main()
