"""Counting in bounded memory: values by name, exact percentiles of lengths, mean and spread."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_VALUES = 1000


@dataclass(slots=True)
class Tally:
    """How often each value occurs; `None` is null. After `limit` different values, new ones are counted together."""

    limit: int = MAX_VALUES
    values: Counter[Any] = field(default_factory=Counter)
    null: int = 0
    others: int = 0

    def add(self, value: str | int | None, count: int = 1) -> None:
        """Count a value."""
        if value is None:
            self.null += count
        elif value in self.values or len(self.values) < self.limit:
            self.values[value] += count
        else:
            self.others += count

    def most_common(self) -> list[tuple[Any, int]]:
        """(value, count), most frequent first, then by value."""
        return sorted(self.values.items(), key=lambda item: (-item[1], item[0]))

    def to_dict(self) -> dict[str, Any]:
        """`{"values": {value: count}, "null": count, "others": count}`."""
        values = {str(value): count for value, count in self.most_common()}
        return {"values": values, "null": self.null, "others": self.others}


@dataclass(slots=True)
class Lengths:
    """A histogram of lengths, so that percentiles are exact.

    Memory grows with the *different* lengths: k of them need k²/2 tokens in the trace.
    """

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, length: int) -> None:
        """Count a length, 0 or more."""
        self.counts[length] += 1

    def percentile(self, percent: float) -> int | None:
        """The least length that at least `percent` per cent of all do not exceed (nearest rank)."""
        rank = max(1, math.ceil(percent / 100 * self.counts.total()))
        seen = 0
        for length in sorted(self.counts):
            seen += self.counts[length]
            if seen >= rank:
                return length
        return None

    def to_dict(self) -> dict[str, Any]:
        """`count`, `total`, `mean`, `p50`, `p95`, `max`."""
        count, total = self.counts.total(), sum(length * n for length, n in self.counts.items())
        return {
            "count": count,
            "total": total,
            "mean": total / count if count else None,
            "p50": self.percentile(50),
            "p95": self.percentile(95),
            "max": max(self.counts, default=None),
        }


@dataclass(slots=True)
class Moments:
    """Mean and spread of the finite values (Welford's recurrence)."""

    count: int = 0
    mean: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    nonfinite: int = 0
    _squares: float = 0.0

    def add(self, value: float) -> None:
        """Count a value; NaN and infinities are only counted."""
        if not math.isfinite(value):
            self.nonfinite += 1
            return
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self._squares += step * (value - self.mean)
        self.min, self.max = min(self.min, value), max(self.max, value)

    @property
    def std(self) -> float | None:
        """With n - 1; `None` below two values."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 and self._squares >= 0 else None

    def to_dict(self) -> dict[str, Any]:
        """`count`, `mean`, `std`, `min`, `max`, `nonfinite`; null where there is none (or it overflows)."""
        numbers = {"mean": self.mean, "std": self.std, "min": self.min, "max": self.max}
        known = {name: v if self.count and v is not None and math.isfinite(v) else None for name, v in numbers.items()}
        return {"count": self.count, **known, "nonfinite": self.nonfinite}
