"""Records out of untrusted files: JSON Lines, one JSON document, or one JSON array of any size; plain, gzip or zstd.

A record that is damaged is an `Issue` with its place, and the rest goes on. Memory is bounded by one record
(`MAX_RECORD` bytes of JSON), whatever the file's size. A place is `file:12` (the line), `file[3]` (the array's item) or
the file alone.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from memopd_trace.convert.losses import Issue
from memopd_trace.disk import is_node
from memopd_trace.errors import InputError, first_line

MAX_RECORD = 128 * 2**20  # bytes of JSON; as Python objects it takes some six times that
CHUNK = 2**20
UNPACKED = 2**16  # bytes unpacked at once: as much may be lost in front of a damaged place
SUFFIXES = (".json", ".jsonl", ".ndjson")
LINES = (".jsonl", ".ndjson")
PACKED = {".gz": "gzip", ".zst": "zstd"}
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
BOMS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"))  # fmt: skip
# strings, also one that the buffer cuts off, and the brackets outside of them
MARKS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
READ_FAULTS = (OSError, pa.ArrowException, EOFError, UnicodeError, zlib.error)  # what a file that is damaged raises
HEX = rb"[0-9a-fA-F]{2}"
ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB]" + HEX + rb"\\u[dD][c-fC-F]" + HEX + rb"|(?P<lone>u[dD][89a-fA-F]" + HEX + rb")|.)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Record:
    """One object of a log and where it stands, or several that only make sense together: `size` of them. `length` is
    that of its JSON in bytes, where it was read from some."""

    place: str
    value: Any
    size: int = 1
    length: int = 0


def find_files(inputs: Sequence[str | os.PathLike[str]], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """The files that the inputs name, each once by whatever names and links: files as they are, of a folder all that
    end in one of `suffixes` (compressed ones too), sorted; a name that is not there may be a glob.

    Raises:
        InputError: `E-NO-INPUT`, an input names nothing.
    """
    found: dict[str, Path] = {}
    for given in inputs:
        name = os.fspath(given)
        path = Path(name)
        try:
            files = [path] if path.is_file() else _in_folder(path, suffixes) if path.is_dir() else _globbed(name)
        except ValueError:  # a zero byte in the name
            files = []
        if not files:
            raise InputError(f"{name}: {_why_none(path, suffixes)}", code="E-NO-INPUT")
        for file in files:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def _why_none(path: Path, suffixes: Sequence[str]) -> str:
    if path.is_dir():
        return f"no file in it ends in {', '.join(suffixes)}"
    if is_node(path):
        return "a pipe or a device; inputs are read twice, so write it to a file first"
    return "no such file or folder"


def _in_folder(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    names = sorted(Path(at) / name for at, _, names in os.walk(folder) for name in names)
    return [n for n in names if _plain(n).suffix in suffixes and n.is_file()]


def _globbed(name: str) -> list[Path]:
    return sorted(p for p in map(Path, glob.glob(name, recursive=True)) if p.is_file())  # noqa: PTH207 - any pattern


def _plain(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in PACKED else path


def json_records(files: Iterable[Path], limit: int = MAX_RECORD) -> Iterator[Record | Issue]:
    """The records of files, in order."""
    for file in files:
        try:
            with open_text(file) as stream:
                yield from _of_stream(stream, file, limit)
        except READ_FAULTS as error:
            yield Issue(str(file), f"cannot be read to its end: {first_line(error)}")


def json_files(files: Iterable[Path], limit: int = MAX_RECORD) -> Iterator[Record | Issue]:
    """Each file as one record, whose value is the list of its records: for logs of which no line can be read alone.
    What is broken in it is an issue, and the rest of the file goes on."""
    for file in files:
        found: list[Record] = []
        length = size_of(file)
        if length <= limit:
            length = 0  # of what it unpacks to, perhaps a thousand times as much
            for record in json_records([file], limit):
                if not isinstance(record, Record):
                    yield record
                    continue
                found.append(record)
                length += record.length
                if length > limit:
                    break
        if length > limit:
            yield Issue(str(file), _too_large("a file", limit))
        elif found:
            yield Record(str(file), found, len(found), length)


def size_of(file: Path) -> int:
    """Bytes of a file as it is packed; 0 for one that is gone, which is told where it is read."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def open_text(file: Path) -> io.BufferedReader:
    """A file as UTF-8 without a byte order mark, whatever its encoding and packing."""
    source = file.open("rb")
    head = source.read(4)
    source.seek(0)
    packing = next((name for magic, name in MAGIC.items() if head.startswith(magic)), None)
    raw: Any = source
    if packing is not None:
        raw = _Unpacked(
            gzip.GzipFile(fileobj=source) if packing == "gzip" else pa.CompressedInputStream(source, packing)
        )
    stream = io.BufferedReader(raw, UNPACKED if packing else CHUNK)
    head = stream.peek(4)[:4]
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
        return stream
    encoding = next((name for bom, name in BOMS if head.startswith(bom)), None) or _unmarked(head)
    return io.BufferedReader(_Recoded(stream, encoding), CHUNK) if encoding else stream


