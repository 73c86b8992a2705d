"""A recording on disk: the journal that takes every call at once, and the trace's parts that ended episodes go to.

A folder holds `journal-*.log` while it is being recorded, and a `part-*.parquet` for every so many rows of ended
episodes (or so many seconds); each part is a whole trace of its own. `manifest.json` is written when the recording
ends: the folder is then one complete trace, and the journal is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from memopd_trace.disk import exclusive, remove_leftovers
from memopd_trace.errors import InputError, UsageError, first_line
from memopd_trace.metadata import KEY, TraceMetadata, parse_metadata
from memopd_trace.pieces import Pieces
from memopd_trace.places import file_sha256
from memopd_trace.record.call import CallRecord
from memopd_trace.record.proxy.episodes import Episodes
from memopd_trace.record.proxy.journal import Journal, JournalFailed, journal_files, read_journal
from memopd_trace.record.proxy.options import Options
from memopd_trace.record.proxy.records import EndRecord, Record, from_bytes, to_bytes
from memopd_trace.storage import MANIFEST, write, write_manifest

IDLE = "episodes that were ended because nothing was heard of them"
Notice = Callable[[str], None]


@dataclass(slots=True)
class Begun:
    """A recording's folder as it was found: what was replayed of it, and whose records are in which file."""

    folder: Path
    metadata: TraceMetadata
    episodes: Episodes
    notice: Notice = lambda message: None
    in_parts: set[str] = field(default_factory=set)
    files: dict[Path, set[str]] = field(default_factory=dict)
    replayed: int = 0


@contextlib.contextmanager
def begin(
    folder: Path, make_metadata: Callable[[], TraceMetadata], pieces: Pieces | None, notice: Notice
) -> Iterator[Begun]:
    """Hold a folder for one recording and take up what an earlier, killed one left in it. `make_metadata` is asked for
    only where there is none: a recording keeps the metadata with which it was begun.

    Raises:
        UsageError: another process records into it, it holds a complete trace or something else, or it was begun with
            another tokenizer.
        InputError: it cannot be read.
    """
    if (folder / MANIFEST).exists():
        raise UsageError(f"{folder}: holds a complete trace", hint="record into another folder")
    found = journal_files(folder)
    if folder.exists() and not found and any(p.name != ".lock" for p in folder.iterdir()):
        raise UsageError(f"{folder}: is not empty, and no recording", hint="record into another folder")
    with exclusive(folder, "recording into"):
        remove_leftovers(folder)
        logs = {path: read_journal(path) for path in journal_files(folder)}
        stored = next((log.metadata for log in logs.values() if log.metadata is not None), None)
        metadata = make_metadata() if stored is None else parse_metadata({KEY: stored}, where=str(folder))
        _check_tokenizer(folder, metadata, pieces)
        begun = Begun(folder, metadata, Episodes(metadata, pieces), notice)
        begun.in_parts = _episodes_in_parts(folder)
        begun.episodes.close_known(begun.in_parts)
        for path, log in logs.items():
            if log.torn:
                notice(f"{path.name}: {log.torn} bytes of a call that was not finished were cut off")
            if log.damaged:
                kept = path.with_name(f"{path.name}.damaged")
                shutil.copyfile(path, kept)
                notice(f"{path.name}: {log.damaged} bytes are damaged, and calls in them are lost; {kept.name} has all")
            begun.files[path] = _replay(path, log.records, begun)
        if begun.replayed:
            notice(f"{folder}: an earlier run is gone on with; records taken up from its journal: {begun.replayed}")
        yield begun


def _check_tokenizer(folder: Path, metadata: TraceMetadata, pieces: Pieces | None) -> None:
    known = {m.tokenizer.fingerprint for m in metadata.models.values()}
    if pieces is not None and pieces.fingerprint not in known:
        raise UsageError(
            f"{folder}: was begun with another tokenizer, or none", hint="give the same, or another folder"
        )


def _episodes_in_parts(folder: Path) -> set[str]:
    found: set[str] = set()
    for part in sorted(folder.glob("part-*.parquet")):
        try:
            column = pq.read_table(part, columns=["episode_id"]).column(0)
        except (OSError, ValueError) as error:
            raise InputError(f"{part}: cannot be read: {error}", code="E-UNREADABLE") from None
        found.update(pc.unique(column).to_pylist())
    return found


def _replay(path: Path, records: list[bytes], begun: Begun) -> set[str]:
    """Apply a file's records; whose they are, of episodes that are not in the trace yet."""
    held: set[str] = set()
    for data in records:
        try:
            record = from_bytes(data)
        except ValueError as error:
            raise InputError(f"{path}: {error}", code="E-UNREADABLE") from None
        if record.episode in begun.in_parts:
            continue
        held.add(record.episode)
        begun.replayed += 1
        with contextlib.suppress(UsageError):
            begun.episodes.apply(record)
    return held


