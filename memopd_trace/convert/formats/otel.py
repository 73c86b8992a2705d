"""OpenTelemetry's GenAI spans: messages in attributes or events, of the current and of earlier conventions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memopd_trace.convert.assemble import to_text
from memopd_trace.convert.draft import Chat, Draft, finish_reason
from memopd_trace.convert.fields import Fields, as_score
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.records import from_json
from memopd_trace.convert.spans import Span, numbered, records, span_of
from memopd_trace.convert.transcript import is_reasoned, plain_content
from memopd_trace.invocation import Sampling

CALLS = ("chat", "generate_content", "text_completion", "completion")
PROMPTS = ("gen_ai.input.messages", "gen_ai.prompt")
ANSWERS = ("gen_ai.output.messages", "gen_ai.completion")


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A span."""
    span = span_of(value, losses)
    about = span.attributes
    operation = about.peek("gen_ai.operation.name")
    if isinstance(operation, str) and operation not in CALLS:
        raise NotACall("a span of another operation")
    if not any(name.startswith("gen_ai.") for name in about):
        raise NotACall("a span that is none of a model")
    call = span.call(losses)
    ended = _ended(from_json(about.peek(ANSWERS[0])))
    answers = _told(span, ANSWERS)
    call.prompt = _prompt(span, losses)
    call.answer = answers[0] if answers else None
    call.key = about.name("gen_ai.response.id") or call.key
    call.model = about.text("gen_ai.response.model") or about.text("gen_ai.request.model")
    call.sampling = _sampling(about)
    call.reasoned = is_reasoned(call.answer)
    words = about.any("gen_ai.response.finish_reasons")
    word = words[0] if isinstance(words, list) and words and isinstance(words[0], str) else ended
    call.finish_reason = "tool_calls" if word == "tool_call" else finish_reason(word)
    counts = [
        about.whole(new) if new in about else about.whole(old)
        for new, old in (
            ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
            ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
        )
    ]
    call.counts = counts[0], counts[1] if len(answers) < 2 else None
    call.agent_id = about.name("gen_ai.agent.id") or about.name("gen_ai.agent.name")
    call.rewards = _evaluations(span)
    draft = span.draft(call, about.name("gen_ai.conversation.id"), losses)
    for number, answer in enumerate(answers[1:], 1):
        other = replace(call, answer=answer, parent=call.key, extra={}, counts=(call.counts[0], None), rewards=None)
        other.relation, other.key = ("fork", f"{call.key}#{number}") if call.key else (None, None)
        draft.calls.append(other)
    yield draft


def _ended(answers: Any) -> str | None:
    """Why the first answer ended: of a streamed one the span itself does not tell."""
    first = answers[0] if isinstance(answers, list) and answers else None
    word = first.get("finish_reason") if isinstance(first, dict) else None
    return word if isinstance(word, str) else None


def _prompt(span: Span, losses: Losses) -> Chat | None:
    messages = _told(span, PROMPTS)
    above = from_json(_first(span, "gen_ai.system_instructions"))
    if above and messages:
        parts = above if isinstance(above, list) else [above]
        messages = [messages_of({"role": "system", "parts": parts}, losses)[0], *messages]
    if not messages:
        return None
    given = from_json(_first(span, "gen_ai.tool.definitions"))
    tools = [t if "function" in t else {"type": "function", "function": _function(t)}
             for t in given if isinstance(t, dict)] if isinstance(given, list) else []  # fmt: skip
    return Chat(messages=messages, tools=tools or None)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {n: tool[n] for n in ("name", "description", "parameters") if tool.get(n) is not None}


def _first(span: Span, name: str) -> Any:
    """An attribute of the span, or of the first of its events that has it."""
    for fields in (span.attributes, *(event for _, event in span.events)):
        if name in fields:
            return fields.any(name)
    return None


