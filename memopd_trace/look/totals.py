"""The parts of a trace's totals: lineage, log-probabilities, policy versions, outcome, time.

Each is fed row by row, and told where an episode ends; `to_dict` gives the part of `look.stats` of its name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from memopd_trace.invocation import Invocation
from memopd_trace.look.tallies import Lengths, Moments, Tally

MAX_PARTS = 200  # named parts of a reward


@dataclass(slots=True)
class Lineage:
    """Relations of all rows; depth and children of the episode that is open."""

    relations: Tally = field(default_factory=Tally)
    rewrite_kinds: Tally = field(default_factory=Tally)
    rewrite_evidence: Tally = field(default_factory=Tally)
    depth: Lengths = field(default_factory=Lengths)
    rows_with_children: int = 0
    branched_rows: int = 0
    most_children: int = 0
    rejected: int = 0
    _depths: dict[int, int] = field(default_factory=dict)
    _children: Counter[int] = field(default_factory=Counter)

    def add(self, invocation: Invocation) -> None:
        """Count a row of the open episode."""
        self.relations.add(invocation.relation)
        if invocation.relation == "rewrite":
            self.rewrite_kinds.add(invocation.rewrite_kind)
            self.rewrite_evidence.add(invocation.rewrite_evidence)
        self.rejected += invocation.accepted is False
        above = self._depths.get(-1 if invocation.parent_index is None else invocation.parent_index)
        if above is not None and invocation.parent_index is not None:
            self._children[invocation.parent_index] += 1
        self._depths[invocation.invocation_index] = 0 if above is None else above + 1

    def close_episode(self) -> None:
        """The open episode is whole."""
        self.depth.add(max(self._depths.values(), default=0))
        counts = self._children.values()
        self.rows_with_children += len(counts)
        self.branched_rows += sum(1 for c in counts if c > 1)
        self.most_children = max([self.most_children, *counts])
        self._depths, self._children = {}, Counter()

    def to_dict(self) -> dict[str, Any]:
        """See `memopd_trace.look.stats`."""
        return {
            "relations": self.relations.to_dict(),
            "rewrite_kinds": self.rewrite_kinds.to_dict(),
            "rewrite_evidence": self.rewrite_evidence.to_dict(),
            "depth": self.depth.to_dict(),
            "rows_with_children": self.rows_with_children,
            "branched_rows": self.branched_rows,
            "most_children": self.most_children,
            "rejected": self.rejected,
        }


@dataclass(slots=True)
class Logprobs:
    """Which output tokens have a log-probability, of which kind."""

    rows: int = 0
    tokens: int = 0
    trained: int = 0
    kinds: Tally = field(default_factory=Tally)
    _sum: float = 0.0
    _finite: int = 0

    def add(self, invocation: Invocation) -> None:
        """Count a row whose arrays fit together."""
        if invocation.output_logprobs is None:
            return
        there = ~np.ma.getmaskarray(invocation.output_logprobs)
        values = np.ma.getdata(invocation.output_logprobs)[there].astype(np.float64)
        finite = values[np.isfinite(values)]
        self.rows += 1
        self.tokens += len(values)
        self.trained += int((there & invocation.loss_mask()).sum())
        self.kinds.add(invocation.logprob_kind)
        self._sum += float(finite.sum())
        self._finite += len(finite)

    def to_dict(self, output: int, trained: int) -> dict[str, Any]:
        """See `memopd_trace.look.stats`; `output` and `trained` are the trace's tokens."""
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "coverage": self.tokens / output if output else None,
            "trained_coverage": self.trained / trained if trained else None,
            "mean": self._sum / self._finite if self._finite else None,
            "kinds": self.kinds.to_dict(),
        }


