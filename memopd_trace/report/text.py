"""The report for a person: `path:row: error[CODE] message`, both values, the hint and the clause; totals last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from memopd_trace.errors import printable
from memopd_trace.report.model import MAX_TEXT, Finding, Report, TraceSummary

MAX_PATH = 4096
NAMED = 4  # rules named where they were not run for one reason; the JSON names all


def to_text(report: Report) -> str:
    """The report for a person, ending in one line of totals."""
    return "".join(line + "\n" for line in _lines(report))


def message_lines(finding: Finding) -> list[str]:
    """What a finding says, in lines of printable characters, for where its file is told apart from it."""
    place = [f"row {finding.row}"] if finding.row is not None else []
    where = ", ".join(place + ([_who(finding)] if _who(finding) else []))
    first = printable(finding.message, MAX_TEXT) + (f" ({where})" if where else "")
    return [first, *(f"{label}: {value}" for label, value in _details(finding))]


def finding_lines(finding: Finding) -> Iterator[str]:
    """A finding in lines of printable characters, its place first."""
    place = printable(finding.path if finding.row is None else f"{finding.path}:{finding.row}", MAX_PATH)
    named = f" ({_who(finding)})" if _who(finding) else ""
    yield f"{place}: {finding.severity}[{finding.code}] {printable(finding.message, MAX_TEXT)}{named}"
    for label, value in _details(finding):
        yield f"    {label + ':':<9} {value}"


def capped_lines(report: Report) -> Iterator[str]:
    """One line for each code that has more findings than are shown."""
    for rule, stored in report.capped():
        yield f"{rule.code}: {rule.count} findings, {stored} shown"


def totals(report: Report) -> str:
    """The report in one line; nothing in it comes from a trace."""
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


def _lines(report: Report) -> Iterator[str]:
    for finding in report.findings:
        yield from finding_lines(finding)
    yield from capped_lines(report)
    for trace in report.traces:
        yield from _trace_lines(trace)
    reasons: dict[str, list[str]] = defaultdict(list)
    for rule in report.rules:
        if rule.status == "not run":
            reasons[rule.reason or ""].append(rule.code)
    for reason, codes in reasons.items():
        more = f" and {len(codes) - NAMED} more" if len(codes) > NAMED else ""
        yield f"not run: {', '.join(codes[:NAMED])}{more} ({printable(reason, MAX_TEXT)})"
    yield totals(report)


def _trace_lines(trace: TraceSummary) -> Iterator[str]:
    if trace.spec_version is None:
        return
    producer = printable(trace.producer or "")
    line = f"{printable(trace.path, MAX_PATH)}: spec {printable(trace.spec_version)}, producer {producer}"
    line += f"; {_count(trace.rows, 'row')}, {_count(trace.episodes, 'episode')}"
    if trace.of_rows is not None:
        line += f" (a sample of {trace.of_rows} and {trace.of_episodes})"
    if trace.rows_unsound:
        line += f"; {_count(trace.rows_unsound, 'row')} not checked for values (their arrays do not fit together)"
    if trace.episodes_unsound:
        line += f"; {_count(trace.episodes_unsound, 'episode')} not checked as a whole (broken keys or nulls)"
    yield line
    for code, detail in trace.gaps:
        yield f"    the source could not tell: {printable(code)}" + (f" ({printable(detail)})" if detail else "")
    for given in trace.inputs:
        what = f"refused, {given.refused}" if given.refused else _count(given.rows, "row")
        yield f"    with {given.kind} {printable(given.path, MAX_PATH)}: {what}"


def _who(finding: Finding) -> str:
    parts = []
    if finding.episode_id is not None:
        parts.append(f"episode '{printable(finding.episode_id)}'")
    if finding.invocation_index is not None:
        parts.append(f"invocation {finding.invocation_index}")
    return ", ".join(parts)


def _details(finding: Finding) -> Iterator[tuple[str, str]]:
    if finding.expected is not None:
        yield "expected", printable(finding.expected)
    if finding.actual is not None:
        yield "actual", printable(finding.actual)
    if finding.hint is not None:
        yield "hint", printable(finding.hint, MAX_TEXT)
    if finding.clause_url is not None:
        yield "clause", finding.clause_url


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
