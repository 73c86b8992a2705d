"""Which earlier call of its episode a call goes on from, told by ids alone: for whatever logs and clients leave unsaid.

In this order:

    retry     its prompt is that of an attempt which was given up (`accepted` = false), or the caller knows that the
              request was sent again
    extend    its prompt begins with all of an earlier call's state; of several the longest is taken (of equal ones the
              latest), and the others that are on separate branches are reported
    fork      its prompt is a prefix of an earlier call's prompt, or all of it: another continuation, which is all that
              ids show. Whether the context went back, or a call was tried again, only its log or client can say
    rewrite   it shares the longest prefix with an earlier call (of equal ones the latest), more than a template's
              header. What was done, as far as ids and texts show it, says `rewrite_kind`
    root      none of these

A call that was given up is nobody's parent but a retry's. No earlier call is compared with a prompt one by one: what a
prompt costs is its own ids, read a few times, however often calls are repeated: of those with equal ids the latest
`OTHERS` are looked at.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from memopd_trace.causes import HEADER, REWRITE_KINDS, explain
from memopd_trace.invocation import IDS, Invocation
from memopd_trace.lineage import Difference, final_ids, inherited, is_extension, is_prefix, state_difference
from memopd_trace.pieces import Pieces
from memopd_trace.prefixtree import Match, PrefixTree

OTHERS = 32  # so many are told, and of calls with equal ids looked at: calls may be repeated without end
MARKS = 2  # ids of an output in front of its reasoning, at most: a mark and a line break


@dataclass(frozen=True, slots=True)
class Parent:
    """The parent that ids show: its index (`None` for a root) and the `relation` to it; `others` are the indices of
    calls on other branches that the prompt follows as well (`OTHERS` at most): with any, the parent is a guess."""

    relation: str
    index: int | None = None
    others: tuple[int, ...] = ()

    def columns(self) -> dict[str, Any]:
        """The two columns of the row."""
        return {"parent_index": self.index, "relation": self.relation}


class Parents:
    """The earlier calls of one episode, by their index, as candidates for a parent."""

    def __init__(self) -> None:
        self._rows: list[Invocation] = []
        self._parents: list[int | None] = []
        self._states, self._prompts = PrefixTree(), PrefixTree()
        self._twins: dict[bytes, list[int]] = {}
        self._hashed = 0
        self._last: tuple[IDS, bytes] | None = None

    @property
    def compared(self) -> int:
        """How many ids were read so far to look prompts and states up: what the cost grows with."""
        return self._states.compared + self._prompts.compared + self._hashed

    def add(self, row: Invocation, parent: int | None) -> None:
        """Take in the next call, whose index is the number of those before it, with its parent's."""
        index = len(self._rows)
        self._rows.append(row)
        self._parents.append(parent)
        self._twins.setdefault(self._key(row), []).append(index)
        if row.accepted is not False:
            self._states.add(final_ids(row), index)
            self._prompts.add(row.prompt_ids, index)

    def give_up(self, index: int) -> None:
        """A call was an attempt that nobody used, as is known only now."""
        row = self._rows[index]
        if row.accepted is not False:
            self._rows[index] = row.replace(accepted=False, output_loss_mask=None)
            self._states.remove(final_ids(row), index)
            self._prompts.remove(row.prompt_ids, index)

    def same_prompt(self, row: Invocation) -> list[int]:
        """The calls with the prompt of `row`, id for id, given up or not."""
        return self._twins.get(self._key(row), [])

    def find(self, row: Invocation, *, again: bool = False) -> Parent:
        """The parent of the next call. With `again` its request is known to have been sent before: an equal prompt is
        then a retry, whatever became of the first."""
        twins = self.same_prompt(row)
        if twins and (again or self._rows[twins[-1]].accepted is False):
            return Parent("retry", twins[-1])
        states = self._states.match(row.prompt_ids)
        followed = self._followed(row, states)
        if followed:
            return Parent("extend", followed[0], tuple(sorted(followed[1:])))
        if states.latest is None:
            return Parent("root")
        prompts = self._prompts.match(row.prompt_ids)
        if prompts.latest is not None and prompts.length == len(row.prompt_ids) > 0:
            used = (i for i in reversed(twins) if self._rows[i].accepted is not False)
            return Parent("fork", next(used, prompts.latest))
        if states.length < min(HEADER, max(1, (len(row.prompt_ids) + 1) // 2)):
            return Parent("root")
        nearest = self._rows[states.latest]  # one without an output may be gone on from all the same
        return Parent("extend" if is_extension(nearest, row) else "rewrite", states.latest)

    def _followed(self, row: Invocation, states: Match) -> list[int]:
        """The calls whose whole state the prompt begins with, the longest first, without ancestors of others; a call
        with the very state of the longest counts, whoever is whose parent."""
        found: list[int] = []
        above = _Above(self._parents)
        longest = 0
        for length, index in states.ends(OTHERS):
            other = self._rows[index]
            if (index in above and length != longest) or not len(other.output_ids) or state_difference(other, row):
                continue
            longest = longest or length
            found.append(index)
            if len(found) > OTHERS:
                break
            above.add(index)
        return found

    def _key(self, row: Invocation) -> bytes:
        if self._last is None or self._last[0] is not row.prompt_ids:  # a call is found, and then added
            self._hashed += len(row.prompt_ids)
            ids = np.ascontiguousarray(row.prompt_ids)
            self._last = row.prompt_ids, hashlib.blake2b(ids.data, digest_size=16).digest()
        return self._last[1]


class _Above:
    """Some calls and what they go back to. A line is walked no further down than is asked for: one may be as long as
    the episode."""

    def __init__(self, parents: list[int | None]) -> None:
        self._parents = parents
        self._seen: set[int] = set()
        self._open: list[int] = []  # where each line has been walked to, as a heap of negative indices

    def add(self, index: int) -> None:
        """Take in a call."""
        if index not in self:
            self._seen.add(index)
            heapq.heappush(self._open, -index)

    def __contains__(self, index: int) -> bool:
        while self._open and -self._open[0] > index:  # parents are earlier
            before = self._parents[-heapq.heappop(self._open)]
            if before is not None and before not in self._seen:
                self._seen.add(before)
                heapq.heappush(self._open, -before)
        return index in self._seen


def relation_to(parent: Invocation, row: Invocation) -> str:
    """How a call follows a parent that is known, where the relation is not."""
    if is_extension(parent, row):
        return "extend"
    if is_prefix(row.prompt_ids, parent.prompt_ids):
        return "retry" if parent.accepted is False else "fork"
    return "rewrite"


def rewrite_kind(
    parent: Invocation, child: Invocation, pieces: Pieces | None = None, *, reasoned: bool = False
) -> tuple[str, Difference]:
    """What was probably done to the parent's context (a word of the registry, `opaque` where nothing shows it), and the
    difference that shows it. `pieces` are the model's; without them `reasoned` says that the parent's output is known
    to begin with reasoning."""
    difference = explain(parent, child, None, pieces)
    if pieces is None and reasoned and _without_reasoning(parent, child):
        return "strip_thinking", difference
    return REWRITE_KINDS.get(difference.cause, "opaque"), difference


def _without_reasoning(parent: Invocation, child: Invocation) -> bool:
    """Whether of the parent only a stretch at the head of its output is gone: where the log says that there was
    reasoning, that is what it was. The rest of the output has to follow to its end, a stop id that a template writes
    anew aside."""
    start = len(parent.prompt_ids)
    same = inherited(parent, child)
    if not start <= same <= start + MARKS:
        return False
    lost, new = parent.output_ids[same - start :], child.prompt_ids[same:]
    kept = _kept_end(lost, new)
    return kept > 0 and len(lost) - kept > 0


def _kept_end(lost: IDS, new: IDS) -> int:
    """How many last ids of `lost` come back at once in `new`, a few ids from its start; 0 for none."""
    best = 0
    for gap in range(min(len(new), 2 * MARKS + 4)):
        rest = new[gap:]
        for start in np.flatnonzero(lost == rest[0])[:512]:
            kept = len(lost) - int(start)
            if kept > best and kept <= len(rest) and np.array_equal(lost[start:], rest[:kept]):
                best = kept
    return best
