"""What a validation came to: findings as data, and the report that holds them, in five formats.

`text` is for people, `json` for programs (`spec/report.schema.json`), `junit` for test dashboards, `sarif` for code
scanning, `github` for annotations of a workflow run. All say the same of the same report: the row counts from 0 in its
file, a clause is named by its place in the specification, and no trace's string is printed raw.
"""

from memopd_trace.report.model import (
    FORMATS,
    MAX_TEXT,
    REPORT_VERSION,
    Finding,
    Format,
    InputSummary,
    Report,
    RuleResult,
    Status,
    TraceSummary,
)
from memopd_trace.rules.registry import Severity

__all__ = [
    "FORMATS",
    "MAX_TEXT",
    "REPORT_VERSION",
    "Finding",
    "Format",
    "InputSummary",
    "Report",
    "RuleResult",
    "Severity",
    "Status",
    "TraceSummary",
]
