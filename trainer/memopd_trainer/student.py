"""The student: a model loaded to be trained, and how far it is from the stored teacher.

Shape legend: C targets of one chunk, R prediction rows, V real ids, D student width, E teacher width.
"""

from __future__ import annotations

import dataclasses
import os

import torch

from memopd_scorer.head import Head
from memopd_scorer.plan import Layout
from memopd_scorer.signals import iter_chunks
from memopd_scorer.teacher import LoadedModel, check_trace, load
from memopd_trace.errors import UsageError
from memopd_trace.schema import RECORDED
from memopd_trainer.batch import Rollouts, load_rollouts
from memopd_trainer.divergences import divergence
from memopd_trainer.packs import make_packs


def load_student(source: str | os.PathLike[str], rollouts: Rollouts, *, dtype: str, device: str) -> LoadedModel:
    """Load a folder or hub name, with gradients on and dropout off.

    Raises:
        InputError: it cannot be loaded, or its tokenizer is not the trace's.
        UsageError: a `.gguf` file, or an unknown dtype or device.
    """
    if os.fspath(source).endswith(".gguf"):
        raise UsageError(f"{source}: quantised weights cannot be trained", hint="save it as safetensors first")
    student = load(source, dtype=dtype, device=device)
    check_trace(rollouts.metadata, student)
    student.model.requires_grad_(True)
    return student


def evaluate_kl(
    model: str | os.PathLike[str] | LoadedModel,
    trace: str | os.PathLike[str],
    scores: str | os.PathLike[str],
    *,
    layout: Layout = "tree",
    dtype: str = "float32",
    device: str = "cpu",
    max_tokens: int = 8192,
    view: str = RECORDED,
) -> dict[str, float]:
    """Divergence between a model and the stored teacher, scored under `view`, on the trained tokens of a trace.

    Returns `reverse_kl` = D(model || teacher) and `forward_kl` = D(teacher || model), in nats per token, each
    token counting alike, and `tokens`.

    Raises:
        InputError: a fault of the model, the trace or the scores (see `memopd_trainer.batch.load_rollouts`).
        UsageError: the model is in training mode (dropout would be on), or an unknown dtype or device.
    """
    rollouts = load_rollouts(trace, scores, policy=False, view=view)
    if not isinstance(model, LoadedModel):
        model = load(model, dtype=dtype, device=device)
    check_trace(rollouts.metadata, model)
    return measure_kl(model, rollouts, layout, max_tokens)


@torch.no_grad()
def measure_kl(student: LoadedModel, rollouts: Rollouts, layout: Layout, max_tokens: int) -> dict[str, float]:
    """As `evaluate_kl`, for a student and rollouts with scores that were opened already."""
    assert rollouts.scores is not None
    device = student.head.weight_VD.device
    teacher = head_on(rollouts.scores.head(), device)
    reverse = forward = 0.0
    tokens = 0
    for train_pack in make_packs(rollouts, rollouts.groups, {}, layout=student.layout(layout), max_tokens=max_tokens):
        hidden_RD = student.states(train_pack.pack)
        assert train_pack.teacher is not None and train_pack.teacher.hidden_ME is not None
        logsumexps = []
        for start, stop in iter_chunks(len(train_pack.row_M), teacher.size):
            logits_CV = student.head.logits(hidden_RD[train_pack.row_M[start:stop].to(device)])
            teacher_CE = train_pack.teacher.hidden_ME[start:stop].to(device)
            teacher_CV = teacher.logits(teacher_CE).to(logits_CV.dtype)
            logsumexps.append(teacher_CV.logsumexp(1))
            reverse += float(divergence(logits_CV, teacher_CV, "reverse_kl").sum(dtype=torch.float64))
            forward += float(divergence(logits_CV, teacher_CV, "forward_kl").sum(dtype=torch.float64))
        train_pack.check_teacher(torch.cat(logsumexps))
        tokens += len(train_pack.row_M)
    return {"reverse_kl": reverse / tokens, "forward_kl": forward / tokens, "tokens": tokens}


def head_on(head: Head, device: torch.device) -> Head:
    """The head on another device."""
    bias_V = None if head.bias_V is None else head.bias_V.to(device)
    return dataclasses.replace(head, weight_VD=head.weight_VD.to(device), bias_V=bias_V)
