"""Which earlier call a call goes on from, told by the ids alone: for logs and clients that do not declare it.

An equal prompt is a `retry` of an attempt that was given up. Else the longest earlier state with which the prompt
begins is the parent (`extend`). Without one, an equal prompt is a `fork`; what shares a beginning with an earlier call
is a `rewrite` of the one with which it shares most, with what the ids show of its kind and `inferred` as evidence; what
shares no more than a template's header is a `root`. Attempts that were given up (`accepted` = false) are nobody's
parent but a retry's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memopd_trace.causes import HEADER, REWRITE_KINDS, explain
from memopd_trace.invocation import Invocation
from memopd_trace.lineage import common_prefix, inherited, is_extension
from memopd_trace.pieces import Pieces


@dataclass(frozen=True, slots=True)
class Lineage:
    """`columns` are the lineage columns of the row (its parent, relation, and what belongs to them); `others` the
    indices of calls on other branches that the prompt follows as exactly: with any, the parent is a guess."""

    columns: dict[str, Any]
    others: tuple[int, ...] = ()


def infer_lineage(
    row: Invocation, earlier: Sequence[Invocation], *, again: bool = False, pieces: Pieces | None = None
) -> Lineage:
    """The lineage of a row behind the `earlier` ones of its episode. With `again` the caller knows that the request was
    sent before: an equal prompt is then a retry, whatever became of the first. `pieces` are the model's."""
    twin = next((i for i in reversed(earlier) if same_prompt(i, row)), None)
    if twin is not None and (again or twin.accepted is False):
        return Lineage(retry_of(twin, earlier))
    usable = [i for i in earlier if i.accepted is not False]
    followed = [i for i in usable if len(i.output_ids) and is_extension(i, row)]
    if followed:
        parent = max(followed, key=lambda i: (len(i), i.invocation_index))
        above = _ancestors(parent, earlier)
        twins = (i for i in followed if i is not parent and len(i) == len(parent))  # one state, whoever is whose parent
        others = {i.invocation_index for i in followed} - above | {i.invocation_index for i in twins}
        return Lineage({"parent_index": parent.invocation_index, "relation": "extend"}, tuple(sorted(others)))
    if twin is not None:
        return Lineage({"parent_index": twin.invocation_index, "relation": "fork"})
    nearest = max(usable, key=lambda i: (inherited(i, row), i.invocation_index), default=None)
    least = min(HEADER, (len(row.prompt_ids) + 1) // 2)
    if nearest is None or inherited(nearest, row) < max(least, 1):
        return Lineage({"relation": "root"})
    return Lineage(rewrite_of(nearest, row, pieces))


def same_prompt(a: Invocation, b: Invocation) -> bool:
    """Whether two calls have one prompt, id for id."""
    return len(a.prompt_ids) == len(b.prompt_ids) == common_prefix(a.prompt_ids, b.prompt_ids)


def retry_of(attempt: Invocation, earlier: Sequence[Invocation]) -> dict[str, Any]:
    """The lineage columns of the next attempt behind the `earlier` rows; its number is one that no other has."""
    numbers = [i.attempt or 0 for i in earlier if same_prompt(i, attempt)]
    return {"parent_index": attempt.invocation_index, "relation": "retry", "attempt": 1 + max(numbers, default=0)}


def rewrite_of(parent: Invocation, row: Invocation, pieces: Pieces | None, kind: str | None = None) -> dict[str, Any]:
    """The lineage columns of a rewrite: of a declared `kind`, or of the kind that ids (and texts) show."""
    shown = kind or REWRITE_KINDS.get(explain(parent, row, None, pieces).cause, "opaque")
    return {
        "parent_index": parent.invocation_index,
        "relation": "rewrite",
        "rewrite_kind": shown,
        "rewrite_evidence": "inferred" if kind is None else "explicit",
    }


def _ancestors(row: Invocation, earlier: Sequence[Invocation]) -> set[int]:
    by_index = {i.invocation_index: i for i in earlier}
    found: set[int] = set()
    at: Invocation | None = row
    while at is not None and at.invocation_index not in found:
        found.add(at.invocation_index)
        at = None if at.parent_index is None else by_index.get(at.parent_index)
    return found
