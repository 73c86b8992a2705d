"""What the recorder refuses: at once, what cannot be a record of a call; at an episode's end, what would not validate.

The first part (`check_row`, `lineage_of`) is cheap and speaks while the caller can still see the mistake. The second
(`check_episode`) runs the validator's own rules, so what is written validates by construction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memopd_trace.errors import UsageError
from memopd_trace.invocation import Invocation, batch_from_invocations
from memopd_trace.lineage import common_prefix, final_ids, is_extension, state_difference
from memopd_trace.metadata import Model, TraceMetadata
from memopd_trace.rules import choose
from memopd_trace.rules.batch import Batch
from memopd_trace.rules.episode import Run
from memopd_trace.rules.files import FileContext
from memopd_trace.rules.lineage import BUILDS_ON_OUTPUT
from memopd_trace.rules.registry import Hit, Rule
from memopd_trace.schema import COLUMN, RELATIONS, TRACE_COLUMNS, arrow_schema


def check_row(row: Invocation, earlier: Sequence[Invocation], model: Model, where: str) -> None:
    """Lengths, registry values, ids, log-probabilities and segment copies of one row.

    Raises:
        UsageError: naming `where` and the first fault.
    """
    if not len(row.prompt_ids):
        raise UsageError(f"{where}: the prompt is empty, so nothing predicts the first output token")
    _check_columns(row, where)
    for name in ("prompt_ids", "output_ids"):
        ids = getattr(row, name)
        bad = np.flatnonzero((ids < 0) | (ids >= model.tokenizer.vocab_size))
        if len(bad):
            limit = model.tokenizer.vocab_size
            raise UsageError(f"{where}: {name}[{bad[0]}] is {ids[bad[0]]}, the model's vocabulary has {limit} ids")
    _check_logprobs(row, where)
    _check_segments(row, earlier, where)


def _check_columns(row: Invocation, where: str) -> None:
    lengths = {"prompt": len(row.prompt_ids), "output": len(row.output_ids), "sequence": len(row)}
    for column in TRACE_COLUMNS:
        value = getattr(row, column.name)
        if value is None:
            continue
        if column.length is not None and len(value) != lengths[column.length]:
            raise UsageError(
                f"{where}: {column.name} has {len(value)} items, the {column.length} has {lengths[column.length]}"
            )
        if column.values is not None and value not in column.values and not _is_private(column.name, value):
            raise UsageError(f"{where}: {column.name} is '{value}'", hint=f"one of {', '.join(column.values)}")


def _is_private(name: str, value: str) -> bool:
    return name == "rewrite_kind" and value.startswith("x_")


def _check_logprobs(row: Invocation, where: str) -> None:
    for name in ("output_logprobs", "output_kept_logmass"):
        given = getattr(row, name)
        if given is None:
            continue
        values, missing = np.ma.getdata(given), np.ma.getmaskarray(given)
        bad = np.flatnonzero(~missing & ~((values <= 0) & np.isfinite(values)))
        if len(bad):
            raise UsageError(f"{where}: {name}[{bad[0]}] is {values[bad[0]]}, not the logarithm of a probability")
        bad = np.flatnonzero(missing & row.sampled())
        if len(bad):
            raise UsageError(
                f"{where}: {name}[{bad[0]}] is missing for a sampled token",
                hint="mark tokens that the policy did not choose by output_sampled",
            )


def _check_segments(row: Invocation, earlier: Sequence[Invocation], where: str) -> None:
    ids, end = final_ids(row), 0
    for segment in row.segments or ():
        name = f"{where}: segment '{segment.kind}' [{segment.start}, {segment.stop})"
        if not end <= segment.start < segment.stop <= len(ids):
            raise UsageError(f"{name} is empty, out of order, or outside the {len(ids)} tokens")
        end = segment.stop
        if (segment.source_index is None) != (segment.source_start is None):
            raise UsageError(f"{name} has half a source", hint="give both source_index and source_start, or none")
        if segment.source_index is None or segment.source_start is None:
            continue
        if not 0 <= segment.source_index < len(earlier):
            raise UsageError(f"{name} copies from invocation {segment.source_index}, which is not an earlier one")
        copied = ids[segment.start : segment.stop]
        source = final_ids(earlier[segment.source_index])
        stretch = source[segment.source_start : segment.source_start + len(copied)]
        if segment.source_start < 0 or not np.array_equal(copied, stretch):
            at = common_prefix(copied, stretch)
            raise UsageError(
                f"{name} is not a copy of invocation {segment.source_index} from {segment.source_start} on: they "
                f"differ at index {segment.start + at}"
            )


def lineage_of(
    row: Invocation,
    earlier: Sequence[Invocation],
    parent: Invocation | None,
    relation: str | None,
    rewrite_kind: str | None,
    where: str,
) -> dict[str, Any]:
    """The lineage columns of a row, derived from the ids where they are not declared (see `EpisodeRecorder.record`).

    Raises:
        UsageError: the ids do not bear the declared relation out, or none was declared where one must be.
    """
    if relation not in (None, *RELATIONS):
        raise UsageError(f"{where}: relation is '{relation}'", hint=f"one of {', '.join(RELATIONS)}")
    if parent is not None and (parent.episode_id != row.episode_id or parent.invocation_index >= len(earlier)):
        raise UsageError(f"{where}: parent {parent.key} is not an earlier invocation of the episode")
    if relation == "root" and parent is not None:
        raise UsageError(f"{where}: a root has no parent, but {parent.key} is given")
    if relation == "root" or not earlier:
        if relation not in (None, "root") or rewrite_kind is not None:
            raise UsageError(f"{where}: relation '{relation or 'rewrite'}' needs an earlier invocation")
        return {"relation": "root"}
    if parent is None:
        parent = next((i for i in reversed(earlier) if i.accepted is not False), earlier[-1])
    found = relation or ("extend" if rewrite_kind is None or is_extension(parent, row) else "rewrite")
    _check_relation(row, parent, found, relation, rewrite_kind, where)
    columns: dict[str, Any] = {"relation": found, "parent_index": parent.invocation_index}
    if found == "rewrite":
        columns |= {"rewrite_kind": rewrite_kind, "rewrite_evidence": "explicit"}
    if found == "retry" and row.attempt is None:
        columns["attempt"] = (parent.attempt or 0) + 1
    return columns


def _check_relation(
    row: Invocation,
    parent: Invocation,
    found: str,
    declared: str | None,
    rewrite_kind: str | None,
    where: str,
) -> None:
    above = f"invocation {parent.invocation_index}"
    if parent.accepted is False and found in BUILDS_ON_OUTPUT:
        raise UsageError(
            f"{where}: '{found}' of {above}, which was rejected",
            hint="give an accepted parent, or declare the relation: retry, fork or root",
        )
    if found == "extend" and not is_extension(parent, row):
        ids = final_ids(parent)
        at = common_prefix(ids, row.prompt_ids)
        if at == len(ids):
            fault = f"its {state_difference(parent, row)} differs from that of {above}"
        elif at == len(row.prompt_ids):
            fault = f"it ends at index {at}, {above} goes on to {len(ids)}"
        else:
            fault = f"at index {at} it has {row.prompt_ids[at]}, {above} has {ids[at]}"
        raise UsageError(
            f"{where}: the prompt does not extend {above}: {fault}",
            hint=None if declared else "declare what the harness did: rewrite_kind='memory', 'summary', …",
        )
    if found == "rewrite":
        if rewrite_kind is None:
            raise UsageError(f"{where}: a rewrite of {above} without rewrite_kind")
        kinds = COLUMN["rewrite_kind"].values or ()
        if rewrite_kind not in kinds and not _is_private("rewrite_kind", rewrite_kind):
            raise UsageError(f"{where}: rewrite_kind is '{rewrite_kind}'", hint=f"one of {', '.join(kinds)}, or x_…")
    if found == "fork" and not common_prefix(parent.prompt_ids, row.prompt_ids):
        raise UsageError(f"{where}: a fork of {above} whose first id differs from it")
    if found == "retry" and not np.array_equal(parent.prompt_ids, row.prompt_ids):
        at = common_prefix(parent.prompt_ids, row.prompt_ids)
        raise UsageError(f"{where}: a retry of {above} with another prompt: they differ at index {at}")


def check_episode(rows: Sequence[Invocation], metadata: TraceMetadata, profile: str) -> None:
    """Run every MUST of a profile over one whole episode.

    Raises:
        UsageError: the first violation, with its rule's code and hint.
    """
    for rule, hit in _violations(rows, metadata, profile):
        at = "" if hit.row is None else f" invocation {hit.row}"
        values = "" if hit.expected is None else f": expected {hit.expected}, got {hit.actual}"
        raise UsageError(
            f"episode '{rows[0].episode_id}'{at}: {hit.message}{values}",
            code=rule.code,
            hint=hit.hint or rule.hint,
        )


def _violations(rows: Sequence[Invocation], metadata: TraceMetadata, profile: str) -> Iterator[tuple[Rule, Hit]]:
    table = batch_from_invocations(rows)
    schema = arrow_schema("trace", metadata.to_schema_metadata())
    file = FileContext(Path(), 0, schema, metadata, schema, rows=len(rows), episodes=1)
    file.first_value = {name: 0 for name in table.schema.names if table.column(name).null_count < len(rows)}
    run = Run(rows[0].episode_id, metadata)
    for number, row in enumerate(rows):
        run.add(number, row)
    given: dict[str, Any] = {"file": file, "shape": (batch := Batch(table, metadata)), "batch": batch, "episode": run}
    for rule in choose(profile):
        vacuous = rule.needs and not any(name in file.first_value for name in rule.needs)
        exempt = rule.severity != "error" or vacuous or (rule.unless and rule.unless(file))
        if rule.check and rule.phase in given and not exempt:
            yield from ((rule, hit) for hit in rule.check(given[rule.phase]))
