"""What the recorded log-probabilities say of the policy: one rule, for whoever recomputes or trains on them.

    raw        log softmax(z)[id]                          temperature 1
    tempered   log softmax(z / T)[id]                      as recorded
    processed  log softmax(z / T)[id] - kept log-mass      plus the kept log-mass, where it is known

Greedy decoding (T = 0) and a repetition penalty leave no such softmax unless the raw numbers were recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memopd_trace.invocation import Invocation, Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Behaviour:
    """Log-probabilities over the whole vocabulary, such that the unchanged policy gives the same numbers by
    `log_softmax(logits / temperature)`.

    `logprobs` is float64[len(output)] in nats, NaN where there is none; `reason` says why there is none at all.
    """

    logprobs: NDArray[np.float64]
    temperature: float
    reason: str | None = None


def behaviour_of(invocation: Invocation) -> Behaviour:
    """The behaviour of one invocation, for a row that is valid."""
    kind, sampling = invocation.logprob_kind, invocation.sampling or Sampling()
    if invocation.output_logprobs is None:
        return _none(invocation, "no log-probabilities are recorded")
    logprobs = np.ma.filled(invocation.output_logprobs.astype(np.float64), np.nan)
    if kind == "raw":
        return Behaviour(logprobs, 1.0)
    if kind not in ("tempered", "processed"):
        return _none(invocation, f"the kind of its log-probabilities is {kind or 'not recorded'}")
    if sampling.temperature is None:
        return _none(invocation, f"{kind} log-probabilities without a recorded temperature")
    if sampling.temperature == 0 or sampling.repetition_penalty not in (None, 1.0):
        return _none(
            invocation,
            f"{kind} log-probabilities at temperature {sampling.temperature}, repetition penalty "
            f"{sampling.repetition_penalty} are those of no softmax",
        )
    if kind == "processed":
        if invocation.output_kept_logmass is not None:
            logprobs = logprobs + np.ma.filled(invocation.output_kept_logmass.astype(np.float64), np.nan)
        elif restricts(sampling):
            return _none(invocation, "processed log-probabilities without the kept log-mass")
    return Behaviour(logprobs, sampling.temperature)


def restricts(sampling: Sampling) -> bool:
    """Whether top-k, top-p or min-p kept tokens from being drawn."""
    top_p = sampling.top_p is not None and sampling.top_p < 1
    return bool(sampling.temperature) and ((sampling.top_k or 0) > 0 or top_p or bool(sampling.min_p))


def _none(invocation: Invocation, reason: str) -> Behaviour:
    return Behaviour(np.full(len(invocation.output_ids), np.nan), 1.0, reason)