def _unmarked(head: bytes) -> str | None:
    """UTF-16 without a mark: a log begins with an ASCII character, of which one byte is 0."""
    if len(head) >= 2 and (head[0] == 0) != (head[1] == 0):
        return "utf-16-be" if head[0] == 0 else "utf-16-le"
    return None


class _Unpacked(io.RawIOBase):
    """A packed stream that gives what it has, so that all in front of a damaged or missing end is read."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._source.close()
        super().close()


class _Recoded(io.RawIOBase):
    """A stream in another encoding as UTF-8; what is no character becomes U+FFFD."""

    def __init__(self, source: io.BufferedReader, encoding: str) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._source.read1(CHUNK)
            self._ready = self._decoder.decode(data, final=not data).encode("utf-8", "replace")
            if not data:
                break
        part, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._source.close()
        super().close()


def _of_stream(stream: io.BufferedReader, file: Path, limit: int) -> Iterator[Record | Issue]:
    if _plain(file).suffix in LINES:
        yield from _of_lines(_lines(stream, limit), file, limit)
        return
    start = _first_byte(stream)
    if start == b"[":
        yield from _of_array(stream, file, limit)
    elif start:
        yield from _of_text(stream, file, limit)
    else:
        yield Issue(str(file), "the file is empty")


def _first_byte(stream: io.BufferedReader) -> bytes:
    """The first byte that is no white space, which stays to be read; nothing at the end."""
    while True:
        head = stream.peek(1)
        kept = head.lstrip()
        if kept or not head:
            stream.read(len(head) - len(kept))
            return kept[:1]
        stream.read(len(head))


def _of_text(stream: io.BufferedReader, file: Path, limit: int) -> Iterator[Record | Issue]:
    """Lines where the first or the second one is an object by itself, else one document."""
    first = stream.readline(limit + 1)
    record, more = parse(first, f"{file}:1"), b""
    if not isinstance(record, Record):
        more = stream.readline(limit + 1)
        second = parse(more, f"{file}:2")
        if not isinstance(second, Record) or not isinstance(second.value, dict):
            yield from _of_document(first + more, stream, file, limit)
            return
    yield record
    if more:
        yield second
    yield from _of_lines(_lines(stream, limit, 2 if more else 1), file, limit)


def _of_document(head: bytes, stream: io.BufferedReader, file: Path, limit: int) -> Iterator[Record | Issue]:
    data = head + stream.read(max(0, limit + 1 - len(head)))
    if len(data) > limit:
        yield Issue(str(file), _too_large("a JSON document", limit))
    else:
        yield parse(data, str(file))


def _lines(stream: io.BufferedReader, limit: int, read: int = 0) -> Iterator[tuple[int, bytes | None]]:
    """(line number from 1, the line), `None` for one that is too long, of which nothing is kept. `read` lines are read
    already."""
    number = read
    while line := stream.readline(limit + 1):
        number += 1
        if len(line) <= limit or line.endswith(b"\n"):
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(CHUNK)
        yield number, None


def _of_lines(lines: Iterator[tuple[int, bytes | None]], file: Path, limit: int) -> Iterator[Record | Issue]:
    for number, line in lines:
        if line is None:
            yield Issue(f"{file}:{number}", _too_large("a line", limit))
        elif line.strip():
            yield parse(line, f"{file}:{number}")


def _of_array(stream: io.BufferedReader, file: Path, limit: int) -> Iterator[Record | Issue]:
    splitter = _Splitter(stream, limit)
    for number, item in enumerate(splitter):
        place = f"{file}[{number}]"
        yield parse(item, place) if len(item) <= limit else Issue(place, _too_large("an item", limit))
    if splitter.fault:
        yield Issue(f"{file}[{splitter.count}]", splitter.fault)


class _Splitter:
    """Cuts an array into its items by counting brackets, with one item in memory at once. `fault` says why it ended
    before the file's end; `count` items were found."""

    def __init__(self, stream: io.BufferedReader, limit: int) -> None:
        self.fault, self.count = "", 0
        self._stream, self._limit = stream, limit
        self._data, self._at = b"", 0  # the buffer, and up to where it is scanned
        self._depth, self._start = 0, 0  # open brackets, and where the current item (or what is in front of it) begins

    def __iter__(self) -> Iterator[bytes]:
        while self._more():
            for mark in MARKS.finditer(self._data, self._at):
                if mark.end() == len(self._data) and self._data[mark.start()] == ord('"'):
                    self._at = mark.start()  # a string that may go on behind the buffer
                    break
                self._at = mark.end()
                item = self._step(self._data[mark.start()], mark.start())
                if item is not None:
                    yield item
                if self.fault or self._depth <= 0:
                    return
            else:
                self._at = len(self._data)

    def _more(self) -> bool:
        """Read on: as much again as is kept, so that a long item is copied a few times only."""
        self._data = self._data[self._start :]
        self._at, self._start = self._at - self._start, 0
        if len(self._data) > self._limit:
            self.fault = _too_large("an item", self._limit) + "; the file is read no further"
            return False
        chunk = self._stream.read(max(CHUNK, len(self._data)))
        if not chunk:
            self.fault = "the file ends inside the array"
        self._data += chunk
        return bool(chunk)

    def _step(self, byte: int, at: int) -> bytes | None:
        """One bracket; the item that it closes."""
        if byte == ord('"'):
            return None
        opens = byte in b"[{"
        self._depth += 1 if opens else -1
        if self._depth == (2 if opens else 0):
            if self._data[self._start : at].strip(b" \t\r\n,"):
                self.fault = "an item that is neither an object nor a list; the file is read no further"
            self._start = at
        elif opens and self._depth == 1:
            self._start = at + 1
        elif not opens and self._depth == 1:
            item, self._start = self._data[self._start : self._at], self._at
            self.count += 1
            return item
        return None


