"""From a recorded call to a row that validates: what is declared and the ids do not bear out is left out, and counted.

The ids are the record. A wrong label never costs a call: a lineage that is not so is inferred anew, segments that do
not fit are dropped, and so are log-probabilities that the format refuses (of an unknown kind, say).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from memopd_trace.errors import UsageError
from memopd_trace.invocation import Invocation, Segment
from memopd_trace.metadata import TraceMetadata
from memopd_trace.parents import Parents, relation_to, rewrite_kind
from memopd_trace.pieces import Pieces
from memopd_trace.record.call import CallRecord, DeclaredSegment, Labels, Sampled
from memopd_trace.record.checks import check_row

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NO_LOGPROBS = {
    "output_logprobs": None,
    "logprob_kind": None,
    "output_kept_logmass": None,
    "output_loss_mask": None,
}
REMEDIES: dict[str, tuple[str, dict[str, Any]]] = {  # a code's beginning: what is said, what is left out
    "E-LOGPROB-": ("log-probabilities left out", NO_LOGPROBS),
    "E-SUPPORT-": ("log-probabilities left out", NO_LOGPROBS),
    "E-SEGMENT-": ("segments left out: they do not fit", {"segments": None}),
    "E-LOSS-CONTENT": ("segments left out: they do not fit", {"segments": None}),
    "E-ROUTED-": ("expert routes left out: they do not fit", {"routed_experts": None}),
    "E-FEATURE-": ("expert routes left out: not asked for", {"routed_experts": None}),
    "E-SAMPLING-": ("sampling left out: out of range", {"sampling": None}),
}
BUILDS_ON = ("extend", "rewrite", "spawn")
LINEAGE = ("E-PARENT", "E-ROOT", "E-RELATION", "E-REWRITE", "E-DISCONTINUITY", "E-EXTEND", "E-RETRY", "E-FORK")


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A row, and what of the call it does not hold, in words."""

    row: Invocation
    notes: tuple[str, ...]


class Earlier:
    """The rows of an episode in front of a call, and the calls' response ids."""

    def __init__(self) -> None:
        self.rows: list[Invocation] = []
        self.parents = Parents()
        self._places: dict[str, int] = {}

    def add(self, row: Invocation, response_id: str | None, choice: int) -> None:
        """Add a row; it can be named as `ID/CHOICE`, and the first output of a call as `ID`."""
        self.rows.append(row)
        self.parents.add(row, row.parent_index)
        if response_id is not None:
            self._places.setdefault(response_id, row.invocation_index)
            self._places[f"{response_id}/{choice}"] = row.invocation_index

    def give_up(self, row: Invocation) -> None:
        """A row turned out to be an attempt that nobody used."""
        self.rows[row.invocation_index] = row.replace(accepted=False, output_loss_mask=None)
        self.parents.give_up(row.invocation_index)

    def unused(self, index: int) -> bool:
        """Whether nobody has said if a row was accepted, and no call goes on from it."""
        used = any(i.parent_index == index and i.relation in BUILDS_ON for i in self.rows)
        return self.rows[index].accepted is None and not used

    def named(self, name: str | None) -> Invocation | None:
        """The row that a client names."""
        place = None if name is None else self._places.get(name)
        return None if place is None else self.rows[place]


def make_row(
    record: CallRecord,
    output: Sampled,
    earlier: Earlier,
    sibling: Invocation | None,
    metadata: TraceMetadata,
    pieces: Pieces | None,
) -> Made:
    """The row of one output behind the `earlier` ones. `sibling` is the first output of the same call and prompt.

    Raises:
        UsageError: its ids make no valid row (the error carries the rule's code).
    """
    row = _row(record, output, earlier)
    if sibling is not None:
        return _checked(row.replace(parent_index=sibling.invocation_index, relation="fork"), earlier.rows, metadata, ())
    labels, notes = record.labels, []
    try:
        declared = _declared(row, earlier, labels, pieces)
        if declared is not None:
            return _checked(row.replace(**declared), earlier.rows, metadata, ())
    except UsageError as error:
        if error.code is not None and not error.code.startswith(LINEAGE):
            raise
        notes.append("declared lineage not borne out by the ids")
    found = earlier.parents.find(row, again=labels.retry > 0)
    if found.others:
        notes.append("parent ambiguous: the longest was taken")
        others = ",".join(map(str, found.others))
        row = row.replace(extra={**(row.extra or {}), "parent_candidates": others})
    columns = _columns(found.relation, found.index, row, earlier, pieces)
    return _checked(row.replace(**columns), earlier.rows, metadata, tuple(notes))


