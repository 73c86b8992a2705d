"""A scoring run as one process sees it: the job, its teacher, the plan, and the scores of a shard.

Every worker of a run opens the same job and plans for itself; plans are deterministic, so shard 17 is the same packs
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from memopd_scorer.halving import Halving
from memopd_scorer.plan import Layout, Pack, PlanSummary, plan_states
from memopd_scorer.signals import Signals, bytes_per_target, check_signals, compute_signals, describe_head
from memopd_scorer.store import SHARD_BYTES, SHARD_TOKENS, iter_shards
from memopd_scorer.teacher import LoadedModel, check_trace
from memopd_scorer.views import iter_states, open_views
from memopd_trace import __version__
from memopd_trace.errors import InputError
from memopd_trace.metadata import HeadInfo, Producer, ScoresMetadata, TeacherInfo
from memopd_trace.record.fingerprint import config_digest, weights_digest
from memopd_trace.schema import RECORDED
from memopd_trace.storage import TraceReader


@dataclass(frozen=True, slots=True)
class Job:
    """What is scored and how; plain values, so that it can be sent to workers.

    Raises:
        UsageError: an unknown signal.
    """

    trace: str
    signals: tuple[str, ...] = ("sampled", "hidden")
    topk: int = 64
    layout: Layout = "tree"
    max_tokens: int = 8192
    view: str = RECORDED
    views: str | None = None
    shard_bytes: int = SHARD_BYTES
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        check_signals(self.signals)


class Run:
    """A job opened with its teacher: planned once for `plan` and `metadata`, and again by every `iter_shards`.

    The trace must be valid (`memopd_trace.validate.require_valid`). `on_notice` is told what a user should know.

    Raises:
        InputError: a teacher of another tokenizer, views that are not of this trace, `E-NO-TARGETS`.
        UsageError: an unknown layout or view.
    """

    def __init__(self, job: Job, teacher: LoadedModel, on_notice: Callable[[str], None]) -> None:
        self.job, self.teacher = job, teacher
        self.padded_mass = 0.0
        self._reader, self._views = TraceReader(job.trace), open_views(job.view, job.views)
        self._halving = Halving(self._signals, on_notice)
        check_trace(self._reader.metadata, teacher)
        self.plan = PlanSummary(teacher.layout(job.layout), job.max_tokens)
        for pack in self._packs():
            self.plan.add(pack)
        if not self.plan.targets:
            under = "" if job.view == RECORDED else f" under the view '{job.view}'"
            raise InputError(f"{job.trace}: no sampled token to score{under}", code="E-NO-TARGETS")
        self.metadata = _metadata(job, teacher, self.plan)

    @property
    def budget(self) -> int | None:
        """Packed tokens of a forward after the device ran out of memory; `None` = it never did."""
        return self._halving.budget

    def iter_shards(self) -> Iterator[list[Pack]]:
        """The packs of shard 0, 1, …"""
        head = self.metadata.teacher.head
        per_target = bytes_per_target(
            self.job.signals,
            width=head.width,
            hidden_bytes=self.teacher.head.weight_VD.element_size(),
            topk=self.job.topk,
            size=head.size,
        )
        return iter_shards(
            self._packs(),
            bytes_per_target=per_target,
            shard_bytes=self.job.shard_bytes,
            shard_tokens=self.job.shard_tokens,
        )

    def score(
        self, packs: Sequence[Pack], on_pack: Callable[[int], None] = lambda done: None
    ) -> list[tuple[Pack, Signals]]:
        """The signals of a shard's packs, in order; a pack that found no memory comes in parts. `on_pack(done)` follows
        each."""
        results: list[tuple[Pack, Signals]] = []
        for done, pack in enumerate(packs, 1):
            results.extend(self._halving.run(pack))
            on_pack(done)
        self.padded_mass = max(self.padded_mass, *(signals.padded_mass for _, signals in results))
        return results

    def _packs(self) -> Iterator[Pack]:
        states = iter_states(self._reader, self.job.view, self._views, vocabulary=self.teacher.head.size)
        return plan_states(states, layout=self.plan.layout, max_tokens=self.job.max_tokens)

    @torch.no_grad()
    def _signals(self, pack: Pack) -> Signals:
        return compute_signals(self.teacher.states(pack), self.teacher.head, pack, self.job.signals, topk=self.job.topk)


def _metadata(job: Job, teacher: LoadedModel, plan: PlanSummary) -> ScoresMetadata:
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
        view=job.view,
        signals=list(job.signals),
        topk=min(job.topk, teacher.head.size) if "topk" in job.signals else None,
        topk_source="teacher" if "topk" in job.signals else None,
        hidden_dtype=dtype if "hidden" in job.signals else None,
        layout=plan.layout,
        attention=teacher.backend,
        max_tokens=plan.max_tokens,
        shard_bytes=job.shard_bytes,
        shard_tokens=job.shard_tokens,
        plan_digest=plan.digest,
    )
