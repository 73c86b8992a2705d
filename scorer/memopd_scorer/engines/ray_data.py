"""A pool of Ray actors on one machine or a cluster: `--engine ray --workers N`.

The data set is the numbers of the shards that are left. Each actor holds a teacher, plans for itself, and writes its
shards into the folder, which every machine must see (a shared disk, a store); only a few numbers come back. The process
that was called holds the folder and writes the manifest. It needs no device: a task of the cluster opens the run for
it, so the teacher is loaded once more than there are actors.

An actor that dies is started again and its shards are scored again, unless they are there: a shard appears whole or not
at all. What a worker refuses is no failure of Ray's; it comes back and is raised here.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NamedTuple

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayError, RayTaskError

from memopd_scorer.job import Planned, Shape
from memopd_scorer.run import Order, Run, ScoreResult, Tally, check_inputs
from memopd_scorer.store import ScoresWriter, follow, lead
from memopd_trace.errors import InputError, TraceError, first_line
from memopd_trace.metadata import ScoresMetadata
from memopd_trace.places import exclusive

OBJECT_STORE_BYTES = 128 * 2**20  # of an own cluster: only numbers travel through it
NO_PROGRESS_S = 2 * 3600  # without a shard: then it is given up, or one that kills its actor every time would go on


class _Opened(NamedTuple):
    """A run as the cluster has opened it."""

    metadata: ScoresMetadata
    shape: Shape
    probe: str
    attention: str


class _Report(NamedTuple):
    """What came of a shard; `error` in place of it."""

    number: int
    tally: Tally
    notices: tuple[str, ...]
    error: Exception | None


def score(order: Order, *, workers: int, gpus: float) -> ScoreResult:
    """Score what is not finished yet by `workers` actors with `gpus` each, and write the manifest.

    Uses the cluster at RAY_ADDRESS or the one this process is connected to; else one is started on this machine and
    ended again.

    Raises:
        InputError: as `memopd_scorer.score`, or a worker whose trace or teacher is another one.
        UsageError: as `memopd_scorer.score`.
        TraceError: a worker failed in a way that is not known, no shard ended for NO_PROGRESS_S, or Ray failed.
    """
    check_inputs(order.job, order.folder)
    # Ray prints to stdout that an actor died; stdout is for results
    with exclusive(order.folder, "scoring into"), redirect_stdout(sys.stderr), _cluster(workers), _told():
        # after one call its process ends, and frees the device
        opening: Any = ray.remote(max_calls=1, num_cpus=1, num_gpus=gpus)(_open)
        sent = dataclasses.replace(order, on_pack=_nothing, on_notice=_nothing)
        opened = ray.get(opening.remote(sent))
        if isinstance(opened, Exception):
            raise opened
        planned = Planned(order.job, opened.shape)
        if planned.plan.digest != opened.metadata.plan_digest:
            raise InputError(
                f"{order.job.trace}: the cluster sees another trace than this machine",
                code="E-SCORES-OTHER-RUN",
                hint="a path that is the same on all machines",
            )
        writer = follow(order.folder, opened.metadata, repair=order.repair)
        left = writer.left(planned)
        order.tell_rest(len(left), len(planned.shards))
        tally = _run(order, sent, planned, left, workers, gpus)
        writer.finish(planned)
    return ScoreResult.of(order.folder, planned, tally, probe=opened.probe, attention=opened.attention)


def _open(order: Order) -> _Opened | TraceError | OSError:
    """Begin or continue the run, as its lead."""
    try:
        run = order.open(_nothing)
        lead(order.folder, run.metadata, run.teacher.head, repair=order.repair)
    except (TraceError, OSError) as error:
        return error
    teacher = run.teacher
    return _Opened(run.metadata, run.planned.shape, teacher.capability.reason, teacher.describe_attention())


def _run(order: Order, sent: Order, planned: Planned, left: list[int], workers: int, gpus: float) -> Tally:
    """Let actors score the shards that are left."""
    tally, done, total = Tally(), planned.packs_without(left), planned.plan.packs
    order.on_pack(done, total)
    if not left:
        return tally
    numbers = ray.data.from_items([{"shard": number} for number in left], override_num_blocks=len(left))
    reports = numbers.map_batches(
        _Worker,
        fn_constructor_args=(sent,),
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(left)), max_tasks_in_flight_per_actor=2),
        num_cpus=1,
        num_gpus=gpus,
    )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    reports.context.enable_progress_bars = False
    reports.context.execution_no_progress_timeout_s = NO_PROGRESS_S
    for row in reports.iter_rows():
        report: _Report = pickle.loads(row["report"])
        for notice in report.notices:
            order.on_notice(notice)
        if report.error is not None:
            raise report.error
        tally, done = tally.plus(report.tally), done + planned.shards[report.number].packs
        order.on_pack(done, total)
    return tally


class _Worker:
    """An actor: opens the run when the first shard comes, so that what it refuses is a report and no dead actor."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._notices: list[str] = []
        self._opened: tuple[Run, ScoresWriter] | None = None

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Numbers of shards -> what came of each."""
        return pa.table({"report": [pickle.dumps(self._report(n)) for n in batch["shard"].to_pylist()]})

    def _report(self, number: int) -> _Report:
        try:
            tally, error = self._score(number), None
        except (TraceError, OSError) as refusal:
            tally, error = Tally(), refusal
        notices, self._notices = tuple(self._notices), []
        return _Report(number, tally, notices, error)

    def _score(self, number: int) -> Tally:
        if self._opened is None:
            run = self._order.open(self._notices.append)
            self._opened = run, follow(self._order.folder, run.metadata)
        run, writer = self._opened
        packs = run.planned.shard(number)
        if writer.has(number, packs):  # its worker died before it could say so
            return Tally(shards=1)
        run.tally = Tally()
        writer.write_shard(number, run.score(packs))
        return run.tally


def _nothing(*_: Any) -> None:
    """Workers have nobody to tell."""


@contextmanager
def _cluster(workers: int) -> Iterator[None]:
    """The Ray cluster that this process is connected to, the one at RAY_ADDRESS, or an own one while this runs."""
    if ray.is_initialized():
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cpus = max(workers + 2, os.cpu_count() or 1)  # logical ones: actors must not take what Ray Data needs itself
        ray.init("local", num_cpus=cpus, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _told() -> Iterator[None]:
    """One line for what Ray raises."""
    try:
        yield
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
        raise TraceError(
            f"the engine ray failed: {type(cause).__name__}: {first_line(cause)}",
            hint="run the same command again, finished shards are kept",
        ) from error
