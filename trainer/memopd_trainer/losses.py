"""What one pass over a pack's targets gives: the student's log-probabilities and its divergence from the teacher.

Nothing of size targets x vocabulary is ever held: targets go through both output heads in chunks, with one
float32 upcast a chunk (float64 stays float64), and each chunk is computed again in the backward pass. The
gradient reaches the student's states and its output head. Cost per target: three products with the student's
head when training (forward, again, backward), two with the teacher's where its states are the signal.

Shape legend: M targets (sampled tokens that are trained), C targets of one chunk, V real ids, K ids of a top-k,
D student width, E teacher width. All values are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memopd_scorer.head import Head
from memopd_scorer.signals import iter_chunks
from memopd_trainer.divergences import Kind, divergence, sampled_divergence, topk_divergence


class TeacherRows(NamedTuple):
    """What the teacher says of M targets, by one signal; the fields of the others are `None`."""

    hidden_ME: Tensor | None = None  # states; their divergence is at temperature 1
    topk_ids_MK: Tensor | None = None  # int64
    topk_logprobs_MK: Tensor | None = None
    tail_logprob_M: Tensor | None = None
    logprob_M: Tensor | None = None  # of the sampled id

    def each(self, change: Any) -> TeacherRows:
        """`change(tensor)` of every tensor that is there."""
        return TeacherRows(*(None if tensor is None else change(tensor) for tensor in self))


class Teacher(NamedTuple):
    """How the student is held against a teacher."""

    kind: Kind = "reverse_kl"
    beta: float = 0.5
    head: Head | None = None  # of the states, of the student's `size`
    temperature: float = 1.0  # at which top-k and sampled log-probabilities are; the student's are taken there too
    overlap_k: int | None = None  # with `head`: compare the k likeliest ids of both


class RowLosses(NamedTuple):
    """What one pass over the targets gives; `None` where nothing was asked for it."""

    logprob_M: Tensor  # of the sampled id, at the sampling temperature
    entropy_M: Tensor  # of the student at temperature 1, without gradient
    divergence_M: Tensor | None
    teacher_logsumexp_M: Tensor | None  # of the teacher's logits, as rebuilt: to be held against the stored one
    common_M: Tensor | None = None  # int64: how many of the k likeliest ids both have in common


def row_losses(
    student: Head,
    hidden_MD: Tensor,
    ids_M: Tensor,
    *,
    temperature_M: Tensor | None = None,
    teacher: Teacher | None = None,
    rows: TeacherRows | None = None,
) -> RowLosses:
    """Student log-probabilities, and the divergence from the teacher's distribution, of every target.

    Args:
        student: the head that the gradient flows into.
        hidden_MD: the student's post-final-norm state that predicts each target.
        ids_M: the sampled ids, below `student.size`.
        temperature_M: temperature of `logprob_M`; `None` = 1.
        teacher: the divergence that is wanted; needs `rows`, what the teacher says of the same targets.

    Returns:
        float32 (float64 where the head gives float64) vectors of length M, in nats.
    """
    if (teacher is None) != (rows is None):
        raise ValueError("a teacher and its rows come together")
    if teacher is not None and teacher.head is not None and teacher.head.size != student.size:
        raise ValueError(f"student head of {student.size} ids, teacher head of {teacher.head.size}")
    parts = []
    for start, stop in [*iter_chunks(len(ids_M), student.size)] or [(0, 0)]:
        part = slice(start, stop)
        arguments = (
            student,
            hidden_MD[part],
            ids_M[part],
            None if temperature_M is None else temperature_M[part],
            teacher,
            None if rows is None else rows.each(lambda tensor, part=part: tensor[part]),
        )
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk_losses, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk_losses(*arguments))
    logprobs, entropies, divergences, logsumexps, common = zip(*parts, strict=True)
    return RowLosses(torch.cat(logprobs), torch.cat(entropies), *map(_joined, (divergences, logsumexps, common)))


def clipped_policy_loss(ratio_M: Tensor, advantage_M: Tensor, clip: float, clip_high: float | None = None) -> Tensor:
    """-min(r A, clip(r, 1 - clip, 1 + clip_high) A) per token: the negated surrogate of Schulman et al., "Proximal
    Policy Optimization Algorithms" (arXiv 1707.06347), equation 7, where `clip_high` (`None`) is `clip`."""
    clamped_M = ratio_M.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    return -torch.minimum(ratio_M * advantage_M, clamped_M * advantage_M)


