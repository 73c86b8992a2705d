"""What the tests of `memopd_trace.testing` share: fixed samples of a strategy, and how rows are compared."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from memopd_trace import Invocation
from memopd_trace.schema import COLUMN
from memopd_trace.testing import traces


def sample(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """`count` examples, the same ones each time."""
    found: list[Any] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found


@cache
def trace_sample(profile: str) -> tuple[Any, ...]:
    """Traces of every kind under a profile: one sample for all tests that look at a few."""
    return tuple(sample(traces(profile), 45))


def differences(a: Invocation, b: Invocation) -> list[str]:
    """The columns whose values are not the same: dtypes, nulls, NaN and the sign of zero included."""
    return [name for name in COLUMN if not _same(getattr(a, name), getattr(b, name))]


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, np.ma.MaskedArray) and isinstance(y, np.ma.MaskedArray):
        masks = np.ma.getmaskarray(x), np.ma.getmaskarray(y)
        return np.array_equal(*masks) and x.dtype == y.dtype and x.filled(0).tobytes() == y.filled(0).tobytes()
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return x.dtype == y.dtype and np.array_equal(x, y)
    if isinstance(x, list | tuple) and isinstance(y, list | tuple):  # segments and media are any sequence
        return tuple(x) == tuple(y)
    return type(x) is type(y) and bool(x == y)
