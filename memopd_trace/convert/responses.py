"""OpenAI's Responses form: its items as chat messages, for whoever renders them, and a request with its answer.

What the model made in one go (reasoning, text, function calls) is one assistant's message; reasoning becomes
`reasoning_content`. An item of another kind (an encrypted or compacted one, say) becomes a message with that part,
which no template takes: such a call is dropped, with the kind as the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memopd_trace.convert.draft import Call, Chat, finish_reason
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.losses import Losses
from memopd_trace.invocation import Sampling

KEPT_BY_SERVER = ("previous_response_id", "conversation")
COMPACTED = "response.compaction"  # an answer that is a shorter history, of which most is encrypted
CALLS = ("function_call", "custom_tool_call")
TOOL_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def made_by_model(item: dict[str, Any]) -> bool:
    """Whether an item is (a part of) what a model sampled."""
    kind = item.get("type", "message")
    return kind in ("reasoning", *CALLS) or (kind == "message" and item.get("role") == "assistant")


def to_messages(items: Iterable[Any]) -> list[dict[str, Any]]:
    """Chat messages of a list of items; a plain text is what the user said."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, dict) and made_by_model(item):
            if answer is None:
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            _add(answer, item)
        else:
            answer = None
            messages.append(_message(item))
    return messages


def of_input(value: Any) -> list[Any]:
    """The `input` of a request as a list of items."""
    return [value] if isinstance(value, str) else value if isinstance(value, list) else []


def to_tools(tools: Iterable[Any]) -> list[dict[str, Any]]:
    """Function tools in the chat form; others as they are."""
    found = []
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
            names = ("name", "description", "parameters", "strict")
            tool = {"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}}
        if isinstance(tool, dict):
            found.append(tool)
    return found


def calls(request: Fields | None, response: Fields, losses: Losses) -> list[Call]:
    """The call of a request and its answer; none, counted, where a server made several to answer once."""
    items = response.items("output") or []
    if response.peek("object") == COMPACTED:
        losses.lose("a compaction, whose result the server encrypted")
        losses.gap("opaque_content", "a compaction is encrypted")
        return []
    made = [i for i in items if isinstance(i, dict) and made_by_model(i)]
    runs = sum(i in made and (n == 0 or items[n - 1] not in made) for n, i in enumerate(items))
    if runs > 1:
        losses.lose("several calls are one answer, with what lies between kept by the server", runs)
        return []
    hidden = any(i.get("encrypted_content") and not _thoughts(i) for i in made)
    if hidden:
        losses.gap("opaque_content", "reasoning is encrypted, and missing in the output")
    told = [i for i in made if not (i.get("encrypted_content") and not _thoughts(i))]
    usage = response.fields("usage")
    call = Call(
        place=losses.place,
        key=response.name("id"),
        model=response.text("model"),
        prompt=None if request is None else _prompt(request, items, losses),
        answer=to_messages(told)[0] if told else None,
        sampling=None if request is None else _sampling(request),
        reasoned=any(i.get("type") == "reasoning" for i in made),
        finish_reason=_finish(response, made),
        counts=(usage.whole("input_tokens"), usage.whole("output_tokens")) if usage else (None, None),
    )
    if hidden and not told:
        losses.lose("all of the answer is encrypted")
        return []
    return [call]


def _prompt(request: Fields, output: list[Any], losses: Losses) -> Chat | None:
    """The prompt; none where the log does not hold all of it."""
    kept = [name for name in KEPT_BY_SERVER if request.any(name) is not None]
    if kept:
        losses.gap("server_state", f"'{kept[0]}' stands for a part of the prompt")
        return None
    if any(isinstance(i, dict) and i.get("type") == "compaction" for i in output):
        losses.gap("server_state", "the server compacted the prompt before it answered")
        return None
    opaque = [i for i in of_input(request.peek("input")) if isinstance(i, dict) and i.get("encrypted_content")]
    if any(not _thoughts(i) for i in opaque):
        losses.gap("opaque_content", "a part of the prompt is encrypted")
    instructions, tools = request.text("instructions"), request.items("tools")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += to_messages(of_input(request.any("input")))
    return Chat(messages=messages, tools=to_tools(tools) if tools else None)


def _sampling(request: Fields) -> Sampling | None:
    temperature, top_p = request.number("temperature"), request.number("top_p")
    return None if temperature is None and top_p is None else Sampling(temperature=temperature, top_p=top_p)


def _finish(response: Fields, made: list[dict[str, Any]]) -> str | None:
    cut = response.fields("incomplete_details")
    if cut is not None:
        return finish_reason(cut.name("reason"))
    if response.text("status") != "completed":
        return None
    return "tool_calls" if any(i.get("type") in CALLS for i in made) else "stop"


def _thoughts(item: dict[str, Any]) -> str:
    """The text of an item of reasoning: the reasoning itself, or the summary that stands for it."""
    parts = [p for name in ("content", "summary") if isinstance(item.get(name), list) for p in item[name]]
    return "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))


def _message(item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return {"role": "user", "content": item}
    if not isinstance(item, dict):
        return {"role": "user", "content": [{"type": type(item).__name__}]}
    kind = item.get("type", "message")
    if kind in TOOL_OUTPUTS:
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    if kind == "message":
        return {"role": item.get("role", "user"), "content": item.get("content")}
    return {"role": "user", "content": [{"type": kind}]}


def _add(answer: dict[str, Any], item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        answer["content"] = _joined(answer["content"], item.get("content"))
    elif kind == "reasoning":
        answer["reasoning_content"] = answer.get("reasoning_content", "") + _thoughts(item)
    else:
        arguments = item.get("arguments", item.get("input"))
        call = {
            "type": "function",
            "id": item.get("call_id"),
            "function": {"name": item.get("name"), "arguments": arguments},
        }
        answer.setdefault("tool_calls", []).append(call)


def _joined(content: Any, more: Any) -> Any:
    if not isinstance(more, list):
        return f"{content}{more or ''}" if isinstance(content, str) else [*content, {"type": "text", "text": more}]
    if isinstance(content, str) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in more):
        return content + "".join(p["text"] for p in more)
    return [*([{"type": "text", "text": content}] if isinstance(content, str) and content else []), *more]
