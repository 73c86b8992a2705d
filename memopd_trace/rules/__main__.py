"""Print `spec/codes.json`: `python -m memopd_trace.rules > spec/codes.json`."""

from __future__ import annotations

from memopd_trace.rules import codes_json

print(codes_json(), end="")
