"""Gemini CLI: chat records, one JSON document or a list of changes to one.

A message of Gemini's is one call, with its tools' results behind it. A message may be told again (the last word holds),
`$rewindTo` takes messages back, and `$set` with messages replaces them all: an explicit rewrite where it changes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memopd_trace.convert.assemble import to_text
from memopd_trace.convert.draft import Call, Chat, Draft
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.linewise import each_line, families
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses, NotACall
from memopd_trace.convert.records import Record

SESSION = re.compile(rb'"sessionId"\s*:\s*"[^"\\]+"')
NO_PART = ("info", "error", "warning")  # said to the person, not to the model


def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """The files of each session, together."""
    return families(files, SESSION)


def read(value: list[Record], losses: Losses) -> Iterator[Draft]:
    """A session: the record of a chat, or the changes that add up to one."""
    place = losses.place
    session = _Session(losses)
    each_line(value, losses, session.line)
    losses.place = place
    calls = session.done()
    if calls:
        yield Draft(episode_id=session.name or place, calls=calls, extra=session.extra)


@dataclass(slots=True, kw_only=True)
class _Told:
    """A message as a line tells it: `uses` are (name, call of a tool, its results)."""

    name: str
    model: bool
    content: Any
    uses: list[tuple[str | None, dict[str, Any], list[dict[str, Any]]]]
    call: Call | None

    def chat(self, known: set[str | None]) -> list[dict[str, Any]]:
        """Its messages in the chat form, without the uses of `known` names."""
        if not self.model:
            return self.content if isinstance(self.content, list) else []
        uses = [use for use in self.uses if use[0] not in known]
        answer = {"role": "assistant", "content": "" if known else self.content}
        answer |= {"tool_calls": [use[1] for use in uses]} if uses else {}
        return [answer, *(message for use in uses for message in use[2])]


@dataclass(slots=True)
class _Message:
    """What a message puts into prompts, the tools that it used, and the calls that it is."""

    chat: list[dict[str, Any]]
    tools: set[str | None]
    calls: list[Call]

    def has_answers(self) -> bool:
        """Whether a tool has answered."""
        return any(message["role"] == "tool" for message in self.chat)


@dataclass(slots=True)
class _Session:
    """The messages of a chat by their names, as they stand at a line, and all calls so far."""

    losses: Losses
    name: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    messages: dict[str, _Message] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    last: str | None = None
    rewritten: str | None = None
    answered: set[str] = field(default_factory=set)  # tools whose results stand behind their call

    def line(self, record: Fields) -> None:
        """The next line."""
        changes = record.fields("$set")
        if changes is not None:
            self._set(changes, True)
        elif "$rewindTo" in record:
            self._rewind(record.name("$rewindTo"))
        elif "sessionId" in record:
            self._set(record, False)
        elif "id" in record and "type" in record:
            if record.text("type") in NO_PART:
                raise NotACall(f"a message of type '{record.text('type')}'")
            self._put(self._read(record), True)
        elif "method" in record and "response" in record:
            raise BrokenRecord("no record of a chat: an answer of the API that was recorded without its prompt")
        else:
            raise BrokenRecord("no record of a chat: neither 'sessionId', a message, '$set' nor '$rewindTo'")

    def _set(self, record: Fields, changed: bool) -> None:
        """What is said of the whole chat; messages in it replace those before."""
        name = record.name("sessionId")
        told = [self._read(m) for m in record.each("messages") if m.peek("type") not in NO_PART]
        if "messages" in record:
            before, self.messages = self.messages, {}
            for message in told:
                old = before.get(message.name)
                self._put(message, message.call is not None and (not changed or message.call.model is not None),
                          old.calls if old else ())  # fmt: skip
            self._compare(before)
        self.name = self.name or name
        self.extra |= {name: value for name, value in record.rest().items() if name != "messages"}  # those are calls'

    def _compare(self, before: dict[str, _Message]) -> None:
        """What a new list of messages did to the old one: a summary where messages went and others came."""
        gone, come = before.keys() - self.messages.keys(), self.messages.keys() - before.keys()
        if gone and come:
            self.rewritten = "summary"
            self.losses.gap("lost_calls", "the call that wrote a summary is not in the log")
        elif any(m.chat != before[n].chat for n, m in self.messages.items() if n in before):
            self.rewritten = "elide"

    def _rewind(self, name: str | None) -> None:
        """Take back a message and all behind it; where it is not known, all of them."""
        names = list(self.messages)
        at = names.index(name) if name in self.messages else 0
        self.messages = {n: self.messages[n] for n in names[:at]}
        self.last = next((m.calls[-1].key for m in reversed(self.messages.values()) if m.calls), None)
        self.rewritten = None

    def _read(self, record: Fields) -> _Told:
        name, kind = record.name("id"), record.text("type")
        if name is None or kind not in ("user", "gemini"):
            raise BrokenRecord(f"{record.path or 'a message'}: no 'id', or a type other than user and gemini")
        parts = _parts(record.any("content"))
        if kind == "user":
            return _Told(name=name, model=False, content=self._said(parts), uses=[], call=None)
        uses = [_use(use) for use in record.each("toolCalls")]
        if not uses:
            made = [inner for p in parts if (inner := _inner(p, "functionCall")) is not None]
            uses = [_use(Fields({"args": {}, **call}, self.losses, record.path)) for call in made]
        self.answered |= {name for name, _, results in uses if name is not None and results}
        content = _content([p for p in parts if "functionCall" not in p and p.get("thought") is not True])
        return _Told(name=name, model=True, content=content, uses=uses, call=self._call(name, record))

    def _said(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What a user's message puts into the prompt; results that stand behind their call already are left out."""
        found: list[dict[str, Any]] = []
        text = [p for p in parts if "functionResponse" not in p]
        for part in parts:
            inner = _inner(part, "functionResponse")
            name = inner.get("id") if inner else None
            if inner and not (isinstance(name, str) and name in self.answered):
                found.append(_result(part, name))
        return [*found, {"role": "user", "content": _content(text)}] if text or not parts else found

    def _call(self, name: str, record: Fields) -> Call:
        tokens = record.fields("tokens")
        thoughts, output = (tokens.whole("thoughts"), tokens.whole("output")) if tokens else (None, None)
        call = Call(
            place=self.losses.place + (f" {record.path}" if record.path else ""),
            key=name,
            model=record.text("model"),
            reasoned=bool(record.peek("thoughts") or thoughts),
            counts=(tokens.whole("input") if tokens else None, None if output is None else output + (thoughts or 0)),
            ended_at=record.time("timestamp"),
        )
        call.extra = record.rest()
        return call

    def _put(self, told: _Told, is_call: bool, calls: Sequence[Call] = ()) -> None:
        """Add a message, which was `calls` already, or tell it again: then the last word holds."""
        old = self.messages.get(told.name)
        names = {use[0] for use in told.uses}
        if old is not None and old.has_answers() and names - old.tools:
            self._go_on(old, told, names)
            return
        if old is not None and len(old.calls) > 1:
            return
        chat, found = told.chat(set()), list(old.calls if old is not None else calls)
        if told.call is not None and is_call and not found:
            found = [self._begin(told.call, chat[0])]
        elif told.call is not None and old is not None and found:
            first, last = found[0], told.call  # what stood in front of it when it was first told is its prompt
            first.answer, first.counts, first.extra = chat[0], last.counts, last.extra
            first.reasoned = last.reasoned
        self.messages[told.name] = _Message(chat, names, found)

    def _go_on(self, old: _Message, told: _Told, names: set[str | None]) -> None:
        """A further call under the name of an earlier one: tools that were added when others had answered."""
        more = told.chat(old.tools)
        call = Call(place=self.losses.place, key=f"{told.name}#{len(old.calls) + 1}")
        call.model = told.call.model if told.call is not None else None
        old.calls = [*old.calls, self._begin(call, more[0])]
        old.chat, old.tools = [*old.chat, *more], old.tools | names

    def _begin(self, call: Call, answer: dict[str, Any]) -> Call:
        """A new call, whose prompt is all messages so far."""
        self.losses.history(len(self.messages))
        call.prompt, call.answer = Chat(messages=[part for m in self.messages.values() for part in m.chat]), answer
        call.parent, call.rewrite_kind = self.last, self.rewritten
        self.last, self.rewritten = call.key, None
        self.calls[str(call.key)] = call
        return call

    def done(self) -> list[Call]:
        """All calls, in order."""
        for call in self.calls.values():
            if call.reasoned:
                self.losses.gap("opaque_content", "of reasoning only a summary is told, which is kept as extra")
        return list(self.calls.values())


