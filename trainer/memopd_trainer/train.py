"""The reference trainer: PPO on the final reward plus full-vocabulary distillation, state by recorded state.

The loss is `memopd_trainer.objective`'s, with the weights w of `memopd_trainer.advantages` (they sum to 1 over a
step). One step: draw groups, plan their states as the scorer does, ask the critic (if there is one) for values, run
each pack once, all losses from one pass over its targets, backward, one AdamW update. Dropout stays off, so that at
unchanged weights every ratio is 1. Training in an existing output folder goes on from its newest checkpoint and ends
with the same bits as an uninterrupted run (on the CPU).

What a step draws depends on the seed and its number alone (`memopd_trainer.recipes.drawing`): each epoch is a new
permutation of the groups, cut into whole steps; a rest of fewer groups is left for other epochs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from memopd_scorer.attention import recompute_layers
from memopd_scorer.plan import Layout
from memopd_scorer.teacher import LoadedModel
from memopd_trace.disk import exclusive
from memopd_trace.errors import CheckFailed, UsageError
from memopd_trainer.advantages import Advantages, group_advantages
from memopd_trainer.batch import Group, Rollouts, load_rollouts
from memopd_trainer.checkpoint import (
    FREE_KEYS,
    checkpoint_at,
    checkpoint_name,
    latest_checkpoint,
    load_critic,
    remove_unfinished,
    restore_optimizer,
    save_checkpoint,
)
from memopd_trainer.config import TrainConfig
from memopd_trainer.critic import ValueHead, estimate_values, token_credit
from memopd_trainer.losses import Teacher
from memopd_trainer.metrics import METRICS, MetricsFile, StepMetrics, StepSums
from memopd_trainer.objective import make_teacher, pack_loss
from memopd_trainer.packs import make_packs
from memopd_trainer.ranks import Ranks
from memopd_trainer.recipes.drawing import chosen_turns, draw, one_task
from memopd_trainer.recipes.measures import Measures
from memopd_trainer.student import load_student, measure_kl
from memopd_trainer.versions import check_versions

TRACE_DIGEST, SCORES_DIGEST = "digest of the trace", "digest of the scores"


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run did. `first` and `last` are steps of this call; `episodes_alone` counts episodes that nothing was
    compared with (their advantage is 0). Held-out values are nats per token (see
    `memopd_trainer.student.evaluate_kl`), `before` at step 0 or where these data were first given."""

    checkpoint: Path
    steps: int
    resumed_from: int
    groups: int
    episodes: int
    episodes_alone: int
    layout: Layout
    layout_reason: str
    first: StepMetrics | None
    last: StepMetrics | None
    held_out_before: dict[str, float] | None
    held_out_after: dict[str, float] | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self) | {"checkpoint": str(self.checkpoint)}


def train(config: TrainConfig, *, on_step: Callable[[StepMetrics], None] | None = None) -> TrainResult:
    """Run, or go on with, the training that `config` describes; see the module's docstring.

    Writes `output/step-<n>/` (checkpoints) and `output/metrics.jsonl`; `on_step` is called after each step.

    Raises:
        InputError: a fault of the trace, the scores or the student; see `memopd_trainer.batch.load_rollouts`.
        UsageError: a configuration that does not fit the data, or an output folder that holds another run or that
            another process trains into.
        CheckFailed: the loss or the gradient is not finite; names step and episodes. Checkpoints stay.
    """
    started = time.perf_counter()
    with Ranks.join(config.device) as ranks:
        return _train(config, ranks, on_step if ranks.leads else None, started)


def _train(
    config: TrainConfig, ranks: Ranks, on_step: Callable[[StepMetrics], None] | None, started: float
) -> TrainResult:
    torch.manual_seed(config.seed)
    scores = config.scores if config.divergence.weight > 0 else None
    signal = config.divergence.signal
    rollouts = load_rollouts(
        config.trace,
        scores,
        policy=config.needs_behaviour,
        view=config.view,
        signal=signal,
        leave_out_unscored=config.leave_out_unscored,
    )
    if config.policy_version is not None or config.max_staleness is not None:
        versions = {"policy_version": config.policy_version, "max_staleness": config.allowed_staleness}
        check_versions(rollouts.groups, **versions)
    held_out = None
    if config.held_out is not None:
        view = config.view if config.held_out.view is None else config.held_out.view
        held_out = load_rollouts(config.held_out.trace, config.held_out.scores, policy=False, view=view)
    advantages = Advantages({}, 0)
    if config.ppo.weight > 0 and not config.ppo.has_critic:
        advantages = group_advantages(rollouts.groups, normalise_std=config.ppo.normalise_std)
    _check_groups_per_step(config, rollouts)
    output = Path(config.output)
    with exclusive(output, "training into") if ranks.leads else nullcontext():
        if ranks.leads:
            remove_unfinished(output)
        ranks.meet()
        origin = checkpoint_at(Path(config.student)) if config.continues else 0
        start, checkpoint = latest_checkpoint(output) or (origin, None)
        if start > config.steps:
            raise UsageError(f"{output}: is at step {start} already, the configuration asks for {config.steps} steps")
        learner = make_learner(config, rollouts, advantages, checkpoint, ranks)
        run = _Run(learner, held_out, origin, start, checkpoint, on_step)
        before = run.measure(origin)
        run.go()
        return run.result(before, run.measure(config.steps), time.perf_counter() - started)


