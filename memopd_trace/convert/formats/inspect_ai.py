"""Inspect: evaluation logs, `.eval` (a zip of samples) and `.json`.

A model event is a call with exactly what it read; what is pooled or attached elsewhere in the sample is put back. Where
the provider was asked in the chat form, its own request and answer are taken, with the ids if the server gave some. A
compaction makes the next call of that model's role an explicit rewrite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memopd_trace.convert import exchange
from memopd_trace.convert.draft import Call, Chat, Draft, finish_reason
from memopd_trace.convert.evalfile import eval_samples, is_eval
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses, NotACall
from memopd_trace.convert.records import Record, json_records
from memopd_trace.convert.transcript import each_of, is_reasoned, plain_content
from memopd_trace.invocation import Sampling

REFERENCES = ("attachment://", "tc://")
REWRITES = {"summary": "summary", "trim": "truncate_left", "edit": "elide"}
GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}  # what Inspect's own metrics count them as
STOPS = {**{w: w for w in ("stop", "tool_calls", "content_filter")}, "max_tokens": "length", "model_length": "length"}
MAX_DEPTH = 100  # levels in which references are put back


def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """Each sample of a zip with the log's header; other files as JSON."""
    for file in files:
        if is_eval(file):
            yield from eval_samples(file)
            continue
        for record in json_records([file]):
            if isinstance(record, Record) and isinstance(record.value, dict) and "eval" in record.value:
                yield from each_of(record, "samples", ("version", "eval"))
            else:
                yield record


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A sample, with what the log says of all."""
    record = Fields(value, losses)
    if "item" not in record:
        if "eval" in record:
            raise NotACall("a log without samples")
        raise BrokenRecord("no evaluation log: no 'eval' with 'samples'")
    losses.version(record.name("version"))
    at = record.text("at") or "sample"
    sample = Fields(record.any("item"), losses, at)
    draft = _sample(sample, record.fields("eval"), losses)
    rest = record.fields("rest")
    if draft is None:
        raise NotACall("a sample without an answer of a model")
    if rest is not None:
        draft.extra |= rest.rest()
    yield draft


def _sample(sample: Fields, about: Fields | None, losses: Losses) -> Draft | None:
    transcript = sample.fields("transcript")
    stored = (transcript.peek("content") if transcript else None) or sample.peek("attachments")
    events = transcript.each("events") if transcript and "events" in transcript else sample.each("events")
    pools = sample.peek("events_data") if isinstance(sample.peek("events_data"), dict) else {}
    whole = _Sample(
        losses,
        stored if isinstance(stored, dict) else {},
        _items(pools.get("messages")) or _items(sample.peek("message_pool")),
        _items(pools.get("calls")),
    )
    draft = Draft(episode_id="", calls=whole.calls(events))
    if not draft.calls:
        return None
    task = about.name("task") if about else None
    number, epoch = sample.name("id"), sample.name("epoch")
    draft.task_id = None if number is None else f"{task or ''}/{number}".lstrip("/")
    draft.group_id = draft.task_id
    draft.episode_id = sample.name("uuid") or "/".join(p for p in (draft.task_id, epoch) if p) or losses.place
    draft.rewards = _scores(sample)
    if draft.rewards is not None and len(draft.rewards) == 1:
        draft.reward = next(iter(draft.rewards.values()))
    if sample.peek("limit"):
        draft.truncated = True
    for name in ("attachments", "events_data", "message_pool", "transcript", "events", "messages", "output"):
        sample.any(name)  # put back where they belong, or told by the events
    left = sample.rest()
    kept = {name: value for name, value in sample.value.items() if name in left and value not in ({}, [])}
    draft.extra = {"sample": kept} if kept else {}
    if sample.peek("scores"):
        draft.extra["scores"] = sample.peek("scores")
    return draft


class _Sample:
    """What the events of one sample refer to, and its calls."""

    def __init__(self, losses: Losses, stored: dict[str, Any], messages: list[Any], requests: list[Any]) -> None:
        self.losses, self.stored, self.messages, self.requests = losses, stored, messages, requests
        self.spans: dict[str, tuple[str | None, str | None]] = {}  # a span: (its parent, its name if an agent's)
        self.pending: dict[str | None, str] = {}  # a model's role: how its context was compacted

    def calls(self, events: list[Fields]) -> list[Call]:
        """The calls of all model events, in the order of the log."""
        found: list[Call] = []
        for event in events:
            kind = event.peek("event")
            if kind == "span_begin":
                name = event.name("name") if event.peek("type") in ("agent", "scorer") else None
                self.spans[event.name("id") or ""] = (event.name("parent_id"), name)
            elif kind == "compaction":
                word = event.text("type") or "summary"
                self.pending[event.name("role")] = REWRITES.get(word, "opaque")
            elif kind == "model":
                found += self._call(event, len(found))
        return found

    def _call(self, event: Fields, number: int) -> list[Call]:
        output = event.fields("output")
        choices = output.each("choices") if output else []
        if output is None or event.peek("error") or output.peek("error") or not choices:
            self.losses.lose("a model event without an answer")
            return []
        prompt, told = self._prompt(event), self._provider(event)
        config = event.fields("config")
        key = event.name("uuid") or f"event {number}"
        common: dict[str, Any] = {
            "model": event.name("model"),
            "agent_id": event.name("role") or self._agent(event),
            "sampling": _sampling(config) if config else None,
            "started_at": event.time("timestamp"),
            "ended_at": event.time("completed"),
            "prompt": prompt,
            "rewrite_kind": self.pending.pop(event.name("role"), None),
        }
        usage = output.fields("usage")
        counts = (usage.whole("input_tokens"), usage.whole("output_tokens")) if usage else (None, None)
        calls = [self._choice(choice, i, key, common) for i, choice in enumerate(choices)]
        if len(calls) == 1:
            cached = usage is not None and bool(usage.peek("input_tokens_cache_read"))
            calls[0].counts = (None if cached else counts[0], counts[1])
        for call, own in zip(calls, told, strict=False):
            call.prompt_ids, call.output_ids, call.logprobs = own.prompt_ids, own.output_ids, own.logprobs
            call.prompt, call.answer = own.prompt or call.prompt, own.answer or call.answer
        event.any("call"), event.any("input"), event.any("tools")
        calls[0].extra |= event.rest()
        return calls

    def _choice(self, choice: Fields, number: int, key: str, common: dict[str, Any]) -> Call:
        message = choice.fields("message")
        if message is None:
            raise BrokenRecord(f"{choice.path}: a choice without a message")
        answer = self._chat(self._whole(message.value))
        word = choice.name("stop_reason")
        call = Call(
            place=f"{self.losses.place} {choice.path}",
            key=key if not number else f"{key}#{number}",
            answer=answer,
            reasoned=is_reasoned(answer),
            finish_reason=STOPS.get(word or "", finish_reason(word)),
            **common,
        )
        if number:
            call.parent, call.relation, call.rewrite_kind = key, "fork", None
        message.drop()
        return call

    def _prompt(self, event: Fields) -> Chat:
        given = _items(event.peek("input")) or self._pooled(event.items("input_refs"), self.messages)
        messages = [self._chat(self._whole(m)) for m in given]
        tools = [_tool(self._whole(t)) for t in event.items("tools") or () if isinstance(t, dict)]
        return Chat(messages=messages, tools=tools or None)

    def _provider(self, event: Fields) -> list[Call]:
        """What the provider was asked and said itself, where that is of the chat form."""
        call = event.peek("call")
        request = call.get("request") if isinstance(call, dict) else None
        response = call.get("response") if isinstance(call, dict) else None
        if not isinstance(request, dict) or not isinstance(response, dict) or not isinstance(call, dict):
            return []
        if call.get("call_refs") and call.get("call_key") == "messages":
            request = {**request, "messages": self._pooled(call["call_refs"], self.requests)}
        messages = request.get("messages")
        if not isinstance(messages, list) or not isinstance(response.get("choices"), list) or "error" in response:
            return []
        if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            return []
        try:
            asked = Fields(self._whole(request), self.losses, "call.request")
            return exchange.calls(asked, Fields(self._whole(response), self.losses, "call.response"), self.losses)
        except (BrokenRecord, NotACall) as error:
            self.losses.degrade("the provider's own request and answer are not understood", str(error))
            return []

    def _pooled(self, ranges: Any, pool: list[Any]) -> list[Any]:
        """The items that ranges (start, end) of a pool stand for."""
        found: list[Any] = []
        for pair in _items(ranges):
            if not isinstance(pair, list) or len(pair) != 2 or not all(type(n) is int and n >= 0 for n in pair):
                raise BrokenRecord("a reference into a pool is no pair of numbers")
            if pair[1] > len(pool) or len(found) + pair[1] - pair[0] > 2**20:
                raise BrokenRecord(f"a reference to {pair} of a pool of {len(pool)}")
            found += pool[pair[0] : pair[1]]
        return found

    def _whole(self, value: Any, depth: int = 0) -> Any:
        """A value with its attachments put back; one that is not there stays a reference, and is counted."""
        if isinstance(value, str):
            name = next((value.removeprefix(p) for p in REFERENCES if value.startswith(p)), None)
            if name is None:
                return value
            if not isinstance(self.stored.get(name), str):
                self.losses.degrade("an attachment is not in the log", value)
                return value
            return self.stored[name]
        if depth > MAX_DEPTH:
            return value
        if isinstance(value, dict):
            return {k: self._whole(v, depth + 1) for k, v in value.items()}
        return [self._whole(v, depth + 1) for v in value] if isinstance(value, list) else value

    def _agent(self, event: Fields) -> str | None:
        """The agent (or scorer) whose span the event is in."""
        span, steps = event.name("span_id"), 0
        while span is not None and span in self.spans and steps < len(self.spans):
            parent, name = self.spans[span]
            if name is not None:
                return name
            span, steps = parent, steps + 1
        return None

    def _chat(self, value: Any) -> dict[str, Any]:
        """A message of Inspect's as one of the chat form."""
        message = Fields(value, self.losses, "message")
        content, reasoning = self._content(message.any("content"))
        found: dict[str, Any] = {"role": message.text("role") or "user", "content": content}
        if reasoning:
            found["reasoning_content"] = reasoning
        calls = [
            {"id": c.name("id"), "type": "function",
             "function": {"name": c.text("function"), "arguments": c.any("arguments")}}
            for c in message.each("tool_calls")
        ]  # fmt: skip
        if calls:
            found["tool_calls"] = calls
        if found["role"] == "tool":
            found["tool_call_id"] = message.name("tool_call_id")
            error = message.fields("error")
            if error is not None and not content:
                found["content"] = error.text("message") or ""
        return found

    def _content(self, content: Any) -> tuple[Any, str]:
        """(text or parts, reasoning) of a content."""
        if not isinstance(content, list):
            return content if isinstance(content, str) else "", ""
        parts, thoughts = [], []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "reasoning" and part.get("redacted"):
                self.losses.gap("opaque_content", "reasoning is encrypted, and missing in the text")
            elif kind == "reasoning":
                thoughts.append(str(part.get("reasoning") or ""))
            elif kind == "text":
                parts.append({"type": "text", "text": part.get("text")})
            else:
                parts.append(part)
        return plain_content(parts), "\n".join(thoughts)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}}


