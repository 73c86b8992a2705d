"""Traces as other trainers take them: `export(format, trace, out)`. Every call is a row of its own; what a target has
no place for is listed, and a state that it would judge as another one is refused: `docs/exporters.md`."""

from __future__ import annotations

from memopd_trace.export.formats.jsonl import read_jsonl
from memopd_trace.export.run import Export, export
from memopd_trace.export.samples import FEATURES

__all__ = ["FEATURES", "Export", "export", "read_jsonl"]
