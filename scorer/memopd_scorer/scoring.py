"""The scoring verb: a trace and a teacher in, a folder of scores out; running it again continues it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from memopd_scorer.halving import Halving
from memopd_scorer.plan import Layout, Pack, PlanSummary, plan_states
from memopd_scorer.signals import Signals, bytes_per_target, check_signals, compute_signals, describe_head
from memopd_scorer.store import SHARD_BYTES, SHARD_TOKENS, ScoresWriter, check_folder, iter_shards
from memopd_scorer.teacher import LoadedModel, check_trace, load
from memopd_scorer.views import iter_states, open_views
from memopd_trace import __version__
from memopd_trace.disk import exclusive
from memopd_trace.errors import InputError
from memopd_trace.metadata import HeadInfo, Producer, ScoresMetadata, TeacherInfo
from memopd_trace.record.fingerprint import config_digest, weights_digest
from memopd_trace.schema import RECORDED
from memopd_trace.storage import TraceReader
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
    names = tuple(dict.fromkeys(signals))
    check_signals(names)
    check_folder(Path(out))
    viewed = open_views(view, views)
    require_valid(trace, views=views)
    reader = TraceReader(trace)
    if not isinstance(teacher, LoadedModel):
        teacher = load(teacher, dtype=dtype, device=device, backend=attention)
    check_trace(reader.metadata, teacher)
    layout = teacher.layout(layout)
    summary = PlanSummary(layout, max_tokens)

    def packs() -> Iterator[Pack]:
        states = iter_states(reader, view, viewed, vocabulary=teacher.head.size)
        return plan_states(states, layout=layout, max_tokens=max_tokens)

    for pack in packs():
        summary.add(pack)
    if not summary.targets:
        under = "" if view == RECORDED else f" under the view '{view}'"
        raise InputError(f"{trace}: no sampled token to score{under}", code="E-NO-TARGETS")
    metadata = _metadata(teacher, summary, view, names, topk, (shard_bytes, shard_tokens))
    head_info = metadata.teacher.head
    per_target = bytes_per_target(
        names,
        width=head_info.width,
        hidden_bytes=teacher.head.weight_VD.element_size(),
        topk=topk,
        size=head_info.size,
    )
    shards_of = functools.partial(
        iter_shards, bytes_per_target=per_target, shard_bytes=shard_bytes, shard_tokens=shard_tokens
    )
    halving = Halving(lambda pack: _signals(teacher, pack, names, topk), on_notice)
    done = scored = shards = 0
    padded_mass = 0.0
    with exclusive(Path(out), "scoring into"):
        writer = ScoresWriter(Path(out), metadata, teacher.head, repair=repair)
        for number, run in enumerate(shards_of(packs())):
            shards += 1
            if not writer.has(number, run):
                results: list[tuple[Pack, Signals]] = []
                for at, pack in enumerate(run, 1):
                    results.extend(halving.run(pack))
                    on_pack(done + at, summary.packs)
                padded_mass = max(padded_mass, *(signals.padded_mass for _, signals in results))
                writer.write_shard(number, results)
                scored += 1
            done += len(run)
            on_pack(done, summary.packs)
        writer.finish(shards)
    probe, attention = teacher.capability.reason, teacher.describe_attention()
    return ScoreResult(Path(out), summary, shards, scored, probe, attention, padded_mass, halving.budget)


@torch.no_grad()
def _signals(teacher: LoadedModel, pack: Pack, names: tuple[str, ...], topk: int) -> Signals:
    return compute_signals(teacher.states(pack), teacher.head, pack, names, topk=topk)


def _metadata(
    teacher: LoadedModel, summary: PlanSummary, view: str, names: tuple[str, ...], topk: int, shard: tuple[int, int]
) -> ScoresMetadata:
    dtype = str(teacher.head.weight_VD.dtype).removeprefix("torch.")
    return ScoresMetadata(
        producer=Producer(name="memopd-trace", version=__version__),
        teacher_id=teacher.name,
        teacher=TeacherInfo(
            name=teacher.name,
            weights_digest=weights_digest(teacher.model),
            config_digest=config_digest(teacher.model),
            dtype=dtype,
            tokenizer_fingerprint=teacher.tokenizer.fingerprint,
            head=HeadInfo(**describe_head(teacher.head)),
        ),
        view=view,
        signals=list(names),
        topk=min(topk, teacher.head.size) if "topk" in names else None,
        topk_source="teacher" if "topk" in names else None,
        hidden_dtype=dtype if "hidden" in names else None,
        layout=summary.layout,
        attention=teacher.backend,
        max_tokens=summary.max_tokens,
        shard_bytes=shard[0],
        shard_tokens=shard[1],
        plan_digest=summary.digest,
    )
