"""`Batch`: a conformed record batch as flat arrays, for rules that look at many rows at once.

Legend: B rows, M output tokens of all rows in order, N sequence tokens of all rows in order. Every array is a
view or a copy of exactly these rows, whatever slice they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from memopd_trace.conform import iter_list_values
from memopd_trace.metadata import Model, TraceMetadata
from memopd_trace.rules.registry import Hit, Inputs

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Lists:
    """A list column: row b holds `values[offsets[b]:offsets[b+1]]`; `given` [B] = the list is not null;
    `item_given` = the item is not null (its value is then 0)."""

    offsets: Ints
    values: Array
    given: Bools
    item_given: Bools

    @property
    def lengths(self) -> Ints:
        """[B], 0 where the list is null."""
        return np.diff(self.offsets)

    def cell(self, row: int) -> Any:
        """The list of one row as an array, or `None`."""
        return self.values[self.offsets[row] : self.offsets[row + 1]] if self.given[row] else None


@dataclass(frozen=True, slots=True)
class Tokens:
    """A per-token column laid out over all tokens of the batch: `given` is False where the row's list is null
    or of another length, or the item is null; `values` is 0 there."""

    values: Array
    given: Bools


class Batch:
    """Rows of one conformed batch (no null in a required column) and the metadata they refer to."""

    def __init__(self, table: pa.RecordBatch, metadata: TraceMetadata, inputs: Inputs | None = None) -> None:
        self.table, self.metadata, self.inputs = table, metadata, inputs or Inputs()
        self._lists: dict[str, Lists] = {}
        self._strings: dict[str, pa.Array] = {}
        self._outputs: dict[str, Tokens] = {}
        self._largest: dict[str, int] = {}
        self._ranges: dict[str, tuple[Any, Any]] = {}

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def column(self, name: str) -> pa.Array:
        """The Arrow array of a column."""
        return self.table.column(name)

    # whole-row columns, all [B]; most columns of most traces are null throughout, which needs no Arrow kernel

    def _is_null(self, name: str) -> bool:
        return bool(self.column(name).null_count == len(self))

    def given(self, name: str) -> Bools:
        """Where the column is not null."""
        return np.asarray(self.column(name).is_valid())

    def numbers(self, name: str, field: str | None = None, default: float = 0) -> Array:
        """A number column (or a field of a struct column), `default` where it is null."""
        array = self.column(name)
        if field is not None:
            array = pc.struct_field(array, field)
        if array.null_count == len(array):
            return np.full(len(array), default, array.type.to_pandas_dtype())
        return np.asarray(array.fill_null(default))

    def flags(self, name: str, default: bool) -> Bools:
        """A bool column, `default` where it is null."""
        if self._is_null(name):
            return np.full(len(self), default)
        return np.asarray(self.column(name).fill_null(default))

    def strings(self, name: str) -> pa.Array:
        """A string or category column as plain strings."""
        if name not in self._strings:
            self._strings[name] = self.column(name).cast(pa.string())
        return self._strings[name]

    def equals(self, name: str, *values: str) -> Bools:
        """Where a category column holds one of `values`."""
        if self._is_null(name):
            return np.zeros(len(self), bool)
        return np.asarray(pc.is_in(self.strings(name), pa.array(values, pa.string())))

    def text(self, name: str, row: int) -> str | None:
        """One cell of a string or category column."""
        return self.column(name)[row].as_py()

    def per_model(self, value: Callable[[Model], int | None], default: int) -> Ints:
        """A property of each row's model, `default` where the model is unknown or the property is absent."""
        table = {}
        for name, model in self.metadata.models.items():
            found = value(model)
            table[name] = default if found is None else found
        names = self.strings("model_id")
        keys = pa.array(list(table), pa.string())
        where = np.asarray(pc.fill_null(pc.index_in(names, keys), -1))
        return np.array([*table.values(), default], dtype=np.int64)[where]

    # lists

    def lists(self, name: str) -> Lists:
        """A list column as flat values."""
        if name not in self._lists and self._is_null(name):
            items = np.zeros(0, self.column(name).type.value_type.to_pandas_dtype())
            none = np.zeros(len(self), bool)
            self._lists[name] = Lists(np.zeros(len(self) + 1, np.int64), items, none, np.zeros(0, bool))
        elif name not in self._lists:
            array = self.column(name)
            offsets, flat = iter_list_values(array)
            item_given = np.asarray(flat.is_valid()) if flat.null_count else np.broadcast_to(np.True_, len(flat))
            filled = flat.fill_null(0) if flat.null_count else flat
            values: Array = np.asarray(filled.to_numpy(zero_copy_only=False))
            self._lists[name] = Lists(offsets, values, np.asarray(array.is_valid()), item_given)
        return self._lists[name]

    def all_below(self, name: str, limit: Ints) -> bool:
        """Whether every item of an int32 list column is from 0 to below the least `limit` [B]: one pass, no copy."""
        if name not in self._largest:
            values = self.lists(name).values.view(np.uint32)  # where a negative number is a large one
            self._largest[name] = int(values.max(initial=0))
        return not len(self) or self._largest[name] < int(limit.min())

    @cached_property
    def prompt_lengths(self) -> Ints:
        """Ids per prompt."""
        return self.lists("prompt_ids").lengths

    @cached_property
    def output_lengths(self) -> Ints:
        """Ids per output."""
        return self.lists("output_ids").lengths

    @cached_property
    def sequence_lengths(self) -> Ints:
        """n per row: prompt + output, or the prompt alone for in-place generation."""
        return self.prompt_lengths + np.where(self.given("output_slots"), 0, self.output_lengths)

    # per token

    def output(self, name: str) -> Tokens:
        """A column of length `output`, [M]."""
        if name not in self._outputs:
            self._outputs[name] = self._tokens(name, self.output_lengths)
        return self._outputs[name]

    def sequence(self, name: str) -> Tokens:
        """A column of length `sequence`, [N]."""
        return self._tokens(name, self.sequence_lengths)

    def _tokens(self, name: str, lengths: Ints) -> Tokens:
        lists = self.lists(name)
        fits = lists.given & (lists.lengths == lengths)
        if fits.all():  # as most columns of most traces are, or are not there at all
            return Tokens(lists.values, lists.item_given)
        if not fits.any():
            total = int(lengths.sum())
            return Tokens(np.zeros(total, lists.values.dtype), np.broadcast_to(np.False_, total))
        given = np.repeat(fits, lengths)
        values = np.zeros(len(given), lists.values.dtype)
        source = np.repeat(fits, lists.lengths)
        values[given] = lists.values[source]
        given[given] = lists.item_given[source]
        return Tokens(values, given)

    @cached_property
    def row_of_output(self) -> Ints:
        """[M]: the row of each output token."""
        return np.repeat(np.arange(len(self)), self.output_lengths)

    @cached_property
    def index_of_sequence(self) -> Ints:
        """[N]: each sequence token's index in its row."""
        return ragged_arange(self.sequence_lengths)

    @cached_property
    def index_of_output(self) -> Ints:
        """[M]: each output token's index in its row."""
        return ragged_arange(self.output_lengths)

    @cached_property
    def _output_ends(self) -> Ints:
        return np.cumsum(self.output_lengths)

    def outputs_of(self, row: int) -> slice:
        """Where the output tokens of a row are among [M]."""
        stop = int(self._output_ends[row])
        return slice(stop - int(self.output_lengths[row]), stop)

    @cached_property
    def last_output(self) -> Bools:
        """[M]: the last output token of its row."""
        last = np.zeros(int(self.output_lengths.sum()), bool)
        last[self._output_ends[self.output_lengths > 0] - 1] = True
        return last

    def any_of_row(self, tokens: Bools) -> Bools:
        """[B]: an output token of the row is marked [M]."""
        found, filled = np.zeros(len(self), bool), self.output_lengths > 0
        if filled.any():
            starts = (self._output_ends - self.output_lengths)[filled]
            found[filled] = np.logical_or.reduceat(tokens, starts)
        return found

    def all_within(self, name: str, low: float, high: float) -> bool:
        """Whether every value of an output column [M] is a number above `low` and at most `high` (where null, 0)."""
        if name not in self._ranges:
            values = self.output(name).values
            self._ranges[name] = (values.min(initial=0), values.max(initial=0))  # NaN goes through
        least, most = self._ranges[name]
        return bool(least > low and most <= high)

    @cached_property
    def sampled(self) -> Bools:
        """[M]: chosen by the policy (null = true)."""
        if self._is_null("output_sampled"):
            return np.ones(int(self.output_lengths.sum()), bool)
        tokens = self.output("output_sampled")
        return np.where(tokens.given, tokens.values, True).astype(bool)

    @cached_property
    def trained(self) -> Bools:
        """[M]: sampled, in the loss mask (null = as sampled), and not of a rejected attempt."""
        if self._is_null("output_loss_mask") and self._is_null("accepted"):
            return self.sampled
        mask = self.output("output_loss_mask")
        accepted = self.flags("accepted", True)[self.row_of_output]
        return self.sampled & np.where(mask.given, mask.values, True).astype(bool) & accepted

    @cached_property
    def trains(self) -> Bools:
        """[B]: the row has a token to be trained."""
        return self.any_of_row(self.trained)

    # hits

    def row_hits(self, bad: Bools, column: str, message: str, *, expected: str | None = None) -> Iterator[Hit]:
        """One hit per bad row [B]; the cell is the actual value."""
        for row in np.flatnonzero(bad):
            value = self.column(column)[int(row)].as_py()
            yield Hit(int(row), message, column, expected, _shown(value))

    def output_hits(
        self, bad: Bools, column: str, what: str, values: Array | None = None, *, expected: str | None = None
    ) -> Iterator[Hit]:
        """One hit per row with a bad output token [M], naming the first and counting the others."""
        return _token_hits(bad, self.output_lengths, column, what, values, expected)

    def sequence_hits(
        self, bad: Bools, column: str, what: str, values: Array | None = None, *, expected: str | None = None
    ) -> Iterator[Hit]:
        """One hit per row with a bad sequence token [N]."""
        return _token_hits(bad, self.sequence_lengths, column, what, values, expected)

    def item_hits(self, bad: Bools, column: str, what: str, *, expected: str | None = None) -> Iterator[Hit]:
        """One hit per row with a bad item of a list column."""
        lists = self.lists(column)
        return _token_hits(bad, lists.lengths, column, what, lists.values, expected)


def _shown(value: Any) -> str:
    """A cell in a message; text in quotes, so that an empty one or the word null is seen."""
    return "null" if value is None else f"'{value}'" if isinstance(value, str) else str(value)


def ragged_arange(lengths: Ints) -> Ints:
    """0…l-1 for each length l, concatenated."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _token_hits(
    bad: Bools, lengths: Ints, column: str, what: str, values: Array | None, expected: str | None
) -> Iterator[Hit]:
    tokens = np.flatnonzero(bad)
    if not len(tokens):
        return
    ends = np.cumsum(lengths)
    rows, first, counts = np.unique(np.searchsorted(ends, tokens, side="right"), return_index=True, return_counts=True)
    for row, token, count in zip(rows, tokens[first], counts, strict=True):
        index = token - (ends[row] - lengths[row])
        more = f" (and {count - 1} more in this row)" if count > 1 else ""
        actual = None if values is None else str(values[token])
        yield Hit(int(row), f"{column}[{index}] {what}{more}", column, expected, actual)
