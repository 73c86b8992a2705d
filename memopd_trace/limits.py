"""What a reader takes on before it decodes anything: a few bytes must not ask for gigabytes or for hours.

The limits are far above what writers do, and grow with the file where data may be very regular. A file beyond one is
refused with `E-LIMIT`, from its own headers, at a cost of one small read a page. Single values that Arrow expands
behind these headers (a long string repeated by a dictionary, say) are bounded in `memopd_trace.conform`; for what is
left, the command line caps the memory of its process (`memory_cap`).
"""

from __future__ import annotations

import io
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memopd_trace.errors import InputError, first_line
from memopd_trace.headers import Chunk, HeaderError, Page, RowGroup, read_groups, read_messages, read_pages
from memopd_trace.places import Place

MAX_COLUMNS = 10_000  # of a file, fields of structs and items of lists counted one by one
MAX_DECODED = 2 * 2**30  # bytes: the largest page of each column of a row group together; a compressed batch
FREE_DECODED, DECODED_PER_BYTE = 2**26, 2**15  # and by its bytes on disk: zstd makes 2^15 of one at most
FREE_ROWS, ROWS_PER_BYTE = 2**16, 8  # rows of a row group or batch, by its bytes on disk
FREE_ITEMS, ITEMS_PER_BYTE = 2**25, 4096  # items of all lists of a row group, by its bytes on disk
FIXED = "FIXED_LEN_BYTE_ARRAY"
REMOTE_READ = 2**20
MAX_MANIFEST_BYTES = 16 * 2**20
MEMORY = 4 * 2**30  # bytes that the command line lets a check take


def check_parquet(path: Place, file: pq.ParquetFile) -> list[RowGroup]:
    """Compare what a Parquet file's footer and page headers ask for with the limits; returns its row groups.

    Raises:
        InputError: `E-LIMIT`, or `E-UNREADABLE` for a header that cannot be read.
    """
    columns = [file.schema.column(j) for j in range(file.metadata.num_columns)]
    repeated = [column.max_repetition_level > 0 for column in columns]
    widths = [max(0, column.length) if column.physical_type == FIXED else 0 for column in columns]
    with _headers_of(path) as source:
        try:
            groups = read_groups(source, path.stat().st_size)
            _must_fit(path, [(chunk.start, chunk.stored) for group in groups for chunk in group.chunks if chunk.values])
            for i, group in enumerate(groups):
                asked = _Asked()
                for chunk, many, width in zip(group.chunks, repeated, widths, strict=True):
                    asked.add(chunk, list(read_pages(source, chunk)), many)
                    asked.decoded += width if chunk.values else 0  # Arrow makes room for a value before it looks
                asked.check(path, f"row group {i}")
        except InputError:
            raise
        except (OSError, OverflowError, ValueError) as error:
            raise _unreadable(path, first_line(error)) from None
    return groups


@dataclass(slots=True)
class _Asked:
    """What the page headers of a row group come to so far."""

    stored: int = 0
    decoded: int = 0
    rows: int = 0
    items: int = 0

    def add(self, chunk: Chunk, pages: list[Page], repeated: bool) -> None:
        values = sum(p.values for p in pages if not p.dictionary)
        self.stored += chunk.stored
        for dictionary in (False, True):  # both are held at once
            self.decoded += max((p.size for p in pages if p.dictionary == dictionary), default=0)
        if repeated:
            self.items += values
        else:
            self.rows = max(self.rows, values)

    def check(self, path: Place, where: str) -> None:
        _check_rows(path, where, self.rows, self.stored)
        _at_most(path, f"{where}: items of lists", self.items, FREE_ITEMS + ITEMS_PER_BYTE * self.stored)
        _check_decoded(path, f"{where}: bytes of decoded pages", self.decoded, self.stored)


def check_ipc(path: Place) -> None:
    """Compare what the messages of an Arrow IPC file ask for with the limits; raises as `check_parquet`."""
    places = []
    with _headers_of(path) as source:
        try:
            for message in read_messages(source, path.stat().st_size):
                places.append((message.start, message.stored))
                _check_rows(path, "a record batch", message.rows, message.stored)
                if message.size > message.stored:
                    _check_decoded(path, "a record batch: bytes once decompressed", message.size, message.stored)
        except HeaderError as error:
            raise _unreadable(path, str(error)) from None
    _must_fit(path, places)


