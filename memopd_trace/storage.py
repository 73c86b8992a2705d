"""Traces on disk or in a store: one Parquet or Arrow IPC file, or a folder of parts with a manifest written last.

Reading streams record batches, so memory does not grow with the trace; writing goes to a temporary name that
is synced and renamed, so a file under its final name is whole. A folder without `manifest.json` is incomplete.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import pyarrow as pa

from memopd_trace import limits
from memopd_trace.arrowfile import file_schema, iter_file
from memopd_trace.batching import WaitingRows
from memopd_trace.conform import Misfit, conform_batch
from memopd_trace.errors import InputError, UsageError, first_line
from memopd_trace.invocation import Episode, Invocation, group_episodes, invocations_from_batch
from memopd_trace.metadata import TraceMetadata, parse_metadata
from memopd_trace.parts import SUFFIXES, Part
from memopd_trace.places import PathLike, Place, atomic_file, is_node, must_be_file, place, sync_folder
from memopd_trace.schema import arrow_schema

MANIFEST = "manifest.json"


class TraceReader:
    """A trace opened for reading: its metadata, and its rows as batches, invocations or episodes.

    Raises:
        InputError: on opening: `E-NO-INPUT`, `E-UNREADABLE`, `E-INCOMPLETE`, or a fault of the metadata; while
            iterating: `E-UNREADABLE` for a damaged file, `E-SCHEMA` for a column that does not fit.
    """

    def __init__(self, path: PathLike | Place) -> None:
        self.path = place(path)
        self.files = trace_files(self.path)
        self.metadata: TraceMetadata = parse_metadata(self.schema(0).metadata, where=str(self.files[0]))

    def schema(self, index: int) -> pa.Schema:
        """The Arrow schema of file `index`, as stored."""
        return file_schema(self.files[index])

    def iter_raw(self, index: int, rows: int | None = None) -> Iterator[pa.RecordBatch]:
        """The record batches of file `index` as stored, at most `rows` rows each (see `iter_file`)."""
        return iter_file(self.files[index], rows)

    def iter_batches(self, rows: int | None = None) -> Iterator[pa.RecordBatch]:
        """Batches of all files, conformed to the schema."""
        for index, file in enumerate(self.files):
            for batch in self.iter_raw(index, rows):
                conformed, misfits = conform_batch(batch)
                if misfits:
                    raise InputError(f"{file}: {describe(misfits[0])}", code="E-SCHEMA")
                yield conformed

    def iter_invocations(self, columns: Collection[str] | None = None) -> Iterator[Invocation]:
        """Rows in file order, with all columns or (as views) those named: see `invocations_from_batch`."""
        for batch in self.iter_batches():
            yield from invocations_from_batch(batch, columns)

    def iter_episodes(self, columns: Collection[str] | None = None) -> Iterator[Episode]:
        """Runs of rows with one `episode_id`; one episode is in memory at a time. `columns` as `iter_invocations`."""
        return group_episodes(self.iter_invocations(columns))


class TraceWriter:
    """Write invocations to a Parquet file, an Arrow IPC file, or a folder of Parquet parts.

    The format follows the path's suffix (`.parquet`, `.arrow`, `.ipc`, `.feather`; a path without one is a
    folder). Rows must come episode by episode, indices 0, 1, 2…; missing state digests are computed. Used as a
    context manager: leaving it by an exception leaves nothing under the final name. A new folder is made at once,
    so that a second writer of it is refused before it has anything to lose; a second writer of one new file is
    refused when it closes, and its file kept under the name that the error tells.

    Raises:
        UsageError: an unknown suffix, rows out of order, an existing target (unless `overwrite`), a target that is
            no file (or no folder), or a writer that is closed or has failed.
    """

    def __init__(
        self,
        path: PathLike | Place,
        metadata: TraceMetadata,
        *,
        overwrite: bool = False,
        rows_per_part: int = 100_000,
    ) -> None:
        self.path, self.metadata = place(path), metadata
        if self.path.suffix and self.path.suffix not in SUFFIXES:
            raise UsageError(
                f"{self.path}: unknown suffix '{self.path.suffix}'",
                hint=f"use one of {', '.join(SUFFIXES)}, or no suffix for a folder",
            )
        self._folder = not self.path.suffix
        self._new = not overwrite
        self._check_target()
        self._closed, self._failure = False, ""
        self._schema = arrow_schema("trace", metadata.to_schema_metadata())
        self._rows_per_part = rows_per_part
        self._waiting = WaitingRows()
        self._last: tuple[str, int] | None = None
        self._done: set[str] = set()
        self._part: Part | None = None
        self._parts: list[dict[str, Any]] = []
        if self._folder and self._new:
            self._make_folder()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def write(self, invocation: Invocation) -> None:
        """Add one row."""
        self.must_be_open()
        self._check_order([invocation.key])
        if self._part_is_full() and invocation.invocation_index == 0:
            self._flush(last=True)
        if not self._waiting.take(invocation):
            self._flush()
            self._waiting.take(invocation)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a conformed batch (`batch_from_invocations`, `TraceReader.iter_batches`) as they are, without
        making them invocations."""
        self.must_be_open()
        keys = list(zip(*(batch.column(n).to_pylist() for n in ("episode_id", "invocation_index")), strict=True))
        self._check_order(keys)
        if len(self._waiting):
            self._flush()
        start = 0
        for at, (_, index) in enumerate(keys):
            if index == 0 and self._part_is_full(at - start):
                self._flush(batch.slice(start, at - start), last=True)
                start = at
        self._flush(batch.slice(start))

    def write_episode(self, episode: Episode) -> None:
        """Add all rows of an episode."""
        for invocation in episode:
            self.write(invocation)

    def close(self) -> None:
        """Write what is buffered, sync, and put the file (or the manifest) in place. A second time does nothing.

        Raises:
            UsageError: an earlier write or close failed; the trace is not there.
            OSError: the disk is full or failed; what was written is removed and has to be written again.
        """
        if self._closed and not self._failure:
            return
        self.must_be_open()
        self._flush(last=True)
        if self._folder:
            self._remove_other_parts()
            write_manifest(self.path, self.metadata, self._parts)
        self._closed = True

    def must_be_open(self) -> None:
        """Raises:
        UsageError: the writer is closed, or an earlier write or close failed.
        """
        if self._failure:
            raise UsageError(
                f"{self.path}: writing failed before ({self._failure}); this trace is not there",
                hint="write it again with a new writer",
            )
        if self._closed:
            raise UsageError(f"{self.path}: the writer is closed", hint="write all rows before close()")

    def _check_target(self) -> None:
        if self._new and self.path.exists():
            raise UsageError(f"{self.path}: exists already", hint="remove it or write elsewhere")
        if is_node(self.path) or (self._folder and self.path.is_file()):
            what = "folder" if self._folder else "regular file"
            raise UsageError(f"{self.path}: is no {what}", hint="write elsewhere")
        if not self._folder:
            must_be_file(self.path)

    def _make_folder(self) -> None:
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            raise UsageError(f"{self.path}: exists already", hint="remove it or write elsewhere") from None

    def _abandon(self) -> None:
        """After an exception: no temporary file stays, nor the new folder if it is empty."""
        self._closed = True
        if self._part is not None:
            self._part.abort()
            self._part = None
        if self._folder and self._new:
            with suppress(OSError):
                self.path.rmdir()

    def _remove_manifest(self) -> None:
        """Before the first new part: a folder being overwritten is incomplete until it is whole again."""
        (self.path / MANIFEST).unlink(missing_ok=True)
        if self.path.is_dir():
            sync_folder(self.path)

    def _remove_other_parts(self) -> None:
        """What an earlier, longer trace left behind."""
        written = {part["name"] for part in self._parts}
        for path in self.path.glob("part-*"):
            if path.name not in written:
                path.unlink()

    def _check_order(self, keys: list[tuple[str, int]]) -> None:
        last, new = self._last, set[str]()
        for episode_id, index in keys:
            expected = 0 if last is None or last[0] != episode_id else last[1] + 1
            again = expected == 0 and (episode_id in self._done or episode_id in new)
            if index != expected or again:
                raise UsageError(
                    f"episode '{episode_id}': row with invocation_index {index}, expected {expected}"
                    + (" of an episode not written before" if episode_id in self._done | new else ""),
                    hint="write each episode's rows together, indices 0, 1, 2…",
                )
            new.add(episode_id)
            last = episode_id, index
        self._done |= new
        self._last = last

    def _flush(self, batch: pa.RecordBatch | None = None, *, last: bool = False) -> None:
        """Write `batch`, or the rows that wait."""
        try:
            self._flush_part(batch, last)
        except BaseException as error:  # the rows that the part held are gone with it
            self._part, self._failure = None, first_line(error)
            self._abandon()
            raise

    def _flush_part(self, batch: pa.RecordBatch | None, last: bool) -> None:
        rows = len(self._waiting) if batch is None else batch.num_rows
        if self._part is None and (rows or not self._parts):
            if self._folder and not self._parts:
                self._remove_manifest()
            name = self.path / f"part-{len(self._parts):05d}.parquet" if self._folder else self.path
            new = self._new and not self._folder
            self._part = Part(name, self._schema, SUFFIXES[name.suffix], new)
        if self._part is None:
            return
        if rows:
            self._part.write_batch(self._waiting.batch if batch is None else lambda: batch)
        if last:
            self._parts.append(self._part.close())
            self._part = None

    def _part_is_full(self, more: int = 0) -> bool:
        written = self._part.rows if self._part is not None else 0
        return self._folder and written + len(self._waiting) + more >= self._rows_per_part


