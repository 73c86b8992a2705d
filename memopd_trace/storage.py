"""Traces on disk: one Parquet or Arrow IPC file, or a folder of parts with a manifest written last.

Reading streams record batches, so memory does not grow with the trace; writing goes to a temporary name that
is synced and renamed, so a file under its final name is whole. A folder without `manifest.json` is incomplete.

Writer defaults (measured, see `benchmarks/storage.py`): zstd level 3, no dictionary encoding on id columns and
16 MiB pages, so that the repeated prompts of a growing history compress to little more than the new tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memopd_trace.conform import Misfit, conform_batch
from memopd_trace.disk import atomic_file, file_sha256, sync_folder
from memopd_trace.errors import InputError, UsageError, first_line
from memopd_trace.invocation import (
    ITEM_COLUMNS,
    Episode,
    Invocation,
    batch_from_invocations,
    group_episodes,
    invocations_from_batch,
    item_counts,
)
from memopd_trace.metadata import TraceMetadata, parse_metadata
from memopd_trace.schema import TRACE_COLUMNS, arrow_schema

Format = Literal["parquet", "ipc"]
SUFFIXES: dict[str, Format] = {".parquet": "parquet", ".arrow": "ipc", ".ipc": "ipc", ".feather": "ipc"}
MANIFEST = "manifest.json"
TOKENS_PER_BATCH = 4 * 2**20  # 16 MiB of int32 ids: one data page
ITEMS_PER_BATCH = 64 * 2**20  # of any other list, map or text: 128 MiB of int16 expert ids
ROWS_PER_BATCH = 16384
READ_ROWS = 512
PARQUET_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 3,
    "use_dictionary": [c.name for c in TRACE_COLUMNS if pa.types.is_dictionary(c.type)],
    "data_page_size": 16 * 2**20,
    "write_page_checksum": True,
}


class TraceReader:
    """A trace opened for reading: its metadata, and its rows as batches, invocations or episodes.

    Raises:
        InputError: on opening: `E-NO-INPUT`, `E-UNREADABLE`, `E-INCOMPLETE`, or a fault of the metadata; while
            iterating: `E-UNREADABLE` for a damaged file, `E-SCHEMA` for a column that does not fit.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.files = trace_files(self.path)
        self.metadata: TraceMetadata = parse_metadata(self.schema(0).metadata, where=str(self.files[0]))

    def schema(self, index: int) -> pa.Schema:
        """The Arrow schema of file `index`, as stored."""
        with _damaged(self.files[index]), _open(self.files[index]) as source:
            schema = source.schema_arrow if isinstance(source, pq.ParquetFile) else source.schema
            _read_names(schema)
            return schema

    def iter_raw(self, index: int, rows: int = READ_ROWS) -> Iterator[pa.RecordBatch]:
        """The record batches of file `index` as stored, at most `rows` rows each."""
        with _damaged(self.files[index]), _open(self.files[index]) as source:
            if isinstance(source, pq.ParquetFile):
                for batch in source.iter_batches(batch_size=rows):
                    batch.validate(full=True)
                    yield batch
                return
            for number in range(source.num_record_batches):
                batch = source.get_batch(number)
                batch.validate(full=True)  # offsets and indices are the writer's word; nothing reads them unchecked
                for start in range(0, batch.num_rows, rows):
                    yield batch.slice(start, rows)

    def iter_batches(self, rows: int = READ_ROWS) -> Iterator[pa.RecordBatch]:
        """Batches of all files, conformed to the schema."""
        for index, file in enumerate(self.files):
            for batch in self.iter_raw(index, rows):
                conformed, misfits = conform_batch(batch)
                if misfits:
                    raise InputError(f"{file}: {describe(misfits[0])}", code="E-SCHEMA")
                yield conformed

    def iter_invocations(self) -> Iterator[Invocation]:
        """Rows in file order."""
        for batch in self.iter_batches():
            yield from invocations_from_batch(batch)

    def iter_episodes(self) -> Iterator[Episode]:
        """Runs of rows with one `episode_id`; one episode is in memory at a time."""
        return group_episodes(self.iter_invocations())


