"""One Parquet or Arrow IPC file of a trace being written.

Writer defaults (measured, see `benchmarks/storage.py`): zstd level 3, no dictionary encoding on id columns and
16 MiB pages, so that the repeated prompts of a growing history compress to little more than the new tokens.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from memopd_trace.disk import atomic_file, file_sha256
from memopd_trace.invocation import Invocation, batch_from_invocations
from memopd_trace.schema import TRACE_COLUMNS

Format = Literal["parquet", "ipc"]
SUFFIXES: dict[str, Format] = {".parquet": "parquet", ".arrow": "ipc", ".ipc": "ipc", ".feather": "ipc"}
PARQUET_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 3,
    "use_dictionary": [c.name for c in TRACE_COLUMNS if pa.types.is_dictionary(c.type)],
    "data_page_size": 16 * 2**20,
    "write_page_checksum": True,
}


class Part:
    """One file being written under a temporary name."""

    def __init__(self, path: Path, schema: pa.Schema, file_format: Format, new: bool) -> None:
        self.path, self.rows = path, 0
        self._episodes: set[str] = set()
        self._schema = schema
        self._context = atomic_file(path, new=new)
        self._sink = self._context.__enter__()
        if file_format == "parquet":
            self._writer: Any = pq.ParquetWriter(self._sink, schema, **PARQUET_OPTIONS)
        else:
            options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=3), unify_dictionaries=True)
            self._writer = pa.ipc.new_file(self._sink, schema, options=options)

    def write(self, invocations: list[Invocation]) -> None:
        """Add one batch (of Parquet: one row group); after an exception nothing of the file is left."""
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
            "sha256": file_sha256(self.path),
        }

    def abort(self) -> None:
        """Remove what was written."""
        if isinstance(self._writer, pq.ParquetWriter):
            self._writer.is_open = False  # or it would write a footer into the closed file when collected
        stop = KeyboardInterrupt()
        with suppress(KeyboardInterrupt):
            self._context.__exit__(type(stop), stop, None)
