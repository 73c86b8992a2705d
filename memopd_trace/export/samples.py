"""Rows of a trace as samples: what is trained, by which log-probabilities, and what the target must not be given.

A state that a target would judge as another one is refused by name, or where the caller says so flattened or left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from memopd_trace.behaviour import behaviour_of
from memopd_trace.errors import InputError, printable
from memopd_trace.export.format import FLOATS, Format, Sample
from memopd_trace.export.losses import IMPLIED, WHY, Losses, says
from memopd_trace.export.scores import Scores
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.schema import TRACE_COLUMNS

# features of a state, and the columns that have them
STATE: Mapping[str, tuple[str, ...]] = {
    "positions": ("position_ids",),
    "visibility": ("visible_from", "visible_until"),
    "slots": ("output_slots",),
    "media": ("media",),
}
TEMPERATURE = "temperature"  # of the teacher, if it is not 1
FEATURES: Mapping[str, str] = {
    "positions": "explicit positions are taken for 0…n-1",
    "visibility": "eviction and bidirectional blocks are taken for plain causal attention",
    "slots": "rows of in-place generation are left out",
    "media": "placeholder ids stand without their media",
    TEMPERATURE: "a teacher's log-probabilities of another temperature are taken for those of 1",
}
FLOAT32_MAX = float(np.finfo(np.float32).max)
GROUP = {"group": "group_id", "task": "task_id"}


def samples(
    chosen: Format, episodes: Iterator[Episode], scores: Scores | None, dropped: Collection[str], losses: Losses
) -> Iterator[Sample]:
    """The rows that the target gets, in the order of the trace; everything else is counted.

    Raises:
        InputError: a state that the target would judge as another one, or scores that are not of a row.
    """
    for episode in episodes:
        kind, group = episode.group_key
        for invocation in episode:
            losses.rows += 1
            if chosen.lossless:
                yield Sample(invocation, invocation.loss_mask(), None, None, group, episode.episode_return, None)
                continue
            check_state(chosen, invocation, dropped)
            reason = _unfit(invocation)
            teacher = None if scores is None or reason else scores.teacher_of(invocation)
            if not reason and chosen.needs_scores and teacher is None:
                reason = "not scored"
            if reason:
                losses.leave_out(reason, invocation)
                continue
            invocation = _with_reward(chosen, invocation, losses)
            mask = invocation.loss_mask()
            logprobs, temperature = _behaviour(chosen, invocation, mask, losses)
            sample = Sample(invocation, mask, logprobs, temperature, group, episode.episode_return, teacher)
            _count(chosen, sample, scores, GROUP.get(kind), losses)
            yield sample


def check_state(chosen: Format, invocation: Invocation, dropped: Collection[str]) -> None:
    """Raises:
    InputError: the row has a feature of a state that the target has no word for, and that is not dropped.
    """
    for feature, columns in STATE.items():
        for name in columns:
            if feature not in dropped and not chosen.carries(name) and says(invocation, name):
                raise InputError(
                    f"{invocation.name}: {name} is part of its state, and {chosen.name} has no place for it",
                    hint=f"--drop {feature}: {FEATURES[feature]}",
                )


def _unfit(invocation: Invocation) -> str:
    """Why a row is not for a trainer, or nothing."""
    if invocation.accepted is False:
        return "a rejected attempt: never trained on"
    if invocation.output_slots is not None:
        return "generated in place: its outputs are not appended (--drop slots)"
    if not len(invocation.prompt_ids):
        return "an empty prompt: nothing predicts its first token"
    return "" if len(invocation.output_ids) else "an empty output"


def _behaviour(
    chosen: Format, invocation: Invocation, mask: np.ndarray, losses: Losses
) -> tuple[FLOATS | None, float | None]:
    sampling = invocation.sampling
    temperature = None if sampling is None else sampling.temperature
    if invocation.output_logprobs is None or not chosen.carries("output_logprobs"):
        return None, temperature
    behaviour = behaviour_of(invocation)
    if behaviour.reason is not None:
        losses.lose("output_logprobs", f"left null: {printable(behaviour.reason)}", invocation)
        return None, temperature
    return np.where(mask, behaviour.logprobs, 0.0).astype(np.float32), behaviour.temperature


def _with_reward(chosen: Format, invocation: Invocation, losses: Losses) -> Invocation:
    """The row, without a reward that is infinite in the target's type."""
    if invocation.reward is None or abs(invocation.reward) <= FLOAT32_MAX:
        return invocation
    if not any("float32" in f.type_name for f in chosen.fields if "reward" in f.of):
        return invocation
    losses.lose("reward", "left null: it is beyond float32", invocation)
    return invocation.replace(reward=None)


def _count(chosen: Format, sample: Sample, scores: Scores | None, grouped_by: str | None, losses: Losses) -> None:
    """What this row loses on the way."""
    invocation = sample.invocation
    for column in TRACE_COLUMNS:
        name = column.name
        if name in WHY and name not in IMPLIED and not chosen.carries(name) and says(invocation, name):
            if name == grouped_by and chosen.carries("group_id"):
                continue
            losses.lose(name, WHY[name], invocation)
    if scores is None:
        return
    if sample.teacher is None:
        losses.lose("scores", "not scored: what is of the teacher is left null", invocation)
        return
    if sample.full_teacher is None and not chosen.needs_scores:
        losses.lose("scores", "a trained token is not scored: what is of the teacher is left null", invocation)
    for name, why in scores.lacking(chosen):
        losses.lose(f"scores.{name}", why, invocation)
