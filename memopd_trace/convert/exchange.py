"""One request to an OpenAI-compatible server and its answer, as several logs hold it: chat and plain completions.

    {"messages" or "prompt", "tools", "temperature", …}  ->  {"choices": [{"message" or "text", …}], "usage": …}

Token ids are read wherever servers put them: `prompt_token_ids` beside or inside the choice, `token_ids` of the choice,
or tokens written as `token_id:123`. An answer that was streamed may be a list of its chunks, or their text.
"""

from __future__ import annotations

import re
from typing import Any

from memopd_trace.convert.draft import Call, Chat, finish_reason
from memopd_trace.convert.fields import Fields, as_ids, as_logprobs
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.records import json_in
from memopd_trace.convert.transcript import is_reasoned
from memopd_trace.invocation import IDS, MaskedFloats, Sampling

TOKEN_ID = re.compile(r"token_id:(\d{1,10})")
LAST = ("response.completed", "response.incomplete", "response.failed")  # events that hold a whole answer of Responses
SETTINGS = ("temperature", "top_p", "min_p", "repetition_penalty")


def part(record: Fields, *names: str) -> Fields | None:
    """The first of these fields that is there, as an object; JSON in a text is read, and so are the events of a stream
    and one more level `body`.

    Raises:
        BrokenRecord: it is there and no object.
    """
    for name in names:
        value = record.peek(name)
        if isinstance(value, str):
            value = json_in(value, events(value) or value)
        if isinstance(value, list):
            value = joined(value, record.losses, name)
        if value is not None:
            record.value[name] = value
            inner = record.fields(name)
            return part(inner, "body", "json") or inner if inner is not None else None
    return None


def events(text: str) -> list[Any] | None:
    """The events of a streamed answer out of its text, whose lines begin with `data:`; `None` for another text."""
    if not text.lstrip().startswith(("event:", "data:")):
        return None
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    return [event for line in lines if line != "[DONE]" and (event := json_in(line)) is not None]


def calls(request: Fields | None, response: Fields, losses: Losses) -> list[Call]:
    """A call for each choice of an answer; further choices are forks of the first.

    Raises:
        NotACall: the answer is an error, or has no choice.
    """
    if "error" in response:
        raise NotACall("an error instead of an answer")
    choices = response.each("choices")
    if not choices:
        raise NotACall("an answer without choices")
    shared = _shared(request, response)
    key = response.name("id")
    found = []
    for number, choice in enumerate(choices):
        call = _of_choice(choice, response, losses, **shared)
        call.key = key if number == 0 or key is None else f"{key}#{number}"
        if number:
            call.counts = (call.counts[0], None)
            call.parent, call.relation = (key, "fork") if key is not None else (None, None)
        elif len(choices) > 1:
            call.counts = (call.counts[0], None)
        found.append(call)
    return found


def _shared(request: Fields | None, response: Fields) -> dict[str, Any]:
    """What all choices have in common: the prompt, the settings, the counts."""
    usage = response.fields("usage")
    counts = (usage.whole("prompt_tokens"), usage.whole("completion_tokens")) if usage else (None, None)
    model = response.text("model")
    if request is None:
        return {"model": model, "counts": counts}
    return {
        "model": model or request.text("model"),
        "counts": counts,
        "sampling": sampling(request),
        "prompt": prompt(request),
    }


def prompt(request: Fields) -> Chat | str | None:
    """The prompt of a request as text; one that is given as ids is `prompt_ids_of`'s."""
    messages = request.items("messages")
    if messages is not None:
        if not all(isinstance(m, dict) for m in messages):
            raise BrokenRecord(f"{request.path}.messages: expected objects")
        if request.any("chat_template") is not None:
            request.losses.degrade("the request has a chat template of its own, which is not run")
            return None
        options = request.fields("chat_template_kwargs")
        tools = request.any("tools")
        return Chat(
            messages=messages,
            tools=[t for t in tools if isinstance(t, dict)] if isinstance(tools, list) else None,
            options=dict(options.value) if options else {},
        )
    text = request.peek("prompt")
    if isinstance(text, str):
        return request.text("prompt")
    return None


def sampling(request: Fields) -> Sampling | None:
    """The settings that a request names; `top_k` -1 (and 0) means all."""
    values: dict[str, Any] = {name: request.number(name) for name in SETTINGS}
    top_k, values["seed"] = request.whole("top_k"), request.whole("seed")
    values["top_k"] = None if top_k is None else max(0, top_k)
    return Sampling(**values) if any(v is not None for v in values.values()) else None


def _of_choice(choice: Fields, response: Fields, losses: Losses, **shared: Any) -> Call:
    message = choice.fields("message")
    answer: Any = choice.text("text") if message is None else dict(message.value)
    if message is not None and isinstance(shared.get("prompt"), Chat):  # the row's `messages` will hold it
        message.drop()
    prompt_ids = _first_ids(choice, response, "prompt_token_ids")
    output_ids, logprobs = _output(choice, losses)
    word = choice.name("finish_reason")
    call = Call(
        place=losses.place,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logprobs=logprobs,
        answer=answer,
        finish_reason=finish_reason(word),
        reasoned=message is not None and is_reasoned(message.value),
        **shared,
    )
    if word is not None and call.finish_reason is None:
        call.extra["finish_reason"] = word
        losses.degrade("a reason to finish that has no word here is kept as extra", word)
    return call


