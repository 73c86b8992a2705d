"""Whole prompts on disk: what a growing history costs beside its new tokens alone, and how fast it reads back.

Run: python benchmarks/storage.py [--calls 40] [--episodes 20]
Limit: reading the new tokens' bytes is the least any delta format could do.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from memopd_trace.invocation import Invocation
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata
from memopd_trace.storage import read, write

VOCABULARY = 50_000
METADATA = TraceMetadata(
    producer=Producer(name="benchmark"),
    models={"m": Model(name="m", tokenizer=Tokenizer(fingerprint="b", size=VOCABULARY, vocab_size=VOCABULARY))},
)


def text_like(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Ids with the skew of text (Zipf, exponent 1.2)."""
    return np.minimum(rng.zipf(1.2, tokens), VOCABULARY - 1).astype(np.int32)


def history(episode: int, calls: int) -> list[Invocation]:
    """One growing history: 2000 tokens of task, then 450 of observation and 50 of output a call."""
    rng = np.random.default_rng(episode)
    prompt, rows = text_like(rng, 2000), []
    for index in range(calls):
        output = text_like(rng, 50)
        rows.append(
            Invocation(
                episode_id=f"e{episode}", invocation_index=index, model_id="m", prompt_ids=prompt, output_ids=output
            )
        )
        prompt = np.concatenate([prompt, output, text_like(rng, 450)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=20)
    options = parser.parse_args()
    rows = [r for e in range(options.episodes) for r in history(e, options.calls)]
    new = [r if r.invocation_index == 0 else r.replace(prompt_ids=r.prompt_ids[-450:]) for r in rows]
    with tempfile.TemporaryDirectory() as folder:
        whole, delta = Path(folder) / "whole.parquet", Path(folder) / "delta.parquet"
        write(whole, METADATA, rows)
        write(delta, METADATA, new)
        tokens = sum(len(r) for r in rows)
        print(f"{'':24}{'tokens':>14}{'bytes':>12}{'bytes/token':>13}")
        for name, path, data in (("whole prompts", whole, rows), ("new tokens alone", delta, new)):
            count, size = sum(len(r) for r in data), path.stat().st_size
            print(f"{name:24}{count:>14,}{size:>12,}{size / count:>13.3f}")
        print(f"whole / new alone: {whole.stat().st_size / delta.stat().st_size:.2f}x on disk")
        raw, ours = [], []
        for _ in range(5):
            began = time.perf_counter()
            pq.read_table(whole, columns=["prompt_ids", "output_ids"], use_threads=False)
            raw.append(time.perf_counter() - began)
            began = time.perf_counter()
            count = sum(len(batch) for batch in read(whole).iter_batches())
            assert count == len(rows)
            ours.append(time.perf_counter() - began)
        for name, seconds in (("pyarrow, the two id columns", raw), ("iter_batches, all columns", ours)):
            low, middle, high = (tokens / s / 1e6 for s in (max(seconds), float(np.median(seconds)), min(seconds)))
            print(f"{name}: {middle:.0f} M tokens/s (of 5 runs: {low:.0f} to {high:.0f})")
        print(f"ratio of the medians: {np.median(ours) / np.median(raw):.2f}")


if __name__ == "__main__":
    main()