@dataclass(frozen=True, slots=True, eq=False)
class Learner:
    """What a step needs."""

    config: TrainConfig
    rollouts: Rollouts
    advantages: Advantages
    student: LoadedModel
    teacher: Teacher | None
    critic: ValueHead | None
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    measures: Measures | None  # of the rank that leads

    @property
    def modules(self) -> list[nn.Module]:
        """What is trained, the student first."""
        return [self.student.model] + ([] if self.critic is None else [self.critic])

    @property
    def identity(self) -> dict[str, Any]:
        """What must stay the same for a run to go on: plain values, the data by their digests."""
        values = {k: v for k, v in self.config.model_dump(mode="json").items() if k not in FREE_KEYS}
        return values | {TRACE_DIGEST: self.rollouts.digest, SCORES_DIGEST: self.rollouts.scores_digest}


def make_learner(
    config: TrainConfig, rollouts: Rollouts, advantages: Advantages, checkpoint: Path | None, ranks: Ranks
) -> Learner:
    """Load the student, from the checkpoint with its optimiser where there is one.

    Raises:
        InputError: as `memopd_trainer.student.load_student`, or the checkpoint cannot be read.
        UsageError: the checkpoint is of another run.
    """
    student = load_student(
        checkpoint or config.student, rollouts, dtype=config.dtype, device=ranks.device(config.device)
    )
    if config.gradient_checkpointing:
        recompute_layers(student.model)
    weight_VD = student.head.weight_VD
    critic = ValueHead(weight_VD.shape[1], weight_VD.dtype, weight_VD.device) if config.ppo.has_critic else None
    teacher = make_teacher(rollouts, config, weight_VD.device)
    optimizer = make_optimizer(student.model, config, critic)
    measures = Measures(config, rollouts) if ranks.leads else None
    learner = Learner(config, rollouts, advantages, student, teacher, critic, optimizer, ranks, measures)
    if checkpoint is not None:
        data = {TRACE_DIGEST: config.trace, SCORES_DIGEST: config.scores}
        restore_optimizer(checkpoint, optimizer, learner.identity, data)
        if critic is not None:
            load_critic(checkpoint, critic)
    elif config.continues:
        restore_optimizer(Path(config.student), optimizer, None, {})
        if critic is not None:
            load_critic(Path(config.student), critic)
    return learner


class _Run:
    """The steps from a checkpoint to the last, in an output folder that no other run writes to."""

    def __init__(
        self,
        learner: Learner,
        held_out: Rollouts | None,
        origin: int,
        start: int,
        checkpoint: Path | None,
        on_step: Callable[[StepMetrics], None] | None,
    ) -> None:
        self.learner, self.held_out, self.checkpoint = learner, held_out, checkpoint
        self.origin, self.start = origin, start
        self.config, self.output, self.on_step = learner.config, Path(learner.config.output), on_step
        self.log = MetricsFile(self.output / METRICS, start) if learner.ranks.leads else None
        if self.log is not None and learner.measures is not None:
            learner.measures.resume(self.log.lines)
        self.first: StepMetrics | None = None
        self.last: StepMetrics | None = None

    def go(self) -> None:
        """Make the steps that are left."""
        rollouts, config = self.learner.rollouts, self.config
        for step in range(self.start + 1, config.steps + 1):
            self.last = train_step(step, draw(rollouts.groups, step, config), self.learner)
            self.first = self.first or self.last
            if self.log is not None:
                self.log.write(dataclasses.asdict(self.last))
            if self.on_step is not None:
                self.on_step(self.last)
            if step == config.steps or (config.save_every and step % config.save_every == 0):
                self.checkpoint = self._save(step)

    def measure(self, step: int) -> dict[str, float] | None:
        """The held-out values of a step: those in the file, or where the run stands there, measured and written."""
        if self.held_out is None or self.log is None:
            return None
        now = self.start if step == self.origin else step
        digest = self.held_out.data_digest
        values = self.log.held_out(step, digest) or self.log.held_out(now, digest)
        if values is None:
            values = measure_kl(self.learner.student, self.held_out, self.config.layout, self.config.max_tokens)
            self.log.write_held_out(now, digest, values)
        return values

    def result(self, before: dict[str, float] | None, after: dict[str, float] | None, seconds: float) -> TrainResult:
        """What was done."""
        rollouts, student = self.learner.rollouts, self.learner.student
        assert self.checkpoint is not None  # the last step wrote one, or there was nothing left to do
        return TrainResult(
            checkpoint=self.checkpoint,
            steps=self.config.steps,
            resumed_from=self.start,
            groups=len(rollouts.groups),
            episodes=rollouts.episodes,
            episodes_alone=self.learner.advantages.alone,
            layout=student.layout(self.config.layout),
            layout_reason=student.capability.reason,
            first=self.first,
            last=self.last,
            held_out_before=before,
            held_out_after=after,
            seconds=seconds,
        )

    def _save(self, step: int) -> Path:
        """The lead writes; all go on when it is there."""
        learner = self.learner
        if learner.ranks.leads:
            save_checkpoint(
                self.output,
                step,
                learner.student.model,
                learner.optimizer,
                learner.identity,
                student=self.config.student,
                critic=learner.critic,
            )
        learner.ranks.meet()
        return self.output / checkpoint_name(step)