def parse(data: bytes, place: str) -> Record | Issue:
    """One JSON value. NaN, infinities and lone surrogates, which many programs write, are read (the last as U+FFFD)."""
    try:
        return Record(place, orjson.loads(data), length=len(data))
    except orjson.JSONDecodeError as error:
        reason = str(error)
    try:
        mended = ESCAPES.sub(lambda m: b"\\ufffd" if m["lone"] else m[0], data)
        return Record(place, json.loads(mended), length=len(data))
    except (ValueError, RecursionError):
        return Issue(place, _reason(data, reason))


def json_in(text: str, otherwise: Any = None) -> Any:
    """What a text holds as JSON; `otherwise` where it is none."""
    found = parse(text.encode("utf-8", "replace"), "")
    return found.value if isinstance(found, Record) else otherwise


def from_json(value: Any) -> Any:
    """A value that may be an object, a list or a text as JSON in a text; any other as it is."""
    return json_in(value, value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{", '"') else value


def _too_large(what: str, limit: int) -> str:
    return f"{what} of more than {limit} bytes, the limit for one record"


def _reason(data: bytes, reason: str) -> str:
    if b"\0" in data:
        return "holds zero bytes: not written to the end, or no text"
    if "UTF-8" in reason:
        return "is not UTF-8"
    if "depth" in reason:
        return "is nested too deeply"
    return f"is no JSON: {reason}" + ("" if data.endswith(b"\n") else "; cut off?")
