"""How the calls of an episode follow from one another: as the log declares it, else by comparing ids.

For a call without a declared parent, in this order:

    extend    its prompt begins with all of an earlier call's ids; of several the longest (others on separate branches
              are counted as an ambiguity)
    fork      its prompt is an earlier call's prompt, or a prefix of one: another answer to it. Whether it is a second
              try is known only to a log that says so
    rewrite   it shares the longest prefix with an earlier call (of equal ones the latest); the kind is what ids, texts
              and the log's word on reasoning show, else `opaque`; the evidence is `inferred`
    root      it shares no more than a template's header with any earlier call
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memopd_trace.causes import HEADER, REWRITE_KINDS, explain
from memopd_trace.convert.losses import Losses
from memopd_trace.invocation import IDS, Invocation
from memopd_trace.lineage import common_prefix, explain_difference, inherited
from memopd_trace.pieces import Pieces

MAX_COMPARED = 64  # earlier calls, the latest, with which a prompt that extends none is compared
NEVER = 2**62  # a length that no prompt has
MARKS = 2  # ids of an output in front of its reasoning, at most: a mark and a line break
TWICE = "a prompt that was answered before: not told whether it is a second try"


@dataclass(frozen=True, slots=True)
class Declared:
    """What a log declares of one call: `key` is its name, `parent` another's."""

    key: str | None = None
    parent: str | None = None
    relation: str | None = None
    rewrite_kind: str | None = None
    reasoned: bool = False


Columns = dict[str, Any]


def resolve(
    rows: Sequence[Invocation], declared: Sequence[Declared], losses: Losses, pieces: Pieces | None = None
) -> list[Columns]:
    """The lineage columns of the rows of one episode, which stand in commit order. `pieces` must be their tokenizer."""
    found: list[Columns] = []
    parents: list[int | None] = []
    states = _States()
    keys: dict[str, int] = {}
    for row, words in zip(rows, declared, strict=True):
        done = rows[: len(found)]
        index = None if words.parent is None else keys.get(words.parent)
        if words.parent is not None and index is None and words.relation != "root":
            losses.degrade("a declared parent is not in the log", f"{row.name}: '{words.parent}'")
        columns: Columns | None = {"relation": "root"} if words.relation == "root" else None
        if columns is None and index is not None:
            columns = _declared(row, done[index], words, declared[index].reasoned, losses, pieces)
        if columns is None:
            followed = states.followed(row, done, parents)
            columns = _found(row, done, declared, followed, losses, pieces)
        found.append(columns)
        parents.append(columns.get("parent_index"))
        states.add(row)
        if words.key is not None:
            keys[words.key] = len(parents) - 1
    _number_attempts(rows, found, losses)
    return found


def _number_attempts(rows: Sequence[Invocation], found: Sequence[Columns], losses: Losses) -> None:
    """Give each try of one call a number of its own: a retry without one the next, a second call of one number none."""
    family: list[object] = []
    used: dict[object, set[int]] = {}
    for row, columns in zip(rows, found, strict=True):
        relation, parent, attempt = columns["relation"], columns.get("parent_index"), row.attempt
        own: object = row.invocation_index
        if relation == "retry":
            own = family[columns["parent_index"]]
        elif relation in ("extend", "rewrite"):
            start = len(rows[columns["parent_index"]]) if relation == "extend" else 0
            own = parent, row.prompt_ids[start:].tobytes()
            if own in used:
                losses.degrade(TWICE, row.name)
        numbers = used.setdefault(own, set())
        if relation == "retry" and attempt is None:
            attempt = max(numbers, default=0) + 1
        elif attempt in numbers:
            losses.degrade("the number of an attempt occurs twice, and is left out", f"{row.name}: {attempt}")
            attempt = None
        numbers |= set() if attempt is None else {attempt}
        columns["attempt"] = attempt
        family.append(own)


def _declared(
    row: Invocation, parent: Invocation, words: Declared, reasoned: bool, losses: Losses, pieces: Pieces | None
) -> Columns | None:
    """The columns of a call whose parent is declared; `None` where the ids contradict what is declared."""
    columns: Columns = {"parent_index": parent.invocation_index}
    same = common_prefix(parent.prompt_ids, row.prompt_ids)
    if words.relation == "retry" and same == len(parent.prompt_ids) == len(row.prompt_ids):
        return {**columns, "relation": "retry"}
    if words.relation == "fork" and same:
        return {**columns, "relation": "fork"}
    if words.relation in ("retry", "fork"):
        losses.degrade(f"declared a {words.relation}, and the ids say otherwise", row.name)
        return None
    if parent.accepted is False:
        losses.degrade("declared to follow a rejected call", row.name)
        return None
    if words.relation == "spawn":
        return {**columns, "relation": "spawn"}
    if inherited(parent, row) == len(parent):
        if words.rewrite_kind is not None:
            losses.degrade("declared a rewrite, and no id changed", f"{row.name}: '{words.rewrite_kind}'")
        return {**columns, "relation": "extend"}
    if words.rewrite_kind is not None:
        kind, evidence = words.rewrite_kind, "explicit"
    else:
        kind, evidence = rewrite_kind(parent, row, reasoned, losses, pieces), "inferred"
    return {**columns, "relation": "rewrite", "rewrite_kind": kind, "rewrite_evidence": evidence}