class TraceWriter:
    """Write invocations to a Parquet file, an Arrow IPC file, or a folder of Parquet parts.

    The format follows the path's suffix (`.parquet`, `.arrow`, `.ipc`, `.feather`; a path without one is a
    folder). Rows must come episode by episode, indices 0, 1, 2…; missing state digests are computed. Used as a
    context manager: leaving it by an exception leaves nothing under the final name.

    Raises:
        UsageError: an unknown suffix, rows out of order, or an existing target (unless `overwrite`).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: TraceMetadata,
        *,
        overwrite: bool = False,
        rows_per_part: int = 100_000,
    ) -> None:
        self.path, self.metadata = Path(path), metadata
        if self.path.suffix and self.path.suffix not in SUFFIXES:
            raise UsageError(
                f"{self.path}: unknown suffix '{self.path.suffix}'",
                hint=f"use one of {', '.join(SUFFIXES)}, or no suffix for a folder",
            )
        if not overwrite and self.path.exists():
            raise UsageError(f"{self.path}: exists already", hint="remove it or write elsewhere")
        self._folder = not self.path.suffix
        self._schema = arrow_schema("trace", metadata.to_schema_metadata())
        self._rows_per_part = rows_per_part
        self._buffer: list[Invocation] = []
        self._tokens = 0
        self._items = np.zeros(len(ITEM_COLUMNS), np.int64)
        self._last: Invocation | None = None
        self._done: set[str] = set()
        self._part: _Part | None = None
        self._parts: list[dict[str, Any]] = []

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._part is not None:
            self._part.abort()

    def write(self, invocation: Invocation) -> None:
        """Add one row."""
        self._check_order(invocation)
        tokens = len(invocation.prompt_ids) + len(invocation.output_ids)
        items = item_counts(invocation)
        if self._part_is_full() and invocation.invocation_index == 0:
            self._flush(last=True)
        elif len(self._buffer) >= ROWS_PER_BATCH or self._would_overflow(tokens, items):
            self._flush()
        self._buffer.append(invocation)
        self._tokens += tokens
        self._items += items

    def write_episode(self, episode: Episode) -> None:
        """Add all rows of an episode."""
        for invocation in episode:
            self.write(invocation)

    def close(self) -> None:
        """Write what is buffered, sync, and put the file (or the manifest) in place."""
        self._flush(last=True)
        if self._folder:
            self._remove_other_parts()
            manifest = {
                "format": "memopd-trace",
                "spec_version": self.metadata.spec_version,
                "files": self._parts,
                "rows": sum(p["rows"] for p in self._parts),
                "episodes": sum(p["episodes"] for p in self._parts),
                "complete": True,
            }
            with atomic_file(self.path / MANIFEST) as out:
                out.write(json.dumps(manifest, indent=1).encode())

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

    def _check_order(self, new: Invocation) -> None:
        last = self._last
        expected = 0 if last is None or last.episode_id != new.episode_id else last.invocation_index + 1
        if new.invocation_index != expected or (expected == 0 and new.episode_id in self._done):
            raise UsageError(
                f"episode '{new.episode_id}': row with invocation_index {new.invocation_index}, expected {expected}"
                + (" of an episode not written before" if new.episode_id in self._done else ""),
                hint="write each episode's rows together, indices 0, 1, 2…",
            )
        self._done.add(new.episode_id)
        self._last = new

    def _flush(self, last: bool = False) -> None:
        if self._part is None and (self._buffer or not self._parts):
            if self._folder and not self._parts:
                self._remove_manifest()
            name = self.path / f"part-{len(self._parts):05d}.parquet" if self._folder else self.path
            self._part = _Part(name, self._schema, SUFFIXES[name.suffix])
        if self._part is None:
            return
        if self._buffer:
            self._part.write(self._buffer)
        self._buffer, self._tokens = [], 0
        self._items[:] = 0
        if last:
            self._parts.append(self._part.close())
            self._part = None

    def _would_overflow(self, tokens: int, items: NDArray[np.int64]) -> bool:
        return self._tokens + tokens > TOKENS_PER_BATCH or bool((self._items + items).max() > ITEMS_PER_BATCH)

    def _part_is_full(self) -> bool:
        written = self._part.rows if self._part is not None else 0
        return self._folder and written + len(self._buffer) >= self._rows_per_part


class _Part:
    """One file being written under a temporary name."""

    def __init__(self, path: Path, schema: pa.Schema, file_format: Format) -> None:
        self.path, self.rows = path, 0
        self._episodes: set[str] = set()
        self._schema = schema
        self._context = atomic_file(path)
        self._sink = self._context.__enter__()
        if file_format == "parquet":
            self._writer: Any = pq.ParquetWriter(self._sink, schema, **PARQUET_OPTIONS)
        else:
            options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=3), unify_dictionaries=True)
            self._writer = pa.ipc.new_file(self._sink, schema, options=options)

    def write(self, invocations: list[Invocation]) -> None:
        try:
            batch = batch_from_invocations(invocations)
            table = pa.Table.from_batches([batch]).cast(self._schema)
            if isinstance(self._writer, pq.ParquetWriter):
                self._writer.write_table(table, row_group_size=len(invocations))
            else:
                self._writer.write_table(table)
        except BaseException:
            self.abort()
            raise
        self.rows += len(invocations)
        self._episodes.update(i.episode_id for i in invocations)

    def close(self) -> dict[str, Any]:
        try:
            self._writer.close()
        except BaseException as error:
            self._context.__exit__(type(error), error, None)
            raise
        self._context.__exit__(None, None, None)
        return {
            "name": self.path.name,
            "rows": self.rows,
            "episodes": len(self._episodes),
            "sha256": file_sha256(self.path),
        }

    def abort(self) -> None:
        if isinstance(self._writer, pq.ParquetWriter):
            self._writer.is_open = False  # or it would write a footer into the closed file when collected
        stop = KeyboardInterrupt()
        with suppress(KeyboardInterrupt):
            self._context.__exit__(type(stop), stop, None)


def read(path: str | os.PathLike[str]) -> TraceReader:
    """Open a trace (see `TraceReader`)."""
    return TraceReader(path)


def write(
    path: str | os.PathLike[str],
    metadata: TraceMetadata,
    invocations: Iterator[Invocation] | list[Invocation],
    *,
    overwrite: bool = False,
) -> None:
    """Write a whole trace (see `TraceWriter`)."""
    with TraceWriter(path, metadata, overwrite=overwrite) as writer:
        for invocation in invocations:
            writer.write(invocation)


def trace_files(path: Path) -> list[Path]:
    """The files of a trace, in order: the file itself, or a folder's parts as its manifest lists them.

    Raises:
        InputError: `E-NO-INPUT` (nothing there), `E-INCOMPLETE` (a folder without a complete manifest, or a part
            that is missing).
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder", code="E-NO-INPUT")
    if path.is_file():
        return [path]
    manifest = read_manifest(path)
    files = [path / part["name"] for part in manifest["files"]]
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: listed in {MANIFEST}, but not there", code="E-INCOMPLETE")
    return files


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a trace folder.

    Raises:
        InputError: `E-INCOMPLETE` when it is absent, damaged, or not marked complete.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        names = [part["name"] for part in manifest["files"]]
        whole = manifest["complete"] is True and names and all(Path(n).name == n for n in names)
    except FileNotFoundError:
        raise InputError(
            f"{folder}: no {MANIFEST}", code="E-INCOMPLETE", hint="the writer did not finish; write it again"
        ) from None
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


def _open(path: Path) -> Any:
    with path.open("rb") as source:
        magic = source.read(6)
    if magic[:4] == b"PAR1":
        return pq.ParquetFile(path, page_checksum_verification=True)
    if magic == b"ARROW1":
        return pa.ipc.open_file(pa.OSFile(str(path)))
    raise InputError(
        f"{path}: neither Parquet nor an Arrow IPC file (it begins with {magic!r})",
        code="E-UNREADABLE",
        hint="logs of other tools are brought in by a converter",
    )


def _read_names(fields: Any) -> None:
    """Decode every field's name, nested ones too: Arrow does so only on access, and damage must show here."""
    for field in fields:
        _ = field.name
        _read_names(field.type.field(i) for i in range(field.type.num_fields))


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {first_line(error)}", code="E-UNREADABLE") from None
