"""The loss of a pack: clipped policy term, divergence from the teacher, value term.

    loss = sum over trained tokens  w * (ppo.weight * PPO + divergence.weight * D(student, teacher)
                                         + critic.weight * value loss)

With `prune_opd` the teacher's term of each token has one more weight (`memopd_trainer.recipes.pruning`).
With divergence.kind `advantage` the second term is inside the first: its advantage is ppo.weight * A +
divergence.weight * (log q - log behaviour), as on-policy distillation is done where policy gradients are at hand.

Shape legend: M trained targets of a pack, R prediction rows, D student width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopd_scorer.teacher import LoadedModel
from memopd_trace.errors import UsageError
from memopd_trainer.batch import Rollouts
from memopd_trainer.config import TrainConfig
from memopd_trainer.critic import ValueHead, value_loss
from memopd_trainer.losses import Teacher, clipped_policy_loss, is_clipped, row_losses
from memopd_trainer.metrics import StepSums
from memopd_trainer.packs import TrainPack
from memopd_trainer.recipes.pruning import effective_lengths, prune_weights
from memopd_trainer.student import head_on


def make_teacher(rollouts: Rollouts, config: TrainConfig, device: torch.device) -> Teacher | None:
    """What the student is held against, with the teacher's head on `device` where states are the signal.

    Raises:
        UsageError: `prune_opd.k` is larger than the vocabulary.
    """
    if rollouts.scores is None:
        return None
    head = head_on(rollouts.scores.head(), device) if rollouts.signal == "hidden" else None
    if config.prune_opd is not None and head is not None and config.prune_opd.k > head.size:
        raise UsageError(f"prune_opd.k is {config.prune_opd.k}, the vocabulary has {head.size} ids")
    return Teacher(
        config.divergence.kind,
        config.divergence.beta,
        head,
        rollouts.scores.metadata.temperature,
        overlap_k=None if config.prune_opd is None else config.prune_opd.k,
    )


def pack_loss(
    student: LoadedModel,
    teacher: Teacher | None,
    train_pack: TrainPack,
    config: TrainConfig,
    sums: StepSums,
    critic: ValueHead | None = None,
) -> Tensor:
    """The share that one pack has in a step's loss, a differentiable scalar; `sums` collects its metrics.

    The ratio is pi(token) / behaviour(token), both over the whole vocabulary at the sampling temperature (at
    1 where raw log-probabilities were recorded); see `memopd_trace.behaviour`.
    """
    hidden_RD = student.states(train_pack.pack)
    on = hidden_RD.device
    hidden_MD = hidden_RD.index_select(0, train_pack.row_M.to(on))
    out = row_losses(
        student.head,
        hidden_MD,
        train_pack.ids_M.to(on),
        temperature_M=None if train_pack.temperature_M is None else train_pack.temperature_M.to(on),
        teacher=teacher,
        rows=None if train_pack.teacher is None else train_pack.teacher.each(lambda tensor: tensor.to(on)),
    )
    if out.teacher_logsumexp_M is not None:
        train_pack.check_teacher(out.teacher_logsumexp_M)
    weight_M = train_pack.weight_M.to(out.logprob_M)
    loss = torch.zeros_like(out.logprob_M.sum())
    ratio_M = None
    if train_pack.behaviour_M is not None:
        ratio_M = (out.logprob_M - train_pack.behaviour_M.to(out.logprob_M)).exp()
    advantage_M = config.ppo.weight * train_pack.advantage_M.to(out.logprob_M)
    if out.divergence_M is not None:
        sums.add_divergence(weight_M, out.divergence_M)
        _add_gap(train_pack, teacher, weight_M, out.logprob_M, sums)
        teacher_weight = config.divergence.weight * _pruned(train_pack, out.common_M, weight_M, config, sums)
        if config.divergence.kind == "advantage":
            advantage_M = advantage_M + teacher_weight * _teacher_advantage(train_pack, teacher).to(advantage_M)
        else:
            divergence_M = out.divergence_M * _importance(ratio_M, config.divergence.importance_clip)
            loss = loss + (weight_M * teacher_weight * divergence_M).sum()
    if config.ppo.weight > 0 or config.divergence.kind == "advantage":
        assert ratio_M is not None, "`load_rollouts` was not asked for behaviour"
        policy_M = clipped_policy_loss(ratio_M, advantage_M, config.ppo.clip, config.ppo.clip_high)
        loss = loss + (weight_M * policy_M).sum()
        clipped_M = is_clipped(ratio_M.detach(), advantage_M, config.ppo.clip, config.ppo.clip_high)
        sums.add_policy(weight_M, ratio_M, policy_M, clipped_M)
    if critic is not None:
        assert train_pack.return_M is not None, "a critic is trained towards the returns of `token_credit`"
        value_M = critic(hidden_MD if config.ppo.critic.shared else hidden_MD.detach())
        off_M = value_loss(value_M, train_pack.return_M.to(value_M)).to(loss)
        loss = loss + config.ppo.critic.weight * (weight_M * off_M).sum()
        sums.add_value(weight_M, off_M)
    sums.add_pack(loss, weight_M, out.entropy_M, train_pack.pack.logical_tokens, len(train_pack.pack))
    return loss


def _pruned(
    train_pack: TrainPack, common_M: Tensor | None, weight_M: Tensor, config: TrainConfig, sums: StepSums
) -> Tensor | float:
    """w + w_base of each target; 1 without `prune_opd`."""
    if config.prune_opd is None:
        return 1.0
    assert common_M is not None, "`make_teacher` asks for it"
    overlap_M = common_M.cpu().double() / config.prune_opd.k  # exact: a share that is gamma is not below it
    w_M = prune_weights(overlap_M.numpy(), train_pack.state_M, train_pack.output_M, config.prune_opd)
    kept_M = torch.from_numpy(w_M + config.prune_opd.w_base).to(weight_M)
    sums.add_overlap(weight_M, overlap_M.to(weight_M), kept_M, effective_lengths(w_M, train_pack.state_M))
    return kept_M


def _add_gap(
    train_pack: TrainPack, teacher: Teacher | None, weight_M: Tensor, logprob_M: Tensor, sums: StepSums
) -> None:
    """Count |log p - log q| of the sampled tokens, where both are at temperature 1."""
    assert teacher is not None and train_pack.teacher_logprob_M is not None
    if teacher.temperature == 1.0 and train_pack.temperature_M is None:
        sums.add_gap(weight_M, (logprob_M.detach() - train_pack.teacher_logprob_M.to(logprob_M)).abs())


def _importance(ratio_M: Tensor | None, clip: float | None) -> Tensor | float:
    """min(pi / behaviour, clip) without gradient; 1 where no clip is asked for."""
    if clip is None:
        return 1.0
    assert ratio_M is not None, "`load_rollouts` was not asked for behaviour"
    return ratio_M.detach().clamp(max=clip)


def _teacher_advantage(train_pack: TrainPack, teacher: Teacher | None) -> Tensor:
    """log q - log behaviour of each target, float64 nats, both at the temperature that was sampled at.

    Raises:
        UsageError: the scores are at another temperature.
    """
    assert teacher is not None and train_pack.teacher is not None and train_pack.behaviour_M is not None
    assert train_pack.teacher.logprob_M is not None, "the kind `advantage` takes the signal `sampled`"
    sampled_M = torch.ones(1, dtype=torch.float64) if train_pack.temperature_M is None else train_pack.temperature_M
    if bool((sampled_M != teacher.temperature).any()):
        raise UsageError(
            f"behaviour is at temperature {float(sampled_M.max())}, the scores are at {teacher.temperature}",
            hint="record raw log-probabilities, or take another divergence.kind",
        )
    return train_pack.teacher.logprob_M.double() - train_pack.behaviour_M
