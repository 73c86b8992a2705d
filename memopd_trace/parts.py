"""One Parquet or Arrow IPC file being written: a part of a trace, or a views file.

Writer defaults (measured, see `benchmarks/storage.py`): zstd level 3, no dictionary encoding on id columns and
16 MiB pages, so that the repeated prompts of a growing history compress to little more than the new tokens.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from memopd_trace.places import Place, atomic_file
from memopd_trace.schema import TRACE_COLUMNS

Format = Literal["parquet", "ipc"]
SUFFIXES: dict[str, Format] = {".parquet": "parquet", ".arrow": "ipc", ".ipc": "ipc", ".feather": "ipc"}
PARQUET_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 3,
    "data_page_size": 16 * 2**20,
    "write_page_checksum": True,
}


class _Hashed(io.RawIOBase):
    """A file being written, and the hash of what went into it: nothing has to be read again for the manifest."""

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink, self.sha256 = sink, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._sink.write(data)

    def tell(self) -> int:
        return self._sink.tell()

    def flush(self) -> None:
        if not self._sink.closed:
            self._sink.flush()


class Part:
    """One file being written under a temporary name."""

    def __init__(self, path: Place, schema: pa.Schema, file_format: Format, new: bool) -> None:
        self.path, self.rows = path, 0
        self._episodes: set[str] = set()
        self._schema = schema
        known = {c.name: c.values or () for c in TRACE_COLUMNS}
        self._words = {f.name: list(known.get(f.name, ())) for f in schema if pa.types.is_dictionary(f.type)}
        self._context = atomic_file(path, new=new)
        self._sink = _Hashed(self._context.__enter__())
        if file_format == "parquet":
            words = list(self._words)
            self._writer: Any = pq.ParquetWriter(self._sink, schema, use_dictionary=words, **PARQUET_OPTIONS)
        else:
            zstd = pa.Codec("zstd", compression_level=3)
            options = pa.ipc.IpcWriteOptions(compression=zstd, emit_dictionary_deltas=True)
            self._writer = pa.ipc.new_file(self._sink, schema, options=options)

    def write_batch(self, make: Callable[[], pa.RecordBatch]) -> None:
        """Add one batch (of Parquet: one row group); after an exception, in making it too, nothing of the file is
        left."""
        try:
            table = pa.Table.from_batches([make()]).cast(self._schema)
            if isinstance(self._writer, pq.ParquetWriter):
                self._writer.write_table(table, row_group_size=table.num_rows)
            else:
                self._writer.write_table(self._same_words(table))
        except BaseException:
            self.abort()
            raise
        self.rows += table.num_rows
        if "episode_id" in table.schema.names:
            self._episodes.update(table.column("episode_id").unique().to_pylist())

    def _same_words(self, table: pa.Table) -> pa.Table:
        """An IPC file has one dictionary a column, to which a later batch may only add."""
        for name, words in self._words.items():
            values = table.column(name).cast(pa.string())
            words += [w for w in values.unique().to_pylist() if w is not None and w not in words]
            dictionary = pa.array(words, pa.string())
            chunks = [pa.DictionaryArray.from_arrays(pc.index_in(c, dictionary), dictionary) for c in values.chunks]
            place = table.schema.get_field_index(name)
            table = table.set_column(
                place, table.schema.field(place), pa.chunked_array(chunks, table.schema.field(place).type)
            )
        return table

    def close(self) -> dict[str, Any]:
        """Sync the file and put it in place; returns its entry in a manifest."""
        try:
            self._writer.close()
        except BaseException:
            self.abort()
            raise
        self._context.__exit__(None, None, None)
        return {
            "name": self.path.name,
            "rows": self.rows,
            "episodes": len(self._episodes),
            "sha256": self._sink.sha256.hexdigest(),
        }

    def abort(self) -> None:
        """Remove what was written."""
        if isinstance(self._writer, pq.ParquetWriter):
            self._writer.is_open = False  # or it would write a footer into the closed file when collected
        stop = KeyboardInterrupt()
        with suppress(KeyboardInterrupt):
            self._context.__exit__(type(stop), stop, None)