def _found(
    row: Invocation,
    done: Sequence[Invocation],
    declared: Sequence[Declared],
    followed: list[int],
    losses: Losses,
    pieces: Pieces | None,
) -> Columns:
    """The columns of a call whose parent is not declared; its prompt begins with the states of `followed`."""
    if not done:
        return {"relation": "root"}
    losses.gap("no_parent")
    if followed:
        if len(followed) > 1:
            names = " or ".join(map(str, followed))
            losses.degrade("several calls could be the parent: the longest is taken", f"{row.name}: {names}")
        return {"parent_index": followed[0], "relation": "extend"}
    nearest, same = _nearest(row, done)
    if nearest is None or same < min(HEADER, (len(row.prompt_ids) + 1) // 2):
        losses.degrade("a context of its own: it shares nothing with earlier calls", row.name)
        return {"relation": "root"}
    columns: Columns = {"parent_index": nearest.invocation_index}
    if same == len(row.prompt_ids) and same <= len(nearest.prompt_ids):
        losses.degrade(TWICE, row.name)
        return {**columns, "relation": "fork"}
    words = declared[row.invocation_index]
    if words.rewrite_kind is not None:
        kind, evidence = words.rewrite_kind, "explicit"
    else:
        reasoned = declared[nearest.invocation_index].reasoned
        kind, evidence = rewrite_kind(nearest, row, reasoned, losses, pieces), "inferred"
    return {**columns, "relation": "rewrite", "rewrite_kind": kind, "rewrite_evidence": evidence}


def _nearest(row: Invocation, done: Sequence[Invocation]) -> tuple[Invocation | None, int]:
    """The call with the longest common prefix, of equal ones the latest, and that prefix's length. A call whose prompt
    alone is shared counts as near as one whose output is not."""
    best: Invocation | None = None
    length = -1
    for other in reversed([i for i in done if i.accepted is not False][-MAX_COMPARED:]):
        same = inherited(other, row)
        if same > length:
            best, length = other, same
    return best, length


def rewrite_kind(parent: Invocation, child: Invocation, reasoned: bool, losses: Losses, pieces: Pieces | None) -> str:
    """What was probably done to the parent's context: a word of the registry, `opaque` where nothing shows it."""
    losses.gap("no_rewrite_kind")
    if pieces is not None:
        difference = explain(parent, child, None, pieces)
        if difference.cause == "other_output":
            losses.gap("lost_calls", "an answer stands in a prompt that no recorded call gave")
    else:
        if reasoned and _without_reasoning(parent, child):
            return "strip_thinking"
        difference = explain_difference(parent.sequence_ids, child.prompt_ids)
    kind = REWRITE_KINDS.get(difference.cause, "opaque")
    if kind == "opaque":
        losses.degrade("a rewrite of an unknown kind", f"{child.name}: {difference.cause}: {difference.detail}")
    return kind


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


class _States:
    """The states of the calls so far, to be found by what a prompt begins with: by the id with which each ends. Only
    what agrees there is compared whole, and of a chain of calls only the last."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._ends: list[int] = []

    def add(self, row: Invocation) -> None:
        """The next call, for those behind it. A rejected one, or one without an output, is followed by none."""
        usable = row.accepted is not False and len(row.output_ids) > 0
        self._lengths.append(len(row) if usable else NEVER)
        self._ends.append(int(row.output_ids[-1]) if usable else 0)

    def followed(self, row: Invocation, done: Sequence[Invocation], parents: Sequence[int | None]) -> list[int]:
        """The calls whose whole state the prompt begins with and that are no ancestors of one another: the longest
        first, of equal ones the latest."""
        lengths, ends = np.array(self._lengths, np.int64), np.array(self._ends, np.int64)
        fits = np.flatnonzero(lengths <= len(row.prompt_ids))
        fits = fits[row.prompt_ids[lengths[fits] - 1] == ends[fits]]
        found: list[int] = []
        above: set[int] = set()
        for index in sorted(fits.tolist(), key=lambda i: (lengths[i], i), reverse=True):
            if index not in above and inherited(done[index], row) == lengths[index]:
                found.append(index)
                above |= _ancestors(index, parents)
        return found


def _ancestors(index: int | None, parents: Sequence[int | None]) -> set[int]:
    """`index` and what it goes back to."""
    found: set[int] = set()
    while index is not None:
        found.add(index)
        index = parents[index]
    return found
