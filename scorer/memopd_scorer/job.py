"""What a run scores, and how its plan is cut into shards: plain values, the same in every worker.

Every worker of a run plans for itself; plans are deterministic, so shard 17 is the same packs everywhere. Planning
again costs little beside a forward (tens of millions of tokens a second), and nothing larger than a shard's number
travels between workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from memopd_scorer.deep import KEPT_BYTES, Deep
from memopd_scorer.plan import Layout, Pack, plan_states
from memopd_scorer.signals import check_signals
from memopd_scorer.summary import PlanSummary
from memopd_scorer.tiers import check_tier
from memopd_scorer.views import iter_states, open_views
from memopd_trace.errors import UsageError
from memopd_trace.schema import RECORDED
from memopd_trace.storage import TraceReader

SHARD_BYTES = 32 * 2**20
SHARD_TOKENS = 2**18


@dataclass(frozen=True, slots=True)
class Job:
    """What is scored and how; plain values, so that it can be sent to workers. `states` is the tier of stored states.

    Raises:
        UsageError: an unknown signal or tier, or a tier without states.
    """

    trace: str
    signals: tuple[str, ...] = ("sampled", "hidden")
    topk: int = 64
    states: str = "exact"
    layout: Layout = "tree"
    max_tokens: int = 8192
    kept_bytes: int = KEPT_BYTES
    view: str = RECORDED
    views: str | None = None
    shard_bytes: int = SHARD_BYTES
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        check_signals(self.signals)
        check_tier(self.states)
        if self.states != "exact" and "hidden" not in self.signals:
            raise UsageError(
                f"states in the tier {self.states}, without the signal hidden", hint="add it to the signals"
            )


class Shape(NamedTuple):
    """What a plan needs to know of a teacher: the layout it is exact in, its real ids, the stored bytes of a target,
    and what deep packs may take."""

    layout: Layout
    vocabulary: int
    bytes_per_target: int
    deep: Deep | None
    asks_student: bool = False


class ShardSize(NamedTuple):
    """What a shard takes to score."""

    packs: int
    tokens: int


class Planned:
    """A job planned for a teacher's shape: the `plan` and the size of its `shards`, whose packs every walk makes anew.

    Raises:
        InputError: views that are not of this trace.
        UsageError: an unknown layout or view.
    """

    def __init__(self, job: Job, shape: Shape) -> None:
        self.job, self.shape = job, shape
        self._reader, self._views = TraceReader(job.trace), open_views(job.view, job.views)
        self.plan = PlanSummary(shape.layout, job.max_tokens)
        self.shards: list[ShardSize] = []
        for packs in self.iter_shards():
            for pack in packs:
                self.plan.add(pack)
            self.shards.append(ShardSize(len(packs), sum(len(pack) for pack in packs)))
        self._walk, self._walked = self.iter_shards(), 0

    def iter_shards(self) -> Iterator[list[Pack]]:
        """The packs of shard 0, 1, …"""
        job, shape = self.job, self.shape
        states = iter_states(
            self._reader, job.view, self._views, vocabulary=shape.vocabulary, with_recorded=shape.asks_student
        )
        return _iter_shards(
            plan_states(states, layout=shape.layout, max_tokens=job.max_tokens, deep=shape.deep),
            bytes_per_target=shape.bytes_per_target,
            shard_bytes=job.shard_bytes,
            shard_tokens=job.shard_tokens,
        )

    def packs_without(self, left: Iterable[int]) -> int:
        """How many packs are in the shards that are not `left`."""
        return self.plan.packs - sum(self.shards[number].packs for number in left)

    def shard(self, number: int) -> list[Pack]:
        """The packs of one shard. In rising order all are one walk; an earlier one than the last begins another.

        Raises:
            IndexError: the plan has fewer shards.
        """
        if number < self._walked:
            self._walk, self._walked = self.iter_shards(), 0
        for packs in self._walk:
            self._walked += 1
            if self._walked > number:
                return packs
        raise IndexError(f"shard {number} of {len(self.shards)}")


def _iter_shards(
    packs: Iterable[Pack], *, bytes_per_target: int, shard_bytes: int, shard_tokens: int
) -> Iterator[list[Pack]]:
    """Runs of consecutive packs that reach `shard_bytes` of scores or `shard_tokens` packed tokens."""
    shard: list[Pack] = []
    size = tokens = 0
    for pack in packs:
        shard.append(pack)
        size += len(pack.target_ids_M) * bytes_per_target
        tokens += len(pack)
        if size >= shard_bytes or tokens >= shard_tokens:
            yield shard
            shard, size, tokens = [], 0, 0
    if shard:
        yield shard
