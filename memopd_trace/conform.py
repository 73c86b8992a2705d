"""Bring a record batch from any Arrow writer to the declared schema, or say exactly what does not fit.

Tools differ in harmless ways: `large_list` or `list_view` for `list`, `large_string`, `string_view` or a
dictionary for `string`, another item name, an item flagged nullable that holds no null, structs in another
order, a map as a list of key-value structs, columns in another order. All of these read alike. A difference
that could change a value (float16 logprobs, int64 ids, a null where none may stand) is a `Misfit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memopd_trace.schema import TRACE_COLUMNS, Column, type_name

MAX_EXPANDED = 2**28  # items or bytes that shared or absent values may come to in one batch
FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799  # of the years 1 and 9999, from 1970


class MisfitError(ValueError):
    """A column that cannot be read as its declared type; `expected` and `actual` are type names."""

    def __init__(self, expected: str, actual: str, detail: str = "") -> None:
        if "null" not in detail:  # whether items may be null is not the fault, and any writer's choice
            expected, actual = expected.replace(" | null", ""), actual.replace(" | null", "")
        super().__init__(f"expected {expected}, got {actual}" + (f": {detail}" if detail else ""))
        self.expected, self.actual, self.detail = expected, actual, detail


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why one column does not fit: `missing`, `type` (with both types), or `null` (with the first row)."""

    column: str
    kind: str
    expected: str
    actual: str
    row: int | None = None


def conform_batch(
    batch: pa.RecordBatch, columns: Sequence[Column] = TRACE_COLUMNS
) -> tuple[pa.RecordBatch, list[Misfit]]:
    """The batch with every column of a table in declared order and type, and what did not fit.

    Absent optional columns come as all-null; a column that does not fit comes as all-null too and is named in
    the list, so that rules can still look at the others. Undeclared columns are left out.
    """
    arrays, misfits = [], []
    names = batch.schema.names
    for column in columns:
        if names.count(column.name) != 1:
            if column.required or names.count(column.name) > 1:
                actual = "nothing" if column.name not in names else "the name twice"
                misfits.append(Misfit(column.name, "missing", type_name(column.type), actual))
            arrays.append(pa.nulls(batch.num_rows, column.type))
            continue
        array, misfit = _conform_column(batch.column(names.index(column.name)), column)
        arrays.append(array)
        if misfit is not None:
            misfits.append(misfit)
    fields = [pa.field(c.name, a.type) for c, a in zip(columns, arrays, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)), misfits


def _conform_column(array: pa.Array, column: Column) -> tuple[pa.Array, Misfit | None]:
    try:
        out = conform(array, column.type)
    except MisfitError as error:
        actual = error.actual + (f" ({error.detail})" if error.detail else "")
        return pa.nulls(len(array), column.type), Misfit(column.name, "type", error.expected, actual)
    if column.required and out.null_count:
        row = int(np.flatnonzero(np.asarray(out.is_null()))[0])
        return out, Misfit(column.name, "null", type_name(column.type), "null", row)
    return out, None


def conform(array: pa.Array, target: pa.DataType) -> pa.Array:
    """`array` as `target`, values unchanged.

    Raises:
        MisfitError: when the types differ in a way that is not mere encoding, or a null stands where none may.
    """
    if pa.types.is_timestamp(target) and pa.types.is_timestamp(array.type) and array.type.tz is not None:
        return _timestamp(array, target)
    if pa.types.is_dictionary(array.type):
        _check_shared(array, target)
    if array.type.equals(target) and not _may_hide_nulls(target):
        return array
    if pa.types.is_null(array.type):
        return _nulls(array, target)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(target):
        return _string(array, target).dictionary_encode()
    if pa.types.is_string(target):
        return _string(array, target)
    if pa.types.is_map(target):
        return _map(array, target)
    if pa.types.is_list(target):
        return _list(array, target)
    if pa.types.is_struct(target):
        return _struct(array, target)
    if pa.types.is_fixed_size_binary(target):
        return _fixed_binary(array, target)
    if array.type.equals(target):
        return array
    raise MisfitError(type_name(target), type_name(array.type))


def iter_list_values(array: pa.ListArray) -> tuple[np.ndarray, pa.Array]:
    """(offsets int64[len+1] from 0, child values of exactly these rows); honours slices, null rows are empty."""
    flat = array.flatten()
    lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0), dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), flat


def _may_hide_nulls(target: pa.DataType) -> bool:
    """Whether an array of just this type may still hold nulls that its flags deny (a writer's lie)."""
    if pa.types.is_list(target):
        return not target.value_field.nullable or _may_hide_nulls(target.value_type)
    return pa.types.is_struct(target) and any(not f.nullable or _may_hide_nulls(f.type) for f in target)


def _nulls(array: pa.Array, target: pa.DataType) -> pa.Array:
    """As many nulls as `array` has items: it has no buffers that would bound their number."""
    _check_size(len(array), array, target)
    return pa.nulls(len(array), target)


def _check_shared(array: pa.DictionaryArray, target: pa.DataType) -> None:
    """A value of a dictionary is stored once and read as often as rows name it."""
    words = array.dictionary
    if words.nbytes * len(array) > MAX_EXPANDED and (
        pa.types.is_string(words.type) or pa.types.is_large_string(words.type)
    ):
        lengths = pc.binary_length(words).cast(pa.int64())
        _check_size(pc.sum(lengths.take(array.indices)).as_py() or 0, array, target)


