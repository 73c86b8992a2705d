"""One process scores every shard in turn."""

from __future__ import annotations

from memopd_scorer.run import Order, Planned, Run, ScoreResult, check_inputs
from memopd_scorer.store import ScoresWriter, lead
from memopd_trace.places import exclusive


def score(order: Order) -> ScoreResult:
    """Score what is not finished yet, and write the manifest.

    Raises:
        InputError, UsageError: as `memopd_scorer.score`.
    """
    check_inputs(order.job, order.folder)
    run = Run(order.job, order.load_teacher(), order.on_notice, student=order.load_student())
    with exclusive(order.folder, "scoring into"):
        writer = lead(order.folder, run.metadata, run.teacher.head, repair=order.repair)
        before = 0

        def count(done: int) -> None:
            order.on_pack(before + done, run.planned.plan.packs)

        for number, size in enumerate(run.planned.shards):
            packs = run.planned.shard(number)
            if not writer.has(number, packs):
                writer.write_shard(number, run.score(packs, count))
            before += size.packs
            count(0)
        writer.finish(len(run.planned.shards), run.planned.plan.invocations)
    return run.result(order.folder, run.tally)


def unfinished(planned: Planned, writer: ScoresWriter) -> list[int]:
    """The shards that are not there yet; one whose rows are not the plan's is refused, or removed to be repaired."""
    return [n for n in range(len(planned.shards)) if not (writer.holds(n) and writer.has(n, planned.shard(n)))]
