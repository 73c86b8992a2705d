"""What a file says of its own sizes, read before anything is decoded: Parquet page headers and Arrow IPC messages.

Arrow allocates what these headers ask for. They are read here on their own, with bounds on every step, so that
`memopd_trace.limits` can refuse a few bytes that ask for gigabytes. Nothing of the data itself is looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

MAX_HEADER = 16 * 2**20  # bytes of one page header or message; Arrow's own bound
FIRST_READ = 512  # most headers are shorter
MAX_DEPTH = 32
DATA, DATA_V2, DICTIONARY = 5, 8, 7  # fields of a page header that say which kind it is

_INTEGERS = (4, 5, 6)
_BINARY, _LIST, _SET, _MAP, _STRUCT = 8, 9, 10, 11, 12
_FIXED = {3: 1, 7: 8, 13: 16}  # bytes of a number, a float, a UUID


class HeaderError(ValueError):
    """A header that cannot be read."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of one row group, as the footer states it: where it begins, its bytes on disk, and its values."""

    start: int
    stored: int
    values: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group as the footer states it: its rows, its bytes in memory, and its columns' chunks."""

    rows: int
    size: int
    chunks: tuple[Chunk, ...]

    @property
    def values(self) -> int:
        """Of all columns."""
        return sum(chunk.values for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Page:
    """One page: bytes of its header, bytes on disk and in memory, and its values (of a dictionary: entries)."""

    header: int
    stored: int
    size: int
    values: int
    dictionary: bool


@dataclass(frozen=True, slots=True)
class Message:
    """One record or dictionary batch: where it begins, its rows, its bytes on disk and once decompressed."""

    start: int
    rows: int
    stored: int
    size: int


def read_groups(source: IO[bytes], size: int) -> list[RowGroup]:
    """The row groups that the footer of a Parquet file of `size` bytes lists.

    Arrow's own accessors of these numbers end the process where one of them contradicts another.

    Raises:
        HeaderError: the footer is damaged.
    """
    source.seek(max(0, size - 8))
    length = int.from_bytes(source.read(4), "little")
    if length > size - 12:
        raise HeaderError("the footer is damaged")
    source.seek(size - 8 - length)
    try:
        return _Compact(source.read(length)).footer()
    except IndexError:
        raise HeaderError("the footer is damaged") from None


def read_pages(source: IO[bytes], chunk: Chunk) -> Iterator[Page]:
    """The pages of a column chunk.

    Raises:
        HeaderError: a header is damaged or a page leaves the chunk.
    """
    at, stop, seen = chunk.start, chunk.start + chunk.stored, 0
    while seen < chunk.values and at < stop:
        page = _page(source, at)
        yield page
        at += page.header + page.stored
        if at > stop:
            raise HeaderError("a page leaves its column chunk")
        seen += 0 if page.dictionary else page.values


def read_messages(source: IO[bytes], size: int) -> Iterator[Message]:
    """The batches that the footer of an Arrow IPC file of `size` bytes lists.

    Raises:
        HeaderError: the footer or a message is damaged.
    """
    try:
        source.seek(size - 10)
        length = struct.unpack("<i", source.read(4))[0]
        if not 0 < length <= size - 18:
            raise HeaderError("the footer is damaged")
        source.seek(size - 10 - length)
        footer = _Table.root(source.read(length))
        for at, head, body in [b for slot in (2, 3) for b in footer.blocks(slot)]:
            yield _message(source, at, head, body)
    except (struct.error, IndexError, OverflowError, OSError) as error:
        raise HeaderError(f"a message is damaged: {error}") from None


def _page(source: IO[bytes], at: int) -> Page:
    for size in (FIRST_READ, MAX_HEADER):
        source.seek(at)
        try:
            return _Compact(source.read(size)).page()
        except IndexError:  # it goes on behind what was read
            continue
    raise HeaderError(f"the page header at byte {at} is damaged")


class _Compact:
    """A reader of Thrift's compact protocol."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def footer(self) -> list[RowGroup]:
        """The row groups of a Parquet footer."""
        groups: list[RowGroup] = []
        for number, kind in self.fields():
            if number == 4 and kind == _LIST:
                groups += [self._group() for _ in self._structs()]
            else:
                self.skip(kind)
        return groups

    def _group(self) -> RowGroup:
        chunks: list[Chunk] = []
        found: dict[int, int] = {}
        for number, kind in self.fields():
            if number == 1 and kind == _LIST:
                chunks += [self._chunk() for _ in self._structs()]
            elif kind in _INTEGERS:
                found[number] = self.number()
            else:
                self.skip(kind)
        return RowGroup(found.get(3, 0), found.get(2, 0), tuple(chunks))

    def _chunk(self) -> Chunk:
        found: dict[int, int] = {}
        for number, kind in self.fields():
            if number == 3 and kind == _STRUCT:
                found |= self._numbers()
            else:
                self.skip(kind)
        values, stored, data, dictionary = (found.get(number, 0) for number in (5, 7, 9, 11))
        start = dictionary if 0 < dictionary < data else data
        if min(values, stored, start) < 0:
            raise HeaderError("a column chunk states a negative size")
        return Chunk(start, stored, values)

    def page(self) -> Page:
        """The page header that begins here."""
        found: dict[int, int] = {}
        values, dictionary = 0, False
        for number, kind in self.fields():
            if number in (DATA, DATA_V2, DICTIONARY) and kind == _STRUCT:
                values, dictionary = self._numbers().get(1, 0), number == DICTIONARY
            elif kind in _INTEGERS:
                found[number] = self.number()
            else:
                self.skip(kind)
        size, stored = found.get(2, 0), found.get(3, 0)
        if min(values, size, stored) < 0:
            raise HeaderError("a page states a negative size")
        if dictionary and values > size:  # the least value takes a byte
            raise HeaderError(f"a dictionary states {values} values in {size} bytes")
        return Page(self.at, stored, size, values, dictionary)

    def _numbers(self, depth: int = 0) -> dict[int, int]:
        """The integers of the struct that begins here. Written out, because most of a footer passes through here."""
        if depth > MAX_DEPTH:
            raise HeaderError("nested too deep")
        data, at, number = self.data, self.at, 0
        found: dict[int, int] = {}
        while head := data[at]:
            at, kind = at + 1, head & 15
            self.at = at
            number = number + (head >> 4) if head >> 4 else self.number()
            if kind in _INTEGERS:
                byte = data[self.at]
                if byte < 128:
                    self.at += 1
                    found[number] = byte >> 1 ^ -(byte & 1)
                else:
                    found[number] = self.number()
            else:
                self.skip(kind, depth)
            at = self.at
        self.at = at + 1
        return found

    def _structs(self) -> Iterator[None]:
        """Once for each struct of the list that begins here."""
        head = self.byte()
        if head & 15 != _STRUCT:
            raise HeaderError("a list of something else than structs")
        for _ in range(self.unsigned() if head >> 4 == 15 else head >> 4):
            yield

    def fields(self) -> Iterator[tuple[int, int]]:
        """(id, type) of each field; whoever asks for the next one has read or skipped the last."""
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.number()
            yield number, head & 15

    def byte(self) -> int:
        """One byte."""
        self.at += 1
        return self.data[self.at - 1]

    def unsigned(self) -> int:
        """A number of seven bits a byte."""
        value = shift = 0
        while (byte := self.data[self.at]) > 127:
            value |= (byte & 127) << shift
            self.at, shift = self.at + 1, shift + 7
            if shift > 63:
                raise HeaderError("a number without end")
        self.at += 1
        return value | byte << shift

    def number(self) -> int:
        """A signed number."""
        raw = self.unsigned()
        return raw >> 1 ^ -(raw & 1)

    def skip(self, kind: int, depth: int = 0) -> None:
        """Go past a value of a field."""
        if kind in _INTEGERS:
            self.unsigned()
        elif kind == _BINARY:
            size = self.unsigned()  # moves `at` itself
            self.at += size
        elif kind == _STRUCT:
            self._numbers(depth + 1)
        elif kind in (_LIST, _SET):
            head = self.byte()
            for _ in range(self.unsigned() if head >> 4 == 15 else head >> 4):
                self._skip_item(head & 15, depth + 1)
        elif kind == _MAP:
            self._skip_map(depth)
        elif kind not in (1, 2):
            self.at += _fixed(kind)

    def _skip_map(self, depth: int) -> None:
        if size := self.unsigned():
            kinds = self.byte()
            for _ in range(size):
                self._skip_item(kinds >> 4, depth + 1)
                self._skip_item(kinds & 15, depth + 1)

    def _skip_item(self, kind: int, depth: int) -> None:
        """A boolean takes a byte in a list and none in a struct."""
        if depth > MAX_DEPTH:
            raise HeaderError("nested too deep")
        if kind in (1, 2):
            self.byte()
        else:
            self.skip(kind, depth)


def _fixed(kind: int) -> int:
    if kind not in _FIXED:
        raise HeaderError(f"a field of type {kind}")
    return _FIXED[kind]


class _Table:
    """A table of a flatbuffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        vtable = at - self._int("i", at)
        size = self._int("H", vtable)
        self.slots = [self._int("H", vtable + i) for i in range(4, size, 2)]

    @classmethod
    def root(cls, data: bytes) -> _Table:
        """The table that a buffer begins with."""
        return cls(data, struct.unpack_from("<I", data)[0])

    def number(self, slot: int, kind: str) -> int:
        """A number, 0 where it is absent."""
        place = self._place(slot)
        return self._int(kind, place) if place else 0

    def table(self, slot: int) -> _Table | None:
        """A table, or `None` where it is absent."""
        place = self._place(slot)
        return _Table(self.data, place + self._int("I", place)) if place else None

    def pairs(self, slot: int) -> Iterator[tuple[int, int]]:
        """A vector of structs of two int64."""
        start, count = self._vector(slot)
        yield from struct.iter_unpack("<qq", self._bytes(start, 16 * count))

    def blocks(self, slot: int) -> Iterator[tuple[int, int, int]]:
        """A vector of (offset, bytes of metadata, bytes of body)."""
        start, count = self._vector(slot)
        yield from struct.iter_unpack("<qi4xq", self._bytes(start, 24 * count))

    def _vector(self, slot: int) -> tuple[int, int]:
        place = self._place(slot)
        if not place:
            return 0, 0
        start = place + self._int("I", place)
        return start + 4, self._int("I", start)

    def _place(self, slot: int) -> int:
        return self.at + self.slots[slot] if slot < len(self.slots) and self.slots[slot] else 0

    def _bytes(self, start: int, size: int) -> bytes:
        if start + size > len(self.data):
            raise HeaderError("a vector leaves its message")
        return self.data[start : start + size]

    def _int(self, kind: str, at: int) -> int:
        if at < 0:
            raise HeaderError("an offset leaves its message")
        return int(struct.unpack_from("<" + kind, self.data, at)[0])


def _message(source: IO[bytes], at: int, head: int, body: int) -> Message:
    if min(at, head, body) < 0 or head > MAX_HEADER:
        raise HeaderError("a block of the footer is damaged")
    source.seek(at)
    data = source.read(head)
    start = 8 if data[:4] == b"\xff\xff\xff\xff" else 4  # a mark before the length, since version 0.15
    message = _Table.root(data[start:])
    batch = message.table(2)
    if batch is not None and message.number(1, "B") == 2:  # a dictionary holds its values as a batch
        batch = batch.table(1)
    if batch is None:
        raise HeaderError("a message without a batch")
    size = body
    if batch.table(3) is not None:
        size = sum(_decompressed(source, at + head + offset, length) for offset, length in batch.pairs(2))
    return Message(at, batch.number(0, "q"), body, size)


def _decompressed(source: IO[bytes], at: int, length: int) -> int:
    """What a compressed buffer says it comes to; -1 there = it is stored as it is."""
    if length < 8:
        return max(length, 0)
    source.seek(at)
    size = int(struct.unpack("<q", source.read(8))[0])
    if size < -1:
        raise HeaderError("a buffer states a negative size")
    return length if size == -1 else size
