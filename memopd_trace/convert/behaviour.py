"""What a call says of each of its output ids, as far as it means something: log-probabilities, masks, settings.

What does not fit its ids, or cannot be, is left out and counted; the numbers themselves stay in `extra`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memopd_trace.behaviour import restricts
from memopd_trace.convert.draft import Call
from memopd_trace.convert.losses import Losses
from memopd_trace.invocation import MaskedFloats, Sampling

MAX_POSITIVE = 0.001  # nats: a logprob above it is none
RANGES: dict[str, Callable[[float], bool]] = {
    "temperature": lambda v: v >= 0,
    "top_p": lambda v: 0 < v <= 1,
    "top_k": lambda v: 0 <= v < 2**31,
    "min_p": lambda v: 0 <= v <= 1,
    "repetition_penalty": lambda v: v > 0,
}  # as the format's clause on sampling settings has them


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Log-probabilities of a row with their kind, and the mask of the ids to be trained; `None` is a null."""

    logprobs: MaskedFloats | None
    kind: str | None
    mask: NDArray[np.bool_] | None


def make_fit(call: Call, length: int, losses: Losses) -> None:
    """Leave out what should say something of each of `length` output ids and does not, and settings out of range."""
    for name in ("sampled", "trained", "output_policy_versions"):
        value = getattr(call, name)
        if value is not None and len(value) != length:
            losses.degrade(f"'{name}' left out: not as many as the ids", f"{len(value)} for {length} ids")
            setattr(call, name, None)
    for name, value in [(name, getattr(call.sampling, name)) for name in RANGES if call.sampling is not None]:
        if value is not None and not RANGES[name](value):
            losses.degrade(f"'{name}' left out: out of its range", str(value))
            call.sampling = replace(call.sampling or Sampling(), **{name: None})
    if call.attempt is not None and not 0 <= call.attempt < 2**31:
        losses.degrade("'attempt' left out: out of its range", str(call.attempt))
        call.attempt = None


def behaviour_of(call: Call, length: int, source: str, default_kind: str | None, losses: Losses) -> Behaviour:
    """What a row of `length` output ids from `source` can say; `default_kind` holds where the log names no kind."""
    mask = call.trained
    if mask is not None and call.sampled is not None:
        mask = mask & call.sampled
    if call.accepted is False:
        mask = None
    logprobs, kind = call.logprobs, call.logprob_kind or default_kind or "unknown"
    if logprobs is None:
        return Behaviour(None, None, mask)
    why = _useless(logprobs, kind, call.sampling or Sampling(), length, source)
    if why is not None:
        losses.degrade(f"log-probabilities left out: {why[0]}", why[1])
        call.extra["log_probabilities"] = logprobs.tolist()
        return Behaviour(None, None, mask)
    without = np.ma.getmaskarray(logprobs)
    positive = ~without & (np.ma.getdata(logprobs) > MAX_POSITIVE)
    if positive.any():
        losses.degrade("a log-probability above 0 is null", number=int(positive.sum()))
        without = without | positive
        logprobs = np.ma.masked_array(np.ma.getdata(logprobs), mask=without)
    if without.all():
        return Behaviour(None, None, mask)
    wanted = mask if mask is not None else call.sampled
    lost = without if wanted is None else without & wanted
    if lost.any() and call.accepted is not False:
        losses.degrade("a token without a log-probability is not trained", number=int(lost.sum()))
        mask = ~without if wanted is None else wanted & ~without
    return Behaviour(logprobs, kind, mask)


def _useless(logprobs: MaskedFloats, kind: str, sampling: Sampling, length: int, source: str) -> tuple[str, str] | None:
    """Why log-probabilities cannot stand in the row, and the values."""
    if source == "retokenized":
        return "the ids are not those that they belong to", ""
    if len(logprobs) != length:
        return "they are not as many as the ids", f"{len(logprobs)} for {length} ids"
    changed = sampling.temperature not in (None, 1.0) or sampling.repetition_penalty not in (None, 1.0)
    if kind == "unknown" and (changed or restricts(replace(sampling, temperature=1.0))):
        return "it is not told whether they were taken before or after sampling's changes (--logprob-kind)", ""
    if kind == "processed" and restricts(sampling):
        return "they are renormalised over a set of unknown mass", ""
    return None
