"""OpenHands: event streams (0.x and the SDK), and the SDK's logs of requests and answers.

A prompt is what the stream showed the model by then. A condensation is followed exactly: the events that it forgets
leave the context, and its summary stands at its offset. Action events of one answer are one call; ids come from the
token event behind them, or from the answer that 0.x keeps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memopd_trace.convert import exchange, sessions
from memopd_trace.convert.draft import Call, Chat, Draft
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses, NotACall
from memopd_trace.convert.records import Record
from memopd_trace.convert.transcript import gathered, is_reasoned, plain_content
from memopd_trace.invocation import Sampling

ONE_EVENT = re.compile(r"(?:event-)?\d+(?:-[0-9a-fA-F-]+)?\.json(?:\.gz|\.zst)?")
STATE = "base_state.json"
UNSEEN = ("null", "agent_state_changed", "change_agent_state", "condensation_request")  # 0.x: never in the context
NOT_SAMPLED = ("system", "recall", "condensation", *UNSEEN)  # 0.x: the agent's, and no model's


def is_event(value: Any) -> bool:
    """Whether a record is one event (or the state beside them), which says nothing alone."""
    if not isinstance(value, dict):
        return False
    return "kind" in value or "action" in value or "observation" in value or ("agent" in value and "stats" in value)


def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """Conversations: of a file, or of a folder with one event a file."""
    return gathered(files, is_event, _folder_of)


def _folder_of(file: Path) -> Path:
    if file.name == STATE:
        return file.parent
    if ONE_EVENT.fullmatch(file.name) is None:
        return file
    return file.parent.parent if file.parent.name == "events" else file.parent


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A conversation, a result of an evaluation with its `history`, or a request with its answer."""
    if isinstance(value, list) and value and all(isinstance(part, Record) for part in value):
        yield from _conversation(Stream(losses), value)
        return
    if isinstance(value, list):
        value = {"events": value}
    record = Fields(value, losses)
    for name in ("history", "events", "trajectory"):
        if isinstance(record.peek(name), list):
            events = [e for item in record.items(name) or () for e in (item if isinstance(item, list) else [item])]
            parts = [Record(f"{losses.place} {name}[{i}]", event) for i, event in enumerate(events)]
            yield from _conversation(Stream(losses, strict=True), parts, record)
            return
    if "response" in record:
        settings = record.fields("kwargs")
        if settings is not None:  # what the request was made with stands one level deeper
            value = {**settings.value, **{k: v for k, v in value.items() if k != "kwargs" and v is not None}}
        yield from sessions.read(value, losses)
        return
    raise BrokenRecord("neither an event nor a history nor a request with its answer")


def _conversation(stream: Stream, parts: list[Record], record: Fields | None = None) -> Iterator[Draft]:
    losses, name = stream.losses, stream.losses.place
    for part in parts:
        losses.place = part.place
        try:
            stream.event(Fields(part.value, losses))
        except BrokenRecord as error:
            if stream.strict:
                raise BrokenRecord(f"{part.place.rpartition(' ')[2]}: {error}") from None
            losses.broke(Issue(part.place, str(error)))
        except NotACall as reason:
            if stream.strict:
                losses.degrade(f"no call: {reason}")
            else:
                losses.skip(str(reason))
    losses.place = name
    if not stream.calls and not losses.dropped_calls:
        raise NotACall("a conversation without an answer of a model: give its folder, with the events")
    draft = Draft(episode_id=name, calls=stream.calls, terminated=stream.ended)
    if record is not None:
        draft.task_id = record.name("instance_id")
        draft.episode_id = draft.task_id or name
        draft.extra = record.rest()
    if stream.loose:
        draft.extra["events"] = stream.loose
    yield draft


@dataclass(slots=True)
class _Seen:
    """An event in the context: its id, and the message that it became, if it became one."""

    key: str | None
    message: dict[str, Any] | None


