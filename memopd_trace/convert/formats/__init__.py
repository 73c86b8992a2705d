"""The formats that can be converted, as they are listed. A new one is a module in this folder and a line below."""

from __future__ import annotations

import difflib

from memopd_trace.convert.format import Format
from memopd_trace.convert.formats import agent_lightning, atif, nemo_gym, openai_api, sglang, vllm
from memopd_trace.errors import UsageError

FORMATS: tuple[Format, ...] = (
    nemo_gym.FORMAT,
    atif.FORMAT,
    vllm.FORMAT,
    sglang.FORMAT,
    agent_lightning.FORMAT,
    openai_api.FORMAT,
)


def find(name: str) -> Format:
    """The format of a name.

    Raises:
        UsageError: there is none; the message names a near one.
    """
    by_name = {f.name: f for f in FORMATS}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), by_name, n=1)
    hint = f"did you mean '{near[0]}'?" if near else "`memopd-trace formats` lists them"
    raise UsageError(f"no format '{name}'", hint=hint)
