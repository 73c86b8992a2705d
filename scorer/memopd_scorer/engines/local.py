"""One process scores every shard in turn."""

from __future__ import annotations

from collections.abc import Callable

from memopd_scorer.run import Run
from memopd_scorer.store import ScoresWriter


def score_shards(run: Run, writer: ScoresWriter, on_pack: Callable[[int, int], None]) -> tuple[int, int]:
    """Score what is not finished yet, and write the manifest. Returns (shards, shards scored now).

    `on_pack(done, total)` follows each pack.
    """
    before = scored = shards = 0

    def count(done: int) -> None:
        on_pack(before + done, run.plan.packs)

    for number, packs in enumerate(run.iter_shards()):
        if not writer.has(number, packs):
            writer.write_shard(number, run.score(packs, count))
            scored += 1
        shards += 1
        before += len(packs)
        count(0)
    writer.finish(shards)
    return shards, scored
