"""Anthropic's messages, which are lists of blocks, as chat messages for whoever renders them.

A tool's result is a block of a user's message and becomes a message of its own; thinking becomes `reasoning_content`. A
block that is no text (an image, a server's tool) stays as it is, and no template takes it: such a call is dropped, with
the block's type as the reason.
"""

from __future__ import annotations

from typing import Any

from memopd_trace.convert.fields import Fields

TOLD = ("type", "text", "thinking", "id", "name", "input")  # fields of an answer's block that its message holds
INPUTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")  # a prompt's tokens, in three parts


def to_messages(role: Any, content: Any) -> list[dict[str, Any]]:
    """The chat messages of one message."""
    if role == "assistant":
        return [of_assistant(content)]
    if role != "user" or not isinstance(content, list):
        return [{"role": role, "content": content}]
    found: list[dict[str, Any]] = []
    for block in content:
        if _kind(block) == "tool_result":
            found.append(_result(block))
        elif found and found[-1]["role"] == "user":
            found[-1]["content"].append(block)
        else:
            found.append({"role": "user", "content": [block]})
    return found or [{"role": "user", "content": ""}]


def of_assistant(content: Any) -> dict[str, Any]:
    """An assistant's message."""
    if not isinstance(content, list):
        return {"role": "assistant", "content": "" if content is None else content}
    parts, thoughts, calls = [], "", []
    for block in content:
        kind = _kind(block)
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts += _text(block, "thinking")
        elif kind != "redacted_thinking":
            parts.append(block)
    told = all(_kind(p) == "text" and isinstance(p.get("text"), str) for p in parts)
    answer: dict[str, Any] = {"role": "assistant", "content": "".join(p["text"] for p in parts) if told else parts}
    answer |= {"reasoning_content": thoughts} if thoughts else {}
    return answer | ({"tool_calls": calls} if calls else {})


def to_tools(tools: list[Any] | None) -> list[dict[str, Any]] | None:
    """Tools in the chat form; those of the server, which have no schema, as they are."""
    found = []
    for tool in tools or ():
        if isinstance(tool, dict) and "input_schema" in tool:
            function = {"name": tool.get("name"), "description": tool.get("description")}
            function["parameters"] = tool["input_schema"]
            tool = {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}
        if isinstance(tool, dict):
            found.append(tool)
    return found or None


def is_hidden(content: Any) -> bool:
    """Whether an answer thought something that is encrypted or left out."""
    return isinstance(content, list) and any(
        _kind(b) == "redacted_thinking" or (_kind(b) == "thinking" and not _text(b, "thinking")) for b in content
    )


def is_empty(answer: dict[str, Any]) -> bool:
    """Whether nothing of an answer is told."""
    return not (answer["content"] or answer.get("reasoning_content") or answer.get("tool_calls"))


def has_thought(content: Any) -> bool:
    """Whether an answer holds reasoning, told or not."""
    return isinstance(content, list) and any(_kind(b) in ("thinking", "redacted_thinking") for b in content)


def leftovers(content: Any) -> list[dict[str, Any]]:
    """What an answer's blocks hold beside what its message says (signatures, citations), by their numbers."""
    found = []
    for number, block in enumerate(content if isinstance(content, list) else ()):
        left = {k: v for k, v in block.items() if k not in TOLD and v is not None} if isinstance(block, dict) else {}
        found += [{"block": number, **left}] if left else []
    return found


def counts(usage: Fields | None) -> tuple[int | None, int | None]:
    """(prompt tokens, output tokens); what comes from a cache is a part of the prompt."""
    if usage is None:
        return None, None
    inputs = [usage.whole(name) for name in INPUTS]
    return None if inputs[0] is None else sum(n or 0 for n in inputs), usage.whole("output_tokens")


def _result(block: dict[str, Any]) -> dict[str, Any]:
    found = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
    return {**found, "is_error": True} if block.get("is_error") is True else found


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _text(block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    return value if isinstance(value, str) else ""