def _sampling(config: Fields) -> Sampling | None:
    values: dict[str, Any] = {name: config.number(name) for name in ("temperature", "top_p")}
    values |= {name: config.whole(name) for name in ("top_k", "seed")}
    return Sampling(**values) if any(v is not None for v in values.values()) else None


def _scores(sample: Fields) -> dict[str, float] | None:
    """The scores that are numbers, or grades that Inspect counts as numbers, by scorer (and by key)."""
    scores = sample.fields("scores")
    found: dict[str, float] = {}
    for name in scores or ():
        score = scores.maybe_fields(name) if scores else None
        value = score.peek("value") if score else None
        for key, item in value.items() if isinstance(value, dict) else [("", value)]:
            number = GRADES.get(item) if isinstance(item, str) else item
            if isinstance(number, int | float) and abs(number) < 2**53:
                found[f"{name}.{key}" if key else name] = float(number)
    return found or None


FORMAT = Format(
    name="inspect",
    title="Inspect: evaluation logs, .eval and .json",
    exactness="some ids",
    read=read,
    records=records,
    suffixes=(".eval", ".json", ".jsonl"),
    unsaid=("no_logprob_kind", "no_policy_version", "no_end", "no_parent", "no_rewrite_kind", "lossy_text"),
    note="Grades count as Inspect's own metrics count them: C 1, P 0.5, I and N 0. Members of a zip are read one at a "
    "time, none larger than the limit for one record.",
)  # fmt: skip
