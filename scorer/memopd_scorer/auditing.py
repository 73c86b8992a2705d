"""Is the recorded state the true one? Recompute the behaviour log-probabilities and compare.

Under the recorded state they must come out again, to rounding; where they do not, the trace does not say in which
state its tokens were sampled. `against="persistent-history"` scores the same tokens under the flattened history as
well, and so measures what misaligned scoring would cost at identical weights.

What is compared is `memopd_trace.behaviour.behaviour_of`: whole-vocabulary numbers at the temperature they include.

    false clip      |exp(recomputed - recorded) - 1| > epsilon: PPO would clip a token that nothing has changed

Shape legend: M targets, R prediction rows, V vocabulary (real ids).
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memopd_scorer.plan import Layout, Pack, iter_groups, plan_states
from memopd_scorer.signals import iter_chunks
from memopd_scorer.states import state_of
from memopd_scorer.teacher import LoadedModel, check_trace, load
from memopd_trace.behaviour import behaviour_of
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.schema import RECORDED
from memopd_trace.storage import TraceReader
from memopd_trace.validate import require_valid
from memopd_trace.views import PERSISTENT_HISTORY, persistent_history, under_prompt

CLIP_EPSILON = 0.2
LAGS = (-1, 0, 1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Recomputed against recorded log-probabilities over `tokens` tokens; differences in nats.
    `false_clip_rate` is a share of the tokens."""

    tokens: int
    max_abs: float
    p99_abs: float
    mean_abs: float
    false_clip_rate: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found. `by_*` split the recorded-state comparison; `against` is the other view's, with the number
    of tokens whose most likely id changed (`top1_flips`). `lag` is the shift of the recorded arrays that fits best:
    anything but 0 is an off-by-one in the log."""

    model: str
    probe: str
    recorded: Comparison
    lag: int
    by_segment_kind: dict[str, Comparison]
    by_policy_version: dict[str, Comparison]
    skipped_tokens: int
    against: Comparison | None
    top1_flips: int | None

    def to_json(self) -> dict[str, Any]:
        """Plain data, `report_version` "1"."""
        return {
            "report_version": "1",
            "model": self.model,
            "probe": self.probe,
            "clip_epsilon": CLIP_EPSILON,
            "recorded": self.recorded.to_json(),
            "lag": self.lag,
            "by_segment_kind": {k: c.to_json() for k, c in self.by_segment_kind.items()},
            "by_policy_version": {k: c.to_json() for k, c in self.by_policy_version.items()},
            "skipped_tokens": self.skipped_tokens,
            "against": None if self.against is None else {"view": PERSISTENT_HISTORY, **self.against.to_json()},
            "top1_flips": self.top1_flips,
        }


def audit(
    trace: str | os.PathLike[str],
    model: str | os.PathLike[str] | LoadedModel,
    *,
    against: str | None = None,
    model_id: str | None = None,
    layout: Layout = "tree",
    dtype: str = "float32",
    device: str = "cpu",
    max_tokens: int = 8192,
    on_pack: Callable[[int], None] = lambda done: None,
) -> AuditReport:
    """Recompute every recorded log-probability with the model that sampled it; `on_pack(done)` follows each pack.

    `model_id` says which rows those are, where the trace has several models.

    Raises:
        InputError: a trace that is not valid, another tokenizer, media, or `E-AUDIT-NO-LOGPROBS`.
        UsageError: an unknown view, or several models and no `model_id`.
    """
    if against not in (None, PERSISTENT_HISTORY):
        raise UsageError(f"unknown view '{against}'", hint=f"only {PERSISTENT_HISTORY}")
    require_valid(trace)
    reader = TraceReader(trace)
    model_id = _one_model(reader, model_id)
    if not isinstance(model, LoadedModel):
        model = load(model, dtype=dtype, device=device)
    check_trace(reader.metadata, model)
    plan = functools.partial(plan_states, layout=model.layout(layout), max_tokens=max_tokens)
    done, sampled = itertools.count(1), 0
    collected: dict[str, list[_Tokens]] = {}
    for view in (RECORDED, against) if against else (RECORDED,):
        collected[view] = []
        for group in _groups_under(view, reader.iter_episodes()):
            by_key = {i.key: i for i in group if i.model_id == model_id}
            for pack in plan([[state_of(i, vocabulary=model.head.size) for i in by_key.values()]]):
                collected[view].extend(_recompute(pack, model, by_key))
                if view == RECORDED:
                    sampled += sum(len(s.target_ids) + s.left_out for s in pack.states)
                on_pack(next(done))
        collected[view].sort(key=lambda t: t.key)
    usable = {view: [t.usable() for t in tokens] for view, tokens in collected.items()}
    recorded = usable[RECORDED]
    if not sum(len(t.recorded_M) for t in recorded):
        raise InputError(
            f"{trace}: no token with a recorded log-probability that could be recomputed{_why_none(reader)}",
            code="E-AUDIT-NO-LOGPROBS",
            hint="an audit compares recorded log-probabilities; `validate --profile policy` says what is missing",
        )
    return AuditReport(
        model=model.name,
        probe=model.capability.reason,
        recorded=_compare(recorded),
        lag=_best_lag(recorded),
        by_segment_kind=_by(recorded, "kind_M"),
        by_policy_version=_by(recorded, "version_M"),
        skipped_tokens=sampled - sum(len(t.recorded_M) for t in recorded),
        against=_compare(usable[against]) if against else None,
        top1_flips=_flips(collected[RECORDED], collected[against]) if against else None,
    )


def _one_model(reader: TraceReader, model_id: str | None) -> str:
    there = list(reader.metadata.models)
    if model_id is None and len(there) == 1:
        return there[0]
    if model_id not in there:
        raise UsageError(
            f"the trace has the models {', '.join(there)}, the one to audit is {model_id or 'not named'}",
            hint="name it with --model-id",
        )
    return model_id


def _why_none(reader: TraceReader) -> str:
    reasons = (behaviour_of(i).reason for i in reader.iter_invocations())
    first = next((r for r in reasons if r is not None), None)
    return f" ({first})" if first else ""


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """The targets of one invocation: recorded and recomputed log-probabilities (NaN: cannot be compared)."""

    key: tuple[str, int]
    output_M: np.ndarray
    recorded_M: np.ndarray
    recomputed_M: np.ndarray
    top1_M: np.ndarray
    kind_M: np.ndarray
    version_M: np.ndarray

    def usable(self) -> _Tokens:
        """Only the targets with both numbers."""
        keep = ~np.isnan(self.recorded_M)
        return _Tokens(self.key, *(getattr(self, n)[keep] for n in self.__slots__[1:]))


def _groups_under(view: str, episodes: Iterable[Episode]) -> Iterator[list[Invocation]]:
    if view == RECORDED:
        yield from iter_groups(episodes)
        return
    for episode in episodes:
        prompts = persistent_history(episode)
        yield [under_prompt(i, p) for i, p in zip(episode, prompts, strict=True)]


@torch.no_grad()
def _recompute(pack: Pack, model: LoadedModel, by_key: dict[tuple[str, int], Invocation]) -> Iterator[_Tokens]:
    """The tokens of a pack's invocations, each at the temperature that its recorded numbers include."""
    hidden_RD = model.states(pack)
    rows_M, ids_M = (torch.from_numpy(a.astype(np.int64)) for a in (pack.target_row_M, pack.target_ids_M))
    for number, state in enumerate(pack.states):
        invocation = by_key[state.episode_id, state.invocation_index]
        behaviour = behaviour_of(invocation)
        mine = np.flatnonzero(pack.target_state_M == number)
        logprobs, top1 = np.empty(len(mine)), np.empty(len(mine), np.int64)
        for start, stop in iter_chunks(len(mine), model.head.size):
            part = mine[start:stop]
            logits = model.head.logits(hidden_RD[rows_M[part].to(hidden_RD.device)])
            chosen = (logits / behaviour.temperature).log_softmax(-1).gather(1, ids_M[part].to(logits.device)[:, None])
            logprobs[start:stop] = chosen[:, 0].double().cpu().numpy()
            top1[start:stop] = logits.argmax(-1).cpu().numpy()
        output_index = pack.target_output_M[mine]
        kinds, versions = _labels(invocation, output_index)
        yield _Tokens(invocation.key, output_index, behaviour.logprobs[output_index], logprobs, top1, kinds, versions)


