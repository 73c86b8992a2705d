"""Untrusted code of a chat template within bounds of time and memory."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STATM = Path("/proc/self/statm")


class Overrun(BaseException):
    """The time is over. No `Exception`, which what is bounded could catch."""


@contextmanager
def bounded(seconds: float, size: int) -> Iterator[None]:
    """Let the block use so many seconds of processor time and allocate `size` bytes more than the process has now.

    Time is bounded in the main thread only, where signals arrive, and memory where the system tells how much there is
    (Linux). A number that the process was given before is kept if it is lower.

    Raises:
        Overrun: it took longer.
        MemoryError: it asked for more.
    """
    with _memory(size), _time(seconds):
        yield


@contextmanager
def _time(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        raise Overrun

    before = signal.signal(signal.SIGVTALRM, over)  # of processor time: a busy machine makes no template slow
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)  # again, should a first one be swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _memory(size: int) -> Iterator[None]:
    try:
        used = int(STATM.read_bytes().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = min(n for n in (used + size, soft, hard) if n != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
