"""Which states meet in one prefix tree: sorted by what they may share, each beside what it shares with the one before.

A state's key is its shareable tokens as bytes: the ids, with positions where a state of the group has its own, and
with the experts its tokens went to where they were recorded. A token is a fixed number of bytes, so equal prefixes are
neighbours in byte order whatever the order of the ids, and the common bytes of neighbours are the trie: nothing that
may be shared is run twice. What lies beyond the shareable tokens is no part of the key, and cannot part two states
that share everything before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memopd_scorer.states import State, counting

Branch = tuple[State, int]  # a state, and how many leading tokens it shares with the branch before it


def arrange(states: Sequence[State]) -> list[Branch]:
    """The states depth first; their order does not depend on the one they come in."""
    with_positions = any(s.positions is not None for s in states)
    keyed = []
    for number, state in enumerate(states):
        width = -1 if state.routes is None else state.routes.shape[1]
        keyed.append(((state.realm, width), _key(state, with_positions), state.digest, number))
    keyed.sort()
    branches: list[Branch] = []
    last: tuple[tuple[bytes, int], bytes] = ((b"", -1), b"")
    for realm, key, _, number in keyed:
        token_bytes = (8 if with_positions else 4) + 2 * max(0, realm[1])
        common = _common_bytes(last[1], key) // token_bytes if last[0] == realm else 0
        branches.append((states[number], common))
        last = realm, key
    return branches


def _key(state: State, with_positions: bool) -> bytes:
    """The shareable tokens, each as many bytes as in all keys of the realm."""
    length = state.shareable
    if state.routes is not None:
        length = min(length, len(state.routes))  # where the last token went is not recorded
    ids = state.ids[:length].astype("<i4", copy=False)
    if not with_positions and state.routes is None:
        return ids.tobytes()
    if not length:
        return b""
    columns = [ids]
    if with_positions:
        positions = counting(0, length) if state.positions is None else state.positions[:length]
        columns.append(positions.astype("<i4", copy=False))
    if state.routes is not None:
        columns.append(state.routes[:length])
    return np.hstack([np.ascontiguousarray(c).view(np.uint8).reshape(length, -1) for c in columns]).tobytes()


def _common_bytes(a: bytes, b: bytes) -> int:
    """How many leading bytes agree, in steps of two, which every part of a key is a multiple of."""
    n = min(len(a), len(b)) // 2
    if not n:
        return 0
    differs = np.frombuffer(a, np.int16, n) != np.frombuffer(b, np.int16, n)
    at = int(differs.argmax())
    return 2 * (at if differs[at] else n)
