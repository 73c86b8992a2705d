"""One process scores every shard in turn."""

from __future__ import annotations

from memopd_scorer.run import Order, ScoreResult, check_inputs
from memopd_scorer.store import lead
from memopd_trace.places import exclusive


def score(order: Order) -> ScoreResult:
    """Score what is not finished yet, and write the manifest.

    Raises:
        InputError, UsageError: as `memopd_scorer.score`.
    """
    check_inputs(order.job, order.folder)
    run = order.open(order.on_notice)
    planned = run.planned
    with exclusive(order.folder, "scoring into"):
        writer = lead(order.folder, run.metadata, run.teacher.head, repair=order.repair)
        left = writer.left(planned)
        order.tell_rest(len(left), len(planned.shards))
        before = planned.packs_without(left)

        def count(done: int) -> None:
            order.on_pack(before + done, planned.plan.packs)

        count(0)
        for number in left:
            writer.write_shard(number, run.score(planned.shard(number), count))
            before += planned.shards[number].packs
        writer.finish(planned)
    return run.result(order.folder, run.tally)
