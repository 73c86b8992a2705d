"""Cells of a trace compared: as 64-bit digests, and where two that differ do so.

Two cells hold the same value if and only if their digests agree (but for a chance of 2^-64), so that traces can be
compared without holding them.

Null and an absent column have digest 0. Floats compare by value: NaN equals NaN, -0 equals 0. The order of a map's keys
does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memopd_trace.conform import iter_list_values
from memopd_trace.invocation import Media, Sampling, Segment
from memopd_trace.schema import COLUMN, Column

DIGESTS = NDArray[np.uint64]
Bytes = bytes | memoryview
HEAD = 8  # items shown of a list where the other cell is null
_NAN, _NULL = 0x7FC00000, 0x7FC00001  # float32 bits


@dataclass(frozen=True, slots=True)
class Cell:
    """One column of one row that differs. `index` is the first differing item of a list; `a` and `b` are that item's
    values (`None` = null, or beyond the list's end), else the whole cells'."""

    column: str
    index: int | None
    a: Any
    b: Any
    length_a: int | None = None
    length_b: int | None = None


def cell_digests(array: pa.Array, column: Column) -> DIGESTS | None:
    """uint64[rows] of a conformed column; `None` = every cell is null."""
    if array.null_count == len(array):
        return None
    return np.array([0 if cell is None else _digest(cell) for cell in _cells(array, column)], np.uint64)


def context_digests(batch: pa.RecordBatch, columns: tuple[str, ...]) -> DIGESTS | None:
    """uint64[rows] of what a conformed batch's states hold beside their ids, defaults counted as null.

    `columns` are those of `position_ids`, `visible_from`, `visible_until`, `output_slots` and `media` that count; of
    media, where they stand and their SHA-256. 0 = positions 0…n-1, plain causal, appended, no media; `None` = all 0.
    """
    used = [c for c in columns if batch.column(c).null_count < batch.num_rows]
    if not used:
        return None
    prompt, output = (_lengths(batch.column(c)) for c in ("prompt_ids", "output_ids"))
    n = prompt + np.where(np.asarray(batch.column("output_slots").is_null()), output, 0)
    cells = {name: list(_context_cells(batch.column(name), name, n)) for name in used}
    rows = ([(name, cells[name][row]) for name in used] for row in range(batch.num_rows))
    return np.array([_joint_digest([(k, v) for k, v in row if v is not None]) for row in rows], np.uint64)


def key_digest(episode_id: str, invocation_index: int, occurrence: int = 0) -> bytes:
    """16 bytes for a row's key; `occurrence` tells rows apart that have the same one."""
    text = f"{occurrence}\0{invocation_index}\0{episode_id}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def compare_cells(name: str, a: Any, b: Any) -> Cell:
    """The difference of two cells that are known to differ."""
    if not pa.types.is_list(COLUMN[name].type):
        return Cell(name, None, _plain(a), _plain(b))
    if a is None or b is None:
        head_a, head_b = (None if v is None else _items(v[:HEAD]) for v in (a, b))
        return Cell(name, None, head_a, head_b, None if a is None else len(a), None if b is None else len(b))
    index = _first_difference(a, b)
    item_a, item_b = ((_items(v[index : index + 1]) or [None])[0] for v in (a, b))
    return Cell(name, index, item_a, item_b, len(a), len(b))


def _first_difference(a: Any, b: Any) -> int:
    """The first index at which two lists differ; the shorter one's length where it begins the other."""
    n = min(len(a), len(b))
    if not isinstance(a, np.ndarray):
        return next((i for i in range(n) if a[i] != b[i]), n)
    x, y = np.ma.getdata(a)[:n], np.ma.getdata(b)[:n]
    gone_x, gone_y = np.ma.getmaskarray(a)[:n], np.ma.getmaskarray(b)[:n]
    differs = (gone_x != gone_y) | ((x != y) & ~((x != x) & (y != y)) & ~gone_x)
    return int(differs.argmax()) if differs.any() else n


def _items(values: Any) -> list[Any]:
    return [_plain(v) for v in (values.tolist() if isinstance(values, np.ndarray) else values)]


def _plain(value: Any) -> Any:
    """A value as JSON holds it: floats that are no numbers by name, bytes in hex, times in ISO 8601."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Segment | Media | Sampling):
        return _plain(asdict(value))
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def canonical(value: Any) -> Any:
    """A cell's Python value in a form that is equal, and prints alike, for equal cells."""
    if isinstance(value, float):
        return "nan" if value != value else value + 0.0
    if isinstance(value, dict):
        return sorted((k, canonical(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return [canonical(v) for v in value]
    return value


def _digest(cell: Bytes) -> int:
    return int.from_bytes(blake2b(cell, digest_size=8).digest(), "little") or 1


def _joint_digest(cells: list[tuple[str, Bytes]]) -> int:
    if not cells:
        return 0
    h = blake2b(digest_size=8)
    for name, cell in cells:
        view = memoryview(cell)
        h.update(f"{name}\0{view.nbytes}\0".encode())
        h.update(view)
    return int.from_bytes(h.digest(), "little") or 1


def _cells(array: pa.Array, column: Column) -> Iterator[Bytes | None]:
    """Each cell as canonical bytes; `None` = null."""
    kind = column.type
    if pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type):
        yield from _list_cells(array)
        return
    ordered: Callable[[Any], Any] = sorted if pa.types.is_map(kind) else lambda value: value
    for value in array.to_pylist():
        yield None if value is None else repr(canonical(ordered(value))).encode("utf-8", "surrogatepass")


def _list_cells(array: pa.ListArray) -> Iterator[memoryview | None]:
    offsets, flat = iter_list_values(array)
    if pa.types.is_float32(flat.type):
        values = np.asarray(flat.fill_null(0), np.float32) + np.float32(0)
        bits = values.view(np.uint32).copy()
        bits[np.isnan(values)] = _NAN
        bits[np.asarray(flat.is_null())] = _NULL
    else:
        bits = np.ascontiguousarray(flat.to_numpy(zero_copy_only=False))
    data = bits.data.cast("B") if len(bits) else memoryview(b"")
    valid, width = np.asarray(array.is_valid()), bits.itemsize
    for row in range(len(array)):
        yield data[offsets[row] * width : offsets[row + 1] * width] if valid[row] else None


def _context_cells(array: pa.Array, name: str, n: NDArray[np.int64]) -> Iterator[Bytes | None]:
    if name == "media":
        for runs in array.to_pylist():
            yield repr([(r["start"], r["stop"], r["sha256"]) for r in runs]).encode() if runs else None
        return
    for cell, length in zip(_cells(array, COLUMN[name]), n.tolist(), strict=True):
        yield None if cell is None or cell == _default(name, length) else cell


def _default(name: str, n: int) -> bytes | None:
    if name == "output_slots":  # written out, the default would not be appended
        return None
    return (np.full(n, n, np.int32) if name == "visible_until" else np.arange(n, dtype=np.int32)).tobytes()


def _lengths(array: pa.ListArray) -> NDArray[np.int64]:
    offsets, _ = iter_list_values(array)
    return np.diff(offsets)
