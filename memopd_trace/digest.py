"""The state digest: one SHA-256 that says under which state a row's tokens were sampled, and which they were.

Canonical bytes, in this order; integers are little-endian and every array is preceded by its length (uint64):

    b"memopd-trace/state/1"
    prompt_ids      int32[]
    output_ids      int32[]
    position_ids    int32[n], or the length 0 alone: 0…n-1
    visible_from    int32[n], or the length 0 alone: k
    visible_until   int32[n], or the length 0 alone: n
    output_slots    int32[], or the length 0 alone: null
    media           uint64 count, then per run: int32 start, int32 stop, 32 bytes sha256

n = len(prompt) + len(output), or len(prompt) where `output_slots` is given. A default that is written out counts as
one that is left out. Identity (episode, index, model) and lineage stay out: two rows with one digest were sampled in
one state, whoever they belong to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IDS = NDArray[np.int32]
_TAG = b"memopd-trace/state/1"
_NONE = bytes(8)  # a length of 0


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
    n = len(prompt_ids) + (len(output_ids) if output_slots is None else 0)
    h = hashlib.sha256(_TAG)
    for array, default in (
        (prompt_ids, None),
        (output_ids, None),
        (position_ids, _counting),
        (visible_from, _counting),
        (visible_until, _ends),
        (output_slots, None),
    ):
        if array is None or (default is not None and np.array_equal(array, default(n))):
            h.update(_NONE)
        else:
            h.update(len(array).to_bytes(8, "little"))
            h.update(np.ascontiguousarray(array, "<i4").data)
    h.update(len(media).to_bytes(8, "little"))
    for start, stop, sha256 in media:
        h.update(start.to_bytes(4, "little", signed=True) + stop.to_bytes(4, "little", signed=True) + sha256)
    return h.digest()


def _counting(n: int) -> IDS:
    return np.arange(n, dtype=np.int32)


def _ends(n: int) -> IDS:
    return np.full(n, n, np.int32)
