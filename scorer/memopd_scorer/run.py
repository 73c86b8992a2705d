"""A scoring run as one process sees it: what was ordered, the job opened with its teacher, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from memopd_scorer.choosing import check_choice, chosen_ids, describe_student
from memopd_scorer.halving import Halving
from memopd_scorer.head import describe_head
from memopd_scorer.job import Job, Planned, Shape
from memopd_scorer.plan import Pack
from memopd_scorer.precision import dtype_name
from memopd_scorer.signals import Signals, bytes_per_target, compute_signals
from memopd_scorer.store import check_folder
from memopd_scorer.summary import PlanSummary
from memopd_scorer.teacher import LoadedModel, check_trace
from memopd_scorer.views import open_views
from memopd_trace import __version__
from memopd_trace.errors import InputError
from memopd_trace.metadata import HeadInfo, Producer, ScoresMetadata, TeacherInfo
from memopd_trace.places import Place
from memopd_trace.record.fingerprint import config_digest, weights_digest
from memopd_trace.schema import RECORDED
from memopd_trace.storage import TraceReader, read_manifest
from memopd_trace.validate import require_valid


@dataclass(frozen=True, slots=True)
class Order:
    """What an engine is asked for: a job, the folder of its scores, and the teacher, which every worker loads itself,
    as the student that chooses ids, where one does. `on_pack(done, total)` follows each pack, `on_notice(text)` is told
    what a user should know.

    Raises:
        UsageError: a student that is not to be asked.
    """

    job: Job
    folder: Place
    load_teacher: Callable[[], LoadedModel]
    repair: bool
    on_pack: Callable[[int, int], None]
    on_notice: Callable[[str], None]
    load_student: Callable[[], LoadedModel] | None = None

    def __post_init__(self) -> None:
        if self.load_student is not None:
            check_choice(self.job.signals)

    def tell_rest(self, left: int, shards: int) -> None:
        """Tell that a run goes on: of its `shards` only some are `left`."""
        if left < shards:
            self.on_notice(f"going on: {shards - left} of {shards} shards are there")

    def open(self, on_notice: Callable[[str], None], *, halves: bool = True) -> Run:
        """The run of this process, its models loaded; for the options and what is raised, see `Run`."""
        student = None if self.load_student is None else self.load_student()
        return Run(self.job, self.load_teacher(), on_notice, student=student, halves=halves)


@dataclass(frozen=True, slots=True)
class Tally:
    """What scoring came to: `shards` scored, the largest probability that the padded ids would have had in them, the
    `budget` of packed tokens in a forward after the device ran out of memory (`None`: it never did)."""

    shards: int = 0
    padded_mass: float = 0.0
    budget: int | None = None

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        budgets = [tally.budget for tally in (self, other) if tally.budget is not None]
        return Tally(
            self.shards + other.shards, max(self.padded_mass, other.padded_mass), min(budgets) if budgets else None
        )


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """What a scoring run did. `probe` is what the probe found, `attention` the backend and why it, `padded_mass` the
    largest probability that the padded ids would have had in the shards scored now, `budget` the packed tokens of
    a forward after the device ran out of memory (`None`: it never did). `hidden_kl` is the mean and the largest
    divergence, in nats, that a tier of states cost over the whole folder (`None`: they are exact), `bytes_per_target`
    what a target takes uncompressed."""

    folder: Place
    plan: PlanSummary
    shards: int
    shards_scored: int
    probe: str
    attention: str
    padded_mass: float
    budget: int | None
    hidden_kl: dict[str, float] | None
    bytes_per_target: int

    @classmethod
    def of(cls, folder: Place, planned: Planned, tally: Tally, *, probe: str, attention: str) -> ScoreResult:
        """A plan worked off; `tally` is of the shards scored now."""
        return cls(
            folder=folder,
            plan=planned.plan,
            shards=len(planned.shards),
            shards_scored=tally.shards,
            probe=probe,
            attention=attention,
            padded_mass=tally.padded_mass,
            budget=tally.budget,
            hidden_kl=read_manifest(folder).get("hidden_kl"),
            bytes_per_target=planned.shape.bytes_per_target,
        )


class Run:
    """A job opened with its teacher, and with the student that chooses ids, if one does. `check_inputs` comes first;
    `on_notice` is told what a user should know.

    A pack that finds no memory is run in more passes; without `halves` (other processes run it too) it is refused.

    Raises:
        InputError: a teacher or student of another tokenizer, views that are not of this trace, `E-NO-TARGETS`.
        UsageError: an unknown layout or view.
    """

    def __init__(
        self,
        job: Job,
        teacher: LoadedModel,
        on_notice: Callable[[str], None],
        *,
        student: LoadedModel | None = None,
        halves: bool = True,
    ) -> None:
        self.job, self.teacher, self.student, self.tally = job, teacher, student, Tally()
        divisible = halves and teacher.capability.layout == "tree"
        self._halving = Halving(self._signals, on_notice, divisible=divisible)
        described = TraceReader(job.trace).metadata
        check_trace(described, teacher)
        if student is not None:
            check_trace(described, student)
        self.planned = Planned(job, _shape(job, teacher, student is not None))
        if not self.planned.plan.targets:
            under = "" if job.view == RECORDED else f" under the view '{job.view}'"
            raise InputError(f"{job.trace}: no sampled token to score{under}", code="E-NO-TARGETS")
        self.metadata = _metadata(job, teacher, student, self.planned.plan)

    def result(self, folder: Place, tally: Tally) -> ScoreResult:
        """What this run did, in whose course `tally` was scored."""
        teacher = self.teacher
        return ScoreResult.of(
            folder, self.planned, tally, probe=teacher.capability.reason, attention=teacher.describe_attention()
        )

    def score(
        self, packs: Sequence[Pack], on_pack: Callable[[int], None] = lambda done: None
    ) -> list[tuple[Pack, Signals]]:
        """The signals of a shard's packs, in order. `on_pack(done)` follows each."""
        results: list[tuple[Pack, Signals]] = []
        for done, pack in enumerate(packs, 1):
            results.append((pack, self._halving.run(pack)))
            on_pack(done)
        padded_mass = max(signals.padded_mass for _, signals in results)
        self.tally = self.tally.plus(Tally(1, padded_mass, self._halving.budget))
        return results

    @torch.no_grad()
    def _signals(self, pack: Pack, pass_tokens: int | None) -> Signals:
        job, teacher = self.job, self.teacher
        chosen = None if self.student is None else chosen_ids(self.student, pack, job.topk, pass_tokens)
        return compute_signals(
            teacher.iter_states(pack, pass_tokens),
            teacher.head,
            pack,
            job.signals,
            topk=job.topk,
            tier=job.states,
            chosen_MK=chosen,
        )


