"""What planning costs beside reading: logical tokens and rows a second, peak memory, how full and even the packs are.

Run: python benchmarks/plan.py [--repetitions 5] [--tokens 20000000] [--tiny-rows 100000] [--stream 200000]

Each repetition reads the trace with pyarrow (the limit), as rows that a plan looks at, and reads and plans it, one
after the other, so that what else the machine does meets all alike. Times are of the processor (all threads). The goal
is 20 million logical tokens a second for the plan itself, which is planning less reading; rows much shorter than 1k
tokens miss it, since a row costs some time however short it is.

The last table is a simulation: invocations of groups of eight are made and planned without a file, and what
`SIMULATED` of them would take is extrapolated from the rate of the last half; peak memory is given at both ends,
since a plan is to hold one group and one pack, however long the trace.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from memopd_scorer.plan import plan
from memopd_scorer.states import STATE_COLUMNS
from memopd_scorer.summary import PlanSummary
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata
from memopd_trace.storage import TraceWriter, read

VOCABULARY = 50_000
MAX_TOKENS = 8192
SIMULATED = 10**8
TOKENIZER = Tokenizer(fingerprint="b", size=VOCABULARY, vocab_size=VOCABULARY)
METADATA = TraceMetadata(producer=Producer(name="benchmark"), models={"m": Model(name="m", tokenizer=TOKENIZER)})


def ids(rng: np.random.Generator, tokens: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, tokens, dtype=np.int32)


def row(episode: str, index: int, prompt: np.ndarray, output: np.ndarray, group: str) -> Invocation:
    logprobs = np.ma.masked_array(np.full(len(output), -1.0, np.float32))
    return Invocation(
        episode_id=episode, invocation_index=index, model_id="m", prompt_ids=prompt, output_ids=output, group_id=group,
        output_logprobs=logprobs, logprob_kind="raw",
    )  # fmt: skip


def growing(rng: np.random.Generator, number: int) -> Iterator[Episode]:
    """A history of 40 calls: 600 tokens, and 120 of output and 60 of observation a call."""
    prompt, rows = ids(rng, 600), []
    for index in range(40):
        output = ids(rng, 120)
        rows.append(row(f"e{number}", index, prompt, output, f"g{number}"))
        prompt = np.concatenate([prompt, output, ids(rng, 60)])
    yield Episode(f"e{number}", tuple(rows))


def memory(rng: np.random.Generator, number: int) -> Iterator[Episode]:
    """Six calls that share 250 tokens of task; memory, chunk and output of 270 more are a call's own."""
    task = ids(rng, 250)
    rows = [row(f"e{number}", n, np.concatenate([task, ids(rng, 200)]), ids(rng, 70), f"g{number}") for n in range(6)]
    yield Episode(f"e{number}", tuple(rows))


def rollouts(rng: np.random.Generator, number: int, prompt: int = 1500, output: int = 500) -> Iterator[Episode]:
    """Eight samples of one prompt."""
    shared = ids(rng, prompt)
    for sample in range(8):
        name = f"e{number}-{sample}"
        yield Episode(name, (row(name, 0, shared, ids(rng, output), f"g{number}"),))


def tiny(rng: np.random.Generator, number: int) -> Iterator[Episode]:
    """Eight samples of 10 tokens after a prompt of 40."""
    return rollouts(rng, number, 40, 10)


def make(path: Path, shape: Callable[[np.random.Generator, int], Iterator[Episode]], most: int, rows: int) -> int:
    """Write groups until there are `most` tokens or `rows` rows; returns the rows."""
    rng, tokens, written, number = np.random.default_rng(0), 0, 0, 0
    with TraceWriter(path, METADATA) as writer:
        while tokens < most and written < rows:
            for episode in shape(rng, number):
                writer.write_episode(episode)
                tokens += sum(len(i) for i in episode)
                written += len(episode)
            number += 1
    return written


def planned(path: Path) -> PlanSummary:
    """As `memopd-trace plan` does, without validating."""
    summary = PlanSummary("tree", MAX_TOKENS)
    for pack in plan(read(path).iter_episodes(STATE_COLUMNS), max_tokens=MAX_TOKENS, vocabulary=VOCABULARY):
        summary.add(pack)
    return summary


def limit(path: Path, size: int) -> None:
    """All columns, read by pyarrow and thrown away."""
    for _ in pq.ParquetFile(path).iter_batches(batch_size=size):
        pass


def rows_only(path: Path) -> None:
    for _ in read(path).iter_episodes(STATE_COLUMNS):
        pass


def timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def spread(values: np.ndarray, digits: int = 1) -> str:
    low, middle, high = np.min(values), np.median(values), np.max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


