"""Langfuse: traces with their observations, and exports of single observations. A generation is a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.convert import exchange, langchain
from memopd_trace.convert.draft import Call, Chat, Draft, finish_reason
from memopd_trace.convert.fields import Fields, as_score
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.records import from_json
from memopd_trace.convert.transcript import is_reasoned


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A trace, or one observation."""
    record = Fields(value, losses)
    trace = record.fields("trace") or record
    holder = record if "observations" in record else trace
    if "observations" not in holder:
        if record.peek("type") is None:
            raise BrokenRecord("neither a trace with 'observations' nor an observation")
        if record.peek("type") != "GENERATION":
            raise NotACall("an observation that is no generation")
        call = _generation(record, losses)
        episode = record.name("traceId")
        if episode is None:
            losses.gap("no_episode")
        yield Draft(episode_id=episode or call.key or losses.place, calls=[call], whole=episode is None)
        return
    trace.any("observations")
    scores = trace.each("scores") if _all_objects(trace.peek("scores")) else []
    draft = Draft(episode_id=trace.name("id") or losses.place)
    others = []
    for observation in holder.each("observations"):
        if observation.peek("type") == "GENERATION":
            draft.calls.append(_generation(observation, losses))
        else:
            others.append(observation.value)
            observation.drop()
    if not draft.calls:
        raise NotACall("a trace without a generation")
    by_call = {call.key: call for call in draft.calls}
    for score in scores:
        _credit(score, draft, by_call)
    draft.extra = trace.rest() if trace is record else record.rest()
    if scores:
        draft.extra["scores"] = [s.value for s in scores]
    if others:
        draft.extra["observations"] = others
    yield draft


def _generation(observation: Fields, losses: Losses) -> Call:
    """A call: messages in, a message out, both of them often JSON in a text."""
    asked, said = from_json(from_json(observation.any("input"))), from_json(from_json(observation.any("output")))
    messages, tools = _messages(asked, losses)
    call = Call(
        place=f"{losses.place} {observation.path}".rstrip(),
        key=observation.name("id"),
        model=observation.text("model"),
        prompt=Chat(messages=messages, tools=tools or None) if messages else _text(asked),
        answer=_answer(said, losses),
        started_at=observation.time("startTime"),
        ended_at=observation.time("endTime"),
    )
    call.order = call.started_at.timestamp() if call.started_at else None
    call.reasoned = is_reasoned(call.answer)
    settings = observation.maybe_fields("modelParameters")
    if settings is not None:
        call.sampling = exchange.sampling(settings)
    if isinstance(said, dict) and isinstance(said.get("finish_reason"), str):
        call.finish_reason = finish_reason(said["finish_reason"])
    call.counts = _counts(observation)
    call.extra = observation.rest()
    return call


def _counts(observation: Fields) -> tuple[int | None, int | None]:
    """Tokens of prompt and output; where a part of a prompt is counted apart (a cache), its count is not the whole."""
    for name in ("usageDetails", "usage"):
        usage = observation.maybe_fields(name)
        if usage is not None and "input" in usage:
            apart = any(usage.peek(n) for n in usage if n.startswith("input_"))
            return None if apart else usage.whole("input"), usage.whole("output")
    return None, None


def _messages(value: Any, losses: Losses) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(messages, tools) of an input: a list, or an object with one. LangChain lists tools among the messages."""
    tools: list[Any] = []
    if isinstance(value, dict):
        tools = value["tools"] if isinstance(value.get("tools"), list) else []
        value = value.get("messages")
    if not isinstance(value, list) or not _all_objects(value):
        return [], []
    found, offered = [], [t for t in tools if isinstance(t, dict)]
    for item in value:
        content = item.get("content")
        if item.get("role") == "tool" and isinstance(content, dict) and content.get("type") == "function":
            offered.append(content)
        else:
            found.append(langchain.message(Fields(item, losses, "input")))
    return found, offered


def _answer(value: Any, losses: Losses) -> Any:
    """The message of an output: a message, an answer of the chat form, a list of one, or a text."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        choices = value.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            value = choices[0].get("message")
        if isinstance(value, dict) and ("content" in value or "tool_calls" in value):
            return {**langchain.message(Fields({"role": "assistant", **value}, losses, "output")), "role": "assistant"}
        return None
    return {"role": "assistant", "content": value} if isinstance(value, str) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _all_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, dict) for v in value)


def _credit(score: Fields, draft: Draft, by_call: dict[str | None, Call]) -> None:
    """A score that is a number: of the call that it names, else of the trace."""
    name, number, about = score.peek("name"), as_score(score.peek("value")), score.peek("observationId")
    if not isinstance(name, str) or number is None:
        return
    if about is None:
        draft.rewards = {**(draft.rewards or {}), name: number}
    elif isinstance(about, str) and about in by_call:
        by_call[about].rewards = {**(by_call[about].rewards or {}), name: number}


FORMAT = Format(
    name="langfuse",
    title="Langfuse: traces and observations",
    exactness="text",
    read=read,
    unsaid=(
        "no_token_ids", "no_logprobs", "no_policy_version", "no_reward", "no_end", "no_group", "no_parent",
        "no_rewrite_kind", "lossy_text",
    ),
    note="Scores keep their names; which of them is the reward is not told.",
)  # fmt: skip
