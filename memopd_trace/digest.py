"""The state digest: one SHA-256 that says under which state a row's tokens were sampled, and which they were.

Canonical bytes, in this order; integers are little-endian and every array is preceded by its length (uint64):

    b"memopd-trace/state/1"
    prompt_ids      int32[]
    output_ids      int32[]
    position_ids    int32[n]   default 0…n-1 written out
    visible_from    int32[n]   default k written out
    visible_until   int32[n]   default n written out
    output_slots    int32[]    default len(prompt_ids) + i written out
    media           uint64 count, then per run: int32 start, int32 stop, 32 bytes sha256

n = len(prompt) + len(output), or len(prompt) where `output_slots` is given. Identity (episode, index, model)
and lineage stay out: two rows with one digest were sampled in one state, whoever they belong to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IDS = NDArray[np.int32]
_TAG = b"memopd-trace/state/1"


def state_digest(
    prompt_ids: IDS,
    output_ids: IDS,
    position_ids: IDS | None = None,
    visible_from: IDS | None = None,
    visible_until: IDS | None = None,
    output_slots: IDS | None = None,
    media: Sequence[tuple[int, int, bytes]] = (),
) -> bytes:
    """SHA-256 of the canonical bytes (32 bytes). Arrays are int32; `media` is (start, stop, sha256) runs."""
    prompt, output = len(prompt_ids), len(output_ids)
    n = prompt if output_slots is not None else prompt + output
    counting = np.arange(prompt + output, dtype="<i4")
    arrays = (
        prompt_ids,
        output_ids,
        counting[:n] if position_ids is None else position_ids,
        counting[:n] if visible_from is None else visible_from,
        np.full(n, n, dtype="<i4") if visible_until is None else visible_until,
        counting[prompt:] if output_slots is None else output_slots,
    )
    h = hashlib.sha256(_TAG)
    for array in arrays:
        h.update(len(array).to_bytes(8, "little"))
        h.update(np.ascontiguousarray(array, dtype="<i4").data)
    h.update(len(media).to_bytes(8, "little"))
    for start, stop, sha256 in media:
        h.update(start.to_bytes(4, "little", signed=True) + stop.to_bytes(4, "little", signed=True) + sha256)
    return h.digest()
