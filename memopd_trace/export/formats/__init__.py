"""The formats that a trace can be exported to, as they are listed. A new one is a module in this folder and a line."""

from __future__ import annotations

from memopd_trace.errors import UsageError, suggestion
from memopd_trace.export.format import Format
from memopd_trace.export.formats import distillkit, jsonl, nemo_rl, trl, verl

FORMATS: tuple[Format, ...] = (verl.FORMAT, trl.FORMAT, nemo_rl.FORMAT, distillkit.FORMAT, jsonl.FORMAT)


def find(name: str) -> Format:
    """The format of a name.

    Raises:
        UsageError: there is none; the message names a near one.
    """
    by_name = {f.name: f for f in FORMATS}
    if name in by_name:
        return by_name[name]
    raise UsageError(f"no export format '{name}'", hint=suggestion(name, by_name, f"one of {', '.join(by_name)}"))