def _check_size(size: int, array: pa.Array, target: pa.DataType) -> None:
    if size > MAX_EXPANDED:
        detail = f"values that come to {size} items or bytes in one batch, limit {MAX_EXPANDED}"
        raise MisfitError(type_name(target), type_name(array.type), detail)


def _string(array: pa.Array, target: pa.DataType) -> pa.Array:
    kind = array.type
    if pa.types.is_dictionary(kind):
        indices = array.indices
        if len(indices) - indices.null_count:
            low, high = pc.min_max(indices).values()
            if low.as_py() < 0 or high.as_py() >= len(array.dictionary):
                raise MisfitError(type_name(target), type_name(kind), "a dictionary index is out of range")
        return _string(array.dictionary, target).take(indices)
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise MisfitError(type_name(target), type_name(kind))
    if pa.types.is_string_view(kind):
        _check_size(int(_view_lengths(array).sum()), array, target)
    return pc.cast(array, pa.string())


def _view_lengths(array: pa.Array) -> np.ndarray:
    """int64[len]: the lengths of a view array's values, 0 where null; a view is 16 bytes, its length first."""
    stop = array.offset + len(array)  # the buffer may be longer, by no whole view
    views = np.frombuffer(array.buffers()[1], "<i4", count=4 * stop).reshape(-1, 4)[array.offset :, 0]
    return np.where(np.asarray(array.is_valid()), views, 0).astype(np.int64)


def _list(array: pa.Array, target: pa.DataType) -> pa.Array:
    kind = array.type
    if not (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    ):
        raise MisfitError(type_name(target), type_name(kind))
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):  # rows may share their items
        _check_size(pc.sum(pc.list_value_length(array)).as_py() or 0, array, target)
    offsets, flat = iter_list_values(array)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise MisfitError(type_name(target), type_name(kind), f"{offsets[-1]} items in one batch, limit 2^31-1")
    try:
        items = conform(flat, target.value_type)
    except MisfitError as error:
        raise MisfitError(type_name(target), type_name(kind), error.detail) from None
    if not target.value_field.nullable and items.null_count:
        first = int(np.flatnonzero(np.asarray(items.is_null()))[0])
        row = int(np.searchsorted(offsets, first, side="right")) - 1
        raise MisfitError(type_name(target), type_name(kind), f"a null item in row {row}")
    starts = pa.array(offsets.astype(np.int32))
    mask = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(starts, items, type=target, mask=mask)


def _struct(array: pa.Array, target: pa.DataType) -> pa.Array:
    if not pa.types.is_struct(array.type):
        raise MisfitError(type_name(target), type_name(array.type))
    have = {array.type.field(i).name for i in range(array.type.num_fields)}
    children = []
    for field in target:
        if field.name not in have and not field.nullable:
            raise MisfitError(type_name(target), type_name(array.type), f"no field '{field.name}'")
        # StructArray.field ignores the parent's validity, flatten applies it; both honour slices
        child = array.field(field.name) if field.name in have else _nulls(array, field.type)
        child = conform(child, field.type)
        if not field.nullable and pc.any(pc.and_(child.is_null(), array.is_valid())).as_py():
            raise MisfitError(type_name(target), type_name(array.type), f"null in '{field.name}'")
        children.append(child)
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(children, fields=list(target), mask=mask)


def _map(array: pa.Array, target: pa.DataType) -> pa.Array:
    kind = array.type
    if pa.types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)])))
    entry = pa.struct([pa.field("key", target.key_type, nullable=False), pa.field("value", target.item_type)])
    pairs = _list(array, pa.list_(pa.field("item", entry, nullable=False)))
    keys, values = pairs.values.field("key"), pairs.values.field("value")
    offsets = pairs.offsets
    if pairs.null_count:  # MapArray takes its nulls from the offsets
        valid = np.append(np.asarray(pairs.is_valid()), True)
        offsets = pa.array(np.asarray(offsets), mask=~valid)
    return pa.MapArray.from_arrays(offsets, keys, values)


def _timestamp(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Any unit; a time that no `datetime` can hold does not fit."""
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[array.type.unit]
    ticks = array.view(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    seconds = ticks // per_second
    beyond = np.flatnonzero((seconds < FIRST_SECOND) | (seconds > LAST_SECOND))
    if len(beyond):
        detail = f"a time before year 1 or after year 9999 in row {beyond[0]} of a batch"
        raise MisfitError(type_name(target), type_name(array.type), detail)
    return pc.cast(array, target, safe=False)


def _fixed_binary(array: pa.Array, target: pa.DataType) -> pa.Array:
    kind, width = array.type, target.byte_width
    if pa.types.is_binary_view(kind):
        lengths = _view_lengths(array)[np.asarray(array.is_valid())]
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or kind.equals(target):
        lengths = np.asarray(pc.binary_length(array.drop_null()))
    else:
        raise MisfitError(type_name(target), type_name(kind))
    if (lengths != width).any():
        raise MisfitError(type_name(target), type_name(kind), f"a value is not {width} bytes long")
    return pc.cast(array, target)
