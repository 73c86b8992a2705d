"""What the validator costs beside reading: time, tokens a second, peak memory, and a process from start to exit.

Run: python benchmarks/validate.py [--repetitions 7] [--rows 4000] [--tiny-rows 100000] [--memory-gib 2]

The limit is pyarrow reading the same columns in batches of the same size; each repetition runs all of them, one after
the other, so that what else the machine does meets all alike. Times are of the processor (all threads) and of the
clock; the ratio is to be at most 3 for rows of 8k tokens, the start at most 0.5 s, the peak at most 1 GiB. The state
digests are SHA-256 over 4 bytes a token and what is no default: the last line says how fast this machine hashes.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from memopd_trace.invocation import Invocation, Sampling
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata
from memopd_trace.storage import TraceWriter, read
from memopd_trace.validate import validate

VOCABULARY = 50_000
STOP = 2
COMMAND = str(Path(sys.executable).with_name("memopd-trace"))
TOKENIZER = Tokenizer(fingerprint="b", size=VOCABULARY, vocab_size=VOCABULARY, eos_ids=[STOP])
METADATA = TraceMetadata(producer=Producer(name="benchmark"), models={"m": Model(name="m", tokenizer=TOKENIZER)})
NO_DIGESTS = ["E-STATE-DIGEST"]
Seconds = tuple[float, float]  # of the processor, of the clock
PEAK = """
import re, sys
from memopd_trace import validate
report = validate(sys.argv[1], "train")
assert report.clean, report.to_text()
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]))  # ru_maxrss may be the parent's
"""


def text_like(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Ids with the skew of text (Zipf, exponent 1.2), no stop among them."""
    return np.minimum(rng.zipf(1.2, tokens) + STOP, VOCABULARY - 1).astype(np.int32)


def episode(number: int, calls: int, prompt: int, output: int, observation: int) -> list[Invocation]:
    """A growing history, with everything that a trainer records."""
    rng = np.random.default_rng(number)
    ids, rows = text_like(rng, prompt), []
    for index in range(calls):
        sampled, last = text_like(rng, output), index == calls - 1
        sampled[-1] = STOP
        rows.append(
            Invocation(
                episode_id=f"e{number}", invocation_index=index, model_id="m", prompt_ids=ids, output_ids=sampled,
                parent_index=index - 1 if index else None, relation="extend" if index else "root",
                group_id=f"g{number // 8}", output_logprobs=np.ma.masked_array(-rng.exponential(1.0, output)),
                logprob_kind="raw", sampling=Sampling(temperature=1.0), policy_version=3, finish_reason="stop",
                token_source="engine", reward=1.0 if last else None, terminated=True if last else None,
            )
        )  # fmt: skip
        ids = np.concatenate([ids, sampled, text_like(rng, observation)])
    return rows


def make(path: Path, rows: int, calls: int, prompt: int, output: int, observation: int) -> tuple[int, int]:
    """Write a valid trace; returns its tokens and its bytes in memory."""
    tokens = 0
    with TraceWriter(path, METADATA) as writer:
        for number in range(rows // calls):
            for row in episode(number, calls, prompt, output, observation):
                tokens += len(row)
                writer.write(row)
    return tokens, sum(batch.nbytes for batch in read(path).iter_batches())


def timed(work: Callable[[], object]) -> Seconds:
    processor, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - processor, time.perf_counter() - clock


def limit(path: Path, size: int) -> None:
    """All columns, read by pyarrow and thrown away."""
    for _ in pq.ParquetFile(path).iter_batches(batch_size=size):
        pass


def check(path: Path, ignore: list[str]) -> None:
    report = validate(path, "train", ignore=ignore)
    assert report.clean, report.to_text()


def compare(name: str, path: Path, rows: int, tokens: int, repetitions: int) -> None:
    """Read and validate in turns; print ratios and rates, each as the median and the range of the repetitions."""
    size = next(read(path).iter_raw(0)).num_rows
    works: dict[str, Callable[[], object]] = {
        "pyarrow reads": lambda: limit(path, size),
        "validate": lambda: check(path, []),
        "validate, no digests": lambda: check(path, NO_DIGESTS),
    }
    for work in works.values():  # imports and the page cache
        work()
    runs = [{kind: timed(work) for kind, work in works.items()} for _ in range(repetitions)]
    print(f"\n{name}: {rows:,} rows, {tokens:,} tokens, {path.stat().st_size:,} bytes")
    print(f"{'':22}{'M tokens/s':>24}{'rows/s':>28}{'ratio, processor':>22}{'ratio, clock':>22}")
    for kind in works:
        clock = np.array([run[kind][1] for run in runs])
        ratios = [np.array([run[kind][i] / run["pyarrow reads"][i] for run in runs]) for i in (0, 1)]
        rates = spread(tokens / clock / 1e6, 0), spread(rows / clock, 0)
        print(f"{kind:22}{rates[0]:>24}{rates[1]:>28}{spread(ratios[0], 2):>22}{spread(ratios[1], 2):>22}")


def spread(values: np.ndarray, digits: int) -> str:
    low, middle, high = np.min(values), np.median(values), np.max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


def start_up(path: Path, repetitions: int) -> None:
    command = [COMMAND, "validate", str(path), "--profile", "train"]
    clock = []
    for _ in range(repetitions):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        clock.append(time.perf_counter() - began)
    print(f"\nstart to exit of `memopd-trace validate` on a tiny file: {spread(np.array(clock), 2)} s")


def peak(path: Path, in_memory: int) -> None:
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], check=True, capture_output=True, text=True)
    print(f"\npeak memory on {in_memory / 2**30:.2f} GiB of Arrow data: {int(done.stdout) / 2**20:,.0f} MiB")


def hash_rate() -> None:
    data = np.random.default_rng(0).bytes(2**26)
    rates = [2**26 / timed(lambda: hashlib.sha256(data))[0] / 2**30 for _ in range(5)]
    print(f"\nSHA-256 on this machine: {spread(np.array(rates), 2)} GiB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--tiny-rows", type=int, default=100_000)
    parser.add_argument("--memory-gib", type=float, default=2.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, file, count, shape in (
            ("8k-token rows, long prompts", "long", options.rows, (5, 6600, 256, 300)),
            ("8k-token rows, long outputs", "outputs", options.rows // 2, (2, 1000, 4500, 100)),
            ("50-token rows", "tiny", options.tiny_rows, (8, 15, 6, 2)),
        ):
            path = folder / f"{file}.parquet"
            tokens, _ = make(path, count, *shape)
            compare(title, path, count // shape[0] * shape[0], tokens, options.repetitions)
            path.unlink()
        make(folder / "one.parquet", 2, 2, 40, 8, 4)
        start_up(folder / "one.parquet", options.repetitions)
        large = folder / "large.parquet"
        rows = int(options.memory_gib * 2**30 / 34_000)
        peak(large, make(large, rows, 5, 6600, 256, 300)[1])
        hash_rate()


if __name__ == "__main__":
    main()
