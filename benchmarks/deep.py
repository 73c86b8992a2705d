"""Histories that no forward holds: one by one, as packed trees that run prefixes again, and as deep packs.

Run: python benchmarks/deep.py [--scale 1.0] [--max-tokens 1024] [--layers 4] [--repetitions 1]

Every contender scores the same targets (`sampled`) of the same random Llama, in a process of its own, which gives its
peak memory; `held` are the keys and values that the plan foresees. Seconds are of the processor (all threads), so that
what else the machine does counts little; `ratio` is to the packed tree. An arrow marks what the plan would choose:
`deep` is forced here, so that it is also seen where it gains nothing or loses.

The last lines measure what the plan's cost model assumes: how many FLOPs of a forward take as long as one byte of keys
and values that is copied to the next pass, and how many tokens a pass itself costs.
"""

from __future__ import annotations

import argparse
import os
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from parts.measure import status_bytes
from transformers import LlamaConfig, LlamaForCausalLM

from memopd_scorer.attention import iter_states_at_rows
from memopd_scorer.cost import ModelCost
from memopd_scorer.deep import FLOPS_PER_BYTE, Deep
from memopd_scorer.fit import PACK_TOKENS
from memopd_scorer.head import head_of
from memopd_scorer.plan import Pack, plan_states
from memopd_scorer.signals import compute_signals
from memopd_scorer.states import State
from memopd_scorer.summary import PlanSummary

VOCABULARY = 4096
CONTENDERS = ("one by one", "packed tree", "deep")


class Always(Deep):
    """Deep packs for every group."""

    __slots__ = ()

    def pays(self, *_: object) -> bool:
        """Whatever it costs."""
        return True


class Result(NamedTuple):
    """What one contender did; seconds, bytes."""

    executed: int
    passes: int
    seconds: float
    held: int
    peak: int


def state(index: int, ids: np.ndarray, output: int) -> State:
    rows = np.arange(len(ids) - output - 1, len(ids) - 1, dtype=np.int32)
    ids = ids.astype(np.int32)
    return State("b", index, index.to_bytes(4), ids, None, None, None, rows, np.arange(output), ids[-output:])


