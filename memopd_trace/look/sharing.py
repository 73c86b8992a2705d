"""How many tokens of a set of invocations are distinct: the size of their prefix tree.

Two invocations share a token if they agree in everything up to and including it: the model, the media, the ids, the
positions, the recorded expert routes, and default visibility so far. From the first token on whose visibility is
explicit nothing is shared. A planner that packs a prefix tree can run no fewer tokens than that.

Example: [7 8 9 | 1], [7 8 9 | 2 3] and [7 8 5 | 4] have 13 tokens, of which 8 are distinct.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memopd_trace.invocation import Invocation
from memopd_trace.lineage import first_true, realm, shareable_length

TREE_TOKENS = 16 * 2**20  # 128 MiB of keys; a larger set is counted in parts


@dataclass(slots=True)
class PrefixTree:
    """Counts logical and distinct tokens of the invocations added since the last `cut`, in bounded memory.

    Keys take 8 bytes a token (more with expert routes). A set of more than `limit` tokens is counted in parts that
    share nothing with each other; `parts` says how often that was needed, and then `distinct` is an upper bound.
    """

    limit: int = TREE_TOKENS
    logical: int = 0
    distinct: int = 0
    parts: int = 0
    _held: int = 0
    _keys: list[tuple[bytes, bytes, int]] = field(default_factory=list, repr=False)  # realm, key, bytes a token

    def add(self, invocation: Invocation, key: tuple[bytes, bytes, int] | None = None) -> None:
        """Count one invocation whose arrays fit together; `key` is its `prefix_key`, where that is known already."""
        key = key or prefix_key(invocation)
        if self._keys and self._held + len(invocation) > self.limit:
            self.cut()
            self.parts += 1
        self.logical += len(invocation)
        self.distinct += len(invocation) - len(key[1]) // key[2]  # what can never be shared
        self._held += len(invocation)
        self._keys.append(key)

    def cut(self) -> None:
        """What comes next shares nothing with what came before (another episode, another group)."""
        last = (b"", b"", 1)
        for key in sorted(self._keys):
            common = _common_bytes(last[1], key[1]) if last[0] == key[0] else 0
            self.distinct += (len(key[1]) - common // key[2] * key[2]) // key[2]
            last = key
        self._keys, self._held = [], 0

    @property
    def ratio(self) -> float | None:
        """Logical over distinct tokens; 1 = nothing is shared; `None` without tokens."""
        return self.logical / self.distinct if self.distinct else None


def prefix_key(invocation: Invocation) -> tuple[bytes, bytes, int]:
    """(realm, the shareable tokens as bytes, bytes a token): equal bytes are equal prefixes within a realm."""
    length = shareable_length(len(invocation), invocation.visible_from, invocation.visible_until)
    digest, routes = realm(invocation)
    records = np.empty((length, 2), ">i4")
    records[:, 0] = invocation.sequence_ids[:length]
    records[:, 1] = invocation.positions()[:length]
    if routes is None:
        return digest, records.tobytes(), 8
    width, table = routes.shape[1], routes[:length]
    known = records[: len(table)]  # where the last token went is not recorded
    return digest + b" routes %d" % width, np.hstack([_bytes(known), _bytes(table)]).tobytes(), 8 + 2 * width


def _bytes(table: NDArray[np.generic]) -> NDArray[np.uint8]:
    table = np.ascontiguousarray(table)
    return table.view(np.uint8).reshape(len(table), -1) if table.size else np.empty((len(table), 0), np.uint8)


def _common_bytes(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b))
    return first_true(np.frombuffer(a, np.uint8, n) != np.frombuffer(b, np.uint8, n), n)
