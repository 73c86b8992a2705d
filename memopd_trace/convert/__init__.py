"""Other frameworks' logs as traces: `convert(format, inputs, out)`. How to write a converter: `docs/converters.md`."""

from __future__ import annotations

from memopd_trace.convert.run import Conversion, convert

__all__ = ["Conversion", "convert"]