@dataclass(slots=True)
class Policy:
    """Versions of the weights: by output token, and how far calls and episodes mix them."""

    versions: Tally = field(default_factory=Tally)
    oldest: int | None = None
    newest: int | None = None
    mixed_rows: int = 0
    mixed_episodes: int = 0
    stale_kv_rows: int = 0
    max_kv_lag: int = 0
    _tokens: int = 0
    _sum: int = 0
    _episode: set[int] = field(default_factory=set)  # its oldest and newest

    def add(self, invocation: Invocation) -> None:
        """Count a row whose arrays fit together."""
        tokens = len(invocation.output_ids)
        if invocation.output_policy_versions is not None:
            found, counts = np.unique(invocation.output_policy_versions, return_counts=True)
            versions = dict(zip(found.tolist(), counts.tolist(), strict=True))
        else:
            versions = {invocation.policy_version: tokens}
        for version, count in versions.items():
            self.versions.add(version, count)
        known = [v for v in versions if v is not None]
        self.mixed_rows += len(known) > 1
        if known:
            self._tokens += sum(versions.values())
            self._sum += sum(v * versions[v] for v in known)
            self.oldest = min(known if self.oldest is None else [self.oldest, *known])
            self.newest = max(known if self.newest is None else [self.newest, *known])
            self._episode = {min(self._episode | set(known)), max(self._episode | set(known))}
            lag = 0 if invocation.kv_policy_version is None else max(known) - invocation.kv_policy_version
            self.stale_kv_rows += lag > 0
            self.max_kv_lag = max(self.max_kv_lag, lag)

    def close_episode(self) -> None:
        """The open episode is whole."""
        self.mixed_episodes += len(self._episode) > 1
        self._episode = set()

    def to_dict(self) -> dict[str, Any]:
        """See `memopd_trace.look.stats`."""
        newest, oldest = self.newest, self.oldest
        mean = None if newest is None or not self._tokens else (newest * self._tokens - self._sum) / self._tokens
        return {
            "versions": self.versions.to_dict(),
            "oldest": oldest,
            "newest": newest,
            "mean_lag": mean,
            "max_lag": None if newest is None or oldest is None else newest - oldest,
            "mixed_rows": self.mixed_rows,
            "mixed_episodes": self.mixed_episodes,
            "stale_kv_rows": self.stale_kv_rows,
            "max_kv_lag": self.max_kv_lag,
        }


@dataclass(slots=True)
class Outcome:
    """Rewards, returns and how episodes ended."""

    reward: Moments = field(default_factory=Moments)
    episode_return: Moments = field(default_factory=Moments)
    parts: dict[str, Moments] = field(default_factory=dict)
    parts_others: int = 0
    terminated: int = 0
    truncated: int = 0
    _return: float | None = None
    _ends: tuple[bool, bool] = (False, False)

    def add(self, invocation: Invocation) -> None:
        """Count a row of the open episode."""
        if invocation.reward is not None:
            self.reward.add(invocation.reward)
            self._return = (self._return or 0.0) + invocation.reward
        for name, value in (invocation.rewards or {}).items():
            if name not in self.parts and len(self.parts) >= MAX_PARTS:
                self.parts_others += 1
            elif value is not None:
                self.parts.setdefault(name, Moments()).add(value)
        self._ends = (self._ends[0] or bool(invocation.terminated), self._ends[1] or bool(invocation.truncated))

    def close_episode(self) -> None:
        """The open episode is whole."""
        if self._return is not None:
            self.episode_return.add(self._return)
        self.terminated += self._ends[0]
        self.truncated += self._ends[1]
        self._return, self._ends = None, (False, False)

    def to_dict(self) -> dict[str, Any]:
        """See `memopd_trace.look.stats` (`rewards`)."""
        return {
            "reward": self.reward.to_dict(),
            "return": self.episode_return.to_dict(),
            "parts": {name: self.parts[name].to_dict() for name in sorted(self.parts)},
            "parts_others": self.parts_others,
        }


@dataclass(slots=True)
class Clock:
    """The time that the trace spans."""

    first: datetime | None = None
    last: datetime | None = None
    timed_rows: int = 0
    calls_s: float = 0.0

    def add(self, invocation: Invocation) -> None:
        """Count a row."""
        times = [t for t in (invocation.started_at, invocation.ended_at) if t is not None]
        if times:
            self.first = min([*times, self.first or times[0]])
            self.last = max([*times, self.last or times[0]])
        if len(times) == 2:
            self.timed_rows += 1
            self.calls_s += (times[1] - times[0]).total_seconds()

    def to_dict(self) -> dict[str, Any]:
        """See `memopd_trace.look.stats`."""
        first, last = self.first, self.last
        return {
            "first": None if first is None else first.astimezone(UTC).isoformat(),
            "last": None if last is None else last.astimezone(UTC).isoformat(),
            "span_s": None if first is None or last is None else (last - first).total_seconds(),
            "timed_rows": self.timed_rows,
            "calls_s": self.calls_s if self.timed_rows else None,
        }
