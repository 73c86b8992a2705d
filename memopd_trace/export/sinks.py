"""Where exported rows go: a Parquet file in bounded memory. Folders and text are of the formats that have them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memopd_trace.export.format import Field, Sample

KEY = b"memopd_trace_export"
ITEMS_PER_BATCH = 4 * 2**20  # values of all lists
ROWS_PER_BATCH = 4096
OPTIONS: dict[str, Any] = {"compression": "zstd", "compression_level": 3}


class ParquetSink:
    """Rows to a Parquet file: `make` turns a sample into its columns' values (arrays of one or two dimensions, plain
    values, or `None`)."""

    def __init__(self, out: IO[bytes], fields: Sequence[Field], make: Callable[[Sample], dict[str, Any]]) -> None:
        self._fields, self._make = fields, make
        self._schema = pa.schema([pa.field(f.name, f.type) for f in fields])
        self._writer = pq.ParquetWriter(out, self._schema, **OPTIONS)
        self._rows: list[dict[str, Any]] = []
        self._items = 0

    def add(self, sample: Sample) -> None:
        """Take one row."""
        row = self._make(sample)
        items = sum(v.size for v in row.values() if isinstance(v, np.ndarray)) + 4 * len(sample.invocation)
        if self._rows and (self._items + items > ITEMS_PER_BATCH or len(self._rows) >= ROWS_PER_BATCH):
            self._flush()
        self._rows.append(row)
        self._items += items

    def close(self, notes: dict[str, Any]) -> None:
        """Write what is left, and `notes` into the file's metadata."""
        self._flush()
        self._writer.add_key_value_metadata({KEY.decode(): json.dumps(notes)})
        self._writer.close()

    def abort(self) -> None:
        """Write nothing more."""
        self._writer.is_open = False  # or it would write a footer into the closed file when collected

    def _flush(self) -> None:
        if self._rows:
            arrays = [column([row[f.name] for row in self._rows], f.type) for f in self._fields]
            self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._rows, self._items = [], 0


def column(cells: list[Any], kind: pa.DataType) -> pa.Array:
    """Cells as an Arrow array; two-dimensional ones become lists of equally long lists, without a loop over tokens."""
    deep = pa.types.is_list(kind) and pa.types.is_list(kind.value_type)
    if not deep or all(c is None for c in cells):
        return pa.array(cells, kind)
    present: list[NDArray[Any]] = [c for c in cells if c is not None]
    width = present[0].shape[1]
    flat = pa.array(np.concatenate(present).reshape(-1), kind.value_type.value_type)
    inner = pa.ListArray.from_arrays(pa.array(np.arange(len(flat) // width + 1) * width, pa.int32()), flat)
    lengths = [0 if c is None else len(c) for c in cells]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    mask = pa.array([c is None for c in cells]) if len(present) < len(cells) else None
    return pa.ListArray.from_arrays(offsets, inner, mask=mask).cast(kind)
