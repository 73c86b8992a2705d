"""The student: loaded with its live output head, probed for the layout it is exact in, and measured.

Shape legend: C targets of one chunk, R prediction rows, V real ids, D student width, E teacher width.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from memopd_scorer.attention import Backend, states_at_rows
from memopd_scorer.plan import Layout, Pack
from memopd_scorer.signals import Head, head_of
from memopd_scorer.teacher import load_model, load_tokenizer, probe
from memopd_trace.errors import InputError, UsageError
from memopd_trace.metadata import Tokenizer
from memopd_trainer.batch import Rollouts, load_rollouts, make_packs
from memopd_trainer.losses import divergence, iter_chunks


@dataclass(frozen=True, slots=True, eq=False)
class Student:
    """A model in eval mode (no dropout), its live output head, and the layout it is exact in (and why)."""

    model: PreTrainedModel
    head: Head
    layout: Layout
    reason: str
    backend: Backend

    @property
    def device(self) -> torch.device:
        """Where its head is."""
        return self.head.weight_VD.device

    def states(self, pack: Pack) -> Tensor:
        """hidden_RD at a pack's prediction rows, differentiable, in the model's dtype.

        Raises:
            InputError: `E-MODEL-UNSUPPORTED` for recorded positions or visibility that the model cannot run.
        """
        if self.backend == "native" and not pack.is_plain:
            raise InputError(
                f"{type(self.model).__name__} cannot run recorded positions or visibility: {self.reason}",
                code="E-MODEL-UNSUPPORTED",
                hint="such rows need a student with plain attention",
            )
        return states_at_rows(self.model, pack, backend=self.backend)


def student_of(model: PreTrainedModel, size: int, layout: Layout = "tree") -> Student:
    """Probe a model and take its head, cut to `size` real ids; `layout` turns to `single` where it must.

    Raises:
        UsageError: the model is in training mode (dropout would be on).
        InputError: its head cannot be used.
    """
    if any(m.training for m in model.modules()):
        raise UsageError("the model is in training mode", hint="call model.eval() first")
    head = head_of(model, size)
    capability = probe(model, head)
    backend: Literal["sdpa", "native"] = "sdpa" if capability.layout == "tree" else "native"
    return Student(model, head, layout if backend == "sdpa" else "single", capability.reason, backend)


def load_student(
    source: str | os.PathLike[str], tokenizer: Tokenizer, *, dtype: str, device: str, layout: Layout
) -> Student:
    """Load a folder or hub name, with gradients on and dropout off.

    Raises:
        InputError: it cannot be loaded, or its tokenizer is not the trace's.
        UsageError: a `.gguf` file, or an unknown dtype or device.
    """
    if os.fspath(source).endswith(".gguf"):
        raise UsageError(f"{source}: quantised weights cannot be trained", hint="save it as safetensors first")
    model = load_model(source, dtype=dtype, device=device)
    theirs = load_tokenizer(source, vocab_size=model.get_input_embeddings().weight.shape[0])
    if theirs.fingerprint != tokenizer.fingerprint or theirs.size != tokenizer.size:
        raise InputError(
            f"{source}: has tokenizer {theirs.fingerprint} ({theirs.size} ids), the trace has "
            f"{tokenizer.fingerprint} ({tokenizer.size} ids)",
            code="E-TOKENIZER-MISMATCH",
            hint="train the student that sampled the trace",
        )
    model.requires_grad_(True)
    return student_of(model, tokenizer.size, layout)


def evaluate_kl(
    model: PreTrainedModel,
    trace: str | os.PathLike[str],
    scores: str | os.PathLike[str],
    *,
    layout: Layout = "tree",
    max_tokens: int = 8192,
) -> dict[str, float]:
    """Divergence between a model and the stored teacher on the trained tokens of a trace.

    Returns `reverse_kl` = D(model || teacher) and `forward_kl` = D(teacher || model), in nats per token, each
    token counting alike, and `tokens`.

    Raises:
        InputError: a fault of the trace or the scores (see `memopd_trainer.batch.load_rollouts`).
        UsageError: the model is in training mode (dropout would be on).
    """
    rollouts = load_rollouts(trace, scores, policy=False)
    return measure_kl(student_of(model, rollouts.tokenizer.size, layout), rollouts, max_tokens)


@torch.no_grad()
def measure_kl(student: Student, rollouts: Rollouts, max_tokens: int) -> dict[str, float]:
    """As `evaluate_kl`, for a student and rollouts with scores that were opened already."""
    assert rollouts.scores is not None
    teacher = head_on(rollouts.scores.head(), student.device)
    reverse = forward = 0.0
    tokens = 0
    for train_pack in make_packs(rollouts, rollouts.groups, {}, layout=student.layout, max_tokens=max_tokens):
        hidden_RD = student.states(train_pack.pack)
        assert train_pack.teacher_ME is not None
        for start, stop in iter_chunks(len(train_pack.row_M), teacher.size):
            logits_CV = student.head.logits(hidden_RD[train_pack.row_M[start:stop].to(student.device)])
            teacher_CE = train_pack.teacher_ME[start:stop].to(student.device)
            teacher_CV = teacher.logits(teacher_CE).to(logits_CV.dtype)
            reverse += float(divergence(logits_CV, teacher_CV, "reverse_kl").sum(dtype=torch.float64))
            forward += float(divergence(logits_CV, teacher_CV, "forward_kl").sum(dtype=torch.float64))
        tokens += len(train_pack.row_M)
    return {"reverse_kl": reverse / tokens, "forward_kl": forward / tokens, "tokens": tokens}


def head_on(head: Head, device: torch.device) -> Head:
    """The head on another device."""
    bias_V = None if head.bias_V is None else head.bias_V.to(device)
    return dataclasses.replace(head, weight_VD=head.weight_VD.to(device), bias_V=bias_V)
