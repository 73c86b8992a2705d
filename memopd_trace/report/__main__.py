"""Print `spec/report.schema.json`: `python -m memopd_trace.report > spec/report.schema.json`."""

from __future__ import annotations

from memopd_trace.report.document import json_schema

print(json_schema(), end="")
