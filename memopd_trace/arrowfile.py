"""One Parquet or Arrow IPC file being read, wherever it lies: its schema and its record batches, checked.

Memory holds one batch, whatever the writer's row groups are like: Parquet is streamed, with batches of about
`BATCH_BYTES`. A record batch of an IPC file is decoded as a whole, and so is a single row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memopd_trace import limits
from memopd_trace.errors import InputError, first_line
from memopd_trace.headers import RowGroup
from memopd_trace.places import Place, open_arrow

BATCH_BYTES = 16 * 2**20  # of decoded values: 512 rows of 8k ids
MAX_ROWS = 2048  # in a batch, however small they are
READ_AHEAD = 2**20  # bytes of each column's chunk; without it Arrow takes whole chunks into memory


def file_schema(path: Place) -> pa.Schema:
    """The Arrow schema of one Parquet or Arrow IPC file, as stored.

    Raises:
        InputError: `E-UNREADABLE`.
    """
    with _damaged(path), _open(path) as source:
        schema = _parquet_schema(source) if isinstance(source, pq.ParquetFile) else source.schema
        limits.check_columns(path, schema)
        _read_names(schema)
        return schema


def _parquet_schema(source: pq.ParquetFile) -> pa.Schema:
    """With the footer's metadata: Arrow reads that of the `ARROW:schema` entry, where other writers put none."""
    schema = source.schema_arrow
    footer = {k: v for k, v in (source.metadata.metadata or {}).items() if k != b"ARROW:schema"}
    return schema.with_metadata({**(schema.metadata or {}), **footer})


def iter_file(path: Place, rows: int | None = None) -> Iterator[pa.RecordBatch]:
    """The record batches of one Parquet or Arrow IPC file as stored, at most `rows` rows each (`None`: as many as make
    about `BATCH_BYTES`).

    Raises:
        InputError: `E-UNREADABLE`, or `E-LIMIT` for what asks for more than `memopd_trace.limits` allows.
    """
    with _damaged(path), _open(path) as source:
        if isinstance(source, pq.ParquetFile):
            layout = limits.check_parquet(path, source)
            yield from _parquet_batches(source, rows or _batch_rows(layout))
        else:
            limits.check_ipc(path)
            yield from _ipc_batches(path, source, rows)


def iter_wanted(path: Place, wanted: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
    """([B] row numbers, batch) of the rows that `wanted` [rows of the file] marks; row groups without one are skipped.

    Raises:
        InputError: as `iter_file`.
    """
    with _damaged(path), _open(path) as source:
        if isinstance(source, pq.ParquetFile):
            layout = limits.check_parquet(path, source)
            first = 0
            for number, group in enumerate(layout):
                if wanted[first : first + group.rows].any():
                    yield from _only(wanted, first, _parquet_batches(source, _batch_rows(layout), [number]))
                first += group.rows
        else:
            limits.check_ipc(path)
            yield from _only(wanted, 0, _ipc_batches(path, source))


def iter_column(path: Place, name: str) -> Iterator[pa.Array]:
    """One column of a file, if it is there, batch by batch; raises as `iter_file`."""
    with _damaged(path), _open(path) as source:
        if isinstance(source, pq.ParquetFile):
            limits.check_parquet(path, source)
            for batch in source.iter_batches(batch_size=2**16, columns=[name]):
                batch.validate(full=True)
                yield from batch.columns
        else:
            limits.check_ipc(path)
            for batch in _ipc_batches(path, source):
                yield from (batch.column(n) for n, field in enumerate(batch.schema.names) if field == name)


def _only(
    wanted: NDArray[np.bool_], first: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
    for batch in batches:
        rows = first + np.flatnonzero(wanted[first : first + batch.num_rows])
        if len(rows):
            yield rows, batch.take(pa.array(rows - first))
        first += batch.num_rows


def _parquet_batches(source: pq.ParquetFile, rows: int, groups: list[int] | None = None) -> Iterator[pa.RecordBatch]:
    for batch in source.iter_batches(batch_size=rows, row_groups=groups):
        batch.validate(full=True)
        yield batch


def _ipc_batches(path: Place, source: Any, rows: int | None = None) -> Iterator[pa.RecordBatch]:
    for number in range(source.num_record_batches):
        batch = source.get_batch(number)
        limits.check_views(path, batch)
        batch.validate(full=True)  # offsets and indices are the writer's word; nothing reads them unchecked
        most = rows or max(1, min(MAX_ROWS, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, most):
            yield batch.slice(start, most)


def _batch_rows(groups: list[RowGroup]) -> int:
    """How many rows make a batch: what the widest row group allows (values count as 4 bytes where encoding hides their
    size), or so much more or less that the longest one falls into equal parts, without a few rows left over."""
    most, longest = MAX_ROWS, max((group.rows for group in groups), default=0)
    for group in groups:
        most = min(most, BATCH_BYTES * group.rows // max(group.size, 4 * group.values, 1))
    parts = max(1, round(longest / max(1, most)))
    return max(1, -(-longest // parts))


def _open(path: Place) -> Any:
    with path.open("rb") as source:
        magic = bytes(source.read(6))
    if magic[:4] == b"PAR1":
        return pq.ParquetFile(open_arrow(path), page_checksum_verification=True, buffer_size=READ_AHEAD)
    if magic == b"ARROW1":
        return pa.ipc.open_file(open_arrow(path))
    raise InputError(
        f"{path}: neither Parquet nor an Arrow IPC file (it begins with {magic!r})",
        code="E-UNREADABLE",
        hint="a trace is Parquet or Arrow IPC; other logs have to be converted first",
    )


def _read_names(fields: Any) -> None:
    """Decode every field's name, nested ones too, and its time zone, and look for a type that pyarrow cannot show
    (intervals of days): all of this would come up on access only, and must come up here."""
    for field in fields:
        _ = field.name, getattr(field.type, "tz", None)
        try:
            pa.nulls(0, field.type)
        except KeyError:
            raise pa.ArrowNotImplementedError(f"field '{field.name}' has a type that pyarrow does not know") from None
        _read_names(field.type.field(i) for i in range(field.type.num_fields))


@contextmanager
def _damaged(path: Place) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise InputError(f"{path}: does not fit into memory: {first_line(error)}", code="E-LIMIT") from None
    except (pa.ArrowException, OSError, EOFError, UnicodeError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {first_line(error)}", code="E-UNREADABLE") from None
