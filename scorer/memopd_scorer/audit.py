"""Is the recorded state the true one? Recompute the behaviour log-probabilities and compare.

Under the recorded state they must come out again, to rounding; where they do not, the trace does not say in which
state its tokens were sampled. `against="persistent-history"` scores the same tokens under the flattened history as
well, and so measures what misaligned scoring would cost at identical weights.

    kind raw        log softmax(z)[id]
    kind tempered   log softmax(z / T)[id]
    kind processed  log softmax(z / T)[id] - kept log-mass
    false clip      |exp(recomputed - recorded) - 1| > epsilon: PPO would clip a token that nothing has changed

Shape legend: M targets, R prediction rows, V vocabulary (real ids).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memopd_scorer.plan import Layout, Pack, State, iter_groups, plan_states, state_of
from memopd_scorer.score import check_tokenizer
from memopd_scorer.signals import CHUNK_CELLS
from memopd_scorer.teacher import Teacher, load_teacher
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.storage import TraceReader
from memopd_trace.views import PERSISTENT_HISTORY, RECORDED, persistent_history, under_prompt

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
    capability: str
    recorded: Comparison
    lag: int
    by_segment_kind: dict[str, Comparison]
    by_policy_version: dict[str, Comparison]
    skipped_tokens: int
    against: Comparison | None
    top1_flips: int | None

    def to_json(self) -> dict[str, Any]:
        """Plain data, `report_version` 1."""
        return {
            "report_version": 1,
            "model": self.model,
            "capability": self.capability,
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
    model: str | os.PathLike[str] | Teacher,
    *,
    against: str | None = None,
    layout: Layout = "tree",
    dtype: str = "float32",
    device: str = "cpu",
    max_tokens: int = 8192,
) -> AuditReport:
    """Recompute every recorded log-probability with the model that sampled it.

    Raises:
        InputError: an unreadable trace, another tokenizer, or `E-AUDIT-NO-LOGPROBS`.
        UsageError: an unknown view.
    """
    if against not in (None, PERSISTENT_HISTORY):
        raise UsageError(f"unknown view '{against}'", hint=f"only {PERSISTENT_HISTORY}")
    reader = TraceReader(trace)
    if not isinstance(model, Teacher):
        model = load_teacher(model, dtype=dtype, device=device)
    check_tokenizer(reader.metadata, model)
    layout = model.layout(layout)
    collected: dict[str, list[_Tokens]] = {}
    for view in (RECORDED, against) if against else (RECORDED,):
        groups = _groups_under(view, reader.iter_episodes())
        collected[view] = [t for group in groups for t in _recompute(group, model, layout, max_tokens)]
    usable = {view: [t.usable() for t in tokens] for view, tokens in collected.items()}
    recorded = usable[RECORDED]
    if not sum(len(t.recorded_M) for t in recorded):
        raise InputError(
            f"{trace}: no token with a recorded log-probability of a known kind",
            code="E-AUDIT-NO-LOGPROBS",
            hint="an audit compares recorded log-probabilities; `validate --profile policy` says what is missing",
        )
    return AuditReport(
        model=model.name,
        capability=model.capability.reason,
        recorded=_compare(recorded),
        lag=_best_lag(recorded),
        by_segment_kind=_by(recorded, "kind_M"),
        by_policy_version=_by(recorded, "version_M"),
        skipped_tokens=sum(len(t.recorded_M) for t in collected[RECORDED]) - sum(len(t.recorded_M) for t in recorded),
        against=_compare(usable[against]) if against else None,
        top1_flips=_flips(collected[RECORDED], collected[against]) if against else None,
    )


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


def _recompute(group: list[Invocation], model: Teacher, layout: Layout, max_tokens: int) -> Iterator[_Tokens]:
    """The tokens of a group's invocations, in (episode, index) order."""
    by_key = {i.key: i for i in group}
    states: list[State] = [state_of(i) for i in group]
    found = []
    for pack in plan_states([states], layout=layout, max_tokens=max_tokens):
        logprob_M, top1_M = _behaviour_logprobs(pack, model, by_key)
        for number, state in enumerate(pack.states):
            mine = pack.target_state_M == number
            invocation = by_key[state.episode_id, state.invocation_index]
            found.append(_tokens(invocation, pack.target_output_M[mine], logprob_M[mine], top1_M[mine]))
    yield from sorted(found, key=lambda t: t.key)


