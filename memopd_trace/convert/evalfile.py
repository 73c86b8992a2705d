"""Samples out of Inspect's `.eval` files, which are zips, without trust: no member is unpacked beyond the limit for one
record, and members that overlap (as in a bomb) are refused.

A sample is one member, or a folder of pieces: its shell, and lists of its events, messages, requests and attachments.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from memopd_trace.convert.losses import Issue
from memopd_trace.convert.records import MAX_RECORD, Record, parse
from memopd_trace.errors import first_line

MEMBER = re.compile(r"samples/([^/]+)\.json")
PIECE = re.compile(r"samples/([^/]+)/(?:(sample|metadata)|(messages|events|calls|attachments)/(\d{1,12}))\.json")
ZSTD = 93  # a packing that Python's own reader does not know
LOCAL = struct.Struct("<26xHH")  # of a member's own header: the lengths of its name and of its extra field


def is_eval(file: Path) -> bool:
    """Whether a file is a zip; one that cannot be read, which is told where it is, is none."""
    try:
        with file.open("rb") as stream:
            return stream.read(4) in (b"PK\x03\x04", b"PK\x05\x06")
    except OSError:
        return False


def eval_samples(file: Path, limit: int = MAX_RECORD) -> Iterator[Record | Issue]:
    """The samples of a zip, each with the log's header. A member of more than `limit` bytes is an issue."""
    try:
        with zipfile.ZipFile(file) as archive:
            if sum(m.compress_size for m in archive.infolist()) > file.stat().st_size:
                yield Issue(str(file), "members of the zip overlap")
                return
            yield from _samples(_Archive(archive, file, limit))
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, UnicodeError, struct.error) as error:
        yield Issue(str(file), f"no readable zip: {first_line(error)}")


def _samples(archive: _Archive) -> Iterator[Record | Issue]:
    header: dict[str, Any] = {}
    for name in ("header.json", "_journal/start.json"):
        if name in archive.members:
            found = archive.load(name)
            if isinstance(found, Issue):
                yield found
            elif isinstance(found.value, dict):
                header = {"version": found.value.get("version"), "eval": found.value.get("eval")}
                break
    pieces: dict[str, list[tuple[str, int, str]]] = {}
    number = 0
    for name in archive.members:
        if MEMBER.fullmatch(name):
            found, number = archive.load(name), number + 1
            yield found if isinstance(found, Issue) else _with(header, found.value, found.place)
        elif match := PIECE.fullmatch(name):
            sample, single, kind, start = match.groups()
            pieces.setdefault(sample, []).append((single or kind, int(start or 0), name))
    for sample, parts in pieces.items():
        number += 1
        yield _joined(archive, header, sample, sorted(parts))
    if not number:
        yield Issue(str(archive.file), "a zip without samples")


def _with(header: Any, sample: Any, place: str) -> Record:
    return Record(place, {**header, "item": sample})


def _joined(archive: _Archive, header: Any, sample: str, parts: list[tuple[str, int, str]]) -> Record | Issue:
    """A sample put together from its pieces, which stand in the order of their first items."""
    place = f"{archive.file}:samples/{sample}"
    if sum(archive.members[name].file_size for _, _, name in parts) > archive.limit:
        return Issue(place, f"a sample of more than {archive.limit} bytes, the limit for one record")
    shell: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {"events": [], "messages": [], "calls": [], "attachments": []}
    for kind, _, name in parts:
        found = archive.load(name)
        if isinstance(found, Issue):
            return found
        if kind in lists and isinstance(found.value, list):
            lists[kind] += found.value
        elif kind not in lists and isinstance(found.value, dict):
            shell |= found.value if kind == "sample" else {kind: found.value}
        else:
            return Issue(found.place, "a piece of a sample that is of another kind than its name")
    attachments = {str(i): text for i, text in enumerate(lists["attachments"])}
    pools = {"messages": lists["messages"], "calls": lists["calls"]}
    return _with(header, {**shell, "events": lists["events"], "events_data": pools, "attachments": attachments}, place)


class _Archive:
    """A zip whose members are read up to a limit."""

    def __init__(self, archive: zipfile.ZipFile, file: Path, limit: int) -> None:
        self.archive, self.file, self.limit = archive, file, limit
        self.members = {m.filename: m for m in archive.infolist()}

    def load(self, name: str) -> Record | Issue:
        """A member's JSON."""
        member, place = self.members[name], f"{self.file}:{name}"
        try:
            data = self._bytes(member)
        except Exception as error:  # what packings raise for damaged data is not one kind
            return Issue(place, f"cannot be unpacked: {first_line(error)}")
        if len(data) > self.limit:
            return Issue(place, f"a member of more than {self.limit} bytes, the limit for one record")
        return parse(data, place)

    def _bytes(self, member: zipfile.ZipInfo) -> bytes:
        """At most one byte more than the limit."""
        if member.compress_type != ZSTD:
            with self.archive.open(member) as stream:
                return stream.read(self.limit + 1)
        with self.file.open("rb") as raw:
            raw.seek(member.header_offset)
            raw.seek(sum(LOCAL.unpack(raw.read(LOCAL.size))), 1)
            packed = raw.read(member.compress_size)
        with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
            return bytes(stream.read(min(self.limit, member.file_size) + 1))