def _parts(value: Any) -> list[dict[str, Any]]:
    """A content as a list of Gemini's parts."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [p if isinstance(p, dict) else {"text": p if isinstance(p, str) else str(p)} for p in values]


def _content(parts: list[dict[str, Any]]) -> Any:
    """Text, or the parts with a name for their kind, of which only text can be rendered."""
    if all(isinstance(p.get("text"), str) for p in parts):
        return "".join(p["text"] for p in parts)
    return [{"type": "text" if "text" in p else next(iter(p), "nothing"), **p} for p in parts]


def _inner(part: Any, name: str) -> dict[str, Any] | None:
    value = part.get(name) if isinstance(part, dict) else None
    return value if isinstance(value, dict) else None


def _use(use: Fields) -> tuple[str | None, dict[str, Any], list[dict[str, Any]]]:
    """(name, call, results) of a tool. Results may be those of all tools that were used at once: each has a name."""
    name, value = use.name("id"), use.any("result")
    call = {"id": name, "type": "function", "function": {"name": use.text("name"), "arguments": use.any("args")}}
    own = [p for p in _parts(value) if (_inner(p, "functionResponse") or {}).get("id", name) in (name, None)]
    return name, call, [_result(part, name) for part in own]


def _result(part: dict[str, Any], name: Any) -> dict[str, Any]:
    """A tool's result, as it went into the next prompt."""
    response = (_inner(part, "functionResponse") or {}).get("response")
    if response is None:
        return {"role": "tool", "tool_call_id": name, "content": _content([part])}
    output = response.get("output") if isinstance(response, dict) and len(response) == 1 else None
    content = output if isinstance(output, str) else to_text(response)
    return {"role": "tool", "tool_call_id": name, "content": content}


FORMAT = Format(
    name="gemini-cli",
    title="Gemini CLI: chat records",
    exactness="text",
    read=read,
    records=records,
    suffixes=(".json", ".jsonl"),
    unsaid=(
        "no_token_ids", "no_logprobs", "no_sampling", "no_policy_version", "no_finish_reason", "no_reward", "no_end",
        "no_group", "lossy_text",
    ),
    note="The system prompt, the tools and the reasoning are not in the log, and long outputs of tools are cut. "
    "Gemini's tokenizer is not public: ids are another model's.",
)  # fmt: skip
