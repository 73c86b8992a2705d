"""Work on several inputs at once, in processes or threads, with the results in the inputs' order."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from memopd_trace.errors import TraceError

HEAVY = 2048  # tokens to hash: 20 us, about what handing them to a thread costs
MAX_THREADS = 4

T = TypeVar("T")
R = TypeVar("R")


class WorkerDiedError(TraceError):
    """A process that worked on an input is gone (exit code 4): what it found is lost."""


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(work: Callable[[T], R], items: Sequence[T], weight: int) -> Iterator[R]:
    """`work(item)` of each item, in order; by several threads where each is heavy enough to repay it. For work that
    leaves Python's lock, as hashing does."""
    if weight < HEAVY or len(items) < 2 or cores() < 2:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(min(cores(), MAX_THREADS)) as pool:
        yield from pool.map(work, items)


def in_order(work: Callable[[T], R], items: Sequence[T], jobs: int) -> Iterator[R]:
    """`work(item)` of each item, in order, by at most `jobs` processes; in this one where one is enough.

    Processes are spawned, not forked (Arrow's threads do not survive a fork), so a script that asks for several needs
    `if __name__ == "__main__"`. Leaving early, by Ctrl-C too, ends them.

    Raises:
        WorkerDiedError: one was killed or could not start.
    """
    if min(jobs, len(items)) <= 1:
        yield from map(work, items)
        return
    others = multiprocessing.active_children()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(items)), context, initializer=_leave_interrupts)
    try:
        for future in [pool.submit(work, item) for item in items]:
            yield future.result()
    except BrokenProcessPool:
        raise WorkerDiedError(
            "a process that checked an input was killed or could not start",
            hint="was there too little memory? with fewer --jobs less is needed",
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()


def _leave_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; the first one ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
