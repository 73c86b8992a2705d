"""Rollouts, checked and joined with their scores.

The trace is validated first (profile `policy` while the policy term is on, else `core`). A target is known by
its state and its index into `output_ids`, here as in the scorer's plan; the join looks each one up by that
key and refuses whatever does not belong: another state, another tokenizer, a missing score, a stored state
that does not give its stored log-probability. All of this is checked once, before the first step.

Shape legend: M trained tokens of an invocation.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memopd_scorer.scores import ScoreRow, ScoresReader
from memopd_trace.behaviour import Behaviour, behaviour_of
from memopd_trace.errors import InputError, UsageError, printable
from memopd_trace.invocation import IDS, Episode, Invocation
from memopd_trace.metadata import Tokenizer, TraceMetadata
from memopd_trace.places import Place
from memopd_trace.schema import RECORDED
from memopd_trace.storage import TraceReader
from memopd_trace.validate import require_valid
from memopd_trainer.advantages import trained_mask
from memopd_trainer.config import TeacherSignal

Group = Sequence[Episode]


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """A checked trace, in memory, and its scores, on disk."""

    groups: tuple[Group, ...]
    metadata: TraceMetadata  # the trace's, of the one model that is trained
    scores: ScoresReader | None
    signal: TeacherSignal  # what is taken from them
    policy: bool  # behaviour log-probabilities were checked, and are wanted in packs
    digest: str  # hex SHA-256 of everything of the trace that a step depends on

    @property
    def episodes(self) -> int:
        """Episodes in all groups."""
        return sum(len(g) for g in self.groups)

    @property
    def tokenizer(self) -> Tokenizer:
        """What the ids mean."""
        (model,) = self.metadata.models.values()
        return model.tokenizer

    @property
    def scores_digest(self) -> str | None:
        """What two runs must agree on to be trained on the same scores."""
        if self.scores is None:
            return None
        m = self.scores.metadata
        return f"{m.teacher.weights_digest} {m.view} {m.hidden_type} {m.plan_digest}"

    @property
    def data_digest(self) -> str:
        """Names the trace and the scores."""
        return f"{self.digest} {self.scores_digest}"


def load_rollouts(
    trace: str | os.PathLike[str],
    scores: str | os.PathLike[str] | None,
    *,
    policy: bool,
    view: str = RECORDED,
    signal: TeacherSignal = "hidden",
    leave_out_unscored: bool = False,
) -> Rollouts:
    """Read a trace, group its episodes, and check every row against the scores, which must be of `view` and hold
    `signal`. With `leave_out_unscored` a row that they do not hold is not trained, else it is refused.

    Raises:
        InputError: the trace is not valid (with the code of the first finding), the scores cannot be read, or
            `E-NO-TARGETS`, `E-TOKENIZER-MISMATCH`, `E-ID-PADDED`, `E-MODEL-UNSUPPORTED`, `E-SCORES-MISSING`,
            `E-SCORES-STATE`, `E-SCORES-CHECK`; with `policy` also `E-LOGPROB-KIND`.
        UsageError: the tokens to be trained are of several models, or the scores are of another view.
    """
    require_valid(trace, "policy" if policy else "core")
    reader = TraceReader(trace)
    groups = _grouped(reader.iter_episodes())
    store = None if scores is None else ScoresReader(scores)
    if store is not None and leave_out_unscored:
        groups = _scored(groups, store)
    invocations = [i for group in groups for e in group for i in e]
    trained = [i for i in invocations if trained_mask(i).any()]
    if not trained:
        raise InputError(
            f"{trace}: none of its {len(invocations)} invocations has a token to be trained",
            code="E-NO-TARGETS",
        )
    model_id = _one_model(reader.path, trained)
    model = reader.metadata.models[model_id]
    metadata = reader.metadata.model_copy(update={"models": {model_id: model}})
    if store is not None:
        _check_view(store, view)
        _check_teacher(store, model.tokenizer)
    for invocation in trained:
        _check_ids(invocation, model.tokenizer)
        if store is not None:
            row = score_row(store, invocation, signal)
            _verify(store, row, invocation.output_ids[row.output_index])
        if policy:
            behaviour_row(invocation)
    return Rollouts(groups, metadata, store, signal, policy, _digest(groups, policy))


def _grouped(episodes: Iterable[Episode]) -> tuple[Group, ...]:
    """Episodes by what they are compared by, in order of first appearance."""
    groups: dict[tuple[str, str], list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_key, []).append(episode)
    return tuple(tuple(group) for group in groups.values())


def _scored(groups: Sequence[Group], store: ScoresReader) -> tuple[Group, ...]:
    """The same groups, without a loss on rows that have no score."""

    def masked(invocation: Invocation) -> Invocation:
        if store.get(*invocation.key) is not None:
            return invocation
        return invocation.replace(output_loss_mask=np.zeros(len(invocation.output_ids), bool))

    return tuple(tuple(Episode(e.episode_id, tuple(map(masked, e))) for e in group) for group in groups)


def _digest(groups: Sequence[Group], policy: bool) -> str:
    """Names what training takes from a trace: the rows and their order, states and tokens, what each episode is
    compared by, which tokens get a loss, what must not share a prefix; with `policy` also rewards and behaviour."""
    h = hashlib.sha256()
    for episode in (e for group in groups for e in group):
        for invocation in episode:
            mask, routes = trained_mask(invocation), invocation.routed_experts
            said: list[object] = [episode.group_key, *invocation.key, invocation.model_id]
            said.append(None if routes is None else hashlib.sha256(routes.astype("<i2").tobytes()).hexdigest())
            logprobs = np.empty(0)
            if policy:
                said.append(invocation.reward)
                if mask.any():
                    behaviour = behaviour_row(invocation)
                    said.append(behaviour.temperature)
                    logprobs = behaviour.logprobs[mask]
            h.update(repr(said).encode() + invocation.compute_digest() + mask.tobytes())
            h.update(logprobs.astype("<f8").tobytes())
    return h.hexdigest()


def _one_model(path: Place, invocations: Sequence[Invocation]) -> str:
    """The `model_id` that all trained rows share."""
    counts = Counter(i.model_id for i in invocations)
    if len(counts) > 1:
        listed = ", ".join(f"{count} of '{model}'" for model, count in counts.items())
        raise UsageError(
            f"{path}: rows to be trained are of several models ({listed}); one run trains one policy",
            hint="split the trace by model, or mask the rows of the others out (output_loss_mask)",
        )
    return next(iter(counts))


def behaviour_row(invocation: Invocation) -> Behaviour:
    """The behaviour of a trained invocation, which a ratio can be taken with."""
    behaviour = behaviour_of(invocation)
    if behaviour.reason is not None:
        raise InputError(
            f"{invocation.name}: {behaviour.reason}",
            code="E-LOGPROB-KIND",
            hint="record raw ones, or set ppo.weight=0",
        )
    return behaviour


def _check_ids(invocation: Invocation, tokenizer: Tokenizer) -> None:
    """Refuse what the losses cannot take: a token of the padded vocabulary has no probability under a head
    that is cut to the real ids, and media are not fed to a student."""
    if invocation.media:
        raise InputError(f"{invocation.name}: holds media", code="E-MODEL-UNSUPPORTED")
    ids = invocation.output_ids[trained_mask(invocation)]
    if ids.max() >= tokenizer.size:
        raise InputError(
            f"{invocation.name}: trained id {ids.max()}, the tokenizer has {tokenizer.size}",
            code="E-ID-PADDED",
            hint="take it out of output_loss_mask",
        )


def _check_view(store: ScoresReader, wanted: str) -> None:
    scored = store.metadata.view
    if scored != wanted:
        raise UsageError(
            f"{store.folder}: scored under the view '{printable(scored)}', to be trained on is '{printable(wanted)}'",
            hint="a teacher that read another prompt is taken only when `view` names it; or score the trace again",
        )


def _check_teacher(store: ScoresReader, tokenizer: Tokenizer) -> None:
    teacher = store.metadata.teacher
    if teacher.tokenizer_fingerprint != tokenizer.fingerprint or teacher.head.size != tokenizer.size:
        raise InputError(
            f"{store.folder}: scored with tokenizer {teacher.tokenizer_fingerprint[:16]} "
            f"({teacher.head.size} ids), the trace has {tokenizer.fingerprint[:16]} ({tokenizer.size} ids)",
            code="E-TOKENIZER-MISMATCH",
            hint="a teacher must share the student's tokenizer",
        )


def score_row(store: ScoresReader, invocation: Invocation, signal: TeacherSignal) -> ScoreRow:
    """The score row of an invocation, checked to be of its state and to hold every trained target."""
    where = f"{store.folder}: {invocation.name}"
    row = store.get(*invocation.key)
    again = "score the trace again"
    held = None if row is None else {"hidden": row.hidden, "topk": row.topk_ids, "sampled": row.logprob}[signal]
    if row is None or held is None:
        what = "no score" if row is None else f"a score without the signal '{signal}'"
        raise InputError(f"{where}: {what}", code="E-SCORES-MISSING", hint=again)
    digest = invocation.compute_digest()
    if row.state_digest != digest:
        raise InputError(
            f"{where}: scored in state {row.state_digest.hex()[:16]}, sampled in {digest.hex()[:16]}",
            code="E-SCORES-STATE",
            hint=again,
        )
    if len(row.output_index) and not 0 <= row.output_index.min() <= row.output_index.max() < len(invocation.output_ids):
        raise InputError(
            f"{where}: scored outputs {row.output_index.min()} to {row.output_index.max()} of "
            f"{len(invocation.output_ids)}",
            code="E-SCORES-STATE",
            hint=again,
        )
    missing = np.setdiff1d(np.flatnonzero(trained_mask(invocation)), row.output_index)
    if len(missing):
        raise InputError(
            f"{where}: output {missing[0]} is trained and has no score ({len(missing)} such)",
            code="E-SCORES-MISSING",
            hint=again,
        )
    return row


def _verify(store: ScoresReader, row: ScoreRow, ids_M: IDS) -> None:
    """Check what will not be checked when it is trained on, where logits are at temperature 1."""
    if store.metadata.temperature == 1.0:
        store.verify(row, ids_M)
        return
    for _ in store.logprobs(row, ids_M):
        pass
