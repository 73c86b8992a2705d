"""What a row is made from (`rows`): a call as the proxy or a hook saw it, and what the client says of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memopd_trace.invocation import IDS, Sampling

Logprobs = NDArray[np.float32]
Routes = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class DeclaredSegment:
    """A segment as a client declares it: `source` is the response id of the call that it is a copy from."""

    start: int
    stop: int
    kind: str
    source: str | None = None
    source_start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What a client says of a call. `parent` is a response id (`ID` or `ID/CHOICE`), or `none`; `end` is `terminated`,
    `truncated`, or `None` where the episode goes on; `retry` counts how often the request was sent before."""

    episode: str | None = None
    group: str | None = None
    task: str | None = None
    agent: str | None = None
    parent: str | None = None
    relation: str | None = None
    rewrite: str | None = None
    segments: tuple[DeclaredSegment, ...] | None = None
    reward: float | None = None
    end: str | None = None
    policy_version: int | None = None
    retry: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One output of a call: int32 ids of its prompt and of what was sampled, float32 log-probabilities (nats, NaN =
    there is none; `None` = none for the whole), int16 expert routes (flat, as in the format), float32 log of the mass
    that was kept (nats). No server tells that mass, so the proxy has none."""

    choice: int
    prompt: IDS
    output: IDS
    logprobs: Logprobs | None
    finish_reason: str | None
    extra: dict[str, str]
    routes: Routes | None = None
    kept_logmass: Logprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallRecord:
    """One call. Times are microseconds since 1970. `accepted` is false for an attempt that was given up."""

    episode: str
    model_id: str
    response_id: str | None
    labels: Labels
    outputs: tuple[Sampled, ...]
    sampling: Sampling | None
    logprob_kind: str
    policy_version: int | None
    started: int
    ended: int
    accepted: bool | None = None
    extra: dict[str, str] = field(default_factory=dict)
