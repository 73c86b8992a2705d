"""The append log of a recording: what is in it survives a kill.

Files `journal-000000.log`, … in the recording's folder. Each begins with the trace's metadata; a record is its length
and CRC-32 (two little-endian uint32) and its bytes. Records that wait are written together and synced once (group
commit): `append` returns when its record is on disk, and only then is a client given the end of its answer. A kill can
leave a record half written at the end; nobody was told that it is there, and it is cut off when the log is read. A
record that a disk has damaged costs none of those behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from memopd_trace.disk import sync_folder
from memopd_trace.errors import InputError, first_line

FRAME = struct.Struct("<II")
MAX_RECORD = 2**30
MAX_METADATA = 2**24
LENGTH, MARK = 4, b'{"type":"'  # how a record begins (see `records`): the length of its text, and that
ROLL_BYTES = 64 * 2**20  # a file that is longer gets a successor


class JournalFailed(Exception):
    """The disk does not take records any more."""


class Journal:
    """The log that is being written. `replayed` names the episodes of each earlier file (see `read_journal`); `failure`
    says why the disk takes no more, once it does not.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, metadata: bytes, replayed: dict[Path, set[str]], roll: int = ROLL_BYTES) -> None:
        self._folder, self._metadata, self._roll = folder, metadata, roll
        self._episodes = dict(replayed)  # whose records are in which file
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "journal")
        self.failure: str | None = None
        self._closing = False
        self.syncs = self.records = 0
        self._file = self._next_file()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def append(self, episode: str, data: bytes) -> asyncio.Future[None]:
        """Add a record; the future is done when it is on disk, and raises `JournalFailed` where it cannot be."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: None if done.cancelled() else done.exception())  # seen, if by nobody else
        if self.failure is not None:
            future.set_exception(JournalFailed(self.failure))
            return future
        self._episodes[self._path].add(episode)
        self._waiting.append((data, future))
        self._wake.set()
        return future

    def release(self, episodes: Iterable[str]) -> None:
        """These episodes are in the trace now: files that hold nothing else are removed."""
        gone = set(episodes)
        for path, held in list(self._episodes.items()):
            held -= gone
            if not held and path != self._path:
                path.unlink(missing_ok=True)
                del self._episodes[path]

    async def close(self) -> None:
        """Write what waits."""
        self._closing = True
        self._wake.set()
        await self._task
        self._thread.shutdown()
        self._file.close()

    @property
    def files(self) -> list[Path]:
        """The files of the log, oldest first."""
        return sorted(self._episodes)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting or not self._closing:
            await self._wake.wait()
            self._wake.clear()
            batch, self._waiting = self._waiting, []
            if not batch:
                continue
            try:
                if self.failure is None:
                    await loop.run_in_executor(self._thread, self._write, [data for data, _ in batch])
            except OSError as error:
                self.failure = first_line(error)
            for _, future in batch:
                if future.done():  # its call was given up meanwhile
                    continue
                if self.failure is None:
                    future.set_result(None)
                else:
                    future.set_exception(JournalFailed(self.failure))
            if self.failure is None and self._file.tell() > self._roll:
                self._roll_over()

    def _write(self, batch: list[bytes]) -> None:
        whole = self._file.tell()
        try:
            self._put(b"".join(_framed(data) for data in batch))
        except OSError:
            with contextlib.suppress(OSError):  # nobody will be told that these calls are there
                os.ftruncate(self._file.fileno(), whole)
            raise
        self.syncs += 1
        self.records += len(batch)

    def _put(self, data: bytes) -> None:
        """Write and sync, without a buffer that could bring a failed write back."""
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) or 0 :]
        os.fsync(self._file.fileno())

    def _roll_over(self) -> None:
        """Go on in a new file. What was appended and not yet written goes there, so its episodes belong to both."""
        try:
            waiting = set(self._episodes[self._path]) if self._waiting else set()
            old, self._file = self._file, self._next_file()
            old.close()
            self._episodes[self._path] |= waiting
        except OSError as error:
            self.failure = first_line(error)

    def _next_file(self) -> FileIO:
        last = max((int(p.stem.removeprefix("journal-")) for p in self._episodes), default=-1)
        path = self._folder / f"journal-{last + 1:06d}.log"
        file = path.open("xb", buffering=0)
        file.write(_framed(self._metadata))
        os.fsync(file.fileno())
        sync_folder(self._folder)
        self._path = path
        self._episodes[path] = set()
        return file


def journal_files(folder: Path) -> list[Path]:
    """The files of the log in a folder, oldest first."""
    return sorted(folder.glob("journal-[0-9][0-9][0-9][0-9][0-9][0-9].log"))


@dataclass(frozen=True, slots=True)
class Found:
    """What a file of the log holds: the metadata (`None` where not even that is whole) and the records; how many `torn`
    bytes were cut off its end, and how many in front of whole records are `damaged`, which stay in the file."""

    metadata: bytes | None
    records: list[bytes]
    torn: int = 0
    damaged: int = 0


def read_journal(path: Path) -> Found:
    """Read a file of the log. What is torn at its end is cut off. What is damaged in the middle is no torn write: calls
    that were promised are lost in it, but none behind it.

    Raises:
        InputError: the file cannot be read, or not be cut, or is none of a recording; it is then left as it was.
    """
    try:
        with path.open("r+b") as file:
            data = file.read()
            frames = list(_frames(data))
            if not frames and not _may_be_torn(data):
                raise InputError(f"{path}: is no journal of a recording", code="E-UNREADABLE")
            whole = frames[-1].stop if frames else 0
            if len(data) > whole:
                file.truncate(whole)
                os.fsync(file.fileno())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    damaged = whole - sum(FRAME.size + len(data[f]) for f in frames)
    first = frames.pop(0) if frames and frames[0].start == FRAME.size else None
    return Found(None if first is None else data[first], [data[f] for f in frames], len(data) - whole, damaged)


def _frames(data: bytes) -> Iterator[slice]:
    """Where the whole records stand. What is damaged is passed over, up to the next one."""
    at = 0
    while at < len(data):
        found = _frame(data, at)
        if found is None:
            mark = data.find(MARK, at + 1 + FRAME.size + LENGTH)
            if mark < 0:
                return
            at = mark - FRAME.size - LENGTH
        else:
            yield found
            at = found.stop


def _frame(data: bytes, at: int) -> slice | None:
    """The record whose frame begins at `at`."""
    start = at + FRAME.size
    if start > len(data):
        return None
    length, checksum = FRAME.unpack_from(data, at)
    if not 0 < length <= min(MAX_RECORD, len(data) - start):  # 0: a file system may leave zeros where a write was torn
        return None
    return slice(start, start + length) if zlib.crc32(data[start : start + length]) == checksum else None


def _may_be_torn(data: bytes) -> bool:
    """Whether this is what a kill leaves of a file of the log that had just been begun: its first bytes, or zeros."""
    if len(data) < FRAME.size or not data.strip(b"\0"):
        return True
    return FRAME.unpack_from(data)[0] <= MAX_METADATA and data[FRAME.size : FRAME.size + 1] in (b"", b"{", b"\0")


def _framed(data: bytes) -> bytes:
    return FRAME.pack(len(data), zlib.crc32(data)) + data
