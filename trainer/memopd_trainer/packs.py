"""The packs of one training step: the scorer's plan over the step's states, and what their trained targets need.

Only invocations with a trained token are packed, and only trained tokens become targets: everything else has neither
loss nor gradient.

Shape legend: M trained targets of a pack, R prediction rows, K ids of a top-k, E teacher width, N outputs of an
invocation.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memopd_scorer.plan import Layout, Pack, plan_states
from memopd_scorer.scores import ScoreRow
from memopd_scorer.states import State, state_of
from memopd_trace.errors import InputError, printable
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.schema import RECORDED
from memopd_trace.views import persistent_history, under_prompt
from memopd_trainer.advantages import token_weights, trained_mask
from memopd_trainer.batch import Group, Rollouts, behaviour_row, score_row
from memopd_trainer.config import StudentView, TeacherSignal
from memopd_trainer.losses import TeacherRows

Key = tuple[str, int]  # (episode_id, invocation_index)


class Credit(NamedTuple):
    """What a critic says of one invocation, over its N outputs; only those that are trained are read."""

    advantage_N: NDArray[np.float64]
    return_N: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TrainPack:
    """A pack and what its trained targets need; tensors are on the CPU."""

    pack: Pack
    state_M: NDArray[np.int64]  # index into pack.states
    output_M: NDArray[np.int64]  # index into the state's output_ids
    row_M: Tensor  # int64, index into rows_R
    ids_M: Tensor  # int64
    weight_M: Tensor  # float64, sums to 1 over the packs of a step
    advantage_M: Tensor  # float64
    return_M: Tensor | None  # float64, what a critic's values are trained towards
    behaviour_M: Tensor | None  # float64 nats, see `memopd_trace.behaviour`; None = no policy term
    temperature_M: Tensor | None  # float64, None = 1 throughout
    teacher: TeacherRows | None  # states in the teacher's dtype (float32 where stored in a tier), or float32 nats
    teacher_logsumexp_M: Tensor | None  # float32 nats, stored: what these states and the teacher's head must give
    tolerance: float  # nats, of that
    teacher_logprob_M: Tensor | None = None  # float32 nats, of the sampled id, at the temperature of the scores

    @property
    def episode_ids(self) -> tuple[str, ...]:
        """The episodes of its states, each once."""
        return tuple(dict.fromkeys(s.episode_id for s in self.pack.states))

    def check_teacher(self, logsumexp_M: Tensor) -> None:
        """Hold the log-sum-exp of the rebuilt teacher's logits against the stored one, for every target: the whole
        vocabulary is there anyway when it is trained on.

        Raises:
            InputError: `E-SCORES-CHECK`.
        """
        if self.teacher_logsumexp_M is None:
            return
        off_M = (logsumexp_M.detach().cpu().double() - self.teacher_logsumexp_M).abs()
        if bool((off_M <= self.tolerance).all()):
            return
        raise InputError(
            f"stored states of {', '.join(map(printable, self.episode_ids[:3]))} do not give their log-sum-exp, off "
            f"by up to {float(off_M.nan_to_num(torch.inf).max()):.2e} nats (limit {self.tolerance:.2g})",
            code="E-SCORES-CHECK",
            hint="these scores are not of this head and these states; score again",
        )


def make_packs(
    rollouts: Rollouts,
    groups: Sequence[Group],
    advantages: Mapping[str, float],
    *,
    credit: Mapping[Key, Credit] | None = None,
    chosen: Container[Key] | None = None,
    view: StudentView = "recorded",
    share: Callable[[Iterable[Pack]], Iterable[Pack]] = iter,
    layout: Layout = "tree",
    max_tokens: int = 8192,
) -> Iterator[TrainPack]:
    """The packs of one step over `groups`; the weights of all their targets sum to 1.

    `advantages` maps episode ids (a missing one has 0), `credit` takes their place token by token; states are planned
    exactly as for scoring, under `view`; `chosen` are the invocations to be trained (`None` = all); `share` picks the
    packs that are wanted.

    Raises:
        UsageError: `persistent-history` of a row of in-place generation.
    """
    weights = token_weights(groups, chosen)
    by_key = {
        i.key: i
        for group in groups
        for e in group
        for i in e
        if trained_mask(i).any() and (chosen is None or i.key in chosen)
    }
    states = [[s for e in group for s in _states(e, by_key, view, rollouts.tokenizer.size)] for group in groups]
    for pack in share(plan_states(states, layout=layout, max_tokens=max_tokens)):
        yield _join(rollouts, pack, by_key, weights, advantages, credit)


def _states(episode: Episode, wanted: Container[Key], view: StudentView, size: int) -> Iterator[State]:
    """The states of an episode's wanted invocations; one under another view keeps the digest of its row."""
    if view == RECORDED:
        yield from (state_of(i, vocabulary=size) for i in episode if i.key in wanted)
        return
    for invocation, prompt in zip(episode, persistent_history(episode), strict=True):
        if invocation.key in wanted:
            viewed = under_prompt(invocation, prompt).replace(state_digest=invocation.compute_digest())
            yield replace(state_of(viewed, vocabulary=size), view_digest=viewed.compute_digest())


