"""Annotations of a GitHub workflow run: one workflow command a finding, then the totals.

What comes from a trace must not be able to end its command or to begin another. A command is one line, so all is made
printable first; `%` is escaped, and in properties also what ends a property. A line that is no command holds no word of
a trace, since a runner also obeys `##[command]` in the middle of a line.

An annotation has a file and no line: a row of a Parquet file is none. A runner shows ten errors and ten warnings of a
step; the rest is in its log.
"""

from __future__ import annotations

from collections.abc import Iterator

from memopd_trace.errors import printable
from memopd_trace.report.locations import relative
from memopd_trace.report.model import Finding, Report
from memopd_trace.report.text import MAX_PATH, capped_lines, message_lines, totals
from memopd_trace.rules import RULES


def to_github(report: Report) -> str:
    """The report as workflow commands, one a line, and its totals."""
    return "".join(line + "\n" for line in _lines(report))


def _lines(report: Report) -> Iterator[str]:
    for finding in report.findings:
        yield _command(finding)
    yield from capped_lines(report)
    yield totals(report)


def _command(finding: Finding) -> str:
    body = "\n".join(message_lines(finding))
    file = printable(relative(finding.path) or finding.path, MAX_PATH)
    title = f"{finding.code}: {RULES[finding.code].title}"
    return f"::{finding.severity} file={_property(file)},title={_property(title)}::{_data(body)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