def check_inputs(job: Job, folder: Place) -> None:
    """What is refused before a teacher is loaded; the trace and its views are validated.

    Raises:
        InputError: an unreadable or invalid trace, views that are not of it.
        UsageError: a folder that holds other things, a view that does not exist.
    """
    check_folder(folder)
    open_views(job.view, job.views)  # a wrong name is told before a long validation
    require_valid(job.trace, views=job.views)


def _shape(job: Job, teacher: LoadedModel, asks_student: bool) -> Shape:
    head = teacher.head
    stored = bytes_per_target(
        job.signals,
        width=head.weight_VD.shape[1],
        hidden_bytes=head.weight_VD.element_size(),
        topk=job.topk,
        size=head.size,
        tier=job.states,
    )
    return Shape(teacher.layout(job.layout), head.size, stored, teacher.deep(job.kept_bytes), asks_student)


def _metadata(job: Job, teacher: LoadedModel, student: LoadedModel | None, plan: PlanSummary) -> ScoresMetadata:
    source = "teacher" if student is None else "student"
    dtype = dtype_name(teacher.head.weight_VD.dtype)
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
        topk_source=source if "topk" in job.signals else None,
        student=None if student is None else describe_student(student),
        hidden_dtype=dtype if "hidden" in job.signals else None,
        hidden_tier=job.states,
        layout=plan.layout,
        attention=teacher.backends(with_visibility=plan.visibility_packs > 0),
        max_tokens=plan.max_tokens,
        shard_bytes=job.shard_bytes,
        shard_tokens=job.shard_tokens,
        plan_digest=plan.digest,
    )
