"""Findings, and the report that holds them. Nothing is rendered before it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from memopd_trace.rules.registry import Severity

if TYPE_CHECKING:
    from memopd_trace.report.document import ReportDocument

REPORT_VERSION = "1"
Status = Literal["pass", "fail", "warn", "not run"]
Format = Literal["text", "json", "junit", "sarif", "github"]
FORMATS: tuple[Format, ...] = get_args(Format)
MAX_TEXT = 400  # characters of a message, of which a value may be a part


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation: what, where, both values, and the way out.

    `row` is 0-based in the file `path`. `clause_url` is the broken clause, relative to the project's root.
    """

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
    clause_url: str | None = None


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What one rule came to. `count` is the true number of its findings; `reason` says why it was not run."""

    code: str
    status: Status
    count: int = 0
    reason: str | None = None


@dataclass(slots=True)
class InputSummary:
    """What was read of a views file or a scores folder that a trace was checked with."""

    kind: Literal["views", "scores"]
    path: str
    refused: str | None = None
    rows: int = 0


@dataclass(slots=True)
class TraceSummary:
    """What was read of one input, and what each rule came to in it."""

    path: str
    refused: str | None = None
    spec_version: str | None = None
    producer: str | None = None
    rows: int = 0
    episodes: int = 0
    rows_unsound: int = 0
    episodes_unsound: int = 0
    gaps: tuple[tuple[str, str | None], ...] = ()
    rules: tuple[RuleResult, ...] = ()
    inputs: tuple[InputSummary, ...] = ()
    of_rows: int | None = None  # how many it holds, where `rows` and `episodes` are those of a sample
    of_episodes: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The result of validating one or more traces.

    `errors`, `warnings` and the rules' counts are true numbers; `findings` holds at most `max_findings` per code.
    """

    profile: str
    traces: tuple[TraceSummary, ...]
    rules: tuple[RuleResult, ...]
    findings: tuple[Finding, ...]
    errors: int
    warnings: int

    @property
    def refused(self) -> int:
        """How many inputs were missing, unreadable or refused."""
        given = [code for trace in self.traces for code in (trace.refused, *(i.refused for i in trace.inputs))]
        return len([code for code in given if code is not None])

    @property
    def clean(self) -> bool:
        """No finding of any severity, and every input was read to its end."""
        return not (self.errors or self.warnings or self.refused)

    @property
    def codes(self) -> set[str]:
        """The codes that were found."""
        return {r.code for r in self.rules if r.count}

    def capped(self) -> Iterator[tuple[RuleResult, int]]:
        """The rules with more findings than are stored, each with the number that is stored."""
        for rule in self.rules:
            if rule.count and rule.count > (stored := sum(f.code == rule.code for f in self.findings)):
                yield rule, stored

    def exit_code(self, fail_on: Severity = "error", *, exit_zero: bool = False) -> int:
        """3 if an input was refused, 1 if there are findings of at least `fail_on`, else 0.

        `exit_zero` forgives findings, never a refused input: nothing was checked there.
        """
        if self.refused:
            return 3
        failed = self.errors or (fail_on == "warning" and self.warnings)
        return 1 if failed and not exit_zero else 0

    def render(self, format: Format = "text", *, fail_on: Severity = "error") -> str:
        """The report as text of a format, ending in a newline.

        `fail_on` tells `junit` whether a warning fails its test case; no other format has a notion of failing.
        """
        from memopd_trace.report.render import render  # it imports this module

        return render(self, format, fail_on)

    def to_dict(self) -> ReportDocument:
        """The report as plain data, as `spec/report.schema.json` describes it."""
        from memopd_trace.report.document import to_dict

        return to_dict(self)

    def to_json(self) -> str:
        """The report as JSON text, ending in a newline."""
        return self.render("json")

    def to_text(self) -> str:
        """The report for a person, ending in one line of totals."""
        return self.render("text")
