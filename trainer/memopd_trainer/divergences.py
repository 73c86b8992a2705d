"""How far the student's next-token distribution p is from the teacher's q, by what is known of q.

    over the whole vocabulary          `divergence`         from the teacher's states
    over K ids and all others as one   `topk_divergence`    from its top-k and the mass of the rest
    at the sampled token alone         `sampled_divergence` from its log-probability

Each value is in nats, each gradient goes to the student alone.

Shape legend: C targets of one chunk, V real ids, K chosen ids.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DivergenceKind = Literal["reverse_kl", "forward_kl", "jsd"]
SampledKind = Literal["k1", "k2", "k3", "advantage"]
Kind = Literal[DivergenceKind, SampledKind]


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


def topk_divergence(
    student_CV: Tensor,
    ids_CK: Tensor,
    teacher_CK: Tensor,
    tail_C: Tensor,
    kind: DivergenceKind,
    beta: float = 0.5,
) -> Tensor:
    """`divergence` over K + 1 outcomes: each of the K distinct `ids_CK`, and any other id.

    Merging outcomes never raises a divergence of this family, so the value is at most that over the whole
    vocabulary, and equal to it where K = V or where p and q share out the rest alike.

    Args:
        student_CV: logits.
        ids_CK: int64, the ids that the teacher's values are of, whoever chose them.
        teacher_CK: the teacher's log-probabilities of these ids, nats.
        tail_C: the teacher's log-probability of all other ids together, nats.
        kind: see `divergence`.
        beta: see `divergence`.
    """
    log_p_CV = student_CV.log_softmax(1)
    chosen_CK = log_p_CV.gather(1, ids_CK)
    if ids_CK.shape[1] == student_CV.shape[1]:  # no id is left for a tail
        return divergence(chosen_CK, teacher_CK, kind, beta)
    rest_C = log_p_CV.scatter(1, ids_CK, -math.inf).logsumexp(1)  # summed, not subtracted from 1
    student = torch.cat([chosen_CK, rest_C[:, None]], 1)
    return divergence(student, torch.cat([teacher_CK, tail_C[:, None]], 1), kind, beta)


def sampled_divergence(logprob_C: Tensor, teacher_C: Tensor, kind: SampledKind) -> Tensor:
    """Estimators of D(student || teacher) from tokens v that the student sampled, with g = log p(v) - log q(v):

        k1   g               its gradient is g times that of log p(v): the score-function estimator
        k2   g^2 / 2         biased; the gradient is that of k1
        k3   e^-g - 1 + g    unbiased and never negative
        advantage            the value of k1; what is trained on is -g of the policy that sampled, as an advantage in
                             the clipped policy loss (`memopd_trainer.objective`)

    Averaged over v ~ p, the gradients of k1 and k2 are that of reverse_kl; that of k3 is that of forward_kl.
    The estimators are those of Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html, 2020).
    """
    gap_C = logprob_C - teacher_C
    if kind in ("k1", "advantage"):
        return gap_C.detach() * (1 + logprob_C - logprob_C.detach())
    if kind == "k2":
        return gap_C.square() / 2
    return torch.expm1(-gap_C) + gap_C


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
