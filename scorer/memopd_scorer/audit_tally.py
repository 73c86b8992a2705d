"""What an audit counts while tokens pass by: differences, the best explanation of them, the worst tokens.

Nothing here grows with the trace. Percentiles come from a histogram of |Δ| with 200 bins a decade from 1e-9 to 1e3
nats: a reported percentile is the upper edge of its bin (never more than the largest |Δ|), so at most 1.2 % above the
exact one and never below it. A histogram takes 19 kB, a table of at most 257 of them under 5 MB.

Shape legend: M tokens, B histogram bins.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOATS = NDArray[np.float64]
BINS_PER_DECADE = 200
LOWEST, HIGHEST = -9, 3  # log10 of |Δ| in nats
BINS = (HIGHEST - LOWEST) * BINS_PER_DECADE + 2  # the first holds all below, the last all above
RESOLUTION = 10 ** (1 / BINS_PER_DECADE) - 1
MOST_LABELS = 256
OTHER_LABELS = "(further labels)"
FLOOR = 1e-4  # nats: differences below it are rounding, and no evidence
SPREAD = 1.82  # standard deviation of log(a / b) for independent exponential a, b: pi / sqrt(3)
SIGMAS = 4.0
FEWEST = 3  # tokens, whatever they say


@dataclass(frozen=True, slots=True)
class Comparison:
    """Recomputed against recorded log-probabilities over `tokens` tokens, in nats; Δ = recomputed - recorded.

    `kl` estimates KL(recorded || recomputed) from the sampled tokens by mean(exp(Δ) - 1 - Δ), which is never negative;
    `false_clip_rate` is the share of tokens with |exp(Δ) - 1| > epsilon.
    """

    tokens: int
    max_abs: float
    p50_abs: float
    p99_abs: float
    p999_abs: float
    mean_abs: float
    mean_signed: float
    kl: float
    false_clip_rate: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, eq=False)
class Differences:
    """Δ = recomputed - recorded of some tokens, nats, and what is counted of it; measured once, counted by labels."""

    delta_M: FLOATS
    abs_M: FLOATS
    kl_M: FLOATS  # exp(Δ) - 1 - Δ
    clipped_M: NDArray[np.bool_]
    bin_M: NDArray[np.int64]

    @classmethod
    def of(cls, delta_M: FLOATS, epsilon: float) -> Differences:
        """Measure finite differences."""
        abs_M, bounded_M = np.abs(delta_M), np.clip(delta_M, -50, 50)  # the exponential of more would overflow
        excess_M = np.expm1(bounded_M)
        return cls(delta_M, abs_M, excess_M - bounded_M, np.abs(excess_M) > epsilon, _bins(abs_M))

    def __getitem__(self, part: NDArray[np.bool_]) -> Differences:
        """Those of the tokens where `part` is true."""
        return Differences(*(getattr(self, name)[part] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.delta_M)


@dataclass(slots=True, eq=False)
class Tally:
    """Differences of tokens that pass by; `comparison` says what they were so far."""

    tokens: int = 0
    max_abs: float = 0.0
    sum_abs: float = 0.0
    sum_signed: float = 0.0
    sum_kl: float = 0.0
    clips: int = 0
    counts_B: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, found: Differences) -> None:
        """Count differences."""
        if not len(found):
            return
        self.tokens += len(found)
        self.max_abs = max(self.max_abs, float(found.abs_M.max()))
        self.sum_abs += float(found.abs_M.sum())
        self.sum_signed += float(found.delta_M.sum())
        self.sum_kl += float(found.kl_M.sum())
        self.clips += int(np.count_nonzero(found.clipped_M))
        np.add.at(self.counts_B, found.bin_M, 1)

    def quantile(self, share: float) -> float:
        """The |Δ| that `share` of the tokens do not exceed (nearest rank), by the histogram; 0 without tokens."""
        rank = max(1, math.ceil(share * self.tokens - 1e-9))
        at = int(np.searchsorted(np.cumsum(self.counts_B), rank))
        return self.max_abs if at >= BINS - 1 else min(self.max_abs, float(upper_edges()[at]))

    def comparison(self) -> Comparison | None:
        """What was counted; `None` where nothing was."""
        if not self.tokens:
            return None
        return Comparison(
            tokens=self.tokens,
            max_abs=self.max_abs,
            p50_abs=self.quantile(0.5),
            p99_abs=self.quantile(0.99),
            p999_abs=self.quantile(0.999),
            mean_abs=self.sum_abs / self.tokens,
            mean_signed=self.sum_signed / self.tokens,
            kl=self.sum_kl / self.tokens,
            false_clip_rate=self.clips / self.tokens,
        )


def upper_edges() -> FLOATS:
    """[B] the largest |Δ| of each bin, nats; the last is infinite."""
    edges: FLOATS = 10.0 ** (LOWEST + np.arange(BINS) / BINS_PER_DECADE)
    edges[-1] = np.inf
    return edges


def _bins(size_M: FLOATS) -> NDArray[np.int64]:
    with np.errstate(divide="ignore"):
        at_M = np.ceil((np.log10(size_M) - LOWEST) * BINS_PER_DECADE)
    return np.clip(at_M, 0, BINS - 1).astype(np.int64)


@dataclass(slots=True, eq=False)
class Table:
    """One tally for each value of a label; what comes after `MOST_LABELS` values is counted as `OTHER_LABELS`."""

    tallies: dict[str, Tally] = field(default_factory=dict)

    def add(self, label: str, found: Differences) -> None:
        """Count the differences of tokens with this label."""
        if label not in self.tallies and len(self.tallies) >= MOST_LABELS:
            label = OTHER_LABELS
        if label not in self.tallies:
            self.tallies[label] = Tally()
        self.tallies[label].add(found)

    def comparisons(self) -> dict[str, Comparison]:
        """By label: numbers first and in order, then words; the rest last."""
        found = {label: t.comparison() for label, t in self.tallies.items()}
        order = sorted(found, key=_label_order)
        return {label: c for label in order if (c := found[label]) is not None}


def _label_order(label: str) -> tuple[int, int, str]:
    if label == OTHER_LABELS:
        return 2, 0, label
    head = label.partition("-")[0]  # `4-7`, a range of output indices
    return (0, int(head), label) if head.isascii() and head.isdigit() and len(head) < 20 else (1, 0, label)


@dataclass(slots=True)
class Evidence:
    """How much closer the recorded numbers are to another reading than to the recorded one, over the same `pairs`
    tokens. Every token counts by the logarithm of its two differences, so that no outlier decides.

    `times_closer` is the geometric mean of |Δ as recorded| / |Δ under this reading|; `sigmas` sets its logarithm in
    proportion to what chance gives when neither reading is right.
    """

    pairs: int = 0
    sum_abs: float = 0.0
    sum_abs_recorded: float = 0.0
    sum_log: float = 0.0

    def add(self, reading_M: FLOATS, recorded_M: FLOATS) -> None:
        """Count tokens by their difference under this reading and as recorded; a NaN in either is no pair."""
        here = ~(np.isnan(reading_M) | np.isnan(recorded_M))
        reading, recorded = np.abs(reading_M[here]), np.abs(recorded_M[here])
        self.pairs += int(here.sum())
        self.sum_abs += float(reading.sum())
        self.sum_abs_recorded += float(recorded.sum())
        self.sum_log += float(np.log((recorded + FLOOR) / (reading + FLOOR)).sum())

    @property
    def times_closer(self) -> float:
        """1: no difference."""
        return math.exp(self.sum_log / self.pairs) if self.pairs else 1.0

    @property
    def sigmas(self) -> float:
        """Standard deviations of chance."""
        return self.sum_log / (SPREAD * math.sqrt(self.pairs)) if self.pairs else 0.0

    def convinces(self, times: float) -> bool:
        """Whether this reading is at least `times` closer, on enough tokens for that to be no chance."""
        return self.pairs >= FEWEST and self.sigmas >= SIGMAS and self.times_closer >= times

    def to_json(self) -> dict[str, Any]:
        """Plain data; means in nats, `null` without a pair."""
        return {
            "pairs": self.pairs,
            "mean_abs": self.sum_abs / self.pairs if self.pairs else None,
            "mean_abs_as_recorded": self.sum_abs_recorded / self.pairs if self.pairs else None,
            "times_closer": self.times_closer,
            "sigmas": self.sigmas,
        }


@dataclass(frozen=True, slots=True, order=True)
class WorstToken:
    """A token to look at; log-probabilities in nats, both as compared (whole vocabulary, recorded temperature)."""

    abs_delta: float
    episode_id: str
    invocation_index: int
    output_index: int
    token_id: int
    recorded: float
    recomputed: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True, eq=False)
class Worst:
    """The `size` tokens with the largest |Δ|, largest first; equal ones in the order of the trace."""

    size: int
    tokens: list[WorstToken] = field(default_factory=list)

    def add(
        self,
        key: tuple[str, int],
        output_M: NDArray[Any],
        ids_M: NDArray[Any],
        recorded_M: FLOATS,
        recomputed_M: FLOATS,
    ) -> None:
        """Offer the tokens of one invocation."""
        size_M = np.abs(recomputed_M - recorded_M)
        best = np.argsort(-size_M, kind="stable")[: self.size]
        if len(self.tokens) == self.size:
            least = self.tokens[-1].abs_delta if self.tokens else math.inf
            best = best[size_M[best] >= least]
        offered = [
            WorstToken(
                float(size_M[m]), *key, int(output_M[m]), int(ids_M[m]), float(recorded_M[m]), float(recomputed_M[m])
            )
            for m in best
        ]
        rank = lambda t: (-t.abs_delta, t.episode_id, t.invocation_index, t.output_index)  # noqa: E731
        self.tokens = heapq.nsmallest(self.size, [*self.tokens, *offered], key=rank)
