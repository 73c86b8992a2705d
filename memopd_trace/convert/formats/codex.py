"""Codex CLI: rollout files of a session, a list of Responses items between events.

What the model made in one go is one call; its prompt is all that stands in front of it. A `compacted` line replaces
that history (an explicit rewrite), and a rollback takes the last turns out of it. Encrypted reasoning, and tools, are
not in the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from memopd_trace.convert.draft import Call, Chat, Draft
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.linewise import each_line
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.records import Record, json_files
from memopd_trace.convert.responses import made_by_model, to_messages

MADE = ("local_shell_call", "web_search_call", "image_generation_call", "tool_search_call")  # also by the model
NO_PART = ("ghost_snapshot", "other")  # items that no prompt holds
COUNTS = ("input_tokens", "output_tokens")


def read(value: list[Record], losses: Losses) -> Iterator[Draft]:
    """A session."""
    place = losses.place
    session = _Session(losses)
    each_line(value, losses, session.line)
    session.close()
    losses.place = place
    if session.calls:
        yield Draft(episode_id=session.name or place, calls=session.calls, extra=session.extra)


@dataclass(slots=True)
class _Session:
    """The history of a session as it stands at a line. `turns` are the places in it where the user spoke, `ends` those
    where calls ended, `made` the items of the call that is being told."""

    losses: Losses
    name: str | None = None
    model: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    system: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)  # as chat messages
    known: bool = True
    turns: list[int] = field(default_factory=list)
    ends: list[tuple[int, str]] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    first: tuple[str, datetime | None] | None = None  # where the call begins, and when
    awaited: str | None = None  # what the user said, and which item it is not yet known
    last: str | None = None
    rewritten: str | None = None
    context: dict[str, Any] = field(default_factory=dict)
    total: Any = None
    calls: list[Call] = field(default_factory=list)

    def line(self, record: Fields) -> None:
        """The next line: `{type, payload}`, or in the oldest files the payload itself."""
        kind, payload = record.text("type"), record.fields("payload")
        record.time("timestamp")
        if payload is None and kind is not None:
            self._item(record, record)
        elif payload is None:
            if "id" not in record or "record_type" in record:
                raise NotACall("a line without a 'type'")
            self._meta(record)
        elif kind == "session_meta":
            self._meta(payload)
        elif kind == "response_item":
            self._item(record, payload)
        elif kind == "turn_context":
            self.model = payload.text("model") or self.model
            self.context = payload.rest()
        elif kind == "compacted":
            self._compacted(payload)
        elif kind == "event_msg":
            self._event(payload)
        else:
            raise NotACall(f"a line of type '{str(kind)[:40]}'")

    def _meta(self, payload: Fields) -> None:
        name = payload.name("id")
        base = payload.peek("base_instructions")
        text = base.get("text") if isinstance(base, dict) else payload.peek("instructions")
        if self.name is not None:
            self.losses.degrade("a forked session tells again what the one before it told", f"{self.name}: {name}")
            return
        self.name = name
        self.losses.version(payload.text("cli_version"))
        if isinstance(text, str) and text:
            payload.any("base_instructions"), payload.any("instructions")
            self.system = [{"role": "system", "content": text}]
        self.extra = payload.rest()

    def _item(self, record: Fields, payload: Fields) -> None:
        kind = payload.text("type")
        item = payload.value
        if kind is None:
            raise BrokenRecord("an item without a 'type'")
        if kind in NO_PART:
            raise NotACall(f"an item of type '{kind}'")
        if made_by_model(item) or kind in MADE:
            self.first = self.first or (self.losses.place, record.time("timestamp"))
            self.made.append(item)
            return
        self.close()
        self.history += to_messages([item])
        if self.awaited is not None and _is_said(self.history[-1], self.awaited):
            self.turns, self.awaited = [*self.turns, len(self.history) - 1], None

    def close(self, finish: str | None = None) -> None:
        """The call that is being told is over."""
        made, first = self.made, self.first
        self.made, self.first = [], None
        if not made or first is None:
            return
        hidden = [i for i in made if _is_hidden(i)]
        told = [i for i in made if not _is_hidden(i)]
        if hidden:
            self.losses.gap("opaque_content", "reasoning is encrypted, and missing in prompts and outputs")
        if not told:
            self.losses.lose("all of the answer is encrypted")
            return
        self.losses.history(len(self.history))
        key = str(len(self.calls))
        answers = to_messages(told)
        other = next((i["type"] for i in told if i["type"] in MADE), None)  # no template takes that
        self.calls.append(Call(
            place=first[0],
            key=key,
            model=self.model,
            prompt=Chat(messages=[*self.system, *self.history]) if self.known else None,
            answer=answers[0] if other is None else {"role": "assistant", "content": [{"type": other}]},
            reasoned=any(i.get("type") == "reasoning" for i in made),
            finish_reason=finish,
            parent=self.last,
            rewrite_kind=self.rewritten,
            ended_at=first[1],
            extra={"turn_context": self.context} if self.context else {},
        ))  # fmt: skip
        self.history += answers
        self.ends.append((len(self.history), key))
        self.last, self.rewritten, self.context = key, None, {}

    def _compacted(self, payload: Fields) -> None:
        history = payload.items("replacement_history")
        if history is not None and not all(isinstance(i, dict) for i in history):
            raise BrokenRecord("payload.replacement_history: expected objects")
        self.close()
        self.losses.gap("lost_calls", "the call that wrote a summary is not in the log")
        if any(i.get("encrypted_content") and not _is_hidden(i) for i in history or ()):
            self.losses.gap("opaque_content", "what a compaction made of the history is encrypted")
        self.known = history is not None
        self.history = to_messages(i for i in history or () if i.get("type") not in NO_PART and not _is_hidden(i))
        self.turns, self.ends = [], []
        self.rewritten = "summary"

    def _event(self, payload: Fields) -> None:
        kind = payload.text("type")
        if kind == "user_message":
            self.close()
            self._spoke(payload.text("message"))
        elif kind == "token_count":
            self._count(payload)
        elif kind == "thread_rolled_back":
            self._roll_back(payload.whole("num_turns") or 0)
        elif kind == "turn_aborted":
            self.close("abort")
        elif kind in ("task_complete", "task_started", "turn_complete", "turn_started"):
            self.close()
        else:
            raise NotACall(f"an event '{str(kind)[:40]}'")

    def _spoke(self, text: str | None) -> None:
        """A turn of the user begins, with the item of that text: the last one, or one that is still to come."""
        if text is not None and self.history and _is_said(self.history[-1], text):
            self.turns.append(len(self.history) - 1)
        else:
            self.awaited = text

    def _count(self, payload: Fields) -> None:
        """The tokens of the call that ended; the same numbers may be told again, and zeros follow a compaction."""
        info = payload.fields("info")
        used = info.fields("last_token_usage") if info else None
        if info is None or used is None:
            raise NotACall("a count without numbers")
        counts = used.whole(COUNTS[0]), used.whole(COUNTS[1])
        again, self.total = self.total == info.peek("total_token_usage"), info.any("total_token_usage")
        self.close()
        if self.calls and not again and counts[0] and self.calls[-1].counts == (None, None):
            self.calls[-1].counts = counts
            left = {n: v for n, v in used.value.items() if n not in COUNTS}
            self.calls[-1].extra |= {"usage": left} if left else {}

    def _roll_back(self, turns: int) -> None:
        """Take the last turns out of the history; the call that the next one follows is then an earlier one."""
        self.close()
        if turns <= 0:
            return
        if turns > len(self.turns):
            self.known = False
            return
        at = self.turns[-turns]
        self.history, self.turns = self.history[:at], self.turns[:-turns]
        self.ends = [end for end in self.ends if end[0] <= at]
        self.last, self.rewritten = (self.ends[-1][1] if self.ends else None), None


def _is_said(message: dict[str, Any], text: str) -> bool:
    """Whether a message is what the user said."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    said = "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))
    return message.get("role") == "user" and said == text


def _is_hidden(item: Any) -> bool:
    """Whether an item is reasoning of which nothing can be read."""
    if item.get("type") != "reasoning":
        return False
    parts = [p for name in ("content", "summary") if isinstance(item.get(name), list) for p in item[name]]
    return not any(isinstance(p, dict) and isinstance(p.get("text"), str) and p["text"] for p in parts)


FORMAT = Format(
    name="codex",
    title="Codex CLI: rollout files",
    exactness="text",
    read=read,
    records=json_files,
    suffixes=(".jsonl",),
    unsaid=(
        "no_token_ids", "no_logprobs", "no_sampling", "no_policy_version", "no_finish_reason", "no_reward", "no_end",
        "no_group", "opaque_content", "lossy_text",
    ),
    note="Tools and most of the reasoning are not in the log; a summary of reasoning is taken where one stands for it. "
    "Behind a compaction that the server encrypted, or that does not tell the new history, calls have no prompt.",
)  # fmt: skip
