"""The append log of a recording: what is in it survives a kill.

Files `journal-000000.log`, … in the recording's folder. Each begins with the trace's metadata; a record is its length
and CRC-32 (two little-endian uint32) and its bytes. Records that wait are written together and synced once (group
commit): `append` returns when its record is on disk, and only then is a client given the end of its answer. A kill can
leave a record half written at the end; nobody was told that it is there, and it is cut off when the log is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import IO

from memopd_trace.disk import sync_folder
from memopd_trace.errors import InputError, first_line

FRAME = struct.Struct("<II")
MAX_RECORD = 2**30
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


def read_journal(path: Path) -> tuple[bytes | None, list[bytes], int]:
    """(the metadata, `None` where not even that was written; the records; how many torn bytes were cut off the end).

    Raises:
        InputError: the file cannot be read, or not be cut.
    """
    try:
        with path.open("r+b") as file:
            whole, found = 0, []
            for record in _records(file):
                whole += FRAME.size + len(record)
                found.append(record)
            torn = os.fstat(file.fileno()).st_size - whole
            if torn:
                file.truncate(whole)
                os.fsync(file.fileno())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    return (found[0], found[1:], torn) if found else (None, [], torn)


def _records(file: IO[bytes]) -> Iterator[bytes]:
    while len(frame := file.read(FRAME.size)) == FRAME.size:
        length, checksum = FRAME.unpack(frame)
        if not 0 < length <= MAX_RECORD:  # 0: a file system may leave zeros where a write was torn
            return
        data = file.read(length)
        if len(data) < length or zlib.crc32(data) != checksum:
            return
        yield data


def _framed(data: bytes) -> bytes:
    return FRAME.pack(len(data), zlib.crc32(data)) + data
