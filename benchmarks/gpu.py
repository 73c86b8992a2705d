"""On one GPU: is every attention backend exact, and what does a large teacher cost by every way at hand?

Run: python benchmarks/gpu.py [--params 8] [--scale 8] [--repeats 3] [--json]          (under 8 minutes)
     python benchmarks/gpu.py --device cpu --tiny                                      (this script itself, on a CPU)
     python benchmarks/gpu.py --write docs/benchmarks.md    (no measuring: the tables of the last --json)

The model is a Llama of the asked size with random weights, so nothing has to be downloaded; texts are random ids.

Exactness: a model of the same widths and EXACT_LAYERS layers. The oracle is each invocation alone in float32. float32
must be within 1e-4 nats of it; bfloat16 (the same weights) must be at most 1.1 times as far from it, on the mean, as
each invocation alone in bfloat16. Recorded evictions cannot be run by the plain model: there the oracle is the dense
`eager` in float64, and bfloat16 is held against the dense one in bfloat16.
Times: the whole model in bfloat16; columns as in `docs/benchmarks.md`, errors against each invocation alone.

Exit code 1 when a backend is not exact.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.contenders import CONTENDERS, Bench, Contender, Outcome, oracle, tree
from parts.measure import gemm_peak, layer_shapes, machine
from parts.race import race
from parts.tables import add_options, aligned, as_markdown, as_text, kept, markdown, save, write_between_markers
from parts.workloads import Workload, random_pieces, synthetic
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from memopd_scorer.attention import Choice, UnsupportedAttentionError, choose
from memopd_scorer.cost import ModelCost
from memopd_scorer.head import head_of
from memopd_scorer.probing import probe
from memopd_scorer.teacher import LoadedModel
from memopd_trace.errors import UsageError
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.metadata import Tokenizer

WORKLOADS = ("memory", "history", "group", "unrelated")  # of the times; exactness looks at all but the last
BACKENDS = ("sdpa", "flex", "flash", "eager")
EXACT_LAYERS = 2
FLOAT32_LIMIT = 1e-4  # nats
HALF_LIMIT = 1.1  # times the error of each invocation alone
SHAPES = {  # width, inner width, layers, heads, key/value heads, vocabulary
    "tiny": (64, 128, 2, 4, 2, 512),
    "1": (2048, 8192, 16, 32, 8, 128_256),
    "3": (3072, 8192, 28, 24, 8, 128_256),
    "8": (4096, 14_336, 32, 32, 8, 128_256),
}
CHECKS = ("dtype", "backend", "work", "max error", "p99.9", "mean", "alone's mean", "exact")


def main() -> None:
    options = parse()
    if options.write:
        write_page(options.write)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print("not measured: no CUDA device here")
        return
    device = torch.device(options.device)
    shape = SHAPES["tiny" if options.tiny else options.params]
    scale = 0.3 if options.tiny else options.scale
    checks = list(exactness(device, shape, min(scale, 1.0)))  # the dense reference has T x T scores a head
    print("\n".join(aligned([list(CHECKS), *map(cells, checks)])), flush=True)
    result = measure(options, device, shape, scale) | {"checks": checks}
    print("\n" + "\n".join(as_text(result)))
    if options.json:
        print(f"\nwritten to {save(options.json, result)}")
    if not all(check["exact"] is not False for check in checks):
        sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=("1", "3", "8"), default="8", help="size in billions of weights")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two thin layers and short texts")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--scale", type=float, default=8.0, help="of all lengths")
    parser.add_argument("--repeats", type=int, default=3)
    add_options(parser, "gpu")
    return parser.parse_args()


def random_llama(
    device: torch.device, shape: tuple[int, ...], *, layers: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Random weights, made on the device."""
    width, inner, depth, heads, kv_heads, vocabulary = shape
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers or depth,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=2**17, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def teacher_of(model: PreTrainedModel, choices: list[Choice]) -> LoadedModel:
    """As `memopd_scorer.teacher.load` has it, but of a model that was never in a folder.

    Raises:
        UnsupportedAttentionError: no choice runs it packed.
    """
    size = model.config.vocab_size
    head = head_of(model, size)
    for choice in choices:
        capability = probe(model, head, backend=choice.backend)
        if capability.layout == "tree":
            tokenizer = Tokenizer(fingerprint="random", size=size, vocab_size=size)
            return LoadedModel("random", model, head, tokenizer, choice, capability)
    raise UnsupportedAttentionError(capability.reason)


