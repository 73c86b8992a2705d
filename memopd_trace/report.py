"""Findings as data, and the report that holds them. Text is rendered late, JSON by explicit mapping.

The JSON report, `report_version` "1" (new keys may be added; these stay):

    report_version  "1"
    profile         the profile that was asked for
    clean           no finding and no refused input
    errors, warnings, refused   true counts, whatever was stored
    traces          per input: path, refused (the code, or null), spec_version, producer, rows, episodes,
                    rows_unsound (their arrays do not fit together: rules about values did not see them),
                    episodes_unsound (their keys are broken: rules about episodes did not see them),
                    gaps (what the source could not tell: code, detail)
    rules           per rule: code, status ("pass", "fail", "warn", "not run"), count, reason (of "not run")
    findings        at most `max_findings` per code: code, severity, path, row, episode_id, invocation_index,
                    column, message, expected, actual, hint

`row` counts from 0 in its file, in every format.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from memopd_trace.errors import printable

REPORT_VERSION = "1"
Severity = Literal["error", "warning"]
Status = Literal["pass", "fail", "warn", "not run"]
MAX_TEXT = 400  # characters of a message, of which a value may be a part
MAX_PATH = 4096
NAMED = 4  # rules named in the text where they were not run for one reason; the JSON names all


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation: what, where, both values, and the way out. `row` is 0-based in the file `path`."""

    code: str
    severity: Severity
    path: str
    message: str
    row: int | None = None
    episode_id: str | None = None
    invocation_index: int | None = None
    column: str | None = None
    expected: str | None = None
    actual: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What one rule came to. `count` is the true number of its findings; `reason` says why it was not run."""

    code: str
    status: Status
    count: int = 0
    reason: str | None = None


@dataclass(slots=True)
class TraceSummary:
    """What was read of one input."""

    path: str
    refused: str | None = None
    spec_version: str | None = None
    producer: str | None = None
    rows: int = 0
    episodes: int = 0
    rows_unsound: int = 0
    episodes_unsound: int = 0
    gaps: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The result of validating one or more traces."""

    profile: str
    traces: tuple[TraceSummary, ...]
    rules: tuple[RuleResult, ...]
    findings: tuple[Finding, ...]
    errors: int
    warnings: int

    @property
    def refused(self) -> int:
        """How many inputs were missing, unreadable or refused."""
        return sum(1 for t in self.traces if t.refused)

    @property
    def clean(self) -> bool:
        """No finding of any severity, and every input was read to its end."""
        return not (self.errors or self.warnings or self.refused)

    @property
    def codes(self) -> set[str]:
        """The codes that were found."""
        return {r.code for r in self.rules if r.count}

    def exit_code(self, fail_on: Severity = "error", *, exit_zero: bool = False) -> int:
        """3 if an input was refused, 1 if there are findings of at least `fail_on`, else 0.

        `exit_zero` forgives findings, never a refused input: nothing was checked there.
        """
        if self.refused:
            return 3
        failed = self.errors or (fail_on == "warning" and self.warnings)
        return 1 if failed and not exit_zero else 0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; see the module's docstring."""
        return {
            "report_version": REPORT_VERSION,
            "profile": self.profile,
            "clean": self.clean,
            "errors": self.errors,
            "warnings": self.warnings,
            "refused": self.refused,
            "traces": [_trace_dict(t) for t in self.traces],
            "rules": [{"code": r.code, "status": r.status, "count": r.count, "reason": r.reason} for r in self.rules],
            "findings": [_finding_dict(f) for f in self.findings],
        }

    def to_json(self) -> str:
        """The report as JSON text, ending in a newline."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def to_text(self) -> str:
        """The report for a person, ending in one line of totals."""
        return "".join(line + "\n" for line in _text_lines(self))


def _trace_dict(trace: TraceSummary) -> dict[str, Any]:
    return {
        "path": trace.path,
        "refused": trace.refused,
        "spec_version": trace.spec_version,
        "producer": trace.producer,
        "rows": trace.rows,
        "episodes": trace.episodes,
        "rows_unsound": trace.rows_unsound,
        "episodes_unsound": trace.episodes_unsound,
        "gaps": [{"code": code, "detail": detail} for code, detail in trace.gaps],
    }


def _finding_dict(finding: Finding) -> dict[str, Any]:
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
    }


def _text_lines(report: Report) -> Iterator[str]:
    stored: dict[str, int] = defaultdict(int)
    for finding in report.findings:
        stored[finding.code] += 1
        yield from _finding_lines(finding)
    for rule in report.rules:
        if rule.count > stored[rule.code]:
            yield f"{rule.code}: {rule.count} findings, {stored[rule.code]} shown"
    for trace in report.traces:
        yield from _trace_lines(trace)
    reasons: dict[str, list[str]] = defaultdict(list)
    for rule in report.rules:
        if rule.status == "not run":
            reasons[rule.reason or ""].append(rule.code)
    for reason, codes in reasons.items():
        more = f" and {len(codes) - NAMED} more" if len(codes) > NAMED else ""
        yield f"not run: {', '.join(codes[:NAMED])}{more} ({printable(reason, MAX_TEXT)})"
    yield _totals(report)


def _finding_lines(finding: Finding) -> Iterator[str]:
    place = finding.path if finding.row is None else f"{finding.path}:{finding.row}"
    who = []
    if finding.episode_id is not None:
        who.append(f"episode '{printable(finding.episode_id)}'")
    if finding.invocation_index is not None:
        who.append(f"invocation {finding.invocation_index}")
    line = f"{printable(place, MAX_PATH)}: {finding.severity}[{finding.code}] {printable(finding.message, MAX_TEXT)}"
    yield line + (f" ({', '.join(who)})" if who else "")
    for label, value in (("expected", finding.expected), ("actual", finding.actual)):
        if value is not None:
            yield f"    {label + ':':<9} {printable(value)}"
    if finding.hint is not None:
        yield f"    hint:     {printable(finding.hint, MAX_TEXT)}"


def _trace_lines(trace: TraceSummary) -> Iterator[str]:
    if trace.spec_version is None:
        return
    producer = printable(trace.producer or "")
    line = f"{printable(trace.path, MAX_PATH)}: spec {printable(trace.spec_version)}, producer {producer}"
    line += f"; {_count(trace.rows, 'row')}, {_count(trace.episodes, 'episode')}"
    if trace.rows_unsound:
        line += f"; {_count(trace.rows_unsound, 'row')} not checked for values (their arrays do not fit together)"
    if trace.episodes_unsound:
        line += f"; {_count(trace.episodes_unsound, 'episode')} not checked as a whole (broken keys or nulls)"
    yield line
    for code, detail in trace.gaps:
        yield f"    the source could not tell: {printable(code)}" + (f" ({printable(detail)})" if detail else "")


def _totals(report: Report) -> str:
    run = sum(1 for r in report.rules if r.status != "not run")
    parts = [_count(report.errors, "error"), _count(report.warnings, "warning")]
    if report.refused:
        parts.append(f"{_count(report.refused, 'input')} refused")
    rows = sum(t.rows for t in report.traces)
    episodes = sum(t.episodes for t in report.traces)
    return (
        f"{', '.join(parts)}; {_count(rows, 'row')}, {_count(episodes, 'episode')}; "
        f"profile {report.profile}: {run} rules run, {len(report.rules) - run} not run"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
