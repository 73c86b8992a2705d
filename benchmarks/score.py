"""What teacher log-probabilities of sampled tokens cost, by every way at hand, on the same work in one run.

Run: OMP_NUM_THREADS=2 python benchmarks/score.py [--only memory group] [--contenders tree packed] [--repeats 3]
     [--scale 0.8] [--model FOLDER] [--json]
     python benchmarks/score.py --write docs/benchmarks.md    (no measuring: the tables of the last --json)

The workloads are described in `parts/workloads.py`, the contenders in `parts/contenders.py`. Every contender answers
for the same targets in float32; its largest error against each invocation alone, in nats, stands beside its time.

`docs/benchmarks.md` says what the columns are. trl needs `pip install trl`, vllm `sh benchmarks/setup_vllm.sh`; a
contender that is not there is named as absent.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from parts.contenders import CONTENDERS, Bench, absent
from parts.measure import gemm_peak, layer_shapes, machine
from parts.model import DEFAULT_MODEL, unpack
from parts.race import race
from parts.tables import add_options, as_markdown, as_text, kept, save, write_between_markers
from parts.vllm_server import FOLDER as VLLM_FOLDER
from parts.vllm_server import VllmServer
from parts.workloads import MAX_TOKENS, Workload, rollouts, synthetic, text_pieces
from transformers import AutoTokenizer

from memopd_scorer.cost import ModelCost
from memopd_scorer.teacher import load

WORKLOADS = ("memory", "history", "group", "unrelated", "rollouts")
TOLERANCE = 1e-4  # nats: the contract for a real model in float32


def main() -> None:
    options = parse()
    if options.write:
        write_between_markers(options.write, "score", as_markdown(kept("score")))
        return
    unpack(options.model)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no server stays behind
    with TemporaryDirectory() as scratch, ExitStack() as open_until_the_end:
        result = measure(options, Path(scratch), open_until_the_end)
    print("\n".join(as_text(result)))
    if options.json:
        print(f"\nwritten to {save(options.json, result)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.8, help="of all lengths")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a Transformers folder with a tokenizer")
    add_options(parser, "score")
    return parser.parse_args()


def measure(options: argparse.Namespace, scratch: Path, until_the_end: ExitStack) -> dict[str, Any]:
    """All workloads, as plain data."""
    tell("loading the model")
    teacher = load(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    bench = Bench(teacher, options.model, max_tokens=MAX_TOKENS)
    if "vllm" in options.contenders and VLLM_FOLDER.exists():
        tell("starting vLLM's server")
        bench.server = until_the_end.enter_context(VllmServer(options.model, scratch / "vllm.log"))
    missing = {name: reason for name in options.contenders if (reason := absent(name, bench)) is not None}
    contenders = {name: CONTENDERS[name] for name in options.contenders if name not in missing}
    config = teacher.model.config.get_text_config()
    peak = gemm_peak(bench.device, teacher.model.dtype, layer_shapes(config, 2048))
    cost = ModelCost.read(options.model)
    result: dict[str, Any] = {
        "model": f"{options.model.name}, float32",
        "machine": machine(bench.device),
        "repeats": options.repeats,
        "scale": options.scale,
        "tolerance": TOLERANCE,
        "gemm_flops": peak,
        "absent": missing,
        "workloads": {},
    }
    for work in workloads(options, bench, tokenizer, scratch):
        bench.traces[work.name] = work.write(scratch / f"{work.name}.trace.parquet", teacher.tokenizer)
        told = lambda text, work=work: tell(f"{work.name}: {text}")  # noqa: E731
        result["workloads"][work.name] = race(
            bench, work, contenders, repeats=options.repeats, cost=cost, peak=peak, on_step=told
        )
    # the machine may have been busier when it began: the peak is the best that was seen
    again = gemm_peak(bench.device, teacher.model.dtype, layer_shapes(config, 2048))
    if again > peak:
        for work in result["workloads"].values():
            for row in work["contenders"].values():
                row["utilisation"] *= peak / again
        result["gemm_flops"] = again
    tell("")
    result["goals"] = list(goals(result["workloads"]))
    return result


def workloads(options: argparse.Namespace, bench: Bench, tokenizer: Any, scratch: Path) -> Iterator[Workload]:
    for work in synthetic(text_pieces(tokenizer), options.scale):
        if work.name in options.only:
            yield work
    if "rollouts" in options.only:
        tell("recording rollouts")
        yield rollouts(bench.teacher.model, tokenizer, scratch / "rollouts.parquet", options.scale)


def goals(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What is aimed at with SmolLM2 on two cores, as far as it was measured: `value` is to be at least `wanted`."""

    def times(work: str, name: str) -> float | None:
        row = found.get(work, {}).get("contenders", {}).get(name, {})
        return row["times_tree"]["median"] if "times_tree" in row else None

    for work, result in found.items():
        gained = times(work, "packed")
        if gained is not None and result["sharing"] > 1:
            rows, name = result["contenders"], f"{work}: gain over packing, as a share of logical/executed"
            bound = rows["packed"]["flops"] / rows["tree"]["flops"] / result["sharing"]
            yield goal(name, gained / result["sharing"], 0.9) | {"bound": bound}
        if "utilisation" in result["contenders"].get("tree", {}):
            yield goal(f"{work}: the tree's share of the GEMM peak", result["contenders"]["tree"]["utilisation"], 0.7)
    for work, name, wanted in (("memory", "vllm", 3.0), ("group", "packed", 1.63)):
        value = times(work, name)
        if value is not None:
            yield goal(f"{work}: {name} over the tree", value, wanted)


def goal(name: str, value: float, wanted: float) -> dict[str, Any]:
    return {"name": name, "value": value, "wanted": wanted}


def tell(text: str) -> None:
    """Progress, on stderr: a line that is written over on a terminal, a line each where there is none."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