def compare(name: str, path: Path, rows: int, repetitions: int) -> None:
    """One workload: rates, and what its packs are like."""
    size = next(read(path).iter_raw(0)).num_rows
    works: dict[str, Callable[[], object]] = {
        "pyarrow reads": lambda: limit(path, size),
        "read rows": lambda: rows_only(path),
        "read and plan": lambda: planned(path),
    }
    for work in works.values():  # imports and the page cache
        work()
    runs = [{kind: timed(work) for kind, work in works.items()} for _ in range(repetitions)]
    summary = planned(path)
    tokens = summary.logical_tokens
    clock = {kind: np.array([run[kind] for run in runs]) for kind in works}
    clock["plan alone"] = clock["read and plan"] - clock["read rows"]
    print(f"\n{name}: {rows:,} rows, {tokens:,} tokens; {summary.executed_tokens:,} run ({summary.sharing:.2f}x)")
    print(f"{'':16}{'M tokens/s':>26}{'rows/s':>32}{'ratio to pyarrow':>24}")
    for kind, seconds in clock.items():
        ratio = spread(seconds / clock["pyarrow reads"], 2)
        print(f"{kind:16}{spread(tokens / seconds / 1e6):>26}{spread(rows / seconds, 0):>32}{ratio:>24}")
    share = np.median(clock["read rows"] / clock["read and plan"])
    balance = ", ".join(f"{value:.2f} by {kind}" for kind, value in summary.balance.items())
    print(f"reading is {share:.0%}; peak {peak(path)} MiB; {summary.repeated_tokens:,} tokens are run again")
    print(f"{summary.packs:,} packs, the largest over the mean {balance}")


def peak(path: Path) -> str:
    done = subprocess.run([sys.executable, __file__, "--peak", path], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def resident() -> str:
    """The most memory that this process has held, in MiB. Linux hands a parent's `ru_maxrss` on, but not its status."""
    status = Path("/proc/self/status")
    if status.exists():
        (kib,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return f"{int(kib) / 1024:,.0f}"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:,.0f}"  # macOS counts bytes


def stream(rows: int) -> Iterator[Episode]:
    """Groups of eight with a digest, as a trace has them, without a file; ids differ from group to group."""
    rng = np.random.default_rng(0)
    template = [e for n in range(8) for e in rollouts(rng, n, 400, 100)]
    for number in range(rows // len(template)):
        for sample, episode in enumerate(template):
            (old,) = episode
            group, name = f"g{number}-{sample // 8}", f"e{number}-{sample}"
            prompt, output = ((a + number) % VOCABULARY for a in (old.prompt_ids, old.output_ids))
            digest = number.to_bytes(28) + sample.to_bytes(4)
            new = old.replace(
                episode_id=name, group_id=group, prompt_ids=prompt, output_ids=output, state_digest=digest
            )
            yield Episode(name, (new,))


def simulate(rows: int) -> None:
    """Plan a stream; print the rate of its second half and what it means for `SIMULATED` invocations."""
    summary, at, began, early = PlanSummary("tree", MAX_TOKENS), 0, 0.0, ""
    for pack in plan(stream(rows), max_tokens=MAX_TOKENS, vocabulary=VOCABULARY):
        summary.add(pack)
        if not early and summary.invocations >= rows // 10:
            early = resident()
        if not at and summary.invocations >= rows // 2:
            at, began = summary.invocations, time.process_time()
    whole = time.process_time() - began
    made = timed(lambda: sum(1 for _ in stream(rows - at)))
    rate, making = (summary.invocations - at) / whole, (rows - at) / made
    alone = 1 / (1 / rate - 1 / making)
    tokens = summary.logical_tokens / summary.invocations
    print(f"\nsimulated: {summary.invocations:,} invocations of {tokens:,.0f} tokens made and planned as a stream")
    print(f"{rate:,.0f} invocations/s, {alone:,.0f} without making them ({alone * tokens / 1e6:,.1f} M tokens/s)")
    print(f"peak memory after a tenth {early} MiB, at the end {resident()} MiB")
    print(f"{SIMULATED:.0e} invocations, extrapolated: {SIMULATED / alone / 60:,.0f} min on one core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=20_000_000, help="of each workload of long rows")
    parser.add_argument("--tiny-rows", type=int, default=100_000)
    parser.add_argument("--stream", type=int, default=200_000, help="invocations of the simulation")
    parser.add_argument("--peak", type=Path, help="only plan this trace, and print the peak memory in MiB")
    parser.add_argument("--only-stream", action="store_true", help="only the simulation")
    options = parser.parse_args()
    if options.peak:
        planned(options.peak)
        print(resident())
        return
    if options.only_stream:
        simulate(options.stream)
        return
    with tempfile.TemporaryDirectory() as name:
        for title, shape, tokens, rows in (
            ("growing histories of 40 calls", growing, options.tokens, sys.maxsize),
            ("memory rewritten six times", memory, options.tokens, sys.maxsize),
            ("groups of 8 rollouts of 2k tokens", rollouts, options.tokens, sys.maxsize),
            ("tiny rows of 50 tokens", tiny, sys.maxsize, options.tiny_rows),
        ):
            path = Path(name) / "trace.parquet"
            compare(title, path, make(path, shape, tokens, rows), options.repetitions)
            path.unlink()
    sys.stdout.flush()
    subprocess.run([sys.executable, __file__, "--only-stream", "--stream", str(options.stream)], check=True)


if __name__ == "__main__":
    main()