def train_step(step: int, groups: Sequence[Group], learner: Learner) -> StepMetrics:
    """One update. The packs hold the weights of the whole step, so their losses and gradients add up."""
    started = time.perf_counter()
    config, student, critic, ranks = learner.config, learner.student, learner.critic, learner.ranks
    factor = config.lr_factor(step)
    for group in learner.optimizer.param_groups:
        group["lr"] = factor * group["initial_lr"]
    learner.optimizer.zero_grad(set_to_none=True)
    packed = functools.partial(
        make_packs,
        learner.rollouts,
        groups,
        view=config.student_view,
        share=ranks.mine,
        layout=student.layout(config.layout),
        max_tokens=config.max_tokens,
    )
    credit = None
    if critic is not None:
        values = ranks.gather_values(estimate_values(student, critic, packed({})))
        c = config.ppo.critic
        credit = token_credit(groups, values, gamma=c.gamma, lam=c.lam, normalise_std=config.ppo.normalise_std)
    sums = StepSums()
    chosen = chosen_turns(groups, step, config)
    for train_pack in packed(learner.advantages.by_episode, credit=credit, chosen=chosen):
        loss = pack_loss(student, learner.teacher, train_pack, config, sums, critic)
        _check_finite(float(loss.detach()), "loss", step, train_pack.episode_ids)
        loss.backward()
    ranks.add_gradients(learner.modules)
    norm = float(torch.nn.utils.clip_grad_norm_(student.model.parameters(), config.grad_clip))
    _check_finite(norm, "gradient norm", step, [e.episode_id for g in groups for e in g])
    if critic is not None:
        torch.nn.utils.clip_grad_norm_(critic.parameters(), config.grad_clip)
    learner.optimizer.step()
    sums = StepSums.plus([StepSums(**each) for each in ranks.gather(dataclasses.asdict(sums))])
    measured = {} if learner.measures is None else learner.measures.measure(step, groups, sums)
    seconds = time.perf_counter() - started
    return sums.finish(step=step, grad_norm=norm, lr=factor * config.lr, seconds=seconds, measured=measured)


def make_optimizer(model: PreTrainedModel, config: TrainConfig, critic: ValueHead | None = None) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors (norms, biases) and the critic do not."""
    parameters = list(model.parameters())
    matrices, vectors = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if critic is not None:
        groups.append({"params": list(critic.parameters()), "weight_decay": 0.0, "lr": config.ppo.critic.lr})
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _check_groups_per_step(config: TrainConfig, rollouts: Rollouts) -> None:
    if config.one_shot is not None:
        one_task(rollouts.groups, config.one_shot)
    wanted, there = config.groups_per_step, len(rollouts.groups)
    if wanted is not None and wanted > there:
        raise UsageError(
            f"groups_per_step is {wanted}, the trace has {there} groups",
            hint="lower it, or leave it out to use all groups in each step",
        )


def _check_finite(value: float, what: str, step: int, episodes: Sequence[str]) -> None:
    if math.isfinite(value):
        return
    more = f" and {len(episodes) - 8} more" if len(episodes) > 8 else ""
    raise CheckFailed(
        f"step {step}: the {what} is {value}, episodes " + ", ".join(f"'{e}'" for e in episodes[:8]) + more,
        hint="nothing of this step was applied; a lower lr or dtype float32 may help",
    )
