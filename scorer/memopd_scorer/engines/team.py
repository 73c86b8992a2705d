"""The processes that torchrun started for one run, and what they tell each other.

They speak through the key-value store that torchrun holds: small values as JSON, a count of packs, and a flag that says
that one of them failed. No collective is needed, so nobody can hang in one: whoever waits looks at the flag, and at
whether anything moves.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from memopd_trace.errors import TraceError, UsageError

START = "torchrun --nproc-per-node N -m memopd_scorer -- TRACE --teacher MODEL -o SCORES"
PATIENCE_S = 12 * 3600.0  # without any pack done by anyone: validating a huge trace takes hours
POLL_S = 0.05
GRACE_S = 2.0  # that the others stay when one has failed: torchrun ends all when one leaves, maybe before it has told
_teams = itertools.count()  # a process may score more than once


class Team:
    """This process among its `size` fellows, ranks 0, 1, …; rank 0 leads. Made by `join`.

    Every process calls `gather`, `meet` and `share` in the same order.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store, self._told = store, 0
        self.on_progress: Callable[[int], None] = lambda packs: None  # while waiting: what all have done so far

    @classmethod
    def join(cls) -> Team:
        """The team that this process was started in.

        Raises:
            UsageError: it was not started by torchrun.
        """
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise UsageError("the engine torchrun runs in processes that torchrun starts", hint=START)
        store, rank, size = next(rendezvous("env://", timeout=timedelta(minutes=10)))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(PrefixStore(f"memopd/{attempt}/{next(_teams)}", store), rank, size)

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """What each rank has to say, by rank; all wait for all."""
        self._told += 1
        self._store.set(f"{self._told}/{self.rank}", json.dumps(value))
        return [json.loads(self._wait(f"{self._told}/{rank}")) for rank in range(self.size)]

    def meet(self) -> None:
        """Go on when all are here."""
        self.gather(None)

    def share(self, value: Any = None) -> Any:
        """What the lead has to say; the others wait for it."""
        return self.gather(value)[0]

    def count(self, packs: int) -> None:
        """Add packs that are done.

        Raises:
            SystemExit: another rank has failed.
        """
        self._end_with_others()
        self.on_progress(self._store.add("packs", packs))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let an error end all ranks with its exit code; only the first that fails says why, and which it was.

        Raises:
            SystemExit: another rank has failed, and says why.
        """
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            first = self._store.add("failures", 1) == 1
            self._store.set("failed", str(getattr(error, "exit_code", 4)))
            if not first:
                self._end_with_others()
            if self.leads or not isinstance(error, TraceError):
                raise
            raise type(error)(f"rank {self.rank}: {error.message}", code=error.code, hint=error.hint) from None

    def _wait(self, key: str) -> bytes:
        moved, since = -1, time.monotonic()
        while not self._store.check([key]):
            self._end_with_others()
            done = self._store.add("packs", 0)
            self.on_progress(done)
            if done != moved:
                moved, since = done, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                raise TraceError(
                    f"rank {key.partition('/')[2]} has not come for {PATIENCE_S / 3600:g} hours, and no pack was done",
                    hint="run the same command again, finished shards are kept",
                )
            time.sleep(POLL_S)
        return self._store.get(key)

    def _end_with_others(self) -> None:
        if self._store.check(["failed"]):
            time.sleep(GRACE_S)
            raise SystemExit(int(self._store.get("failed")))
