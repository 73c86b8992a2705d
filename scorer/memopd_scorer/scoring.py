"""The scoring verb: a trace and a teacher in, a folder of scores out; running it again continues it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from memopd_scorer.plan import Layout, Pack, PlanSummary, plan
from memopd_scorer.signals import Signals, bytes_per_target, check_signals, compute_signals, describe_head
from memopd_scorer.store import SHARD_BYTES, SHARD_TOKENS, ScoresWriter, check_folder, iter_shards
from memopd_scorer.teacher import LoadedModel, check_trace, load
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
    """What a scoring run did. `probe` is what the probe found; `padded_mass` the largest probability that the padded
    ids would have had in the shards scored now."""

    folder: Path
    plan: PlanSummary
    shards: int
    shards_scored: int
    probe: str
    padded_mass: float


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
    repair: bool = False,
    shard_bytes: int = SHARD_BYTES,
    shard_tokens: int = SHARD_TOKENS,
    on_pack: Callable[[int, int], None] = lambda done, total: None,
) -> ScoreResult:
    """Score every sampled token of a trace under its own recorded state.

    Finished shards of an earlier, killed run are verified and skipped; a kill loses at most one shard's work, which
    `shard_bytes` of scores or `shard_tokens` packed tokens end. `on_pack(done, total)` follows each pack.

    Raises:
        InputError: an unreadable trace, a teacher of another tokenizer, a folder that holds another run…
        UsageError: an unknown signal, layout, dtype or device.
    """
    names = tuple(dict.fromkeys(signals))
    check_signals(names)
    check_folder(Path(out))
    require_valid(trace)
    reader = TraceReader(trace)
    if not isinstance(teacher, LoadedModel):
        teacher = load(teacher, dtype=dtype, device=device, backend=attention)  # type: ignore[arg-type]
    check_trace(reader.metadata, teacher)
    layout = teacher.layout(layout)
    summary = PlanSummary(layout, max_tokens)
    size = teacher.head.size
    for pack in plan(reader.iter_episodes(), layout=layout, max_tokens=max_tokens, vocabulary=size):
        summary.add(pack)
    if not summary.targets:
        raise InputError(f"{trace}: no sampled token to score", code="E-NO-TARGETS")
    metadata = _metadata(teacher, summary, names, topk, (shard_bytes, shard_tokens))
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
    done = scored = shards = 0
    padded_mass = 0.0
    with exclusive(Path(out), "scoring into"):
        writer = ScoresWriter(Path(out), metadata, teacher.head, repair=repair)
        packs = plan(reader.iter_episodes(), layout=layout, max_tokens=max_tokens, vocabulary=size)
        for number, run in enumerate(shards_of(packs)):
            shards += 1
            if not writer.has(number, run):
                results = []
                for pack in run:
                    results.append((pack, _signals(teacher, pack, names, topk)))
                    padded_mass = max(padded_mass, results[-1][1].padded_mass)
                    on_pack(done + len(results), summary.packs)
                writer.write_shard(number, results)
                scored += 1
            done += len(run)
            on_pack(done, summary.packs)
        writer.finish(shards)
    return ScoreResult(Path(out), summary, shards, scored, teacher.capability.reason, padded_mass)


@torch.no_grad()
def _signals(teacher: LoadedModel, pack: Pack, names: tuple[str, ...], topk: int) -> Signals:
    return compute_signals(teacher.states(pack), teacher.head, pack, names, topk=topk)


def _metadata(
    teacher: LoadedModel, summary: PlanSummary, names: tuple[str, ...], topk: int, shard: tuple[int, int]
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
        view=RECORDED,
        signals=list(names),
        topk=min(topk, teacher.head.size) if "topk" in names else None,
        topk_source="teacher" if "topk" in names else None,
        hidden_dtype=dtype if "hidden" in names else None,
        layout=summary.layout,
        attention=teacher.backend if summary.layout != "single" or teacher.capability.layout == "tree" else "native",
        max_tokens=summary.max_tokens,
        shard_bytes=shard[0],
        shard_tokens=shard[1],
        plan_digest=summary.digest,
    )
