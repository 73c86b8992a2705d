"""OpenInference: spans of Phoenix and its instrumentations, whose messages are numbered attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.convert import exchange
from memopd_trace.convert.draft import Chat, Draft, finish_reason
from memopd_trace.convert.fields import Fields, as_score
from memopd_trace.convert.format import Format
from memopd_trace.convert.formats.otel import messages_of
from memopd_trace.convert.losses import Losses, NotACall
from memopd_trace.convert.records import from_json
from memopd_trace.convert.spans import Span, numbered, records, span_of
from memopd_trace.convert.transcript import is_reasoned, plain_content


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A span."""
    span = span_of(value, losses, lists=True)
    about = span.attributes
    kind = about.text("openinference.span.kind") or span.record.peek("span_kind")
    if kind != "LLM":
        raise NotACall("a span that is none of a model")
    call = span.call(losses)
    messages = [_message(m) for m in numbered(about, "llm.input_messages")]
    answers = [_message(m) for m in numbered(about, "llm.output_messages")]
    asked, said = from_json(about.any("input.value")), from_json(about.any("output.value"))
    if not messages:
        messages = _of_value(asked, losses)
    tools = [from_json(t.any("tool.json_schema")) for t in numbered(about, "llm.tools")]
    if messages:
        call.prompt = Chat(messages=messages, tools=[t for t in tools if isinstance(t, dict)] or None)
    call.answer = answers[0] if answers else _said(said)
    call.reasoned = is_reasoned(call.answer)
    call.model = next((m for n in ("llm.response.model_name", "llm.model_name") if (m := about.text(n))), None)
    settings = from_json(about.any("llm.invocation_parameters"))
    if isinstance(settings, dict):
        call.sampling = exchange.sampling(Fields(settings, losses, "llm.invocation_parameters"))
        call.extra["invocation_parameters"] = settings
    word = about.name("llm.finish_reason")
    if word is None and isinstance(said, dict):
        told = said.get("finish_reason")
        word = told if isinstance(told, str) else None
    call.finish_reason = finish_reason(word)
    call.counts = about.whole("llm.token_count.prompt"), about.whole("llm.token_count.completion")
    call.rewards = _scores(span)
    yield span.draft(call, about.name("session.id"), losses)


def _message(message: Fields) -> dict[str, Any]:
    """A message of the chat form."""
    found: dict[str, Any] = {"role": message.text("message.role") or "user"}
    content = message.any("message.content")
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for part in numbered(message, "message.contents"):
        kind, text = part.text("message_content.type"), part.any("message_content.text")
        if kind == "reasoning" and isinstance(text, str):
            thoughts.append(text)
        elif isinstance(text, str):
            parts.append({"type": "text", "text": text})
        else:
            parts.append({"type": kind})
    found["content"] = content if isinstance(content, str) else plain_content(parts)
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    calls = [
        {"id": c.name("tool_call.id"), "type": "function",
         "function": {"name": c.text("tool_call.function.name"), "arguments": c.any("tool_call.function.arguments")}}
        for c in numbered(message, "message.tool_calls")
    ]  # fmt: skip
    if calls:
        found["tool_calls"] = calls
    if "message.tool_call_id" in message:
        found["tool_call_id"] = message.name("message.tool_call_id")
    return found


def _of_value(value: Any, losses: Losses) -> list[dict[str, Any]]:
    """Messages out of the raw input, where only that was kept."""
    if isinstance(value, dict):
        value = value.get("messages")
    if not isinstance(value, list) or not all(isinstance(m, dict) and "role" in m for m in value):
        return []
    return [chat for message in value for chat in messages_of(message, losses)]


def _said(value: Any) -> Any:
    """The answer out of the raw output: a text, an object with one, or an answer of the chat form."""
    if isinstance(value, dict):
        choices = value.get("choices")
        first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        if isinstance(first.get("message"), dict):
            return first["message"]
        if isinstance(value.get("role"), str):
            return value
        value = value.get("text")
    return {"role": "assistant", "content": value} if isinstance(value, str) else None


def _scores(span: Span) -> dict[str, float] | None:
    """Evaluations and annotations of this very call, by name."""
    found: dict[str, float] = {}
    for prefix in ("evaluations", "annotations"):
        for item in numbered(span.attributes, prefix):
            name = item.peek(f"{prefix[:-1]}.name") or item.peek("name")
            score = item.peek(f"{prefix[:-1]}.score") if f"{prefix[:-1]}.score" in item else item.peek("score")
            if isinstance(name, str) and (number := as_score(score)) is not None:
                found[name] = number
    return found or None


FORMAT = Format(
    name="openinference",
    title="OpenInference: spans of Phoenix and its instrumentations",
    exactness="text",
    read=read,
    records=records,
    unsaid=(
        "no_token_ids", "no_logprobs", "no_policy_version", "no_reward", "no_end", "no_group", "no_parent",
        "no_rewrite_kind", "lossy_text",
    ),
    note="Calls belong together by `session.id`, else by trace.",
)  # fmt: skip