def exactness(device: torch.device, shape: tuple[int, ...], scale: float) -> Iterator[dict[str, Any]]:
    """Every backend in both dtypes, on all plain work together and on the same with evictions."""
    half = random_llama(device, shape, layers=EXACT_LAYERS)
    models = {"float32": copy.deepcopy(half).float(), "bfloat16": half}
    plain = [w for w in synthetic(random_pieces(shape[-1]), scale) if w.name != "unrelated"]
    kinds = {"plain": plain, "evictions": [evicted(w) for w in plain]}
    dense = {name: Bench(teacher_of(m, choose("eager", device, m.dtype))) for name, m in models.items()}
    double = copy.deepcopy(half).double()
    wide = Bench(teacher_of(double, choose("eager", device, torch.float64)))
    truth = {"plain": found(oracle, dense["float32"], plain), "evictions": found(by_tree, wide, kinds["evictions"])}
    alone = {
        "plain": error(found(oracle, dense["bfloat16"], plain), truth["plain"])["mean"],
        "evictions": error(found(by_tree, dense["bfloat16"], kinds["evictions"]), truth["evictions"])["mean"],
    }
    del double, wide, dense
    for dtype, model in models.items():
        for backend in BACKENDS:
            said = {"dtype": dtype, "backend": backend}
            try:
                bench = Bench(teacher_of(model, choose(backend, device, model.dtype)))
            except (UsageError, UnsupportedAttentionError) as refusal:
                yield said | {"work": "any", "exact": None, "reason": refusal.message}
                continue
            for kind, works in kinds.items():
                try:
                    off = error(found(by_tree, bench, works), truth[kind])
                except UnsupportedAttentionError as refusal:
                    yield said | {"work": kind, "exact": None, "reason": refusal.message}
                    continue
                if dtype == "float32":
                    exact = {"exact": off["max"] <= FLOAT32_LIMIT}
                else:
                    exact = {"alone": alone[kind], "exact": off["mean"] <= HALF_LIMIT * alone[kind]}
                yield said | {"work": kind} | off | exact


def found(way: Callable[[Bench, Workload], list[np.ndarray]], bench: Bench, works: list[Workload]) -> np.ndarray:
    """Log-probabilities of all targets of all works, float64."""
    return np.concatenate([array for work in works for array in way(bench, work)]).astype(np.float64)


def by_tree(bench: Bench, work: Workload) -> list[np.ndarray]:
    return tree(bench, work).logprobs


def evicted(work: Workload) -> Workload:
    """The same rows, each with every third token of its second quarter forgotten from its half on."""

    def forget(row: Invocation) -> Invocation:
        half, until = len(row) // 2, np.full(len(row), len(row), np.int32)
        until[half // 2 : half : 3] = half
        return row.replace(visible_until=until)

    return Workload(work.name, tuple(Episode(e.episode_id, tuple(map(forget, e))) for e in work.episodes))


def error(some: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Nats."""
    differences = np.abs(some - true)
    return {
        "max": float(differences.max()),
        "p999": float(np.quantile(differences, 0.999)),
        "mean": float(differences.mean()),
    }


def measure(options: argparse.Namespace, device: torch.device, shape: tuple[int, ...], scale: float) -> dict[str, Any]:
    """Every workload with the whole model."""
    model = random_llama(device, shape)
    teacher = teacher_of(model, choose("auto", device, model.dtype))
    bench = Bench(teacher, max_tokens=round(8192 * max(1.0, scale / 2)))
    peak = gemm_peak(device, model.dtype, layer_shapes(model.config, 8192 if device.type == "cuda" else 512))
    result: dict[str, Any] = {
        "model": f"random Llama, {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B weights, bfloat16; auto "
        f"takes {teacher.describe_attention()}",
        "machine": machine(device),
        "repeats": options.repeats,
        "scale": scale,
        "tolerance": None,
        "gemm_flops": peak,
        "absent": {},
        "workloads": {},
        "goals": [],
    }
    contenders: dict[str, Contender] = {n: CONTENDERS[n] for n in ("one by one", "padded", "packed", "tree")}
    for backend in BACKENDS:
        try:
            contenders[f"tree, {backend}"] = with_backend(model, choose(backend, device, model.dtype))
        except (UsageError, UnsupportedAttentionError) as refusal:
            result["absent"][f"tree, {backend}"] = refusal.message
    cost = ModelCost.of(model.config.to_dict())
    for work in synthetic(random_pieces(shape[-1]), scale):
        if work.name not in options.only:
            continue
        result["workloads"][work.name] = race(
            bench, work, contenders, repeats=options.repeats, cost=cost, peak=peak, on_step=lambda text: None
        )
    return result


def with_backend(model: PreTrainedModel, choices: list[Choice]) -> Contender:
    """The tree by one backend."""
    teacher = teacher_of(model, choices)

    def run(bench: Bench, work: Workload) -> Outcome:
        return tree(replace(bench, teacher=teacher), work)

    return run


def cells(check: dict[str, Any]) -> list[str]:
    """One line of the table of checks."""
    said = [check["dtype"], check["backend"], check["work"]]
    if check["exact"] is None:
        return [*said, "refused", *[""] * 4]
    alone = f"{check['alone']:.1e}" if "alone" in check else ""
    numbers = [f"{check[name]:.1e}" for name in ("max", "p999", "mean")]
    return [*said, *numbers, alone, "yes" if check["exact"] else "NO"]


def write_page(page: Path) -> None:
    result = kept("gpu")
    lines = [*as_markdown(result), "", *markdown([list(CHECKS), *map(cells, result["checks"])])]
    write_between_markers(page, "gpu", iter(lines))


if __name__ == "__main__":
    main()
