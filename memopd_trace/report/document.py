"""The JSON report, declared once: the mapping below builds it, `spec/report.schema.json` is rendered from it.

Within a `report_version` keys may be added and none goes or changes its meaning: readers ignore what they do not know.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from memopd_trace.report.model import Finding, Report, Status, TraceSummary
from memopd_trace.rules.registry import Severity

Count = Annotated[int, Field(ge=0)]


class GapDocument(TypedDict):
    """Something that the log a trace was made from could not tell."""

    code: str
    detail: str | None


class InputDocument(TypedDict):
    """What was read of a views file or a scores folder that the trace was checked with."""

    kind: Literal["views", "scores"]
    path: str
    refused: Annotated[str | None, Field(description="The code with which it was refused.")]
    rows: Count


class TraceDocument(TypedDict):
    """What was read of one input."""

    path: Annotated[str, Field(description="The input as it was given.")]
    refused: Annotated[str | None, Field(description="The code with which it was refused.")]
    spec_version: str | None
    producer: str | None
    rows: Count
    episodes: Count
    of_rows: Annotated[int | None, Field(ge=0, description="Rows of the input, where `rows` are those of a sample.")]
    of_episodes: Annotated[int | None, Field(ge=0, description="Episodes of the input, likewise.")]
    rows_unsound: Annotated[
        int, Field(ge=0, description="Their arrays do not fit together: rules about values did not see them.")
    ]
    episodes_unsound: Annotated[
        int, Field(ge=0, description="Their keys are broken: rules about episodes did not see them.")
    ]
    gaps: list[GapDocument]
    counts: Annotated[dict[str, int], Field(description="True number of findings in this input, by code.")]
    inputs: Annotated[list[InputDocument], Field(description="What it was checked with.")]


class RuleDocument(TypedDict):
    """What one rule came to over all inputs."""

    code: str
    status: Status
    count: Annotated[int, Field(ge=0, description="True number of its findings.")]
    reason: Annotated[str | None, Field(description="Why it was not run.")]


class FindingDocument(TypedDict):
    """One violation."""

    code: Annotated[str, Field(pattern="^[EW]-[A-Z0-9-]+$")]
    severity: Severity
    path: Annotated[str, Field(description="The file.")]
    row: Annotated[int | None, Field(description="Counts from 0 in the file; null = the file as a whole.")]
    episode_id: str | None
    invocation_index: int | None
    column: str | None
    message: str
    expected: str | None
    actual: str | None
    hint: Annotated[str | None, Field(description="The way out.")]
    clause_url: Annotated[str | None, Field(description="The clause that is broken, e.g. spec/trace.md#rows-order.")]


class ReportDocument(TypedDict):
    """The report of `memopd-trace validate --format json`."""

    report_version: Literal["1"]
    profile: Annotated[str, Field(description="The profile that was asked for.")]
    clean: Annotated[bool, Field(description="No finding, and no input refused.")]
    errors: Annotated[int, Field(ge=0, description="True number, however many findings are listed.")]
    warnings: Annotated[int, Field(ge=0, description="True number, however many findings are listed.")]
    refused: Annotated[int, Field(ge=0, description="Inputs that are missing, unreadable or refused.")]
    traces: Annotated[list[TraceDocument], Field(description="One per input.")]
    rules: Annotated[list[RuleDocument], Field(description="One per rule of the profile.")]
    findings: Annotated[list[FindingDocument], Field(description="At most --max-findings per code.")]


def json_schema() -> str:
    """The text of `spec/report.schema.json`."""
    return json.dumps(TypeAdapter(ReportDocument).json_schema(), indent=1) + "\n"


def to_json(report: Report) -> str:
    """The report as JSON text in plain ASCII (any encoding gives the same document), ending in a newline."""
    return json.dumps(to_dict(report), indent=1, allow_nan=False) + "\n"


def to_dict(report: Report) -> ReportDocument:
    """The report as plain data."""
    return {
        "report_version": "1",
        "profile": report.profile,
        "clean": report.clean,
        "errors": report.errors,
        "warnings": report.warnings,
        "refused": report.refused,
        "traces": [_trace(t) for t in report.traces],
        "rules": [{"code": r.code, "status": r.status, "count": r.count, "reason": r.reason} for r in report.rules],
        "findings": [_finding(f) for f in report.findings],
    }


def _trace(trace: TraceSummary) -> TraceDocument:
    return {
        "path": trace.path,
        "refused": trace.refused,
        "spec_version": trace.spec_version,
        "producer": trace.producer,
        "rows": trace.rows,
        "episodes": trace.episodes,
        "of_rows": trace.of_rows,
        "of_episodes": trace.of_episodes,
        "rows_unsound": trace.rows_unsound,
        "episodes_unsound": trace.episodes_unsound,
        "gaps": [{"code": code, "detail": detail} for code, detail in trace.gaps],
        "counts": {r.code: r.count for r in trace.rules if r.count},
        "inputs": [{"kind": i.kind, "path": i.path, "refused": i.refused, "rows": i.rows} for i in trace.inputs],
    }


def _finding(finding: Finding) -> FindingDocument:
    return {
        "code": finding.code,
        "severity": finding.severity,
        "path": finding.path,
        "row": finding.row,
        "episode_id": finding.episode_id,
        "invocation_index": finding.invocation_index,
        "column": finding.column,
        "message": finding.message,
        "expected": finding.expected,
        "actual": finding.actual,
        "hint": finding.hint,
        "clause_url": finding.clause_url,
    }
