"""What the recorder refuses: what the validator's own rules find, at once in a row and at its end in an episode.

So whatever is written validates by construction, and nothing is refused that would. A row is judged under `core`: what
a profile wants to be there may still be set by `amend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from memopd_trace.errors import UsageError, first_line, printable
from memopd_trace.invocation import Invocation, batch_from_invocations
from memopd_trace.lineage import is_extension
from memopd_trace.metadata import TraceMetadata
from memopd_trace.rules import choose
from memopd_trace.rules.batch import Batch
from memopd_trace.rules.episode import Run
from memopd_trace.rules.files import FileContext
from memopd_trace.rules.gate import may_judge
from memopd_trace.rules.registry import Hit, Phase, Rule
from memopd_trace.schema import arrow_schema

PHASES: tuple[Phase, ...] = ("shape", "file", "batch", "episode")  # each may rely on the ones in front of it


def lineage_of(
    row: Invocation,
    earlier: Sequence[Invocation],
    parent: Invocation | None,
    relation: str | None,
    rewrite_kind: str | None,
) -> dict[str, Any]:
    """The lineage columns of a row, derived from the ids where they are not declared (see `EpisodeRecorder.record`).
    Whether the ids bear them out is for the rules to say (`check_row`).

    Raises:
        UsageError: the parent belongs to another episode, or the declarations contradict each other.
    """
    if parent is not None and parent.episode_id != row.episode_id:
        raise UsageError(f"{row.name}: its parent is of another episode: {parent.name}")
    if rewrite_kind is not None and relation not in (None, "rewrite"):
        raise UsageError(
            f"{row.name}: relation '{relation}' and rewrite_kind '{rewrite_kind}'", hint="give one of them"
        )
    if parent is None and earlier and relation != "root":
        parent = next((i for i in reversed(earlier) if i.accepted is not False), earlier[-1])
    if relation is None:
        relation = _relation(row, parent, rewrite_kind)
    columns: dict[str, Any] = {"relation": relation}
    if parent is not None:
        columns["parent_index"] = parent.invocation_index
    if relation == "rewrite":
        columns |= {"rewrite_kind": rewrite_kind, "rewrite_evidence": "explicit"}
    if relation == "retry" and parent is not None and row.attempt is None:
        columns["attempt"] = (parent.attempt or 0) + 1
    return columns


def _relation(row: Invocation, parent: Invocation | None, rewrite_kind: str | None) -> str:
    if rewrite_kind is None:
        return "root" if parent is None else "extend"
    return "extend" if parent is not None and is_extension(parent, row) else "rewrite"


def check_row(row: Invocation, earlier: Sequence[Invocation], metadata: TraceMetadata) -> None:
    """Judge one row by every MUST of `core`; `earlier` are the rows in front of it in its episode, in order, which are
    not judged again.

    Raises:
        UsageError: the first violation, with its rule's code and hint.
    """
    run = Run(row.episode_id, metadata)
    named = {row.parent_index, *(s.source_index for s in row.segments or ())}
    for index in named:
        if index is not None and 0 <= index < len(earlier):
            run.know(earlier[index])
    run.add(0, row)
    _refuse(run, "core")


def check_episode(rows: Sequence[Invocation], metadata: TraceMetadata, profile: str) -> None:
    """Judge one whole episode by every MUST of a profile.

    Raises:
        UsageError: the first violation, with its rule's code and hint.
    """
    run = Run(rows[0].episode_id, metadata)
    for number, row in enumerate(rows):
        run.add(number, row)
    _refuse(run, profile)


def _refuse(run: Run, profile: str) -> None:
    batch = Batch(_batch(run.invocations), run.metadata)
    file = _file(run)
    given: dict[Phase, Any] = {"shape": batch, "file": file, "batch": batch, "episode": run}
    for rule in _rules(profile):
        if rule.check and may_judge(rule, file):
            for hit in rule.check(given[rule.phase]):
                raise _error(rule, hit, run)


@cache
def _rules(profile: str) -> list[Rule]:
    return [r for phase in PHASES for r in choose(profile) if r.phase == phase and r.severity == "error"]


def _batch(rows: Sequence[Invocation]) -> pa.RecordBatch:
    try:
        return batch_from_invocations(rows)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise UsageError(f"{rows[-1].name}: a value does not fit its column: {first_line(error)}") from None


@cache
def _schema() -> pa.Schema:
    """Of every trace; what its metadata say is in `Run.metadata`."""
    return arrow_schema()


def _file(run: Run) -> FileContext:
    """As if the rows were a file."""
    schema = _schema()
    values = {name: 0 for name in schema.names if any(getattr(i, name) is not None for i in run.known)}
    return FileContext(Path(), 0, schema, run.metadata, schema, rows=len(run.rows), episodes=1, first_value=values)


def _error(rule: Rule, hit: Hit, run: Run) -> UsageError:
    where = f"episode '{printable(run.episode_id)}'" if hit.row is None else run.invocations[hit.row].name
    values = [
        f"{word} {printable(value)}"
        for word, value in (("expected", hit.expected), ("got", hit.actual))
        if value is not None
    ]
    message = f"{where}: {hit.message}" + (f": {', '.join(values)}" if values else "")
    return UsageError(message, code=rule.code, hint=hit.hint or rule.hint)
