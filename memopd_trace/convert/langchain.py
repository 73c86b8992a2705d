"""LangChain's messages as chat messages: in its own form, as its tracers write them (`{"lc": 1, "kwargs": {…}}`), and
in the chat form with its names for roles."""

from __future__ import annotations

from typing import Any

from memopd_trace.convert import blocks
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.losses import BrokenRecord
from memopd_trace.convert.transcript import CHAT, ROLES

NAMES = {"human": "user", "ai": "assistant"}  # for roles
KINDS = {
    "SystemMessage": "system", "HumanMessage": "human", "AIMessage": "ai", "ToolMessage": "tool",
    "FunctionMessage": "function",
}  # fmt: skip


def unpacked(value: Any) -> Any:
    """What an object holds that LangChain wrote with the name of its class; other values as they are."""
    if not isinstance(value, dict) or "lc" not in value or not isinstance(value.get("kwargs"), dict):
        return value
    path = value.get("id")
    name = path[-1] if isinstance(path, list) and path and isinstance(path[-1], str) else ""
    kind = KINDS.get(name.removesuffix("Chunk"))
    return value["kwargs"] if kind is None else {**value["kwargs"], "type": kind}


def message(value: Fields) -> dict[str, Any]:
    """A message of the chat form.

    Raises:
        BrokenRecord: it has no role.
    """
    word = value.peek("role") or value.peek("type")
    role = NAMES.get(word, word) if isinstance(word, str) else None
    if role not in ROLES:
        raise BrokenRecord(f"{value.path}: a message without a role")
    found = {name: value.any(name) for name in CHAT if name in value}
    content = found.get("content", "")
    if role == "assistant" and isinstance(content, list):
        found |= blocks.of_assistant(content)
    else:
        found["content"] = content if isinstance(content, str | list) else ""
    found["role"] = role
    more = value.maybe_fields("additional_kwargs")
    if more is not None:
        for name in ("tool_calls", "reasoning_content"):
            if name in more:
                found[name] = more.any(name)
    calls = found.get("tool_calls")
    if isinstance(calls, list):
        found["tool_calls"] = [_tool_call(c) for c in calls if isinstance(c, dict)]
    if not found.get("tool_calls"):
        found.pop("tool_calls", None)
    return found


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """LangChain's own tool calls have their arguments beside the name."""
    if isinstance(call.get("function"), dict):
        return call
    function = {"name": call.get("name"), "arguments": call.get("args")}
    return {"id": call.get("id"), "type": "function", "function": function}
