"""Peak memory is model + one pack + one chunk (+ one shard of scores), whatever the trace is like.

Each figure is a forked process's own `VmHWM` above what it held, model and libraries included, when work began. Limits
are sums of what the plan and the settings say, and a constant for what allocators keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers_forks import Forks
from helpers_memory import MIB, make_teacher, make_trace

from memopd_scorer.signals import CHUNK_CELLS
from memopd_trace.arrowfile import MAX_ROWS

WIDTH = 32
KEPT = 16 * MIB  # freed memory that allocators keep, at most, in runs as small as these
BATCH = 64  # rows of the trace that are read at a time, of a few hundred bytes each


def pack_bytes(tokens: int, width: int = WIDTH) -> int:
    """What passing a pack of so many tokens through the toy model takes, generously: a dozen arrays of states."""
    return tokens * width * 4 * 12


def chunk_bytes(rows: int, vocabulary: int) -> int:
    """Two arrays of logits, of no more than CHUNK_CELLS each."""
    return 2 * 4 * min(rows * vocabulary, CHUNK_CELLS)


def shard_bytes(limit: int) -> int:
    """The signals of a shard, its columns and its compressed bytes."""
    return 3 * limit


@dataclass
class Toy:
    """A teacher in a warm process, and traces of it."""

    forks: Forks
    folder: Path
    teacher: Path

    def trace(self, name: str, **shape: int) -> Path:
        return make_trace(self.folder / name, self.teacher, **shape)

    def peak(self, function: str, **arguments: Any) -> dict[str, int]:
        """(peak, above, result) of a child."""
        arguments = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
        ended = self.forks.run(f"helpers_memory:{function}", **arguments)
        assert not ended.error and not ended.killed, ended
        found: dict[str, int] = ended.result
        assert found["peak"] > 100 * MIB, "the interpreter and its libraries are counted"
        return found


def make_toy(folder: Path, vocabulary: int, width: int) -> Iterator[Toy]:
    teacher = make_teacher(folder / "teacher", vocabulary=vocabulary, width=width)
    warming = make_trace(folder / "warming.parquet", teacher, rows=16, prompt=40, output=6)
    with Forks("helpers_memory:load_teacher", teacher=str(teacher), warming=str(warming)) as forks:
        yield Toy(forks, folder, teacher)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    """Of 1,000 words: here the trace is what may grow."""
    yield from make_toy(tmp_path_factory.mktemp("small"), vocabulary=1_000, width=WIDTH)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    """Of 150,000 words: here [rows, vocabulary] is what must not exist."""
    yield from make_toy(tmp_path_factory.mktemp("wide"), vocabulary=150_000, width=WIDTH)


REPEATS = 3  # what allocators keep beside what is needed differs from run to run: the least of all is the need


def test_ten_times_the_trace_takes_no_more_memory(small: Toy) -> None:
    """Scoring, going on over finished shards, planning and reading all of it."""
    options = {"max_tokens": 1_024, "shard_bytes": 2**17, "batch_rows": BATCH}
    limit = pack_bytes(1_024) + chunk_bytes(1_024, 1_000) + shard_bytes(2**17) + KEPT
    above: dict[str, list[int]] = {"scoring": [], "going on": [], "planning": [], "reading": []}
    for rows in (200, 2_000):
        trace = small.trace(f"{rows} rows", rows=rows, prompt=40, output=8)
        found: dict[str, list[int]] = {name: [] for name in above}
        for number in range(REPEATS):
            out = small.folder / f"scores {rows} {number}"
            scored = small.peak("peak_of_scoring", trace=trace, out=out, **options)
            assert scored["result"] == 8 * rows
            again = small.peak("peak_of_scoring", trace=trace, out=out, **options)
            planned = small.peak("peak_of_planning", trace=trace, max_tokens=1_024, batch_rows=BATCH)
            read = small.peak("peak_of_reading", trace=trace, scores=out, batch_rows=BATCH)
            assert (planned["result"] > 20 * rows, read["result"]) == (True, 8 * rows)
            assert len(list(out.glob("shard-*"))) >= rows // 150
            for name, measured in zip(above, (scored, again, planned, read), strict=True):
                assert measured["above"] < limit, name
                found[name].append(measured["above"])
            if all(above[name] and min(found[name]) - above[name][0] < KEPT // 2 for name in above):
                break  # a further run could only lower the least
        for name in above:
            above[name].append(min(found[name]))
    print({name: [f"{value / MIB:.1f} MiB" for value in values] for name, values in above.items()})
    for name, (once, tenfold) in above.items():
        assert tenfold - once < KEPT // 2, f"{name} grows with the trace"


@pytest.mark.slow
def test_the_scores_of_a_whole_vocabulary_never_exist(wide: Toy) -> None:
    """3,700 rows of 150,000 float32 logits are 2.07 GiB."""
    logits = 3_700 * 150_000 * 4
    assert logits > 2 * 2**30
    trace = wide.trace("long", rows=1, prompt=40, output=3_700)
    found = wide.peak("peak_of_scoring", trace=trace, out=wide.folder / "s", signals=["topk", "hidden"])
    assert found["result"] == 3_700
    limit = pack_bytes(3_740) + chunk_bytes(3_700, 150_000) + shard_bytes(3_700 * (WIDTH * 4 + 64 * 8 + 20)) + 2 * KEPT
    print(f"{found['above'] / MIB:.0f} MiB above, limit {limit / MIB:.0f}; {found['peak'] / MIB:.0f} MiB in all")
    assert found["above"] < limit
    assert found["peak"] < logits / 2, "all of the process, libraries included (their size is the machine's)"
    rebuilt = wide.peak("peak_of_rebuilding", scores=wide.folder / "s", episode="e0", chunks=3)
    assert rebuilt["result"] == 3 * (CHUNK_CELLS // 150_000) * 150_000
    head, chunk = 150_000 * WIDTH * 4, CHUNK_CELLS * 4
    print(f"{rebuilt['above'] / MIB:.0f} MiB above")
    assert rebuilt["above"] < 4 * chunk + head + 2 * KEPT, "of the vocabulary, a reader holds a few chunks"


@pytest.mark.slow
def test_a_shard_as_long_as_they_get_is_held_three_times_at_most(tmp_path: Path) -> None:
    """Batches of the trace as large as they get, too."""
    for toy in make_toy(tmp_path, vocabulary=500, width=256):
        trace = toy.trace("many.parquet", rows=4 * MAX_ROWS, prompt=8, output=8)
        found = toy.peak("peak_of_scoring", trace=trace, out=tmp_path / "s", max_tokens=2_048)
        assert found["result"] == 4 * MAX_ROWS * 8 > 2 * 32 * MIB // (256 * 4 + 16), "more than two whole shards"
        limit = pack_bytes(2_048, 256) + chunk_bytes(2_048, 500) + shard_bytes(32 * MIB) + 3 * 16 * MIB + KEPT
        assert found["above"] < limit