def _told(span: Span, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """The messages under one of these names: a list, JSON of one, or numbered attributes."""
    losses = span.attributes.losses
    for name in names:
        found: Any = None
        for fields in (span.attributes, *(event for _, event in span.events)):
            found = from_json(fields.any(name))
            if found is None:
                found = [_of_numbers(m) for m in numbered(fields, name)] or None
            if found is not None:
                break
        if isinstance(found, dict) and isinstance(found.get("messages"), list):
            found = found["messages"]
        if isinstance(found, str):
            found = [{"role": "user" if names is PROMPTS else "assistant", "content": found}]
        if isinstance(found, dict):
            found = [{"role": "assistant" if names is ANSWERS else "user", "content": found.get("text"), **found}]
        if isinstance(found, list):
            return [m for item in found for m in messages_of(item, losses)]
        if found is not None:
            raise BrokenRecord(f"{name}: expected messages")
    return []


def _of_numbers(message: Fields) -> dict[str, Any]:
    """A message of numbered attributes, with its tool calls."""
    found = {n: message.any(n) for n in ("role", "content", "tool_call_id") if n in message}
    calls = [
        {"id": c.any("id"), "type": "function", "function": {"name": c.any("name"), "arguments": c.any("arguments")}}
        for c in numbered(message, "tool_calls")
    ]
    return {**found, **({"tool_calls": calls} if calls else {})}


def messages_of(value: Any, losses: Losses) -> list[dict[str, Any]]:
    """A message of the chat form; of one with several tools' answers, one each."""
    message = Fields(value, losses, "message")
    role = message.text("role") or "user"
    if not isinstance(message.peek("parts"), list):
        content = message.any("content")
        found = {"role": role, "content": content if isinstance(content, str | list) else ""}
        for name in ("tool_calls", "tool_call_id", "reasoning_content"):
            if name in message:
                found[name] = message.any(name)
        return [found]
    answer: dict[str, Any] = {"role": role, "content": []}
    results: list[dict[str, Any]] = []
    for part in message.each("parts"):
        kind, content = part.text("type"), part.any("content")
        if kind == "text":
            answer["content"].append({"type": "text", "text": content if isinstance(content, str) else ""})
        elif kind == "reasoning" and isinstance(content, str):
            answer["reasoning_content"] = answer.get("reasoning_content", "") + content
        elif kind == "tool_call":
            function = {"name": part.text("name"), "arguments": part.any("arguments")}
            call = {"id": part.name("id"), "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
        elif kind == "tool_call_response":
            said = part.any("response") if "response" in part else part.any("result")
            text = said if isinstance(said, str | list) else "" if said is None else to_text(said)
            results.append({"role": "tool", "tool_call_id": part.name("id"), "content": text})
        else:
            answer["content"].append({"type": kind})
    parts = answer["content"]
    answer["content"] = plain_content(parts)
    return results + ([answer] if parts or len(answer) > 2 or not results else [])


def _sampling(about: Fields) -> Sampling | None:
    values: dict[str, Any] = {n: about.number(f"gen_ai.request.{n}") for n in ("temperature", "top_p")}
    values |= {n: about.whole(f"gen_ai.request.{n}") for n in ("top_k", "seed")}
    return Sampling(**values) if any(v is not None for v in values.values()) else None


def _evaluations(span: Span) -> dict[str, float] | None:
    """Evaluations of this very call, by name."""
    found: dict[str, float] = {}
    for _, event in span.events:
        name, score = event.peek("gen_ai.evaluation.name"), event.peek("gen_ai.evaluation.score.value")
        if isinstance(name, str) and (number := as_score(score)) is not None:
            found[name] = number
    return found or None


FORMAT = Format(
    name="otel",
    title="OpenTelemetry: spans of the GenAI conventions",
    exactness="text",
    read=read,
    records=records,
    unsaid=(
        "no_token_ids", "no_logprobs", "no_policy_version", "no_reward", "no_end", "no_group", "no_parent",
        "no_rewrite_kind", "lossy_text",
    ),
    note="Messages are there only where the instrumentation was told to capture content. Calls belong together by "
    "`gen_ai.conversation.id`, else by trace.",
)  # fmt: skip
