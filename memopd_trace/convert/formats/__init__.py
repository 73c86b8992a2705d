"""The formats that can be converted, as they are listed. A new one is a module in this folder and a line below."""

from __future__ import annotations

from memopd_trace.convert.format import Format
from memopd_trace.convert.formats import (
    agent_lightning,
    anthropic,
    areal,
    art,
    atif,
    claude_code,
    codex,
    gemini_cli,
    inspect_ai,
    langfuse,
    langsmith,
    mem1,
    memagent,
    messages,
    mini_swe_agent,
    nemo_gym,
    openai_api,
    openhands,
    openinference,
    otel,
    rllm,
    sglang,
    skyrl,
    slime,
    swe_agent,
    tau,
    tinker,
    verifiers,
    verl,
    vllm,
)
from memopd_trace.errors import UsageError, suggestion

FORMATS: tuple[Format, ...] = (
    nemo_gym.FORMAT,
    atif.FORMAT,
    vllm.FORMAT,
    sglang.FORMAT,
    agent_lightning.FORMAT,
    verifiers.FORMAT,
    rllm.FORMAT,
    verl.FORMAT,
    skyrl.FORMAT,
    slime.FORMAT,
    tinker.FORMAT,
    areal.FORMAT,
    art.FORMAT,
    openai_api.FORMAT,
    anthropic.FORMAT,
    claude_code.FORMAT,
    codex.FORMAT,
    gemini_cli.FORMAT,
    messages.FORMAT,
    openhands.FORMAT,
    swe_agent.FORMAT,
    mini_swe_agent.FORMAT,
    inspect_ai.FORMAT,
    openinference.FORMAT,
    otel.FORMAT,
    langfuse.FORMAT,
    langsmith.FORMAT,
    tau.FORMAT,
    mem1.FORMAT,
    memagent.FORMAT,
)


def find(name: str) -> Format:
    """The format of a name.

    Raises:
        UsageError: there is none; the message names a near one.
    """
    by_name = {f.name: f for f in FORMATS}
    if name in by_name:
        return by_name[name]
    raise UsageError(f"no format '{name}'", hint=suggestion(name, by_name, "`memopd-trace formats` lists them"))
