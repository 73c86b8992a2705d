"""A report as text, in the format that is asked for."""

from __future__ import annotations

from memopd_trace.report.document import to_json
from memopd_trace.report.github import to_github
from memopd_trace.report.junit import to_junit
from memopd_trace.report.model import Format, Report
from memopd_trace.report.sarif import to_sarif
from memopd_trace.report.text import to_text
from memopd_trace.rules.registry import Severity


def render(report: Report, format: Format, fail_on: Severity) -> str:
    """The report as text of a format, ending in a newline (see `Report.render`)."""
    if format == "junit":
        return to_junit(report, fail_on)
    renderers = {"text": to_text, "json": to_json, "sarif": to_sarif, "github": to_github}
    return renderers[format](report)
