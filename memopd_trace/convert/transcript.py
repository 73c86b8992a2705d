"""A conversation as one list of messages: each answer in it is a call, and all before it was its prompt.

That is what several agents log. It holds where nothing but appending takes place; what a harness changed on the way is
not in such a log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memopd_trace.convert.draft import MAX_DEPTH, Call, Chat, Draft, is_too_deep
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses
from memopd_trace.convert.records import MAX_RECORD, Record, json_records

CHAT = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")  # what templates read
REASONING = ("reasoning_content", "reasoning", "thinking_blocks")  # fields of an answer
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def chat_message(message: Fields) -> dict[str, Any]:
    """The fields of a message that a chat template reads; the others are left over.

    Raises:
        BrokenRecord: it has no role, or a part of it is of a kind that no chat message has.
    """
    role = message.text("role")
    if role not in ROLES:
        raise BrokenRecord(f"{message.path}.role: expected one of {', '.join(ROLES)}")
    found = {name: value for name in CHAT if (value := message.any(name)) is not None}
    if not isinstance(found.get("content", ""), str | list):
        raise BrokenRecord(f"{message.path}.content: expected text or a list of parts")
    if "tool_calls" in found and not message.items("tool_calls"):
        del found["tool_calls"]  # an empty list is none
    return found


def plain_content(content: Any) -> Any:
    """A content as templates like it: text, or a list of parts where there are several, or one that is no text; of a
    text part only its text is kept, and of no part an empty text.

    Raises:
        BrokenRecord: it is neither.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise BrokenRecord("a content is neither text nor a list of parts")
    parts = [
        {"type": "text", "text": p["text"]} if isinstance(p, dict) and isinstance(p.get("text"), str) else p
        for p in content
    ]
    return parts[0]["text"] if len(parts) == 1 and isinstance(parts[0], dict) and "text" in parts[0] else parts or ""


def is_reasoned(answer: Any) -> bool:
    """Whether an answer holds reasoning: in a field of its message, or between marks in its text."""
    if not isinstance(answer, dict):
        return False
    content = answer.get("content")
    return any(answer.get(name) for name in REASONING) or (isinstance(content, str) and "</think" in content)


def answers(
    messages: Sequence[Fields],
    losses: Losses,
    tools: list[dict[str, Any]] | None = None,
    made: Callable[[Fields], bool] = lambda message: True,
) -> tuple[list[Call], list[Any]]:
    """(a call for each assistant's message, what no call holds of the others). A message that was not `made` by a model
    (a demonstration, say) is context only. Each call follows the one before."""  # fmt: skip
    calls: list[Call] = []
    before: list[dict[str, Any]] = []
    loose: list[Any] = []
    for message in messages:
        said = chat_message(message)
        if said["role"] == "assistant" and made(message):
            losses.history(len(before))
            calls.append(
                Call(
                    place=f"{losses.place} {message.path}",
                    key=f"{len(calls)}",
                    parent=calls[-1].key if calls else None,
                    prompt=Chat(messages=list(before), tools=tools),
                    answer=said,
                    reasoned=is_reasoned(said),
                    extra=message.rest(),
                )
            )
        elif rest := message.rest():
            loose.append(rest)
        before.append(said)
    return calls, loose


def count_lost_calls(draft: Draft, info: Fields, losses: Losses) -> None:
    """Note as a gap what `model_stats.api_calls` counts beyond the calls that are in the log."""
    stats = info.fields("model_stats")
    asked = stats.whole("api_calls") if stats else None
    if asked is not None and asked > len(draft.calls):
        losses.gap(
            "lost_calls", f"{asked} calls were made, {len(draft.calls)} are in the log", asked - len(draft.calls)
        )


def each_of(record: Record, name: str, shared: Sequence[str]) -> Iterator[Record]:
    """Of a record with a list `name`, one for each `item` of it, with the `shared` fields beside; the first one has the
    `rest` too. So a broken item costs no other. `at` is where it stood."""
    items = record.value.get(name) if isinstance(record.value, dict) else None
    if not isinstance(items, list) or not items:
        yield record
        return
    common = {field: record.value.get(field) for field in shared}
    rest = {field: value for field, value in record.value.items() if field != name and field not in shared}
    for number, item in enumerate(items):
        beside = {} if number else {"rest": rest}
        yield Record(record.place, {"item": item, "at": f"{name}[{number}]", **common, **beside})


def gathered(
    files: Iterable[Path], is_part: Callable[[Any], bool], group_of: Callable[[Path], Path] = lambda file: file
) -> Iterator[Record | Issue]:
    """The records of files; those that only make sense together (`is_part`) as one record for each file, or group of
    files that follow one another: its value is the list of its records."""
    group: Path | None = None
    parts: list[Record] = []
    length = 0  # bytes of all parts, unpacked; those of a group that is too large are read and not kept
    for file in files:
        if parts and group_of(file) != group:
            yield Record(str(group), parts, len(parts))
        if group_of(file) != group:
            group, parts, length = group_of(file), [], 0
        for record in json_records([file]):
            if not isinstance(record, Record) or not is_part(record.value):
                yield record
            elif is_too_deep(Draft(episode_id="", extra={"record": record.value})):
                yield Issue(record.place, f"is nested in more than {MAX_DEPTH} levels")
            elif length <= MAX_RECORD:
                parts.append(record)
                length += record.length
                if length > MAX_RECORD:
                    yield Issue(str(file), f"a conversation of more than {MAX_RECORD} bytes, the limit for one record")
                    parts = []
    if parts:
        yield Record(str(group), parts, len(parts))
