"""The student's choice of ids: what a student finds most probable where a teacher is asked.

On-policy distillation compares the two where the student looks, and a student looks from the state in which it sampled.
It is therefore always run in the recorded state, whatever view the teacher reads; the teacher's log-probabilities are
stored at the student's best ids.

Shape legend: R prediction rows, M targets, K chosen ids.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from memopd_scorer.plan import Pack, plan_states
from memopd_scorer.precision import dtype_name
from memopd_scorer.signals import check_finite, iter_chunks
from memopd_scorer.teacher import LoadedModel
from memopd_trace.errors import UsageError
from memopd_trace.metadata import StudentInfo
from memopd_trace.record.fingerprint import config_digest, weights_digest


def check_choice(signals: tuple[str, ...]) -> None:
    """Refuse to ask a student whose choice would not be used.

    Raises:
        UsageError: without the signal `topk`.
    """
    if "topk" not in signals:
        raise UsageError("ids of a student's choice, without the signal topk", hint="add it: --signal sampled,topk")


@torch.no_grad()
def chosen_ids(student: LoadedModel, pack: Pack, topk: int, pass_tokens: int | None = None) -> Tensor:
    """int64 [M, K], on the CPU: the ids that a student finds most probable in place of each target of a pack, best
    first, in the state in which it was sampled.

    The pack itself is run where it is of those states and the student is exact in it, in passes of at most
    `pass_tokens` tokens; else a plan of their own.

    Raises:
        InputError: `E-NONFINITE` when the student has no finite distribution, or as `LoadedModel.states`.
    """
    states = [state.recorded or state for state in pack.states]
    layout = student.layout("tree")
    packs: Iterable[Pack] = [pack]
    if any(state.recorded for state in pack.states) or not (layout == "tree" or pack.is_plain):
        packs = plan_states([states], layout=layout, max_tokens=min(len(pack), pass_tokens or len(pack)))
    ids_MK = torch.full((len(pack.target_ids_M), min(topk, student.head.size)), -1)
    places = {state.key: np.flatnonzero(pack.target_state_M == n) for n, state in enumerate(pack.states)}
    for own in packs:
        best_RK = _best(student, own, topk, pass_tokens)
        for n, state in enumerate(own.states):
            mine, theirs = np.flatnonzero(own.target_state_M == n), places[state.key]
            _, at, there = np.intersect1d(own.target_output_M[mine], pack.target_output_M[theirs], return_indices=True)
            ids_MK[torch.from_numpy(theirs[there])] = best_RK[torch.from_numpy(own.target_row_M[mine[at]]).long()]
    assert bool((ids_MK >= 0).all()), "a valid trace has no target under a view that is none in its recorded state"
    return ids_MK


def describe_student(student: LoadedModel) -> StudentInfo:
    """The student as the scores' metadata states it."""
    return StudentInfo(
        name=student.name,
        dtype=dtype_name(student.model.dtype),
        weights_digest=weights_digest(student.model),
        config_digest=config_digest(student.model),
    )


def _best(student: LoadedModel, pack: Pack, topk: int, pass_tokens: int | None) -> Tensor:
    """int64 [R, K], on the CPU."""
    head, done = student.head.upcast(), 0
    k = min(topk, head.size)
    found = [torch.empty((0, k), dtype=torch.int64)]
    for hidden_RD in student.iter_states(pack, pass_tokens):
        for start, stop in iter_chunks(len(hidden_RD), head.size):
            logits = head.logits(hidden_RD[start:stop])
            what = f"a logit of the student '{student.name}' is not finite"
            check_finite(logits.logsumexp(-1), pack, done + start, what)
            found.append(logits.topk(k, dim=-1).indices.cpu())
        done += len(hidden_RD)
    return torch.cat(found)