@torch.no_grad()
def _behaviour_logprobs(
    pack: Pack, model: Teacher, by_key: dict[tuple[str, int], Invocation]
) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability of each target as its row's kind defines it, most likely id), [M] each."""
    hidden_RD = model.states(pack)
    temperature_M = _per_target(pack, by_key, _temperature)
    logprob_M, top1_M = np.empty(len(pack.target_ids_M)), np.empty(len(pack.target_ids_M), np.int64)
    step = max(1, CHUNK_CELLS // model.head.size)
    for start in range(0, len(pack.target_ids_M), step):
        part = slice(start, start + step)
        rows = torch.from_numpy(pack.target_row_M[part].astype(np.int64)).to(hidden_RD.device)
        ids = torch.from_numpy(pack.target_ids_M[part].astype(np.int64)).to(hidden_RD.device)
        logits = model.head.logits(hidden_RD[rows])
        top1_M[part] = logits.argmax(-1).cpu().numpy()
        tempered = logits / torch.from_numpy(temperature_M[part]).to(logits)[:, None]
        logprob_M[part] = tempered.log_softmax(-1).gather(1, ids[:, None])[:, 0].double().cpu().numpy()
    return logprob_M - _per_target(pack, by_key, _kept_logmass), top1_M


def _per_target(
    pack: Pack, by_key: dict[tuple[str, int], Invocation], value: Callable[[Invocation], np.ndarray | float]
) -> np.ndarray:
    """[M]: `value(invocation)`, one number or one for each output token, at each target."""
    out = np.empty(len(pack.target_ids_M))
    for number, state in enumerate(pack.states):
        mine = pack.target_state_M == number
        invocation = by_key[state.episode_id, state.invocation_index]
        per_output = np.broadcast_to(value(invocation), len(invocation.output_ids))
        out[mine] = per_output[pack.target_output_M[mine]]
    return out


def _kept_logmass(invocation: Invocation) -> np.ndarray | float:
    """What a `processed` log-probability was renormalised by; NaN where the trace does not say it."""
    if invocation.logprob_kind != "processed":
        return 0.0
    if invocation.output_kept_logmass is not None:
        return np.ma.filled(invocation.output_kept_logmass.astype(np.float64), np.nan)
    s = invocation.sampling
    truncated = s is None or (s.top_p or 1) < 1 or (s.top_k or 0) > 0 or (s.min_p or 0) > 0
    return np.nan if truncated else 0.0


def _temperature(invocation: Invocation) -> float:
    """The temperature that the recorded log-probabilities include; 1 for `raw`, and for greedy decoding."""
    tempered = invocation.logprob_kind in ("tempered", "processed")
    temperature = invocation.sampling.temperature if invocation.sampling is not None else None
    return temperature if tempered and temperature else 1.0


def _tokens(invocation: Invocation, output_index: np.ndarray, recomputed: np.ndarray, top1: np.ndarray) -> _Tokens:
    recorded = np.full(len(output_index), np.nan)
    comparable = invocation.logprob_kind in ("raw", "tempered", "processed")
    if invocation.output_logprobs is not None and comparable:
        recorded = np.ma.filled(invocation.output_logprobs.astype(np.float64), np.nan)[output_index]
    recorded[np.isnan(recomputed)] = np.nan
    kinds = np.full(len(invocation), "none", dtype=object)
    for segment in invocation.segments or ():
        kinds[segment.start : segment.stop] = segment.kind
    slots = invocation.output_slots
    sequence_index = len(invocation.prompt_ids) + output_index if slots is None else slots[output_index]
    versions = invocation.output_policy_versions
    if versions is None:
        version = "none" if invocation.policy_version is None else str(invocation.policy_version)
        version_M = np.full(len(output_index), version, dtype=object)
    else:
        version_M = versions[output_index].astype(str).astype(object)
    return _Tokens(invocation.key, output_index, recorded, recomputed, top1, kinds[sequence_index], version_M)


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
    """The lag in {-1, 0, 1} with the least mean |recomputed[i] - recorded[i + lag]|; 0 wins ties."""
    means = {}
    for lag in LAGS:
        pairs = [_shifted(t, lag) for t in tokens]
        total = sum(len(a) for a, _ in pairs)
        means[lag] = sum(float(np.abs(a - b).sum()) for a, b in pairs) / total if total else np.inf
    return min(LAGS, key=lambda lag: (means[lag], abs(lag)))


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
            keep = labels == label
            parts[str(label)].append(_Tokens(t.key, *(getattr(t, n)[keep] for n in t.__slots__[1:])))
    return {label: _compare(parts[label]) for label in sorted(parts)}


def _flips(recorded: list[_Tokens], other: list[_Tokens]) -> int:
    """Tokens whose most likely id differs between two views."""
    there = {t.key: t for t in other}
    flips = 0
    for mine in recorded:
        theirs = there[mine.key]
        _, a, b = np.intersect1d(mine.output_M, theirs.output_M, return_indices=True)
        flips += int((mine.top1_M[a] != theirs.top1_M[b]).sum())
    return flips