def _join(
    rollouts: Rollouts,
    pack: Pack,
    by_key: Mapping[Key, Invocation],
    weights: Mapping[str, float],
    advantages: Mapping[str, float],
    credit: Mapping[Key, Credit] | None,
) -> TrainPack:
    """Look up everything the trained targets of a pack need."""
    targets, weight, advantage, returns, behaviour, temperature, logsumexp, logprob = ([] for _ in range(8))
    teacher: list[TeacherRows] = []
    for number, state in enumerate(pack.states):
        invocation = by_key[state.episode_id, state.invocation_index]
        own = np.flatnonzero(pack.target_state_M == number)
        own = own[trained_mask(invocation)[pack.target_output_M[own]]]
        outputs = pack.target_output_M[own]
        targets.append(own)
        weight.append(np.full(len(own), weights[state.episode_id]))
        if credit is None:
            advantage.append(np.full(len(own), advantages.get(state.episode_id, 0.0)))
        else:
            advantage.append(credit[invocation.key].advantage_N[outputs])
            returns.append(credit[invocation.key].return_N[outputs])
        if rollouts.policy:
            own_behaviour = behaviour_row(invocation)
            behaviour.append(own_behaviour.logprobs[outputs])
            temperature.append(np.full(len(own), own_behaviour.temperature))
        if rollouts.scores is not None:
            row = score_row(rollouts.scores, invocation, rollouts.signal)
            place = np.empty(len(invocation.output_ids), np.int64)
            place[row.output_index] = np.arange(len(row.output_index))
            teacher.append(_teacher_rows(row, rollouts.signal, place[outputs]))
            logprob.append(row.logprob[place[outputs]])
            logsumexp.append((row.logsumexp if row.hidden_logsumexp is None else row.hidden_logsumexp)[place[outputs]])
    chosen = np.concatenate(targets)
    degrees = np.concatenate(temperature) if rollouts.policy else np.ones(1)
    run = None if rollouts.scores is None else rollouts.scores.metadata
    is_held = run is not None and rollouts.signal == "hidden" and run.temperature == 1.0
    return TrainPack(
        pack=pack,
        state_M=pack.target_state_M[chosen].astype(np.int64),
        output_M=pack.target_output_M[chosen].astype(np.int64),
        row_M=_int64(pack.target_row_M[chosen]),
        ids_M=_int64(pack.target_ids_M[chosen]),
        weight_M=torch.from_numpy(np.concatenate(weight)),
        advantage_M=torch.from_numpy(np.concatenate(advantage)),
        return_M=None if credit is None else torch.from_numpy(np.concatenate(returns)),
        behaviour_M=torch.from_numpy(np.concatenate(behaviour)) if rollouts.policy else None,
        temperature_M=torch.from_numpy(degrees) if (degrees != 1.0).any() else None,
        teacher=None if run is None else _joined(teacher),
        teacher_logsumexp_M=torch.from_numpy(np.concatenate(logsumexp)) if is_held else None,
        tolerance=0.0 if run is None else run.tolerance,
        teacher_logprob_M=None if run is None else torch.from_numpy(np.concatenate(logprob)),
    )


def _teacher_rows(row: ScoreRow, signal: TeacherSignal, places: NDArray[np.int64]) -> TeacherRows:
    """The rows of some targets; `_score_row` has refused a row without the signal."""
    if signal == "hidden":
        assert row.hidden is not None
        return TeacherRows(hidden_ME=row.hidden[torch.from_numpy(places)])
    if signal == "sampled":
        return TeacherRows(logprob_M=torch.from_numpy(row.logprob[places]))
    assert row.topk_ids is not None and row.topk_logprobs is not None and row.tail_logprob is not None
    return TeacherRows(
        topk_ids_MK=_int64(row.topk_ids[places]),
        topk_logprobs_MK=torch.from_numpy(row.topk_logprobs[places]),
        tail_logprob_M=torch.from_numpy(row.tail_logprob[places]),
    )


def _joined(rows: Sequence[TeacherRows]) -> TeacherRows:
    return TeacherRows(*(None if part[0] is None else torch.cat(part) for part in zip(*rows, strict=True)))


def _int64(array: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
