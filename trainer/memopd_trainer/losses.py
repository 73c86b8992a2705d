"""Full-vocabulary divergences from stored teacher states, and the clipped policy loss.

Nothing of size targets x vocabulary is ever held: targets go through both output heads in chunks, with one
float32 upcast a chunk (float64 stays float64), and each chunk is computed again in the backward pass. The
gradient reaches the student's states and its output head. Cost per target: three products with the student's
head when training (forward, again, backward), two with the teacher's.

Shape legend: M targets (sampled tokens that are trained), C targets of one chunk, V real ids, D student
width, E teacher width. All values are in nats.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from memopd_scorer.head import Head
from memopd_scorer.signals import iter_chunks

DivergenceKind = Literal["reverse_kl", "forward_kl", "jsd"]


class RowLosses(NamedTuple):
    """What one pass over the targets gives; the last two are `None` when no teacher was given."""

    logprob_M: Tensor  # of the sampled id, at the sampling temperature
    entropy_M: Tensor  # of the student at temperature 1, without gradient
    divergence_M: Tensor | None
    teacher_logsumexp_M: Tensor | None  # of the teacher's logits, as rebuilt: to be held against the stored one


def row_losses(
    student: Head,
    hidden_MD: Tensor,
    ids_M: Tensor,
    *,
    temperature_M: Tensor | None = None,
    teacher: Head | None = None,
    teacher_ME: Tensor | None = None,
    kind: DivergenceKind = "reverse_kl",
    beta: float = 0.5,
) -> RowLosses:
    """Student log-probabilities, and the divergence from the teacher's distribution, of every target.

    Args:
        student: the head that the gradient flows into.
        hidden_MD: the student's post-final-norm state that predicts each target.
        ids_M: the sampled ids, below `student.size`.
        temperature_M: temperature of `logprob_M`; `None` = 1. The divergence is always at temperature 1.
        teacher: the teacher's head, of the same `size`; needs `teacher_ME`, its states for the same targets.
        kind: see `divergence`.
        beta: see `divergence`.

    Returns:
        float32 (float64 where the head gives float64) vectors of length M, in nats.
    """
    if (teacher is None) != (teacher_ME is None):
        raise ValueError("a teacher's head and its states come together")
    if teacher is not None and teacher.size != student.size:
        raise ValueError(f"student head of {student.size} ids, teacher head of {teacher.size}")
    parts = []
    for start, stop in [*iter_chunks(len(ids_M), student.size)] or [(0, 0)]:
        rows = slice(start, stop)
        arguments = (
            student,
            hidden_MD[rows],
            ids_M[rows],
            None if temperature_M is None else temperature_M[rows],
            teacher,
            None if teacher_ME is None else teacher_ME[rows],
            kind,
            beta,
        )
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk_losses, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk_losses(*arguments))
    logprobs, entropies, divergences, logsumexps = zip(*parts, strict=True)
    if teacher is None:
        return RowLosses(torch.cat(logprobs), torch.cat(entropies), None, None)
    return RowLosses(torch.cat(logprobs), torch.cat(entropies), torch.cat(divergences), torch.cat(logsumexps))


def divergence(student_CV: Tensor, teacher_CV: Tensor, kind: DivergenceKind, beta: float = 0.5) -> Tensor:
    """Divergence between softmax(student logits) = p and softmax(teacher logits) = q, per row, in nats.

        reverse_kl   D(student || teacher) = sum_v p (log p - log q)
        forward_kl   D(teacher || student) = sum_v q (log q - log p)
        jsd          beta D(q || m) + (1 - beta) D(p || m),  m = beta q + (1 - beta) p,  0 < beta < 1
                     beta = 0 names forward_kl and beta = 1 names reverse_kl: jsd / beta tends to D(q || p) as
                     beta -> 0, and jsd / (1 - beta) to D(p || q) as beta -> 1. (Near an end `jsd` itself is
                     small: its scale goes with beta.)

    The generalised Jensen-Shannon divergence as in Agarwal et al., "On-Policy Distillation of Language
    Models" (arXiv 2306.13649), section 3; beta = 1/2 is the symmetric one.

    The gradient goes to the student's logits alone, in closed form, so it is exactly zero where p = q.
    """
    if kind == "jsd" and beta in (0.0, 1.0):
        kind = "reverse_kl" if beta else "forward_kl"
    value: Tensor = _Divergence.apply(student_CV, teacher_CV, kind, beta)
    return value


def clipped_policy_loss(ratio_M: Tensor, advantage_M: Tensor, clip: float) -> Tensor:
    """-min(r A, clip(r, 1 - clip, 1 + clip) A) per token: the negated surrogate of Schulman et al.,
    "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), equation 7."""
    clamped_M = ratio_M.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio_M * advantage_M, clamped_M * advantage_M)