def _row(record: CallRecord, output: Sampled, earlier: Earlier) -> Invocation:
    labels = record.labels
    logprobs = None if output.logprobs is None else np.ma.masked_invalid(output.logprobs)
    known = None if logprobs is None else ~np.ma.getmaskarray(logprobs)
    partly = known is not None and not known.all() and record.accepted is not False
    extra = {**record.extra, **output.extra}
    if record.response_id is not None:
        extra["response_id"] = record.response_id
    segments = _segments(labels.segments, earlier, output)
    return Invocation(
        episode_id=record.episode,
        invocation_index=len(earlier.rows),
        model_id=record.model_id,
        prompt_ids=output.prompt,
        output_ids=output.output,
        segments=segments,
        agent_id=labels.agent,
        accepted=record.accepted,
        output_logprobs=logprobs,
        logprob_kind=None if logprobs is None else record.logprob_kind,
        output_kept_logmass=None if output.kept_logmass is None else np.ma.masked_invalid(output.kept_logmass),
        routed_experts=output.routes,
        output_loss_mask=known if partly else None,  # without a log-probability a token is not to be trained
        sampling=record.sampling,
        policy_version=record.policy_version,
        finish_reason=output.finish_reason,
        token_source="engine",
        started_at=EPOCH + timedelta(microseconds=record.started),
        ended_at=EPOCH + timedelta(microseconds=record.ended),
        extra=extra or None,
    )


def _segments(
    declared: Sequence[DeclaredSegment] | None, earlier: Earlier, output: Sampled
) -> tuple[Segment, ...] | None:
    if declared is None:
        return None
    found = []
    for s in declared:
        source = earlier.named(s.source)
        index = None if source is None else source.invocation_index
        found.append(Segment(s.start, s.stop, s.kind, index, None if index is None else s.source_start or 0))
    end = len(output.prompt)
    return (*found, Segment(end, end + len(output.output), "action"))


def _declared(row: Invocation, earlier: Earlier, labels: Labels, pieces: Pieces | None) -> dict[str, Any] | None:
    """The lineage columns that the labels declare; `None` where they declare none.

    Raises:
        UsageError: they name a call that is not there, or contradict each other.
    """
    relation, kind = labels.relation, labels.rewrite
    if labels.parent == "none" or relation == "root":
        return {"relation": "root"}
    if labels.parent is None and relation is None and kind is None:
        return None
    parent = earlier.named(labels.parent) if labels.parent is not None else _latest(row, earlier, relation)
    if parent is None:
        raise UsageError("the declared parent is not there")
    if relation is None:
        relation = "rewrite" if kind is not None else relation_to(parent, row)
    if kind is not None and relation != "rewrite":
        raise UsageError(f"a rewrite, and {relation}")
    return _columns(relation, parent.invocation_index, row, earlier, pieces, kind)


def _latest(row: Invocation, earlier: Earlier, relation: str | None) -> Invocation | None:
    if relation == "retry":
        twins = earlier.parents.same_prompt(row)
        return earlier.rows[twins[-1]] if twins else None
    return next((i for i in reversed(earlier.rows) if i.accepted is not False), None)


def _columns(
    relation: str, parent: int | None, row: Invocation, earlier: Earlier, pieces: Pieces | None, kind: str | None = None
) -> dict[str, Any]:
    """The lineage columns of a row, of which a rewrite is of the declared `kind` or of the one that ids (and texts)
    show, and a retry has a number that no other has."""
    columns: dict[str, Any] = {"relation": relation, "parent_index": parent}
    if relation == "rewrite" and parent is not None:
        shown = kind or rewrite_kind(earlier.rows[parent], row, pieces)[0]
        evidence = "inferred" if kind is None else "explicit"
        columns |= {"rewrite_kind": shown, "rewrite_evidence": evidence}
    if relation == "retry":
        twins = reversed(earlier.parents.same_prompt(row))  # their numbers grow
        numbers = (earlier.rows[i].attempt for i in twins)
        columns["attempt"] = 1 + next((n for n in numbers if n is not None), 0)
    return columns


def _checked(row: Invocation, rows: Sequence[Invocation], metadata: TraceMetadata, notes: tuple[str, ...]) -> Made:
    """The row as it validates, without what keeps it from that."""
    for _ in range(len(REMEDIES)):
        try:
            check_row(row, rows, metadata)
            break
        except UsageError as error:
            remedy = next((r for start, r in REMEDIES.items() if (error.code or "").startswith(start)), None)
            if remedy is None or all(getattr(row, name) is None for name in remedy[1]):
                raise
            notes = (*notes, f"{remedy[0]} ({error.code})")
            row = row.replace(**remedy[1])
    return Made(row, notes)
