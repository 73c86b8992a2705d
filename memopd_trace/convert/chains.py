"""Responses that follow on another by `previous_response_id`: the server keeps what came before, and so does a log that
holds the earlier calls. Their prompts are put together from these: all items up to the answer before, and the new ones.
The instructions are those of the request alone. Of a call whose predecessor is not in the log nothing is made up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from memopd_trace.convert.exchange import events
from memopd_trace.convert.losses import Issue
from memopd_trace.convert.records import Record, json_in, open_text
from memopd_trace.convert.responses import of_input
from memopd_trace.convert.sessions import EPISODE

LINK = "previous_response_id"
NAMED = re.compile(LINK.encode() + rb"\W{1,12}([\w-]{1,200})")
CHUNK, OVERLAP = 2**20, 256  # bytes that are searched at once, and how long a link may be
MAX_RESTORED = 2**20  # items in all prompts of one chain: they grow with its square; what comes behind keeps its gap
MAX_HELD = 2**28  # bytes of JSON of earlier calls; what comes behind them keeps its gap

Reader = Callable[[Iterable[Path]], Iterator[Record | Issue]]


@dataclass(slots=True)
class _Held:
    """Earlier calls: the first of the chain of each, the one before it, and the items that it added."""

    of: dict[str, tuple[str, str | None, list[Any]]] = field(default_factory=dict)
    size: int = 0
    depth: dict[str, int] = field(default_factory=dict)  # how many items go up to an answer
    restored: Counter[str] = field(default_factory=Counter)  # items put in front of the calls of a chain, by its first

    def restores(self, name: str) -> bool:
        """Whether there is room for one more prompt behind an answer."""
        first = self.of[name][0]
        self.restored[first] += self.depth[name]
        return self.restored[first] <= MAX_RESTORED

    def items(self, name: str | None) -> list[Any]:
        """All items up to an answer, itself included."""
        parts = []
        while name is not None:
            _, name, new = self.of[name]
            parts.append(new)
        return [item for part in reversed(parts) for item in part]

    def add(self, name: str, first: str, before: str | None, new: list[Any]) -> None:
        """Keep a call, as long as there is room."""
        if name not in self.of and self.size <= MAX_HELD:
            self.size += len(orjson.dumps(new, default=str, option=orjson.OPT_NON_STR_KEYS))
            self.of[name] = first, before, new
            self.depth[name] = len(new) + (0 if before is None else self.depth[before])


def linked(read: Reader) -> Reader:
    """A reader whose records of linked calls hold the whole prompt, and name their parent and their episode."""

    def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
        files = list(files)
        named = _named(files)
        held = _Held()
        for record in read(files):
            if named and isinstance(record, Record) and isinstance(record.value, dict):
                _link(record.value, named, held)
            yield record

    return records


def _named(files: Iterable[Path]) -> set[str]:
    """The answers on which others follow; the files are searched as text."""
    found: set[str] = set()
    for file in files:
        try:
            with open_text(file) as stream:
                tail = b""
                while chunk := stream.read(CHUNK):
                    found |= {match[1].decode() for match in NAMED.finditer(tail + chunk)}
                    tail = chunk[-OVERLAP:]
        except (OSError, EOFError, ValueError):  # reported where the file is read
            continue
    return found - {"null", "None"}


def _link(value: dict[str, Any], named: set[str], held: _Held) -> None:
    request, response = _object(value.get("request")), _object(value.get("response"))
    if request is None or response is None or not isinstance(response.get("output"), list):
        return
    before, name = request.get(LINK), response.get("id")
    new = of_input(request.get("input"))
    first = name
    if isinstance(before, str):
        if before not in held.of or not held.restores(before):
            return
        first = held.of[before][0]
        whole = {n: v for n, v in request.items() if n != LINK}
        value["request"], value["response"] = {**whole, "input": [*held.items(before), *new]}, response
        value.setdefault("parent_id", before)
    elif before is not None:
        return
    if isinstance(name, str) and name in named:
        held.add(name, str(first), before, [*new, *response["output"]])
    if isinstance(first, str) and (before is not None or name in named) and not _has_episode(value, request):
        value["episode_id"] = first


def _has_episode(*places: dict[str, Any]) -> bool:
    """Whether a record says by itself to which episode it belongs."""
    inner = [p["metadata"] for p in places if isinstance(p.get("metadata"), dict)]
    return any(place.get(name) is not None for place in (*places, *inner) for name in EPISODE)


def _object(value: Any) -> dict[str, Any] | None:
    """A body as an object: from JSON or a stream's events in a text, or one level further in."""
    if isinstance(value, str):
        value = json_in(value, events(value))
    if isinstance(value, list) and all(isinstance(v, dict) for v in value):
        value = next((v.get("response") for v in reversed(value) if isinstance(v.get("response"), dict)), None)
    if isinstance(value, dict) and isinstance(value.get("body"), dict):
        value = value["body"]
    return value if isinstance(value, dict) else None