def is_clipped(ratio_M: Tensor, advantage_M: Tensor, clip: float) -> Tensor:
    """bool[M]: tokens whose policy gradient the clip removes (the ratio left the range on the side that the
    advantage pushes to)."""
    return torch.where(advantage_M >= 0, ratio_M > 1 + clip, ratio_M < 1 - clip) & (advantage_M != 0)


def _chunk_losses(
    student: Head,
    hidden_CD: Tensor,
    ids_C: Tensor,
    temperature_C: Tensor | None,
    teacher: Head | None,
    teacher_CE: Tensor | None,
    kind: DivergenceKind,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    logits_CV = student.logits(hidden_CD)
    scaled_CV = logits_CV if temperature_C is None else logits_CV / temperature_C[:, None].to(logits_CV.dtype)
    logprob_C = scaled_CV.gather(1, ids_C[:, None])[:, 0] - scaled_CV.logsumexp(1)
    with torch.no_grad():
        log_p_CV = logits_CV.log_softmax(1)
        entropy_C = -(log_p_CV.exp() * log_p_CV).sum(1)
    if teacher is None or teacher_CE is None:
        return logprob_C, entropy_C, None, None
    with torch.no_grad():
        teacher_CV = teacher.logits(teacher_CE).to(logits_CV.dtype)
        logsumexp_C = teacher_CV.logsumexp(1)
    return logprob_C, entropy_C, divergence(logits_CV, teacher_CV, kind, beta), logsumexp_C


class _Divergence(torch.autograd.Function):
    """Value and, kept for the backward pass, gradient by the student's logits z:

    reverse_kl   p (log p - log q - D)
    forward_kl   p - q
    jsd          (1 - beta) p (c - sum_v p c),  c = log p - log m
    """

    @staticmethod
    def forward(ctx: Any, student_CV: Tensor, teacher_CV: Tensor, kind: DivergenceKind, beta: float) -> Tensor:
        log_p_CV, log_q_CV = student_CV.log_softmax(1), teacher_CV.log_softmax(1)
        p_CV = log_p_CV.exp()
        if kind == "reverse_kl":
            gap_CV = log_p_CV - log_q_CV
            value_C = (p_CV * gap_CV).sum(1)
            gradient_CV = p_CV * (gap_CV - value_C[:, None])
        elif kind == "forward_kl":
            q_CV = log_q_CV.exp()
            value_C = (q_CV * (log_q_CV - log_p_CV)).sum(1)
            gradient_CV = p_CV - q_CV
        else:
            q_CV = log_q_CV.exp()
            log_m_CV = torch.logaddexp(log_q_CV + math.log(beta), log_p_CV + math.log(1 - beta))
            gap_CV = log_p_CV - log_m_CV
            mean_C = (p_CV * gap_CV).sum(1)
            value_C = beta * (q_CV * (log_q_CV - log_m_CV)).sum(1) + (1 - beta) * mean_C
            gradient_CV = (1 - beta) * p_CV * (gap_CV - mean_C[:, None])
        ctx.save_for_backward(gradient_CV)
        return value_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weight_C: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_CV,) = ctx.saved_tensors
        return gradient_CV * weight_C[:, None], None, None, None
