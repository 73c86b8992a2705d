"""Spans of OpenTelemetry as files hold them, for the formats whose calls are spans: `otel`, `openinference`.

    {"resourceSpans": [{"scopeSpans": [{"spans": […]}]}]}      OTLP's JSON, typed attributes
    {"name": …, "context": {…}, "attributes": {…}}             what SDKs print, and most exports
    {"gen_ai.operation.name": …}                               bare attributes

Attributes come as one flat object: nested ones get dotted names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memopd_trace.convert.draft import Call, Draft
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses
from memopd_trace.convert.records import Record, json_records

KINDS = ("stringValue", "boolValue", "doubleValue", "bytesValue")
MAX_FLAT = 64  # levels of attributes
INDEX = re.compile(r"\d{1,9}")


@dataclass(slots=True)
class Span:
    """A span: its flat attributes, its events (name, flat attributes), and what it says of itself."""

    record: Fields
    attributes: Fields
    events: list[tuple[str, Fields]] = field(default_factory=list)
    trace: str | None = None
    name: str | None = None

    def call(self, losses: Losses) -> Call:
        """A call with what every span has: its name, and when it was."""
        found = Call(place=losses.place, key=self.name)
        found.started_at, found.ended_at = (_moment(self.record, n) for n in ("start", "end"))
        found.order = found.started_at.timestamp() if found.started_at else None
        return found

    def draft(self, call: Call, conversation: str | None, losses: Losses) -> Draft:
        """The call as a piece of its conversation, else of its trace, else as an episode of its own."""
        episode = conversation or self.trace
        if episode is None:
            losses.gap("no_episode")
        call.extra |= self.attributes.rest()
        if self.record is not self.attributes:
            call.extra |= {k: v for k, v in self.record.rest().items() if k not in ("attributes", "events")}
        told = [{"name": name, **left} for name, event in self.events if (left := event.rest())]
        if told:
            call.extra["events"] = told
        return Draft(episode_id=episode or call.key or losses.place, calls=[call], whole=episode is None)


def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """Spans: each of an OTLP document is a record."""
    for record in json_records(files):
        if isinstance(record, Record) and isinstance(record.value, dict) and "resourceSpans" in record.value:
            yield from _of_otlp(record)
        else:
            yield record


def _of_otlp(record: Record) -> Iterator[Record | Issue]:
    found = 0
    for resource in _objects(record.value.get("resourceSpans")):
        about = resource.get("resource")
        for scope in _objects(resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans")):
            for span in _objects(scope.get("spans")):
                found += 1
                yield Record(record.place, {**span, "resource": about, "scope": scope.get("scope")})
    if not found:
        yield Issue(record.place, "an OTLP document without spans")


def _objects(value: Any) -> list[dict[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def span_of(value: Any, losses: Losses, lists: bool = False) -> Span:
    """A record as a span; with `lists`, lists of objects in its attributes are numbered too.

    Raises:
        BrokenRecord: it is none.
    """
    record = Fields(value, losses)
    given = record.peek("attributes")
    if given is None and any("." in name for name in record):
        return Span(record, record)
    if not isinstance(given, dict | list):
        raise BrokenRecord("no span: no 'attributes'")
    attributes = Fields(flat(typed(given), lists), losses, "attributes")
    context = record.fields("context") or record.fields("spanContext") or record
    trace = context.name("traceId") or context.name("trace_id")
    name = context.name("spanId") or context.name("span_id")
    events = [
        (event.text("name") or "", Fields(flat(typed(event.peek("attributes") or {}), lists), losses, event.path))
        for event in record.each("events")
    ]
    return Span(record, attributes, events, trace, name)


def typed(value: Any) -> dict[str, Any]:
    """Attributes as an object, OTLP's typed ones as plain values.

    Raises:
        BrokenRecord: they are neither.
    """
    if isinstance(value, dict):
        return value
    if not isinstance(value, list) or not all(isinstance(v, dict) and isinstance(v.get("key"), str) for v in value):
        raise BrokenRecord("attributes: expected an object, or a list of keys with values")
    return {item["key"]: _plain(item.get("value"), MAX_FLAT) for item in value}


def _plain(value: Any, depth: int) -> Any:
    if not isinstance(value, dict) or not depth:
        return value
    for kind in KINDS:
        if kind in value:
            return value[kind]
    if "intValue" in value:
        number = value["intValue"]
        return int(number) if isinstance(number, str) and re.fullmatch(r"-?\d{1,19}", number) else number
    if "arrayValue" in value:
        return [_plain(v, depth - 1) for v in _objects((value["arrayValue"] or {}).get("values"))] \
            if isinstance(value["arrayValue"], dict) else None  # fmt: skip
    if "kvlistValue" in value and isinstance(value["kvlistValue"], dict):
        pairs = _objects(value["kvlistValue"].get("values"))
        return {str(p.get("key")): _plain(p.get("value"), depth - 1) for p in pairs}
    return None


def flat(value: dict[str, Any], lists: bool, prefix: str = "", depth: int = MAX_FLAT) -> dict[str, Any]:
    """Nested attributes under dotted names, with `lists` lists of objects by their numbers."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if lists and isinstance(item, list) and item and all(isinstance(v, dict) for v in item):
            item = {str(i): v for i, v in enumerate(item)}
        if isinstance(item, dict) and item and depth:
            found |= flat(item, lists, f"{name}.", depth - 1)
        else:
            found[name] = item
    return found


def numbered(attributes: Fields, prefix: str) -> list[Fields]:
    """What stands under `prefix.0.`, `prefix.1.`, …, in the order of the numbers; all of it counts as asked for."""
    found: dict[int, dict[str, Any]] = {}
    for name in list(attributes):
        number, _, rest = name[len(prefix) + 1 :].partition(".")
        if name.startswith(f"{prefix}.") and rest and INDEX.fullmatch(number):
            found.setdefault(int(number), {})[rest] = attributes.any(name)
    return [Fields(found[i], attributes.losses, f"{prefix}.{i}") for i in sorted(found)]


def _moment(record: Fields, which: str) -> Any:
    for name in (f"{which}TimeUnixNano", f"{which}_time", f"{which}Time"):
        value = record.peek(name)
        if isinstance(value, str) and value.isdecimal() and len(value) < 25:
            record.any(name)
            return Fields({name: int(value)}, record.losses).time(name)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return record.time(name)
    return None
