"""Claude Code's sessions: a graph of lines, of which those with one `message.id` are one call.

A call's prompt is what its `parentUuid` leads back to, up to a compaction; results of parallel tools, which hang beside
that path, belong to it too. Files of one session are read together: sub-agents' are spawned by the call that asked for
them, and what a resumed file tells again counts once. The system prompt, the tools and attachments are in no log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from memopd_trace.convert import blocks
from memopd_trace.convert.draft import Call, Chat, Draft, finish_reason
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.linewise import each_line, families
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses, NotACall
from memopd_trace.convert.records import Record

NAMES = (re.compile(rb'"sessionId"\s*:\s*"[^"\\]+"'), re.compile(rb'"uuid"\s*:\s*"[^"\\]+"'))
KINDS = ("user", "assistant", "system", "attachment", "progress")  # what stands on the path of a call
COMMON = ("cwd", "gitBranch", "userType", "entrypoint", "version")  # said on each line, kept where it changes


def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """The files of each session, together."""
    return families(files, *NAMES)


def read(value: list[Record], losses: Losses) -> Iterator[Draft]:
    """A session."""
    place = losses.place
    session = _Session(losses)
    each_line(value, losses, session.add)
    losses.place = place
    session.link()
    draft = Draft(episode_id=session.name or place, calls=session.calls(), extra=session.common)
    if draft.calls or losses.dropped_calls:
        yield draft


@dataclass(slots=True)
class _Line:
    """A line that has a place in the graph; `owner` is the call that it is a part of, `agent` whose side chain."""

    number: int
    place: str
    uuid: str
    above: str | None
    kind: str
    fields: Fields
    content: Any
    time: datetime | None
    agent: str | None
    owner: str | None = None
    cut: str | None = None
    parent: _Line | None = None


@dataclass(slots=True)
class _Before:
    """What stands in front of a call: its messages, the call before it, and how the context was rewritten since."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    last: str | None = None
    rewritten: str | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Session:
    """The lines of a session by their names, and what they say of one another."""

    losses: Losses
    name: str | None = None
    common: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, _Line] = field(default_factory=dict)
    groups: dict[str, list[_Line]] = field(default_factory=dict)
    results: dict[str, list[tuple[_Line, dict[str, Any]]]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  # tool use -> the call that asked for it
    agents: dict[str, str] = field(default_factory=dict)  # agent -> the tool use that started it
    tasks: dict[str, str] = field(default_factory=dict)  # a task's text -> the call that gave it
    before: dict[str, _Before] = field(default_factory=dict)

    def add(self, record: Fields) -> None:
        """The next line."""
        kind = record.text("type")
        if kind is None:
            raise BrokenRecord("a line without a 'type'")
        if kind not in KINDS and "uuid" not in record:
            raise NotACall(f"a line of type '{kind[:40]}'")
        line = self._line(record, kind)
        if line.uuid in self.lines:
            raise NotACall("a line told again")
        self.losses.version(record.text("version"))
        if kind == "assistant":
            self._answer(line, record)
        elif kind == "user":
            self._said(line, record)
        elif kind not in KINDS:  # it stands on the way to others all the same
            self.losses.skip(f"a line of type '{kind[:40]}'")
        self.lines[line.uuid] = line
        self.name = self.name or record.name("sessionId")
        for name in COMMON:
            if name in record and self.common.setdefault(name, record.peek(name)) == record.peek(name):
                record.any(name)

    def _line(self, record: Fields, kind: str) -> _Line:
        uuid, above = record.name("uuid"), record.name("parentUuid")
        message = record.fields("message") if kind in ("user", "assistant") else None
        content = message.any("content") if message else None
        if uuid is None or (kind in ("user", "assistant") and not isinstance(content, str | list)):
            raise BrokenRecord("no 'uuid'" if uuid is None else "message.content: expected text or a list of blocks")
        agent = record.name("agentId") or ("" if record.flag("isSidechain") else None)
        cut = record.text("subtype") if kind == "system" else None
        if cut == "compact_boundary":
            self.losses.gap("lost_calls", "the call that wrote a summary is not in the log")
            above = record.name("logicalParentUuid") or above
        return _Line(len(self.lines), record.losses.place, uuid, above, kind, record, content, record.time("timestamp"),
                     agent, cut=cut if cut in ("compact_boundary", "microcompact_boundary") else None)  # fmt: skip

    def _answer(self, line: _Line, record: Fields) -> None:
        message = record.fields("message")
        assert message is not None
        message.text("stop_reason"), blocks.counts(message.fields("usage"))
        if message.text("model") == "<synthetic>" or record.flag("isApiErrorMessage"):
            self.losses.skip("an error in the place of an answer")
            return
        line.owner = message.name("id") or line.uuid
        for block in _blocks(line.content, "tool_use", "id"):
            self.owners[block["id"]] = line.owner
            task = block["input"].get("prompt") if isinstance(block.get("input"), dict) else None
            if isinstance(task, str):
                self.tasks[task] = line.owner
        self.groups.setdefault(line.owner, []).append(line)

    def _said(self, line: _Line, record: Fields) -> None:
        result = record.peek("toolUseResult")
        agent = result.get("agentId") if isinstance(result, dict) else None
        for block in _blocks(line.content, "tool_result", "tool_use_id"):
            self.results.setdefault(block["tool_use_id"], []).append((line, block))
            if isinstance(agent, str):
                self.agents[agent] = block["tool_use_id"]

    def link(self) -> None:
        """Give each line its parent. Where a session names none it is a list; a parent that was never written is the
        line before, of the same agent."""
        graph = any(line.above is not None for line in self.lines.values())
        latest: dict[str | None, _Line] = {}
        for line in self.lines.values():
            line.parent = self.lines.get(line.above) if line.above is not None else None
            if line.parent is None and (line.above is not None or not graph):
                line.parent = latest.get(line.agent)
                if graph:
                    self.losses.degrade("a parent is not in the log: the line before is taken", line.place)
            latest[line.agent] = line

    def calls(self) -> list[Call]:
        """The calls in the order of the log, or of time where several files tell of them."""
        found = []
        for key, group in sorted(self.groups.items(), key=lambda item: item[1][0].number):
            self.losses.place = group[0].place
            before = self._before(group[0])
            self.losses.history(len(before.messages))
            self.before[key] = before
            call = self._call(key, group, before)
            if call is not None:
                found.append(call)
        return found

    def _call(self, key: str, group: list[_Line], before: _Before) -> Call | None:
        content = _content(group)
        answer = blocks.of_assistant(content)
        if blocks.is_hidden(content):
            self.losses.gap("opaque_content", "reasoning is encrypted, and missing in the output")
            if blocks.is_empty(answer):
                self.losses.lose("all of the answer is encrypted")
                return None
        messages = [m for line in group if (m := line.fields.fields("message")) is not None]
        word = next((w for m in reversed(messages) if (w := m.text("stop_reason"))), None)
        spawner = self._spawner(group[0], before) if before.last is None else None
        call = Call(
            place=group[0].place,
            key=key,
            model=messages[0].text("model"),
            prompt=Chat(messages=before.messages),
            answer=answer,
            reasoned=blocks.has_thought(content),
            finish_reason=finish_reason(word),
            counts=blocks.counts(messages[-1].fields("usage")),
            parent=before.last or spawner,
            relation="spawn" if spawner is not None else None,
            rewrite_kind=before.rewritten,
            agent_id=self._agent(group[0]),
            ended_at=group[-1].time,
            order=None if group[0].time is None else group[0].time.timestamp(),
        )
        if word is not None and call.finish_reason is None:
            call.extra["stop_reason"] = word
        for line in (group[0], group[-1]):
            call.extra |= _rest(line)
        left = blocks.leftovers(content)
        call.extra |= ({"blocks": left} if left else {}) | ({"lines": before.lines} if before.lines else {})
        return call

    def _before(self, line: _Line) -> _Before:
        """What stands in front of a call: what the call before it had, its answer, and what came since."""
        path, at = [], line.parent
        seen = {line.uuid}
        while at is not None and at.uuid not in seen:
            if at.cut == "compact_boundary" or (at.owner in self.before and at.owner != line.owner):
                break
            seen.add(at.uuid)
            path.append(at)
            at = at.parent
        else:
            at = None
        path.reverse()
        before = _Before()
        if at is not None and at.owner is not None:
            before.messages, before.last = [*self.before[at.owner].messages], at.owner
            self._give(at.owner, line, path, before)
        elif at is not None:
            before.last, before.rewritten = self._call_above(at), "summary"
            path = self._with_kept(at, path)
        for node in path:
            self._go_on(node, line, path, before)
        return before

    def _go_on(self, node: _Line, line: _Line, path: list[_Line], before: _Before) -> None:
        """Add one line of the path to what stands in front of a call."""
        if node.owner is not None and node.owner != line.owner:
            self._give(node.owner, line, path, before)
        elif node.cut == "microcompact_boundary":
            _clear(node, before)
        elif node.kind == "user" and (_flag(node, "isCompactSummary") or not _flag(node, "isVisibleInTranscriptOnly")):
            content = node.content
            if isinstance(content, list):
                content = [b for b in content if not _is_answered(b, before.answered)]
            if content:
                before.messages += blocks.to_messages("user", content)
                before.lines += [rest] if (rest := _rest(node)) else []

    def _give(self, owner: str, line: _Line, path: list[_Line], before: _Before) -> None:
        """Add an answer whole, and the results of its tools that were there before `line`: those on the path, else the
        latest."""
        if owner in before.answered:
            return
        before.answered.add(owner)
        content = _content([part for part in self.groups[owner] if part.number < line.number])
        before.messages.append(blocks.of_assistant(content))
        names = {id(node) for node in path}
        given = []
        for use in _blocks(content, "tool_use", "id"):
            found = [(at, block) for at, block in self.results.get(use["id"], ()) if at.number < line.number]
            if found:
                given.append(next((f for f in found if id(f[0]) in names), found[-1]))
                before.answered.add(f"result {use['id']}")
        for at, block in sorted(given, key=lambda item: item[0].number):
            before.messages += blocks.to_messages("user", [block])
            before.lines += [rest] if (rest := _rest(at)) else []

    def _with_kept(self, cut: _Line, path: list[_Line]) -> list[_Line]:
        """The path behind a compaction with the lines that it kept, behind the one that they are anchored at."""
        told = cut.fields.peek("compactMetadata")
        kept = told.get("preservedMessages") if isinstance(told, dict) else None
        names = kept.get("uuids") if isinstance(kept, dict) else None
        if not isinstance(kept, dict) or not isinstance(names, list):
            if isinstance(told, dict) and told.get("preservedSegment"):
                self.losses.degrade("lines that a compaction kept are not told one by one, and left out", cut.place)
            return path
        lines = [self.lines[name] for name in names if isinstance(name, str) and name in self.lines]
        at = next((i + 1 for i, node in enumerate(path) if node.uuid == kept.get("anchorUuid")), 0)
        new = {id(node) for node in path}
        return [*path[:at], *(node for node in lines if id(node) not in new), *path[at:]]

    def _call_above(self, line: _Line) -> str | None:
        """The call that a line leads back to."""
        seen: set[str] = set()
        at: _Line | None = line
        while at is not None and at.uuid not in seen:
            if at.owner in self.before:
                return at.owner
            seen.add(at.uuid)
            at = at.parent
        return None

    def _spawner(self, line: _Line, before: _Before) -> str | None:
        """The call that started the side chain of a line."""
        if line.agent is None:
            return None
        use = self.agents.get(line.agent)
        if use is not None:
            return self.owners.get(use)
        asked = before.messages[0].get("content") if before.messages else None
        if isinstance(asked, list) and len(asked) == 1 and isinstance(asked[0], dict):
            asked = asked[0].get("text")
        return self.tasks.get(asked) if isinstance(asked, str) else None

    def _agent(self, line: _Line) -> str | None:
        """The name of a side chain, which older logs do not name: that of its first line then."""
        seen: set[str] = set()
        at = line
        while line.agent == "" and at.parent is not None and at.parent.agent == "" and at.uuid not in seen:
            seen.add(at.uuid)
            at = at.parent
        return at.uuid if line.agent == "" else line.agent


def _blocks(content: Any, kind: str, name: str) -> list[dict[str, Any]]:
    """The blocks of a kind that have a name."""
    blocks_of = content if isinstance(content, list) else ()
    return [b for b in blocks_of if isinstance(b, dict) and b.get("type") == kind and isinstance(b.get(name), str)]


def _content(group: list[_Line]) -> list[Any]:
    """All blocks of an answer, which is told line by line."""
    found: list[Any] = []
    for line in group:
        found += line.content if isinstance(line.content, list) else [{"type": "text", "text": line.content}]
    return found


def _is_answered(block: Any, answered: set[str]) -> bool:
    return bool(_blocks([block], "tool_result", "tool_use_id")) and f"result {block['tool_use_id']}" in answered


def _flag(line: _Line, name: str) -> bool:
    return line.fields.any(name) is True


def _clear(cut: _Line, before: _Before) -> None:
    """Leave out the results of tools that a compaction cleared; what stands in their place is not told."""
    told = cut.fields.peek("microcompactMetadata")
    names = told.get("compactedToolIds") if isinstance(told, dict) else None
    if isinstance(names, list):
        before.messages = [
            {**m, "content": ""} if m["role"] == "tool" and m.get("tool_call_id") in names else m
            for m in before.messages
        ]
        before.rewritten = "elide"


def _rest(line: _Line) -> dict[str, Any]:
    """What a line holds beside its message; the lines of one answer share their fields."""
    for name in ("isMeta", "slug", "isSidechain", "sessionId", "agentId"):
        line.fields.any(name)
    message = line.fields.fields("message")
    if message is not None:
        message.any("role"), message.any("type"), message.any("id")
    return line.fields.rest()


FORMAT = Format(
    name="claude-code",
    title="Claude Code: sessions, with their sub-agents",
    exactness="text",
    read=read,
    records=records,
    suffixes=(".jsonl",),
    unsaid=(
        "no_token_ids", "no_logprobs", "no_sampling", "no_policy_version", "no_reward", "no_end", "no_group",
        "lossy_text",
    ),
    note="Give the project's folder, so that sub-agents' and resumed files are found. The system prompt, the tools and "
    "what the client adds to a prompt are not in the log: prompts are shorter than what the model read.",
)  # fmt: skip
