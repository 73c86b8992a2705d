"""The scoring verb: a trace and a teacher in, a folder of scores out; running it again continues it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memopd_scorer.engines import local
from memopd_scorer.plan import Layout, PlanSummary
from memopd_scorer.run import Job, Run
from memopd_scorer.store import SHARD_BYTES, SHARD_TOKENS, ScoresWriter, check_folder
from memopd_scorer.teacher import LoadedModel, load
from memopd_scorer.views import open_views
from memopd_trace.disk import exclusive
from memopd_trace.schema import RECORDED
from memopd_trace.validate import require_valid


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """What a scoring run did. `probe` is what the probe found, `attention` the backend and why it, `padded_mass` the
    largest probability that the padded ids would have had in the shards scored now, `budget` the packed tokens of
    a forward after the device ran out of memory (`None`: it never did)."""

    folder: Path
    plan: PlanSummary
    shards: int
    shards_scored: int
    probe: str
    attention: str
    padded_mass: float
    budget: int | None


def score(
    trace: str | os.PathLike[str],
    teacher: str | os.PathLike[str] | LoadedModel,
    out: str | os.PathLike[str],
    *,
    signals: Sequence[str] = ("sampled", "hidden"),
    topk: int = 64,
    layout: Layout = "tree",
    attention: str = "auto",
    dtype: str = "float32",
    device: str = "cpu",
    max_tokens: int = 8192,
    view: str = RECORDED,
    views: str | os.PathLike[str] | None = None,
    repair: bool = False,
    shard_bytes: int = SHARD_BYTES,
    shard_tokens: int = SHARD_TOKENS,
    on_pack: Callable[[int, int], None] = lambda done, total: None,
    on_notice: Callable[[str], None] = lambda text: None,
) -> ScoreResult:
    """Score every sampled token of a trace under its own recorded state, or under another `view` of it.

    A view is one of the file `views`, whose rows alone are scored, or `persistent-history`, which is built here.

    Finished shards of an earlier, killed run are verified and skipped; a kill loses at most one shard's work, which
    `shard_bytes` of scores or `shard_tokens` packed tokens end. `on_pack(done, total)` follows each pack.
    A pack for which the device has no memory is run in halves, rows and shards staying as planned; `on_notice` is told.

    Raises:
        InputError: an unreadable trace, a teacher of another tokenizer, a folder that holds another run, views that
            are not of this trace, an invocation that alone exceeds the device's memory…
        UsageError: an unknown signal, layout, dtype, device or view.
    """
    job = Job(
        trace=os.fspath(trace),
        signals=tuple(dict.fromkeys(signals)),
        topk=topk,
        layout=layout,
        max_tokens=max_tokens,
        view=view,
        views=None if views is None else os.fspath(views),
        shard_bytes=shard_bytes,
        shard_tokens=shard_tokens,
    )
    folder = Path(out)
    check_folder(folder)
    open_views(view, views)  # a wrong name is told before a long validation
    require_valid(trace, views=views)
    if not isinstance(teacher, LoadedModel):
        teacher = load(teacher, dtype=dtype, device=device, backend=attention)
    run = Run(job, teacher, on_notice)
    with exclusive(folder, "scoring into"):
        writer = ScoresWriter(folder, run.metadata, teacher.head, repair=repair)
        shards, scored = local.score_shards(run, writer, on_pack)
    return ScoreResult(
        folder=folder,
        plan=run.plan,
        shards=shards,
        shards_scored=scored,
        probe=teacher.capability.reason,
        attention=teacher.describe_attention(),
        padded_mass=run.padded_mass,
        budget=run.budget,
    )