class Recording:
    """A recording that goes on. `skipped` counts calls that are not in it, by reason.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, begun: Begun, options: Options) -> None:
        self.folder, self.metadata, self.episodes = begun.folder, begun.metadata, begun.episodes
        self._options = options
        self.journal = Journal(begun.folder, begun.metadata.model_dump_json().encode(), begun.files)
        self.skipped: Counter[str] = Counter()
        self.calls = 0
        self._notice, self._told = begun.notice, set[str]()
        self.failure: str | None = None
        self._parts = len(list(self.folder.glob("part-*.parquet")))
        self._writing = asyncio.Lock()
        loop = asyncio.get_running_loop()
        self._timers = [loop.create_task(self._write_in_time()), loop.create_task(self._end_idle())]
        self._jobs: set[asyncio.Task[None]] = set()

    async def commit(self, record: Record) -> bool:
        """Take in a record; back when it is on disk. False where it is not part of the recording (a call of which no
        row could be made).

        Raises:
            UsageError: a reward or an end that does not fit.
            JournalFailed: the disk does not take it.
        """
        future = self._take(record)
        if future is None:
            return False
        try:
            await asyncio.shield(future)
        except JournalFailed as error:
            self.failure = str(error)
            raise
        return True

    def give_up(self, record: CallRecord) -> None:
        """Take in an attempt that its client gave up; nobody waits for it."""
        with contextlib.suppress(UsageError, JournalFailed):
            self._take(record)

    def skip(self, reason: str) -> None:
        """Count a call that is passed through and not recorded; the first of a kind is told."""
        self.skipped[reason] += 1
        self._tell("a call was not recorded", [reason])

    async def close(self) -> None:
        """End the recording: what is open is written as it is, and the manifest. After a failure the journal stays."""
        while self._timers:
            self._timers.pop().cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await self.journal.close()
        self.failure = self.failure or self.journal.failure
        if self.failure is None:  # else what is in memory is more than what was promised
            self.episodes.end_all()
            await self._write_part(last=True)
        if self.failure is None:
            await asyncio.to_thread(self._finish)

    def summary(self) -> dict[str, Any]:
        """What came of the calls, as JSON."""
        return {
            "calls": self.calls,
            "rows": self.episodes.rows,
            "episodes": self.episodes.counts(),
            "not_recorded": dict(self.skipped.most_common()),
            "outputs_refused": dict(self.episodes.refused.most_common()),
            "left_out_of_rows": dict(self.episodes.notes.most_common()),
        }

    def _take(self, record: Record) -> asyncio.Future[None] | None:
        failure = self.failure or self.journal.failure
        if failure is not None:
            raise JournalFailed(failure)
        changed = self.episodes.apply(record)
        self._tell("not all of a call was recorded", [*self.episodes.refused, *self.episodes.notes])
        if not changed:
            return None
        self.calls += isinstance(record, CallRecord)
        future = self.journal.append(record.episode, to_bytes(record))
        if sum(map(len, self.episodes.ended)) >= self._options.part_rows:
            self._start(self._write_part())
        return future

    def _tell(self, what: str, reasons: Iterable[str]) -> None:
        for reason in reasons:
            if reason not in self._told:
                self._told.add(reason)
                self._notice(f"{what}: {reason} (told once; the summary counts them)")

    def _start(self, work: Any) -> None:
        job = asyncio.get_running_loop().create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def _write_in_time(self) -> None:
        while True:
            await asyncio.sleep(self._options.part_seconds)
            await self._write_part()

    async def _end_idle(self) -> None:
        """End episodes of which nothing is heard any more, as by a request: the journal says that they have ended."""
        seconds = self._options.idle
        while seconds:
            await asyncio.sleep(min(seconds / 4, 60.0))
            for episode in self.episodes.idle(seconds):
                with contextlib.suppress(UsageError, JournalFailed):
                    self._take(EndRecord(episode=episode, end=None))  # without a pause, in which a call could begin
                    self.episodes.notes[IDLE] += 1
                    self._tell("an episode was ended", [f"nothing was heard of it for {seconds:g} s"])

    async def _write_part(self, last: bool = False) -> None:
        """Write the episodes that have ended as one part; with `last` also where none have and there is no part yet."""
        async with self._writing:
            ready, self.episodes.ended = self.episodes.ended, []
            if not ready and not (last and self._parts == 0):
                return
            path = self.folder / f"part-{self._parts:05d}.parquet"
            try:
                await asyncio.to_thread(write, path, self.metadata, [row for episode in ready for row in episode])
            except Exception as error:  # whatever it is, the calls are in the journal, which then has to stay
                what = error.strerror if isinstance(error, OSError) else first_line(error)
                self.failure = f"{path}: {what or error}"
                self.episodes.ended = ready + self.episodes.ended
                return
            self._parts += 1
            self.journal.release(episode.episode_id for episode in ready)

    def _finish(self) -> None:
        entries = []
        for path in sorted(self.folder.glob("part-*.parquet")):
            ids = pq.read_table(path, columns=["episode_id"]).column(0)
            entries.append(
                {
                    "name": path.name,
                    "rows": len(ids),
                    "episodes": len(pc.unique(ids)),
                    "sha256": file_sha256(path),
                }
            )
        write_manifest(self.folder, self.metadata, entries)
        for path in journal_files(self.folder):
            path.unlink()