@dataclass(slots=True)
class Stream:
    """The context of the agent, event by event, and its calls so far.

    strict: a broken event breaks all of it.
    """

    losses: Losses
    strict: bool = False
    calls: list[Call] = field(default_factory=list)
    context: list[_Seen] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    sampling: Sampling | None = None
    rewritten: str | None = None
    ended: bool | None = None
    loose: list[Any] = field(default_factory=list)

    def event(self, event: Fields) -> None:
        """The next event, of either generation."""
        key = event.name("id")
        if key is not None and key in self.known and not isinstance(event.peek("agent"), dict):
            if not self.strict:
                self.losses.skip("an event that was told before")
            return
        if isinstance(event.peek("agent"), dict):
            self._state(event)
        elif "kind" in event:
            self._of_sdk(event, event.text("kind") or "", key)
        else:
            self._of_v0(event, key)
        if key is not None:
            self.known.add(key)

    # -- the SDK's events --

    def _of_sdk(self, event: Fields, kind: str, key: str | None) -> None:
        self.losses.version("SDK")
        if kind == "ActionEvent" or (kind == "MessageEvent" and event.peek("source") == "agent"):
            self._answer(event, kind, key)
            return
        if kind == "TokenEvent":
            self._ids(event)
        elif kind == "Condensation":
            self._condense(event, key, appends=False)
        elif kind == "SystemPromptEvent":
            prompt = event.fields("system_prompt")
            parts = [prompt.value] if prompt else []
            more = event.fields("dynamic_context")
            parts += [more.value] if more else []
            self._see(key, {"role": "system", "content": plain_content(parts)})
            tools = [t.value for t in event.each("tools")]
            self.tools = [t for t in tools if "function" in t] or None
            if tools and self.tools is None:
                self.losses.degrade("tools are not kept as the model read them")
        elif kind == "MessageEvent":
            message = event.fields("llm_message")
            if message is None:
                raise BrokenRecord("a message without 'llm_message'")
            content = [*_listed(message.any("content")), *(event.items("extended_content") or ())]
            self._see(key, {"role": message.text("role") or "user", "content": plain_content(content)})
        elif kind == "CondensationSummaryEvent":
            self._see(key, {"role": "user", "content": event.text("summary") or ""})
        elif "tool_call_id" in event:
            self._see(key, _sdk_result(event, kind))
        elif kind == "ConversationStateUpdateEvent":
            self._update(event)
        self._keep(event)

    def _answer(self, event: Fields, kind: str, key: str | None) -> None:
        """An action or what the agent said: a call, or one more action of the call before."""
        source = event.fields("llm_message") if kind == "MessageEvent" else event
        if source is None:
            raise BrokenRecord("a message without 'llm_message'")
        call = event.fields("tool_call")
        tool_calls = [_tool_call(call)] if call else [_tool_call(c) for c in source.each("tool_calls")]
        name = event.name("llm_response_id") or key
        last = self.calls[-1] if self.calls else None
        if last is not None and name is not None and last.key == name and isinstance(last.answer, dict):
            last.answer["tool_calls"] = [*last.answer.get("tool_calls", ()), *tool_calls]
            last.extra.setdefault("actions", []).append(event.rest())
            self.context.append(_Seen(key, None))
            return
        answer: dict[str, Any] = {"role": "assistant"}
        answer["content"] = plain_content(source.any("content" if kind == "MessageEvent" else "thought") or ())
        if reasoning := source.text("reasoning_content"):
            answer["reasoning_content"] = reasoning
        if tool_calls:
            answer["tool_calls"] = tool_calls
        made = self._call(name, answer, event)
        made.extra = event.rest()
        self.context.append(_Seen(key, answer))

    def _ids(self, event: Fields) -> None:
        """The ids of the call in front of it."""
        if not self.calls or self.calls[-1].prompt_ids is not None:
            self.losses.degrade("a token event that follows no call")
            return
        call = self.calls[-1]
        call.prompt_ids, call.output_ids = event.ids("prompt_token_ids"), event.ids("response_token_ids")

    def _update(self, event: Fields) -> None:
        """A change of the conversation's state: how it ended, and which model it is with."""
        key, value = event.peek("key"), event.peek("value")
        if key == "execution_status" and value == "finished":
            self.ended = True
        elif key == "full_state" and isinstance(value, dict):
            self._state(Fields(value, self.losses, "value"))
        elif key == "stats" and isinstance(value, dict):
            usage = value.get("usage_to_metrics")
            main = next(iter(usage.values()), None) if isinstance(usage, dict) else None
            name = main.get("model_name") if isinstance(main, dict) else None
            self.model = self.model or (name if isinstance(name, str) else None)
            for call in self.calls:
                call.model = call.model or self.model

    def _state(self, state: Fields) -> None:
        agent = state.maybe_fields("agent")
        llm = agent.maybe_fields("llm") if agent else None
        if llm is not None:
            self.model = llm.text("model") or self.model
            self.sampling = exchange.sampling(llm)

    # -- the events of 0.x --

    def _of_v0(self, event: Fields, key: str | None) -> None:
        self.losses.version("0.x")
        action, source = event.peek("action"), event.peek("source")
        args = event.fields("args") if action is not None else None
        if action == "condensation" and args is not None:
            self._condense(args, key)
        elif action == "system" and args is not None:
            self._see(key, {"role": "system", "content": args.text("content") or ""})
            self.tools = [t for t in args.items("tools") or () if isinstance(t, dict)] or None
        elif action is not None and source == "agent" and action not in NOT_SAMPLED:
            self._v0_call(event, args, str(action), key)
            return
        elif action == "message" and args is not None:
            self._see(key, {"role": "user", "content": args.text("content") or ""})
            if args.peek("image_urls"):
                self.losses.gap("opaque_content", "images are not converted")
        elif action == "run" and args is not None:
            self._see(key, {"role": "user", "content": f"User executed the command:\n{args.text('command') or ''}"})
        elif event.peek("observation") == "recall":
            self.losses.degrade("what was recalled is not in the log as the model read it")
            self.context.append(_Seen(key, None))
        elif isinstance(event.peek("observation"), str) and event.peek("observation") not in UNSEEN:
            self._see(key, _v0_result(event))
        elif action not in UNSEEN and event.peek("observation") not in UNSEEN:
            self.context.append(_Seen(key, None))
        self._keep(event)

    def _v0_call(self, event: Fields, args: Fields | None, action: str, key: str | None) -> None:
        about = event.fields("tool_call_metadata")
        response = about.fields("model_response") if about else None
        if response is None:
            said = args.text("content") if args and action == "message" else None
            answer = {"role": "assistant", "content": said} if said is not None else None
            self._call(f"event {key}", answer, event).extra = event.rest()
            self.context.append(_Seen(key, answer))
            return
        name = response.name("id")
        if self.calls and name is not None and self.calls[-1].key == name:  # one more action of one answer
            response.drop()
            self.calls[-1].extra.setdefault("actions", []).append(event.rest())
            self.context.append(_Seen(key, None))
            return
        told = exchange.calls(None, response, self.losses)[0]
        call = self._call(name or f"event {key}", told.answer, event)
        call.model = told.model or call.model
        call.prompt_ids, call.output_ids, call.logprobs = told.prompt_ids, told.output_ids, told.logprobs
        call.finish_reason, call.counts, call.reasoned = told.finish_reason, told.counts, told.reasoned
        later = told.answer if isinstance(told.answer, dict) else None
        if action == "finish":  # later calls read what was said, and not the tool call, which nothing answers
            thought = args.any("thought") if args else None
            self.ended = True
            said = thought if isinstance(thought, str) and thought else (later or {}).get("content") or ""
            later = {"role": "assistant", "content": said}
        call.extra = {**told.extra, **event.rest()}
        self.context.append(_Seen(key, later))

    # -- both --

    def _call(self, key: str | None, answer: Any, event: Fields) -> Call:
        self.losses.history(len(self.context))
        context = [s.message for s in self.context if s.message is not None]
        call = Call(
            place=self.losses.place,
            key=key,
            model=self.model,
            sampling=self.sampling,
            prompt=Chat(messages=context, tools=self.tools) if context else None,
            answer=answer,
            reasoned=is_reasoned(answer),
            parent=self.calls[-1].key if self.calls else None,
            rewrite_kind=self.rewritten,
            ended_at=event.time("timestamp"),
        )
        self.rewritten, self.ended = None, None
        self.calls.append(call)
        return call

    def _condense(self, event: Fields, key: str | None, appends: bool = True) -> None:
        """Forget events, and put a summary in their place; one without a place is shown at the end, or not at all."""
        gone = {str(i) for i in event.items("forgotten_event_ids") or ()}
        first, last = event.whole("forgotten_events_start_id"), event.whole("forgotten_events_end_id")
        summary, offset = event.text("summary"), event.whole("summary_offset")
        if first is not None and last is not None:
            gone |= {s.key for s in self.context if s.key and s.key.isdecimal() and first <= int(s.key) <= last}
        # one summary at a time where it cannot be forgotten by a name that the log knows
        unnamed = first is not None or any(i.isdecimal() for i in gone) or bool(gone - self.known)
        if summary is not None and unnamed:
            gone |= {s.key for s in self.context if s.key and s.key.endswith("-summary")}
        self.context = [s for s in self.context if s.key is None or s.key not in gone]
        if summary is not None and (appends or offset is not None):
            at = len(self.context) if offset is None else max(0, min(offset, len(self.context)))
            self.context.insert(at, _Seen(f"{key}-summary", {"role": "user", "content": summary}))
            self.known.add(f"{key}-summary")
            self.rewritten = "summary"
            self.losses.gap("lost_calls", "the call that wrote a summary")
        else:
            self.rewritten = "elide"

    def _see(self, key: str | None, message: dict[str, Any]) -> None:
        self.context.append(_Seen(key, message))

    def _keep(self, event: Fields) -> None:
        for name in ("timestamp", "source"):
            event.any(name)
        if rest := event.rest():
            self.loose.append(rest)