def _first_ids(choice: Fields, response: Fields, name: str) -> IDS | None:
    return choice.ids(name) if name in choice else response.ids(name)


def _output(choice: Fields, losses: Losses) -> tuple[IDS | None, MaskedFloats | None]:
    """(output ids, log-probabilities) of a choice. An empty list of ids beside an empty answer is an empty output."""
    message = choice.peek("message")
    text = choice.peek("text") if message is None else isinstance(message, dict) and message.get("content")
    ids = choice.ids("token_ids", empty=not text) if "token_ids" in choice else None
    tokens, numbers = _tokens(choice)
    if ids is None and tokens and all(TOKEN_ID.fullmatch(t) for t in tokens):
        ids = as_ids([int(t.removeprefix("token_id:")) for t in tokens], f"{choice.path}.logprobs")
    if ids is not None:
        _drop_told(choice)
    return ids, as_logprobs(numbers, losses, f"{choice.path}.logprobs") if numbers else None


def _tokens(choice: Fields) -> tuple[list[str], list[Any]]:
    """(token texts, their log-probabilities) of a choice: the chat form or the older one of plain completions."""
    logprobs = choice.maybe_fields("logprobs")
    if logprobs is None:
        return [], []
    content = logprobs.peek("content")
    if isinstance(content, list):
        if not all(isinstance(item, dict) for item in content):
            raise BrokenRecord(f"{logprobs.path}.content: expected objects")
        return [str(item.get("token")) for item in content], [item.get("logprob") for item in content]
    tokens = logprobs.peek("tokens")
    return [str(t) for t in tokens] if isinstance(tokens, list) else [], logprobs.items("token_logprobs") or []


def _drop_told(choice: Fields) -> None:
    """Leave out of what is left over the texts of tokens, which ids tell; not other tokens' log-probabilities."""
    logprobs = choice.maybe_fields("logprobs")
    if logprobs is None:
        return
    logprobs.any("tokens")
    content = logprobs.peek("content")
    if isinstance(content, list) and not any(item.get("top_logprobs") for item in content):
        logprobs.any("content")


def joined(chunks: list[Any], losses: Losses, name: str) -> dict[str, Any]:
    """The chunks of a streamed answer as the answer that they add up to.

    Raises:
        BrokenRecord: a chunk is no object.
    """
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for number, value in enumerate(chunks):
        chunk = Fields(value, losses, f"{name}[{number}]")
        if chunk.peek("type") in LAST and isinstance(chunk.peek("response"), dict):
            return dict(chunk.peek("response"))
        whole |= {k: v for k, v in chunk.value.items() if v is not None and k != "choices"}
        for choice in chunk.each("choices"):
            _add_chunk(choices.setdefault(choice.whole("index") or 0, {}), choice)
    for message in (made["message"] for made in choices.values() if "message" in made):
        if "tool_calls" in message:
            message["tool_calls"] = list(message["tool_calls"].values())
    return {**whole, "choices": [choices[i] for i in sorted(choices)]} if choices else whole


def _add_chunk(choice: dict[str, Any], chunk: Fields) -> None:
    for name in ("token_ids", "prompt_token_ids"):
        if name in chunk:
            choice[name] = [*choice.get(name, ()), *(chunk.items(name) or ())]
    for name in ("finish_reason", "stop_reason", "index"):
        if name in chunk:
            choice[name] = chunk.peek(name)
    if "text" in chunk:
        choice["text"] = choice.get("text", "") + (chunk.text("text") or "")
    logprobs = chunk.fields("logprobs")
    if logprobs is not None:
        into = choice.setdefault("logprobs", {})
        for name in ("content", "tokens", "token_logprobs"):
            if name in logprobs:
                into[name] = [*into.get(name, ()), *(logprobs.items(name) or ())]
    delta = chunk.fields("delta")
    if delta is not None:
        _add_delta(choice.setdefault("message", {"role": "assistant", "content": ""}), delta)


def _add_delta(message: dict[str, Any], delta: Fields) -> None:
    for name in ("content", "reasoning_content", "reasoning", "refusal"):
        if name in delta:
            message[name] = (message.get(name) or "") + (delta.text(name) or "")
    for part_of in delta.each("tool_calls"):
        calls_by_index = message.setdefault("tool_calls", {})
        call = calls_by_index.setdefault(part_of.whole("index") or 0, {"type": "function", "function": {}})
        if "id" in part_of:
            call["id"] = part_of.peek("id")
        function = part_of.fields("function")
        for name in ("name", "arguments") if function else ():
            call["function"][name] = call["function"].get(name, "") + (function.text(name) or "")  # type: ignore[union-attr]


def prompt_ids_of(request: Fields | None) -> IDS | None:
    """The ids of a completion request whose prompt is a list of ids."""
    value = None if request is None else request.peek("prompt")
    if not isinstance(value, list) or request is None:
        return None
    if len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return as_ids(value, f"{request.path}.prompt") if value and isinstance(value[0], int) else None
