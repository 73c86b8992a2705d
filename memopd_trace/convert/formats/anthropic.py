"""Anthropic's messages API: requests and answers, whole or streamed, as text.

    {"request": {"messages": […], …}, "response": {"type": "message", "content": […], …}, "session_id": "…"}

An answer that was streamed is the list of its events, or their text as it came over the wire. Where the server cleared
a part of the prompt by itself (`context_management`), what the model read is not in the log, and the call is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.convert import blocks, cassettes
from memopd_trace.convert.draft import Call, Chat, Draft, finish_reason
from memopd_trace.convert.exchange import events, part, sampling
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.records import SUFFIXES, json_in
from memopd_trace.convert.sessions import describe, draft_of

INSIDE = {"content_block_start": "content_block", "message_start": "message"}  # what an event holds, if not a delta
DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A request and its answer."""
    record = Fields(value, losses)
    status = record.peek("status_code")
    if type(status) is int and status >= 400:
        raise NotACall(f"an answer with status {status // 100}xx")
    request, response = _pair(record)
    if response.peek("type") == "error" or "error" in response:
        raise NotACall("an error instead of an answer")
    if not isinstance(response.peek("content"), list):
        raise BrokenRecord("no answer of the messages API: no list 'content'")
    call = _call(request, response, losses)
    if call is None:
        return
    describe(call, record)
    draft = draft_of(record, request, [call])
    call.extra |= record.rest()
    yield draft


def _pair(record: Fields) -> tuple[Fields | None, Fields]:
    """(request, answer) of a record."""
    if record.peek("type") in ("message", "error") and "response" not in record:
        return part(record, "request"), record
    holder, name = record.value, "response"
    while isinstance(holder.get(name), dict):
        holder, name = holder[name], "body"
    told = holder.get(name)
    streamed = told if isinstance(told, list) else events(told) if isinstance(told, str) else None
    if streamed:
        holder[name] = _joined(streamed, record.losses, name)
    response = part(record, "response")
    if response is None:
        raise BrokenRecord("no answer: no 'response', and no message itself")
    return part(record, "request") or (record if "messages" in record else None), response


def _call(request: Fields | None, response: Fields, losses: Losses) -> Call | None:
    content, word = response.any("content"), response.name("stop_reason")
    answer = blocks.of_assistant(content)
    if blocks.is_hidden(content):
        losses.gap("opaque_content", "reasoning is encrypted, and missing in the output")
        if blocks.is_empty(answer):
            losses.lose("all of the answer is encrypted")
            return None
    response.any("type"), response.any("role")
    call = Call(
        place=losses.place,
        key=response.name("id"),
        model=response.text("model"),
        prompt=None if request is None else _prompt(request, response, losses),
        answer=answer,
        sampling=None if request is None else sampling(request),
        reasoned=blocks.has_thought(content),
        finish_reason=finish_reason(word),
        counts=blocks.counts(response.fields("usage")),
    )
    if request is not None and request.any("model") is not None and call.model is None:
        call.model = request.text("model")
    if word is not None and call.finish_reason is None:
        call.extra["stop_reason"] = word
        losses.degrade("a reason to finish that has no word here is kept as extra", word)
    left = blocks.leftovers(content)
    call.extra |= {"blocks": left} if left else {}
    return call


def _prompt(request: Fields, response: Fields, losses: Losses) -> Chat | None:
    edits = response.peek("context_management")
    if isinstance(edits, dict) and edits.get("applied_edits"):
        losses.gap("server_state", "the server cleared a part of the prompt")
        return None
    system, messages = request.any("system"), []
    if system:
        messages.append({"role": "system", "content": system})
    for message in request.each("messages"):
        messages += blocks.to_messages(message.any("role"), message.any("content"))
    return Chat(messages=messages, tools=blocks.to_tools(request.items("tools")))


def _joined(events: list[Any], losses: Losses, name: str) -> dict[str, Any]:
    """The message that the events of a stream add up to; an error where it ended in one."""
    whole: dict[str, Any] = {}
    content: dict[int, dict[str, Any]] = {}
    for number, value in enumerate(events):
        event = Fields(value, losses, f"{name}[{number}]")
        kind, index = event.text("type"), event.whole("index") or 0
        inner = event.fields(INSIDE.get(kind or "", "delta"))
        if kind == "error":
            return {"type": "error", "error": event.any("error")}
        if kind == "message_start" and inner is not None:
            whole |= inner.value
        elif kind == "content_block_start" and inner is not None:
            content[index] = dict(inner.value)
        elif kind == "content_block_delta" and inner is not None:
            _add(content.setdefault(index, {"type": "text"}), inner)
        elif kind == "message_delta":
            whole |= inner.value if inner is not None else {}
            usage, more = whole.get("usage"), event.fields("usage")
            whole["usage"] = {**(usage if isinstance(usage, dict) else {}), **(more.value if more else {})}
    return {**whole, "content": [_finished(content[i]) for i in sorted(content)]}


def _add(block: dict[str, Any], delta: Fields) -> None:
    kind = delta.text("type")
    if kind in DELTAS:
        name = DELTAS[kind]
        old = block.get(name)
        block[name] = (old if isinstance(old, str) else "") + (delta.text(name) or "")
    elif kind == "input_json_delta":
        block["partial_json"] = block.get("partial_json", "") + (delta.text("partial_json") or "")


def _finished(block: dict[str, Any]) -> dict[str, Any]:
    """A block with the input that its pieces make up; one that is no JSON stays the text that it is."""
    text = block.pop("partial_json", "")
    if text:
        block["input"] = json_in(text, text)
    return block


FORMAT = Format(
    name="anthropic",
    title="Anthropic's messages API: requests and answers, streamed ones too; VCR's cassettes",
    exactness="text",
    read=read,
    records=cassettes.records,
    suffixes=(*SUFFIXES, *cassettes.SUFFIXES),
    unsaid=(
        "no_token_ids", "no_logprobs", "no_policy_version", "no_reward", "no_end", "no_parent", "no_rewrite_kind",
        "lossy_text",
    ),
    note="Calls belong together by `session_id`, `episode_id` or the like. Claude's tokenizer is not public: ids are "
    "another model's, and the counts that the log has are another tokenizer's.",
)  # fmt: skip