def _listed(content: Any) -> list[Any]:
    """A content as the list of its parts."""
    if content is None or isinstance(content, list):
        return content or []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    raise BrokenRecord("a content is neither text nor a list of parts")


def _tool_call(call: Fields) -> dict[str, Any]:
    """A tool call of the chat form, out of one, or of the SDK's own."""
    function = call.fields("function") or call
    return {
        "id": call.name("id"),
        "type": "function",
        "function": {"name": function.text("name"), "arguments": function.any("arguments")},
    }


def _sdk_result(event: Fields, kind: str) -> dict[str, Any]:
    """What a tool answered, or why it did not."""
    observation = event.fields("observation")
    if kind == "UserRejectObservation":
        content: Any = f"Action rejected: {event.text('rejection_reason') or ''}"
    elif observation is not None:
        content = plain_content([*_listed(observation.any("content")), *(event.items("extended_content") or ())])
    else:
        content = event.text("error") or ""
    return {"role": "tool", "tool_call_id": event.name("tool_call_id"), "content": content}


def _v0_result(event: Fields) -> dict[str, Any]:
    content = event.text("content") or ""
    about = event.fields("tool_call_metadata")
    if about is None:
        return {"role": "user", "content": content}
    about.any("model_response")
    return {"role": "tool", "tool_call_id": about.name("tool_call_id"), "content": content}


FORMAT = Format(
    name="openhands",
    title="OpenHands: events of 0.x and of the SDK, and logs of completions",
    exactness="some ids",
    read=read,
    records=records,
    unsaid=("no_logprobs", "no_policy_version", "no_reward", "no_group", "lossy_text"),
    note="Give the conversation's folder: its events, each in a file, are read together. The SDK keeps ids where "
    "`return_token_ids` was asked of the server. Observations of 0.x were dressed up for the model in ways that events "
    "do not show, and older ones hold no system prompt.",
)  # fmt: skip
