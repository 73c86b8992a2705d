"""How the calls of an episode follow from one another: as the log declares it, else as ids show it (`Parents`).

Every guess is counted: a prompt that was answered before is a `fork` unless the log says that it is a second try; where
several calls could be the parent the longest is taken; the kind of a rewrite is what ids, texts and the log's word on
reasoning show, else `opaque`, with the evidence `inferred`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memopd_trace.convert.losses import Losses
from memopd_trace.invocation import Invocation
from memopd_trace.lineage import common_prefix
from memopd_trace.parents import Parent, Parents, relation_to, rewrite_kind
from memopd_trace.pieces import Pieces

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
    parents = Parents()
    keys: dict[str, int] = {}
    for row, words in zip(rows, declared, strict=True):
        index = None if words.parent is None else keys.get(words.parent)
        if words.parent is not None and index is None and words.relation != "root":
            losses.degrade("a declared parent is not in the log", f"{row.name}: '{words.parent}'")
        columns: Columns | None = {"relation": "root"} if words.relation == "root" else None
        if columns is None and index is not None:
            columns = _declared(row, rows[index], words, declared[index].reasoned, losses, pieces)
        if columns is None:
            columns = _found(row, parents.find(row), rows, declared, losses, pieces)
        parents.add(row, columns.get("parent_index"))
        if words.key is not None:
            keys[words.key] = len(found)
        found.append(columns)
    _number_attempts(rows, found, losses)
    return found


def _number_attempts(rows: Sequence[Invocation], found: Sequence[Columns], losses: Losses) -> None:
    """Give each try of one call a number of its own: a retry without one the next, a second call of one number none."""
    family: list[object] = []
    used: dict[object, set[int]] = {}
    highest: dict[object, int] = {}  # of `used`, so that a call tried very often is not searched each time
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
            attempt = highest.get(own, 0) + 1
        elif attempt in numbers:
            losses.degrade("the number of an attempt occurs twice, and is left out", f"{row.name}: {attempt}")
            attempt = None
        if attempt is not None:
            numbers.add(attempt)
            highest[own] = max(attempt, highest.get(own, 0))
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
    relation = relation_to(parent, row)
    if relation == "extend":
        if words.rewrite_kind is not None:
            losses.degrade("declared a rewrite, and no id changed", f"{row.name}: '{words.rewrite_kind}'")
        return {**columns, "relation": "extend"}
    if relation == "fork" and words.rewrite_kind is None:
        losses.degrade(TWICE, row.name)
        return {**columns, "relation": "fork"}
    return {**columns, **_rewrite(row, parent, words, reasoned, losses, pieces)}


def _found(
    row: Invocation,
    parent: Parent,
    rows: Sequence[Invocation],
    declared: Sequence[Declared],
    losses: Losses,
    pieces: Pieces | None,
) -> Columns:
    """The columns of a call whose parent is not declared."""
    columns = parent.columns()
    if not row.invocation_index:
        return columns
    losses.gap("no_parent")
    if parent.others:
        names = " or ".join(map(str, (parent.index, *parent.others)))
        losses.degrade("several calls could be the parent: the longest is taken", f"{row.name}: {names}")
    if parent.index is None:
        losses.degrade("a context of its own: it shares nothing with earlier calls", row.name)
        return columns
    words = declared[row.invocation_index]
    if parent.relation == "rewrite" or (parent.relation == "fork" and words.rewrite_kind is not None):
        columns |= _rewrite(row, rows[parent.index], words, declared[parent.index].reasoned, losses, pieces)
    elif parent.relation == "fork":
        losses.degrade(TWICE, row.name)
    return columns


def _rewrite(
    row: Invocation, parent: Invocation, words: Declared, reasoned: bool, losses: Losses, pieces: Pieces | None
) -> Columns:
    """The columns of a rewrite but its parent: of the kind that the log declares, or that ids and texts show."""
    columns: Columns = {"relation": "rewrite"}
    if words.rewrite_kind is not None:
        return {**columns, "rewrite_kind": words.rewrite_kind, "rewrite_evidence": "explicit"}
    losses.gap("no_rewrite_kind")
    kind, difference = rewrite_kind(parent, row, pieces, reasoned=reasoned)
    if difference.cause == "other_output":
        losses.gap("lost_calls", "an answer stands in a prompt that no recorded call gave")
    if kind == "opaque":
        losses.degrade("a rewrite of an unknown kind", f"{row.name}: {difference.cause}: {difference.detail}")
    return {**columns, "rewrite_kind": kind, "rewrite_evidence": "inferred"}
