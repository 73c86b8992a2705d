"""Sequences of ids by their beginnings: which earlier ones a new one begins with, and which begin most like it.

A radix tree. A sequence that goes on from another only lengthens the edge on which that ends, so that a growing history
is one edge however many calls it has; an edge is cut in two where sequences part. Ids that sequences share are kept
once. To look one up reads each of its ids at most once, however many sequences there are.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from memopd_trace.invocation import IDS
from memopd_trace.lineage import common_prefix

NOBODY = -1


@dataclass(slots=True)
class _Edge:
    """Some `ids` behind another edge's. `ends` are (how many of these ids, number) of the sequences that end on it, in
    order; `below` the edges behind it by their first id; `deep` the largest number behind it."""

    ids: IDS
    ends: list[tuple[int, int]] = field(default_factory=list)
    below: dict[int, _Edge] = field(default_factory=dict)
    deep: int = NOBODY

    def latest(self, beyond: int = 0) -> int:
        """The largest number of those that hold the first `beyond` ids of this edge."""
        best, at = self.deep, len(self.ends)
        while at and self.ends[at - 1][0] >= beyond:
            offset, number = self.ends[at - 1]  # of those that end here the largest: very many may be alike
            best, at = max(best, number), bisect_left(self.ends, (offset, NOBODY))
        return best


@dataclass(frozen=True, slots=True)
class Match:
    """`length` ids of a looked-up sequence are the beginning of the one numbered `latest` (of several the largest
    number), and of none more; `None` where the tree is empty. `path` are the edges and how much of each."""

    length: int
    latest: int | None
    path: list[tuple[_Edge, int]]

    def ends(self, most: int = sys.maxsize) -> Iterator[tuple[int, int]]:
        """(length, number) of the sequences with all of whose ids the looked-up one begins: longest first, of equal
        ones the largest numbers, `most` of them."""
        at = self.length
        for edge, same in reversed(self.path):
            at -= same
            stop = bisect_left(edge.ends, (same + 1, NOBODY))
            while stop:
                start = bisect_left(edge.ends, (edge.ends[stop - 1][0], NOBODY))
                for offset, number in reversed(edge.ends[max(start, stop - most) : stop]):
                    yield at + offset, number
                stop = start


class PrefixTree:
    """Numbered sequences of ids. `compared` counts the ids that were read."""

    def __init__(self) -> None:
        self._root = _Edge(np.zeros(0, np.int32))
        self.compared = 0

    def match(self, ids: IDS) -> Match:
        """What the tree holds of `ids` (int32[n])."""
        edge, at = self._root, 0
        path = [(edge, 0)]
        while at < len(ids) and (found := edge.below.get(int(ids[at]))) is not None:
            edge = found
            same = common_prefix(edge.ids, ids[at:])
            self.compared += min(len(edge.ids), len(ids) - at)
            path.append((edge, same))
            at += same
            if same < len(edge.ids):
                break
        latest = edge.latest(path[-1][1])
        return Match(at, None if latest == NOBODY else latest, path)

    def add(self, ids: IDS, number: int) -> None:
        """Take in a sequence; numbers grow."""
        found = self.match(ids)
        edge, same = found.path[-1]
        rest = ids[found.length :]
        if len(rest) and same < len(edge.ids):
            self._cut(edge, same)
        for above, _ in found.path[:-1]:
            above.deep = number
        if not len(rest):
            insort(edge.ends, (same, number))
        elif edge.below or edge is self._root:
            edge.below[int(rest[0])] = _Edge(rest.copy(), [(len(rest), number)])
            edge.deep = number
        else:
            edge.ids = np.concatenate([edge.ids, rest])
            edge.ends.append((len(edge.ids), number))

    def remove(self, ids: IDS, number: int) -> None:
        """Take out a sequence that was added.

        Raises:
            KeyError: it was not.
        """
        found = self.match(ids)
        edge, same = found.path[-1]
        if found.length < len(ids) or (same, number) not in edge.ends:
            raise KeyError(number)
        edge.ends.remove((same, number))
        for (above, _), (edge, _) in zip(reversed(found.path[:-1]), reversed(found.path[1:]), strict=True):
            if not edge.below:
                first, edge.ids = int(edge.ids[0]), edge.ids[: edge.ends[-1][0] if edge.ends else 0]
                if not len(edge.ids):
                    del above.below[first]
            above.deep = max((e.latest() for e in above.below.values()), default=NOBODY)

    @staticmethod
    def _cut(edge: _Edge, at: int) -> None:
        """Make two edges of one."""
        place = bisect_left(edge.ends, (at + 1, NOBODY))
        tail = _Edge(edge.ids[at:], [(n - at, number) for n, number in edge.ends[place:]], edge.below, edge.deep)
        edge.ids, edge.ends, edge.below = edge.ids[:at], edge.ends[:place], {int(tail.ids[0]): tail}
        edge.deep = tail.latest()
