"""What the journal holds, as bytes: calls, rewards, and ends of episodes.

A record is a JSON object and the arrays that it names, so that ids and log-probabilities are kept bit for bit. It has
what a row is made from, not the row: rows are made again from the records, in their order, in the same way.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memopd_trace.invocation import Sampling
from memopd_trace.record.call import CallRecord, DeclaredSegment, Labels, Sampled

_LENGTH = struct.Struct("<I")
_TYPES = {"i4": np.int32, "f4": np.float32, "i2": np.int16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRecord:
    """A reward for one call (`response_id`), or the latest; `rewards` are its named parts."""

    episode: str
    reward: float | None
    rewards: dict[str, float] | None
    response_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """The end of an episode: `terminated`, `truncated`, or `None` where it was only silent for too long."""

    episode: str
    end: str | None


Record = CallRecord | RewardRecord | EndRecord


def to_bytes(record: Record) -> bytes:
    """A record as the journal keeps it."""
    arrays: list[NDArray[Any]] = []
    header = {"type": type(record).__name__, **_plain(record, arrays)}
    header["arrays"] = [[a.dtype.str[1:], len(a)] for a in arrays]
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *(a.astype(a.dtype.newbyteorder("<")).tobytes() for a in arrays)])


def from_bytes(data: bytes) -> Record:
    """The record that `to_bytes` wrote.

    Raises:
        ValueError: it is none.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        header = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        arrays, at = [], _LENGTH.size + length
        for kind, count in header.pop("arrays"):
            array = np.frombuffer(data, f"<{kind}", count, at)
            arrays.append(array.astype(_TYPES[kind]))
            at += array.nbytes
        return _record(header.pop("type"), header, arrays)
    except (AttributeError, KeyError, IndexError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise ValueError(f"no record: {error}") from None


def _plain(record: Record, arrays: list[NDArray[Any]]) -> dict[str, Any]:
    if not isinstance(record, CallRecord):
        return asdict(record)
    prompts: dict[int, int] = {}  # a prompt that several outputs share is kept once
    outputs = []
    for s in record.outputs:
        if id(s.prompt) not in prompts:
            prompts[id(s.prompt)] = len(arrays)
            arrays.append(s.prompt)
        places: list[int | None] = [prompts[id(s.prompt)]]
        for array in (s.output, s.logprobs, s.routes):
            places.append(None if array is None else len(arrays))
            arrays += [] if array is None else [array]
        *places, routes = places
        outputs.append([s.choice, *places, s.finish_reason, s.extra, routes])
    plain = {name: getattr(record, name) for name in CallRecord.__dataclass_fields__}
    labels, sampling = asdict(record.labels), None if record.sampling is None else asdict(record.sampling)
    return plain | {"outputs": outputs, "labels": labels, "sampling": sampling}


def _record(kind: str, values: dict[str, Any], arrays: Sequence[NDArray[Any]]) -> Record:
    if kind == "RewardRecord":
        return RewardRecord(**values)
    if kind == "EndRecord":
        return EndRecord(**values)
    outputs = tuple(_sampled(arrays, *output) for output in values.pop("outputs"))
    labels, sampling = values.pop("labels"), values.pop("sampling")
    segments = labels.pop("segments")
    declared = None if segments is None else tuple(DeclaredSegment(**s) for s in segments)
    return CallRecord(
        **values,
        outputs=outputs,
        labels=Labels(**labels, segments=declared),
        sampling=None if sampling is None else Sampling(**sampling),
    )


def _sampled(
    arrays: Sequence[NDArray[Any]],
    choice: int,
    prompt: int,
    output: int,
    logprobs: int | None,
    finish: str | None,
    extra: dict[str, str],
    routes: int | None = None,
) -> Sampled:
    found = [None if place is None else arrays[place] for place in (logprobs, routes)]
    return Sampled(choice, arrays[prompt], arrays[output], found[0], finish, extra, found[1])
