"""Server-sent events, cut out of a stream of bytes with every byte kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_EVENT = 64 * 2**20  # bytes; the first event of a call holds its prompt's ids
_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


@dataclass(frozen=True, slots=True)
class Event:
    """`raw` is the event as it came, blank line included; `data` what it carries, `None` for a comment or an event
    whose data is spread over several lines."""

    raw: bytes
    data: bytes | None

    def with_data(self, data: bytes) -> bytes:
        """The event's bytes with other data."""
        assert self.data is not None
        head, _, tail = self.raw.partition(self.data)
        return head + data + tail


class Splitter:
    """Cuts chunks of any size into events; what is not whole yet is kept (at most `MAX_EVENT` bytes)."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._seen = 0  # how far `_rest` was searched in vain

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that are whole now.

        Raises:
            ValueError: an event exceeds `MAX_EVENT`.
        """
        self._rest += chunk
        while match := _END.search(self._rest, max(0, self._seen - 3)):
            raw = bytes(self._rest[: match.end()])
            del self._rest[: match.end()]
            self._seen = 0
            yield Event(raw, _data(raw))
        self._seen = len(self._rest)
        if self._seen > MAX_EVENT:
            raise ValueError(f"an event of more than {MAX_EVENT} bytes")

    @property
    def rest(self) -> bytes:
        """What came behind the last whole event."""
        return bytes(self._rest)


def _data(raw: bytes) -> bytes | None:
    lines = [line for line in raw.splitlines() if line.startswith(b"data:")]
    if len(lines) != 1:
        return None
    return lines[0].removeprefix(b"data:").removeprefix(b" ") or None