def read(path: PathLike) -> TraceReader:
    """Open a trace (see `TraceReader`)."""
    return TraceReader(path)


def write(
    path: PathLike,
    metadata: TraceMetadata,
    invocations: Iterator[Invocation] | list[Invocation],
    *,
    overwrite: bool = False,
) -> None:
    """Write a whole trace (see `TraceWriter`)."""
    with TraceWriter(path, metadata, overwrite=overwrite) as writer:
        for invocation in invocations:
            writer.write(invocation)


def write_manifest(folder: Place, metadata: TraceMetadata, parts: list[dict[str, Any]]) -> None:
    """Put a trace folder's manifest in place: the folder is whole from then on. `parts`: entries of `Part.close`."""
    manifest = {
        "format": "memopd-trace",
        "spec_version": metadata.spec_version,
        "files": parts,
        "rows": sum(p["rows"] for p in parts),
        "episodes": sum(p["episodes"] for p in parts),
        "complete": True,
    }
    with atomic_file(folder / MANIFEST) as out:
        out.write(json.dumps(manifest, indent=1).encode())


@overload
def trace_files(path: Path) -> list[Path]: ...
@overload
def trace_files(path: Place) -> list[Place]: ...
def trace_files(path: Place) -> Sequence[Place]:
    """The files of a trace, in order: the file itself, or a folder's parts as its manifest lists them.

    Raises:
        InputError: `E-NO-INPUT` (nothing there), `E-UNREADABLE` (out of reach, or a device or FIFO), `E-INCOMPLETE`
            (a folder without a complete manifest, or a part that is missing).
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: no such file or folder", code="E-NO-INPUT") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{path}: cannot be read: {why}", code="E-UNREADABLE") from None
    if stat.S_ISREG(mode):
        return [path]
    if not stat.S_ISDIR(mode):
        raise InputError(f"{path}: not a regular file", code="E-UNREADABLE", hint="save the trace to a file first")
    manifest = read_manifest(path)
    files: list[Place] = [path / part["name"] for part in manifest["files"]]
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: listed in {MANIFEST}, but not there", code="E-INCOMPLETE")
    return files


def read_manifest(folder: Place) -> dict[str, Any]:
    """The manifest of a trace folder.

    Raises:
        InputError: `E-INCOMPLETE` when it is absent, damaged, or not marked complete.
    """
    try:
        if is_node(folder / MANIFEST):  # reading a FIFO would wait for ever
            raise ValueError("not a regular file")
        limits.check_manifest(folder / MANIFEST)
        manifest = json.loads((folder / MANIFEST).read_text())
        names = [part["name"] for part in manifest["files"]]
        plain = all(Path(n).name == n for n in names) and len(set(names)) == len(names)
        whole = manifest["complete"] is True and names and plain
    except FileNotFoundError:
        hint = "a folder is one trace with a manifest: its writer did not finish, write it again"
        if (folder / "run.json").is_file():
            hint = "this is a scores folder, and not finished: a trace is what was scored"
        elif any(folder.glob("journal-*.log")):
            hint = f"a recording: end it with Ctrl-C, or if it was killed: memopd-trace record --finish -o {folder}"
        elif any(folder.glob("*.parquet")):
            hint += f"; if its files are traces of their own, give {folder}/*.parquet"
        raise InputError(f"{folder}: no {MANIFEST}", code="E-INCOMPLETE", hint=hint) from None
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise InputError(f"{folder / MANIFEST}: not a manifest: {error}", code="E-INCOMPLETE") from None
    if not whole:
        raise InputError(f"{folder / MANIFEST}: not a complete list of parts", code="E-INCOMPLETE")
    return dict(manifest)


def describe(misfit: Misfit) -> str:
    """A misfit as one line."""
    if misfit.kind == "missing":
        return f"column '{misfit.column}': expected {misfit.expected}, got {misfit.actual}"
    where = f" in row {misfit.row} of a batch" if misfit.row is not None else ""
    return f"column '{misfit.column}': expected {misfit.expected}, got {misfit.actual}{where}"