def _labels(invocation: Invocation, output_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(segment kind, policy version) of each target, as text; `none` where nothing is recorded."""
    kinds = np.full(len(invocation), "none", dtype=object)
    for segment in invocation.segments or ():
        kinds[segment.start : segment.stop] = segment.kind
    slots = invocation.output_slots
    sequence_index = len(invocation.prompt_ids) + output_index if slots is None else slots[output_index]
    if invocation.output_policy_versions is not None:
        return kinds[sequence_index], invocation.output_policy_versions[output_index].astype(str).astype(object)
    version = "none" if invocation.policy_version is None else str(invocation.policy_version)
    return kinds[sequence_index], np.full(len(output_index), version, dtype=object)


def _compare(tokens: list[_Tokens]) -> Comparison:
    recorded = np.concatenate([t.recorded_M for t in tokens])
    recomputed = np.concatenate([t.recomputed_M for t in tokens])
    delta = np.abs(recomputed - recorded)
    ratio = np.exp(np.clip(recomputed - recorded, -50, 50))
    return Comparison(
        tokens=len(delta),
        max_abs=float(delta.max()),
        p99_abs=float(np.quantile(delta, 0.99)),
        mean_abs=float(delta.mean()),
        false_clip_rate=float(np.mean(np.abs(ratio - 1) > CLIP_EPSILON)),
    )


def _best_lag(tokens: list[_Tokens]) -> int:
    """The lag in {-1, 0, 1} with the least mean |recomputed[i] - recorded[i + lag]|; other than 0 it must halve it."""
    means = {}
    for lag in LAGS:
        pairs = [_shifted(t, lag) for t in tokens]
        total = sum(len(a) for a, _ in pairs)
        means[lag] = sum(float(np.abs(a - b).sum()) for a, b in pairs) / total if total else np.inf
    best = min(LAGS, key=lambda lag: means[lag])
    return best if means[best] < means[0] / 2 else 0


def _shifted(tokens: _Tokens, lag: int) -> tuple[np.ndarray, np.ndarray]:
    recomputed, recorded = tokens.recomputed_M, tokens.recorded_M
    if lag > 0:
        return recomputed[:-lag], recorded[lag:]
    return (recomputed[-lag:], recorded[:lag]) if lag < 0 else (recomputed, recorded)


def _by(tokens: list[_Tokens], name: str) -> dict[str, Comparison]:
    """One comparison for each value of a per-token label."""
    parts: dict[str, list[_Tokens]] = defaultdict(list)
    for t in tokens:
        labels = getattr(t, name)
        for label in dict.fromkeys(labels):
            keep = np.array([other == label for other in labels])  # numpy would strip a trailing NUL
            parts[str(label)].append(_Tokens(t.key, *(getattr(t, n)[keep] for n in t.__slots__[1:])))
    return {label: _compare(parts[label]) for label in sorted(parts)}


def _flips(recorded: list[_Tokens], other: list[_Tokens]) -> int:
    """Tokens whose most likely id differs between two views."""
    there = {t.key: t for t in other}
    flips = 0
    for mine in recorded:
        theirs = there.get(mine.key)
        if theirs is None:  # nothing precedes its first token in the other view
            continue
        _, a, b = np.intersect1d(mine.output_M, theirs.output_M, return_indices=True)
        flips += int((mine.top1_M[a] != theirs.top1_M[b]).sum())
    return flips
