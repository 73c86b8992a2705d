"""How long the attention backends take on one pack, forward only, and what makes `auto` choose as it does.

Run: python benchmarks/attention.py [--device cuda] [--dtype bfloat16] [--scale 8]
The model is a random Llama of 4 layers (grouped queries); the same packs for every backend; the best of five.
Limit: on a CPU, `flex` is torch's uncompiled fall-back, and `flash` does not exist there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memopd_scorer.attention import choose, states_at_rows
from memopd_scorer.plan import Pack, plan_states
from memopd_scorer.states import State
from memopd_scorer.teacher import DTYPES
from memopd_trace.errors import TraceError

VOCABULARY = 512


def packs(scale: int) -> Iterator[tuple[str, Pack]]:
    """Rewritten memory (one task, other rest), a group of samples, a growing history, and evictions in the last."""
    rng = np.random.default_rng(0)

    def piece(tokens: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, tokens * scale)

    task, prompt, history = piece(30), piece(60), piece(128)
    yield "memory", one_pack([np.r_[task, piece(34)] for _ in range(6)])
    yield "group", one_pack([np.r_[prompt, piece(8)] for _ in range(8)])
    yield "history", one_pack([history[: len(history) * (i + 1) // 6] for i in range(6)])
    until = np.full(len(history), len(history))
    until[: len(history) // 2 : 3] = len(history) // 2
    yield "evictions", one_pack([history], until.astype(np.int32))


def one_pack(sequences: list[np.ndarray], until: np.ndarray | None = None) -> Pack:
    states = []
    for index, ids in enumerate(sequences):
        rows = np.arange(len(ids) - 1, dtype=np.int32)
        ids = ids.astype(np.int32)
        states.append(State("b", index, b"", ids, None, None, until, rows, rows, ids[1:]))
    (pack,) = plan_states([states], max_tokens=2**30)
    return pack


@torch.no_grad()
def milliseconds(model: LlamaForCausalLM, pack: Pack, backend: str) -> float | None:
    """Best of five forwards; `None` where the backend refuses."""
    best = float("inf")
    try:
        for _ in range(6):  # the first one compiles and allocates
            start = time.perf_counter()
            states_at_rows(model, pack, backend=backend).sum().item()  # type: ignore[arg-type]
            best = min(best, time.perf_counter() - start)
    except TraceError:
        return None
    return 1e3 * best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--scale", type=int, default=8, help="the history has 128 tokens times this")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2**20,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    backends = ["sdpa", "flex", "eager", *(["flash"] if device.type == "cuda" and options.dtype != "float32" else [])]
    print(f"{'pack':12}{'logical':>9}{'executed':>9}" + "".join(f"{b + ' ms':>12}" for b in backends))
    for name, pack in packs(options.scale):
        times = [milliseconds(model, pack, b) for b in backends]
        cells = "".join(f"{'refused' if t is None else f'{t:.1f}':>12}" for t in times)
        print(f"{name:12}{pack.logical_tokens:>9}{len(pack):>9}{cells}")
    print(f"auto here: {choose('auto', device, dtype)[0]}")


if __name__ == "__main__":
    main()