def check_manifest(path: Place) -> None:
    """Refuse a manifest that is too long; raises `E-LIMIT`, or `FileNotFoundError`."""
    _at_most(path, "bytes", path.stat().st_size, MAX_MANIFEST_BYTES)


def check_views(path: Place, batch: pa.RecordBatch) -> None:
    """Refuse text views that share their bytes so often that only looking at all of them takes for ever.

    Raises:
        InputError: `E-LIMIT`.
        pa.ArrowInvalid: a buffer is too short.
    """
    batch.validate()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        _at_most(path, f"column '{name}': bytes of its views", sum(_viewed(column)), MAX_DECODED)


def _viewed(array: pa.Array) -> Iterator[int]:
    """Bytes that the views in an array and in its children come to."""
    kind = array.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        lengths = np.frombuffer(array.buffers()[1] or b"", "<i4")[::4]
        yield int(lengths.sum(dtype=np.int64))
    elif pa.types.is_dictionary(kind):
        yield from _viewed(array.dictionary)
    elif isinstance(array, pa.ExtensionArray):
        yield from _viewed(array.storage)
    elif pa.types.is_struct(kind) or pa.types.is_union(kind):
        for i in range(kind.num_fields):
            yield from _viewed(array.field(i))
    elif kind.num_fields:  # lists, maps, runs
        yield from _viewed(array.values)


def check_columns(path: Place, schema: pa.Schema) -> None:
    """Refuse a schema of too many columns, fields of structs counted one by one; raises `E-LIMIT`."""
    _at_most(path, "columns", sum(_leaves(field.type) for field in schema), MAX_COLUMNS)


def _leaves(kind: pa.DataType) -> int:
    return sum(_leaves(kind.field(i).type) for i in range(kind.num_fields)) or 1


@contextmanager
def memory_cap(extra: int) -> Iterator[None]:
    """Meanwhile this process may take `extra` more bytes of private memory than it has now (0 = as many as it likes),
    so that running out is an error that is told and not the end of the machine. Where the system knows no such limit,
    or a lower one is set, nothing changes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _private_bytes() + extra
    if not extra or (soft != resource.RLIM_INFINITY and soft <= wanted):
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _private_bytes() -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def _headers_of(path: Place) -> IO[bytes]:
    """A file for many small reads; from afar each costs a request, so that they come in larger pieces."""
    if isinstance(path, Path):
        return path.open("rb", buffering=0)
    return io.BufferedReader(path.open("rb"), REMOTE_READ)


def _check_rows(path: Place, where: str, rows: int, stored: int) -> None:
    _at_most(path, f"{where}: rows in {stored} bytes", rows, FREE_ROWS + ROWS_PER_BYTE * stored)


def _check_decoded(path: Place, what: str, size: int, stored: int) -> None:
    _at_most(path, what, size, min(MAX_DECODED, FREE_DECODED + DECODED_PER_BYTE * stored))


def _must_fit(path: Place, places: list[tuple[int, int]]) -> None:
    """The same bytes, named many times over, would be decoded as many times. `places`: (start, bytes) each."""
    stored, size = sum(length for _, length in places), path.stat().st_size
    if stored > size:
        raise _unreadable(path, f"what it lists comes to {stored} bytes, the file has {size}")
    starts = [start for start, length in places if length]
    if len(set(starts)) < len(starts):
        raise _unreadable(path, "it lists the same bytes more than once")


def _at_most(path: Place, what: str, count: int, limit: int) -> None:
    if count > limit:
        raise InputError(
            f"{path}: {what}: {count}, limit {limit}",
            code="E-LIMIT",
            hint="write smaller row groups, pages or batches; a file that asks for so much is damaged or hostile",
        )


def _unreadable(path: Place, why: str) -> InputError:
    return InputError(f"{path}: cannot be read: {why}", code="E-UNREADABLE")