def workloads(scale: float) -> Iterator[tuple[str, list[list[State]]]]:
    """(name, groups). Lengths times `scale`."""
    rng = np.random.default_rng(0)

    def ids(tokens: float) -> np.ndarray:
        return rng.integers(0, VOCABULARY, max(1, int(tokens * scale)))

    history, calls = ids(600), []
    for n in range(16):  # every call thinks, and its thoughts are in no later call
        thought, answer = ids(100), ids(120)
        calls.append(state(n, np.r_[history, thought, answer], len(thought) + len(answer)))
        history = np.r_[history, answer, ids(60)]
    yield "history, thinking stripped", [calls]
    history = ids(4000)
    yield "history that only grows", [[state(n, history[: len(history) * (n + 1) // 8], 20) for n in range(8)]]
    prompt = ids(1500)
    yield "8 rollouts of a long prompt", [[state(n, np.r_[prompt, ids(150)], 20) for n in range(8)]]
    task = ids(60)
    yield "memory, little shared", [[state(n, np.r_[task, ids(500)], 20) for n in range(12)]]
    short = [ids(100) for _ in range(16)]
    yield "short groups", [[state(n, np.r_[p, ids(30)], 20) for n in range(4)] for p in short]


def model_of(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2**20,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def packs_of(contender: str, groups: list[list[State]], max_tokens: int, cost: ModelCost) -> list[Pack]:
    if contender == "one by one":
        return list(plan_states(groups, layout="single"))
    return list(plan_states(groups, max_tokens=max_tokens, deep=Always(cost) if contender == "deep" else None))


@torch.no_grad()
def run(contender: str, groups: list[list[State]], max_tokens: int, layers: int) -> Result:
    """One contender, in this process; the first tokens warm up."""
    model = model_of(layers)
    cost, head = ModelCost.of(model.config.to_dict()), head_of(model, VOCABULARY)
    model(torch.zeros(1, 64, dtype=torch.int64))
    packs, passes = packs_of(contender, groups, max_tokens, cost), 0
    summary = PlanSummary("tree", max_tokens, cost)
    began = time.process_time()
    for pack in packs:
        summary.add(pack)
        backend: Any = "native" if contender == "one by one" else "sdpa"
        parts = list(iter_states_at_rows(model, pack, backend=backend, pass_tokens=pack.pass_tokens))
        passes += len(parts)
        compute_signals(parts, head, pack, ("sampled",))
    seconds = time.process_time() - began
    held = cost.kept * 4 * summary.kept_tokens
    return Result(summary.executed_tokens, passes, seconds, held, status_bytes("VmHWM"))


def in_child(work: Callable[[], Any]) -> Any:
    """The result of `work` in a forked process; this one never runs a model, so that a fork is safe and small."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(write, "wb") as out:
                pickle.dump(work(), out)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as back:
        found = pickle.loads(back.read())
    os.waitpid(child, 0)
    return found


@torch.no_grad()
def constants(layers: int) -> tuple[float, float]:
    """(FLOPs of a forward in the time of one byte copied, tokens that a forward itself costs)."""
    model = model_of(layers)
    cost = ModelCost.of(model.config.to_dict())
    (one,) = plan_states([[state(0, np.arange(1024) % VOCABULARY, 1)]])

    def seconds(work: Callable[[], object]) -> float:
        work()
        times = []
        for _ in range(5):
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
        return min(times)

    def forward(tokens: int | None) -> float:
        return seconds(lambda: list(iter_states_at_rows(model, one, pass_tokens=tokens)))

    keys = torch.zeros(3, 2**17, 64)
    copying = seconds(lambda: torch.cat([keys, keys], dim=1)) / (2 * keys.nbytes)
    whole, halves = forward(None), forward(512)
    return cost.flops(len(one), one.pairs, 0) / whole * copying, 1024 * (halves - whole) / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=1, help="the best time counts")
    options = parser.parse_args()
    cost = in_child(lambda: ModelCost.of(model_of(options.layers).config.to_dict()))
    print(f"max_tokens {options.max_tokens}, {options.layers} layers, float32, {torch.get_num_threads()} threads")
    print(f"{'':28}{'contender':13}{'logical':>9}{'executed':>9}{'passes':>7}{'s':>8}{'ratio':>7}", end="")
    print(f"{'peak MiB':>10}{'held MiB':>10}")
    for name, groups in workloads(options.scale):
        logical = sum(len(s) for group in groups for s in group)
        chosen = plan_states(groups, max_tokens=options.max_tokens, deep=Deep(cost))
        choice = "deep" if any(p.pass_tokens for p in chosen) else "packed tree"
        results = {}
        for _ in range(options.repetitions):
            for contender in CONTENDERS:
                arguments = (contender, groups, options.max_tokens, options.layers)
                found = in_child(lambda arguments=arguments: run(*arguments))  # type: ignore[misc]
                results[contender] = min(found, results.get(contender, found), key=lambda r: r.seconds)
        tree = results["packed tree"].seconds
        for contender, r in results.items():
            mark = "  <- the plan's choice" if contender == choice else ""
            print(f"{name:28}{contender:13}{logical:9,}{r.executed:9,}{r.passes:7}{r.seconds:8.2f}", end="")
            print(f"{tree / r.seconds:7.2f}{r.peak / 2**20:10,.0f}{r.held / 2**20:10,.1f}{mark}", flush=True)
    per_byte, per_pass = in_child(lambda: constants(options.layers))
    print(f"{per_byte:.0f} FLOPs a byte copied (assumed: {FLOPS_PER_BYTE}), a pass costs {per_pass:.0f} tokens", end="")
    print(f" (assumed: {PACK_TOKENS})")


if __name__ == "__main__":
    main()
