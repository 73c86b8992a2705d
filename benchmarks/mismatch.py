"""What scoring under a flattened history would get wrong, at identical weights, on rollouts of a real model.

Run: OMP_NUM_THREADS=2 python benchmarks/mismatch.py [--policies append memory] [--tasks 4] [--tokens 40] [--json]
     python benchmarks/mismatch.py --write docs/benchmarks.md    (no measuring: the table of the last --json)

SmolLM2 reads the demo's documents under four policies (`parts/policies.py`); each call is recorded as it was sampled.
The same weights then score the same tokens twice: under the recorded state, where the recorded log-probabilities must
come out again, and under the persistent history. `append` is the control: there both are one state.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from parts.measure import machine
from parts.model import DEFAULT_MODEL, unpack
from parts.policies import POLICIES, environment
from parts.tables import add_options, aligned, kept, markdown, save, write_between_markers
from score import tell
from transformers import AutoTokenizer

from memopd_scorer.auditing import audit
from memopd_scorer.teacher import LoadedModel, load
from memopd_trace.invocation import Sampling
from memopd_trainer.environments.reading import reading_tasks
from memopd_trainer.rollout import collect

PAPER = {"p99": 1.774, "false_clips": 0.1329, "top1_flips": 651}
HEADER = ["policy", "tokens", "recorded: largest", "history: p99", "largest", "false clips", "top-1 flips"]


def main() -> None:
    options = parse()
    if options.write:
        write_between_markers(options.write, "mismatch", as_markdown(kept("mismatch")))
        return
    unpack(options.model)
    result = measure(options)
    print("\n".join([about(result), *aligned(rows_of(result))]))
    if options.json:
        print(f"\nwritten to {save(options.json, result)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=40, help="of one output, at most")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a Transformers folder with a tokenizer")
    add_options(parser, "mismatch")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All policies, as plain data."""
    model, tokenizer = load(options.model), AutoTokenizer.from_pretrained(options.model)
    result: dict[str, Any] = {
        "model": f"{options.model.name}, float32",
        "machine": machine(model.head.weight_VD.device),
        "tasks": options.tasks,
        "paper": PAPER,
        "policies": {},
    }
    with TemporaryDirectory() as scratch:
        for policy in options.policies:
            tell(f"{policy}: rollouts and audit")
            trace = Path(scratch) / f"{policy}.parquet"
            result["policies"][policy] = run(model, tokenizer, policy, trace, options)
    tell("")
    return result


def run(model: LoadedModel, tokenizer: Any, policy: str, trace: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Record and audit one policy's rollouts."""
    collect(
        model.model,
        tokenizer,
        environment(policy, tokenizer),
        reading_tasks("train")[: options.tasks],
        out_path=trace,
        rollouts_per_task=2,
        sampling=Sampling(temperature=1.0),
        max_new_tokens=options.tokens,
    )
    report = audit(trace, model, against="persistent-history")
    assert report.difference is not None and report.top1_flips is not None
    return {
        "recorded": asdict(report.recorded),
        "difference": asdict(report.difference),
        "top1_flips": report.top1_flips,
    }


def about(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{result['model']}; {result['tasks']} tasks, 2 rollouts each; {machine['date']}; {versions}"


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """The cells of the table, header first: absolute differences in nats, shares, counts."""
    rows = [HEADER]
    for policy, found in result["policies"].items():
        recorded, history = found["recorded"], found["difference"]
        flips = found["top1_flips"] / history["tokens"]
        rows.append(
            [
                policy,
                f"{history['tokens']:,}",
                f"{recorded['max_abs']:.1e}",
                f"{history['p99_abs']:.3f}",
                f"{history['max_abs']:.3f}",
                f"{history['false_clip_rate']:.1%}",
                f"{found['top1_flips']} ({flips:.1%})",
            ]
        )
    return rows


def as_markdown(result: dict[str, Any]) -> Iterator[str]:
    """Lines for a page."""
    yield about(result)
    yield ""
    yield from markdown(rows_of(result))
    yield ""
    paper = result["paper"]
    yield (
        f"The paper (arXiv 2608.07068) reports p99 {paper['p99']} nats, {paper['false_clips']:.2%} false clips and "
        f"{paper['top1_flips']} top-1 changes, of another model, other tasks and one policy (a rewritten memory)."
    )


if __name__ == "__main__":
    main()