def is_clipped(ratio_M: Tensor, advantage_M: Tensor, clip: float, clip_high: float | None = None) -> Tensor:
    """bool[M]: tokens whose policy gradient the clip removes (the ratio left the range on the side that the
    advantage pushes to)."""
    high = clip if clip_high is None else clip_high
    return torch.where(advantage_M >= 0, ratio_M > 1 + high, ratio_M < 1 - clip) & (advantage_M != 0)


def topk_overlap(student_CV: Tensor, teacher_CV: Tensor, k: int) -> Tensor:
    """int64[C]: how many of the student's k likeliest ids are among the teacher's; k <= V."""
    own_CK, other_CK = (logits.topk(k, dim=1).indices for logits in (student_CV, teacher_CV))
    return (own_CK[:, :, None] == other_CK[:, None, :]).any(2).sum(1)


def _chunk_losses(
    student: Head,
    hidden_CD: Tensor,
    ids_C: Tensor,
    temperature_C: Tensor | None,
    teacher: Teacher | None,
    rows: TeacherRows | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    logits_CV = student.logits(hidden_CD)
    scaled_CV = logits_CV if temperature_C is None else logits_CV / temperature_C[:, None].to(logits_CV.dtype)
    logprob_C = _logprob(scaled_CV, ids_C)
    with torch.no_grad():
        log_p_CV = logits_CV.log_softmax(1)
        entropy_C = -(log_p_CV.exp() * log_p_CV).sum(1)
    if teacher is None or rows is None:
        return logprob_C, entropy_C, None, None, None
    return logprob_C, entropy_C, *_chunk_divergence(logits_CV, ids_C, teacher, rows)


def _chunk_divergence(
    logits_CV: Tensor, ids_C: Tensor, teacher: Teacher, rows: TeacherRows
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(divergence, log-sum-exp of the teacher's logits where they were rebuilt, ids in common where asked for)."""
    kind, like = teacher.kind, logits_CV.dtype
    if rows.logprob_M is not None:
        assert kind in ("k1", "k2", "k3", "advantage"), f"'{kind}' is no estimator from sampled tokens"
        logprob_C = _logprob(logits_CV / teacher.temperature, ids_C)
        return sampled_divergence(logprob_C, rows.logprob_M.to(like), kind), None, None
    assert kind in ("reverse_kl", "forward_kl", "jsd"), f"'{kind}' needs the sampled token's log-probability alone"
    if rows.topk_ids_MK is not None:
        assert rows.topk_logprobs_MK is not None and rows.tail_logprob_M is not None
        teacher_CK, tail_C = rows.topk_logprobs_MK.to(like), rows.tail_logprob_M.to(like)
        student_CV = logits_CV / teacher.temperature
        return topk_divergence(student_CV, rows.topk_ids_MK, teacher_CK, tail_C, kind, teacher.beta), None, None
    assert teacher.head is not None and rows.hidden_ME is not None
    with torch.no_grad():
        teacher_CV = teacher.head.logits(rows.hidden_ME).to(like)
        logsumexp_C = teacher_CV.logsumexp(1)
        common_C = None if teacher.overlap_k is None else topk_overlap(logits_CV, teacher_CV, teacher.overlap_k)
    return divergence(logits_CV, teacher_CV, kind, teacher.beta), logsumexp_C, common_C


def _joined(chunks: Sequence[Tensor | None]) -> Tensor | None:
    there = [chunk for chunk in chunks if chunk is not None]
    return torch.cat(there) if there else None


def _logprob(logits_CV: Tensor, ids_C: Tensor) -> Tensor:
    return logits_CV.gather(1, ids_C[:, None])[:, 0] - logits_CV.logsumexp(1)
