"""One process for each that torchrun started, on one machine or many: `torchrun … -m memopd_scorer`.

Rank 0 leads: it validates the trace, opens the folder and says which shards are left. Every rank deals them out for
itself, by packed tokens, and scores its own. A teacher that the ranks share by tensor parallelism runs every shard on
all of them at once: they are one worker, and rank 0 writes.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import astuple
from functools import reduce
from typing import Any

import torch.distributed

from memopd_scorer.engines.team import START, Team
from memopd_scorer.run import Order, Run, ScoreResult, Tally, check_inputs
from memopd_scorer.store import ScoresWriter, first_difference, follow, lead
from memopd_trace.errors import InputError
from memopd_trace.places import exclusive

__all__ = ["START", "local_device", "score"]


def local_device(device: str) -> str:
    """The device of this process: each has a GPU of its own."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


def score(order: Order, *, as_one: bool) -> ScoreResult:
    """This process's part of a run; all return when the folder is finished. Only rank 0 tells how far it is.

    `as_one`: the ranks hold parts of one teacher. An error ends all ranks with its exit code.

    Raises:
        InputError: as `memopd_scorer.score`, or a rank whose trace or teacher is not that of rank 0.
        UsageError: as `memopd_scorer.score`, or this process was not started by torchrun.
        SystemExit: another rank has failed, and says why.
    """
    team = Team.join()
    grouped = torch.distributed.is_initialized()
    with team.together():
        if team.leads:
            check_inputs(order.job, order.folder)
        team.meet()
        run = order.open(order.on_notice if team.leads else lambda text: None, halves=not as_one)
        opened = team.gather(run.metadata.model_dump(mode="json"))
        if team.leads:
            _check_agree(opened)
        with exclusive(order.folder, "scoring into") if team.leads else nullcontext():
            writer, left = _open(team, run, order)
            writes = team.leads or not as_one
            for number in left if as_one else _share(team, run, left):
                results = run.score(run.planned.shard(number), lambda _: team.count(int(writes)))
                if writes:
                    writer.write_shard(number, results)
            tallies = [Tally(*each) for each in team.gather(astuple(run.tally))]
            if team.leads:
                order.on_pack(run.planned.plan.packs, run.planned.plan.packs)  # others' last were maybe not seen
                writer.finish(run.planned)
            team.meet()
    if torch.distributed.is_initialized() and not grouped:  # by Transformers, for tensor parallelism
        torch.distributed.destroy_process_group()
    return run.result(order.folder, tallies[0] if as_one else reduce(Tally.plus, tallies))


def _open(team: Team, run: Run, order: Order) -> tuple[ScoresWriter, list[int]]:
    """The folder, and the shards that are left to score."""
    if not team.leads:
        left: list[int] = team.share()
        return follow(order.folder, run.metadata), left
    writer = lead(order.folder, run.metadata, run.teacher.head, repair=order.repair)
    left = writer.left(run.planned)
    order.tell_rest(len(left), len(run.planned.shards))
    before, total = run.planned.packs_without(left), run.planned.plan.packs
    team.on_progress = lambda packs: order.on_pack(before + packs, total)
    return writer, team.share(left)


def _share(team: Team, run: Run, left: list[int]) -> list[int]:
    """This rank's shards of those that are left."""
    owners = deal((run.planned.shards[n].tokens for n in left), team.size)
    return [number for number, owner in zip(left, owners, strict=True) if owner == team.rank]


def deal(costs: Iterable[float], workers: int) -> Iterator[int]:
    """For each piece of work, in order, the worker that runs it: the one with the least so far.

    Every worker can deal for itself and take its own. No two workers differ by more than the largest piece.
    """
    heap = [(0.0, worker) for worker in range(workers)]
    for cost in costs:
        done, worker = heap[0]
        heapq.heapreplace(heap, (done + cost, worker))
        yield worker


def _check_agree(metadata: list[dict[str, Any]]) -> None:
    """All ranks must have planned the same and loaded the same teacher."""
    for rank, theirs in enumerate(metadata):
        if theirs != metadata[0]:
            raise InputError(
                f"rank {rank} has opened another run than rank 0: {first_difference(metadata[0], theirs)}",
                code="E-SCORES-OTHER-RUN",
                hint="the same trace, teacher and software on every machine",
            )
