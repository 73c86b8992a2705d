"""Work on several inputs at once, in processes, with the results in the inputs' order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from memopd_trace.errors import TraceError

T = TypeVar("T")
R = TypeVar("R")


class WorkerDiedError(TraceError):
    """A process that worked on an input is gone (exit code 4): what it found is lost."""


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    import multiprocessing  # here: most calls have one input and start sooner without
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

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
