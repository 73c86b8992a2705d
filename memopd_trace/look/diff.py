"""What differs between two traces, by state.

Rows are matched by (episode, index), wherever they stand in their files; rows that share a key are matched in order.
A is read once and then held as digests, B is read against them, and A is read again as far as rows are to be shown.
Memory: some 200 bytes for each row of A, and 16 more for each of its columns that holds anything; nothing for B.

Two matched rows are in the same *state* if their ids, positions, visibility, slots and media agree, defaults written
out or not. A cell that is null and a column that is absent are the same. Numbers are compared exactly (NaN equals NaN).
`state_digest` follows from the state: it is named only where the state is the same.

`Diff.to_dict`, `diff_version` "1" (new keys may be added; these stay):

    diff_version, equal
    a, b           path, rows, only (rows without a match), only_first (the first of them: episode_id,
                   invocation_index), not_compared (undeclared columns)
    matched, same (rows equal in all columns), other_state, other_columns (same state), same_order
    columns        {column: rows in which it differs}
    metadata       key, a, b
    rows           the first of each sort: episode_id, invocation_index, row_a, row_b, state ("same" or "other"), cells
                   (column; index of the first item that differs, or null; a, b; length_a, length_b of a list)
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memopd_trace.errors import UsageError, printable
from memopd_trace.invocation import Invocation, invocations_from_batch
from memopd_trace.look.cells import DIGESTS, Cell, cell_digests, compare_cells, context_digests, key_digest
from memopd_trace.metadata import TraceMetadata
from memopd_trace.schema import COLUMN, TRACE_COLUMNS
from memopd_trace.storage import TraceReader

DIFF_VERSION = "1"
SHOWN = 10  # rows of each sort
KEY = ("episode_id", "invocation_index")
ID_COLUMNS = ("prompt_ids", "output_ids")
CONTEXT = ("position_ids", "visible_from", "visible_until", "output_slots", "media")


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A row that both traces have, and not alike; rows of files are counted over all files of a trace."""

    episode_id: str
    invocation_index: int
    row_a: int
    row_b: int
    other_state: bool
    cells: tuple[Cell, ...]


@dataclass(slots=True)
class Side:
    """One of the two traces."""

    path: str
    rows: int = 0
    only: int = 0
    only_first: list[tuple[str, int]] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """See the module's docstring."""
        first = [{"episode_id": e, "invocation_index": i} for e, i in self.only_first]
        return {
            "path": self.path,
            "rows": self.rows,
            "only": self.only,
            "only_first": first,
            "not_compared": list(self.not_compared),
        }


@dataclass(slots=True)
class Diff:
    """What differs; see the module's docstring."""

    a: Side
    b: Side
    metadata: list[tuple[str, Any, Any]]
    matched: int = 0
    other_state: int = 0
    other_columns: int = 0
    same_order: bool = True
    columns: Counter[str] = field(default_factory=Counter)
    rows: list[RowDifference] = field(default_factory=list)

    @property
    def same(self) -> int:
        """Matched rows that are equal in all compared columns."""
        return self.matched - self.other_state - self.other_columns

    @property
    def equal(self) -> bool:
        """Nothing differs but perhaps the order."""
        return not (self.metadata or self.a.only or self.b.only or self.other_state or self.other_columns)

    def to_dict(self) -> dict[str, Any]:
        """As plain data; see the module's docstring."""
        order = [c.name for c in TRACE_COLUMNS if self.columns[c.name]]
        return {
            "diff_version": DIFF_VERSION,
            "equal": self.equal,
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
            "matched": self.matched,
            "same": self.same,
            "other_state": self.other_state,
            "other_columns": self.other_columns,
            "same_order": self.same_order,
            "columns": {name: self.columns[name] for name in order},
            "metadata": [{"key": key, "a": a, "b": b} for key, a, b in self.metadata],
            "rows": [_row_dict(row) for row in self.rows],
        }

    def to_json(self) -> str:
        """As JSON text, ending in a newline."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    columns: Sequence[str] = (),
    ignore: Sequence[str] = (),
    metadata: bool = True,
    shown: int = SHOWN,
) -> Diff:
    """Compare two traces, which need not be valid, only readable.

    Args:
        a: a trace.
        b: another.
        columns: compare only these; all where empty.
        ignore: do not compare these.
        metadata: compare the files' metadata.
        shown: rows of each sort that are told in detail; counts are of all.

    Raises:
        InputError: as `memopd_trace.read`, for either.
        UsageError: a column that there is not.
    """
    chosen = _choose(columns, ignore)
    readers = TraceReader(a), TraceReader(b)
    changes = list(_metadata_differences(*(r.metadata for r in readers))) if metadata else []
    sides = [Side(str(p), not_compared=_undeclared(r)) for p, r in zip((a, b), readers, strict=True)]
    result = Diff(sides[0], sides[1], changes)
    held = _Held(readers[0], chosen)
    found = held.compare(readers[1], result, shown)
    held.describe(readers[0], result, found, shown)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A differing row of B that is to be shown, and where A has it."""

    row_a: int
    row_b: int
    other_state: bool
    columns: tuple[str, ...]
    invocation: Invocation


class _Held:
    """A as digests: one row number for each key, one uint64[rows] for each column that holds anything."""

    def __init__(self, reader: TraceReader, chosen: tuple[str, ...]) -> None:
        self.chosen = chosen
        self.context = tuple(c for c in CONTEXT if c in chosen)
        self.rows: dict[bytes, int] = {}
        batches: list[dict[str, DIGESTS | None]] = []
        sizes: list[int] = []
        repeats: Counter[bytes] = Counter()
        for batch in reader.iter_batches():
            self._add_keys(batch, repeats)
            batches.append(self._digests(batch))
            sizes.append(batch.num_rows)
        self.columns = {n: _joined([b[n] for b in batches], sizes) for n in (batches[0] if batches else ())}
        self.matched = np.zeros(sum(sizes), bool)

    def compare(self, reader: TraceReader, result: Diff, shown: int) -> list[_Found]:
        """Read B and count what differs; returns the first rows of each sort."""
        found: list[_Found] = []
        repeats: Counter[bytes] = Counter()
        last = -1
        for batch in reader.iter_batches():
            keys = list(_keys(batch))
            places = np.array([self._match(*key, repeats) for key in keys], np.int64)
            missing = np.flatnonzero(places < 0)
            result.b.only += len(missing)
            result.b.only_first += [keys[i] for i in missing[: max(0, shown - len(result.b.only_first))]]
            differs = self._differences(batch, places)
            found += _count(batch, places, differs, result, shown)
            known = np.concatenate([[last], places[places >= 0]])
            result.same_order &= bool((np.diff(known) > 0).all())
            last = int(known[-1])
            result.b.rows += batch.num_rows
        result.a.rows, result.a.only = len(self.matched), int((~self.matched).sum())
        result.matched = result.a.rows - result.a.only
        return found

    def describe(self, reader: TraceReader, result: Diff, found: list[_Found], shown: int) -> None:
        """Read A again, as far as there is something to show, and tell it."""
        only = np.flatnonzero(~self.matched)[:shown].tolist()
        wanted = {f.row_a: f for f in found}
        last = max([*only, *wanted], default=-1)
        base = 0
        for batch in reader.iter_batches() if last >= 0 else ():
            for row in sorted(r for r in {*only, *wanted} if base <= r < base + batch.num_rows):
                (invocation,) = invocations_from_batch(batch.slice(row - base, 1))
                if row in wanted:
                    result.rows.append(_describe(invocation, wanted[row]))
                else:
                    result.a.only_first.append(invocation.key)
            base += batch.num_rows
            if base > last:
                break

    def _add_keys(self, batch: pa.RecordBatch, repeats: Counter[bytes]) -> None:
        for episode, index in _keys(batch):
            key = key_digest(episode, index)
            if key in self.rows:
                repeats[key] += 1
                key = key_digest(episode, index, repeats[key])
            self.rows[key] = len(self.rows)

    def _match(self, episode: str, index: int, repeats: Counter[bytes]) -> int:
        """A's row for a key of B, -1 = none; the next one where the key was matched before."""
        key = key_digest(episode, index)
        row = self.rows.get(key, -1)
        if row >= 0 and self.matched[row]:
            repeats[key] += 1
            row = self.rows.get(key_digest(episode, index, repeats[key]), -1)
        if row >= 0:
            self.matched[row] = True
        return row

    def _digests(self, batch: pa.RecordBatch) -> dict[str, DIGESTS | None]:
        cells = {name: cell_digests(batch.column(name), COLUMN[name]) for name in self.chosen}
        return {**cells, "context": context_digests(batch, self.context)}

    def _differences(self, batch: pa.RecordBatch, places: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
        """bool[rows] for each column (and the state's context) that differs in some matched row."""
        out, there = {}, places >= 0
        for name, new in self._digests(batch).items():
            old = self.columns.get(name)
            if old is None and new is None:
                continue
            nothing = np.zeros(batch.num_rows, np.uint64)
            before = nothing if old is None else np.where(there, old[np.maximum(places, 0)], nothing)
            differs = there & (before != (nothing if new is None else new))
            if differs.any():
                out[name] = differs
        return out


def _count(
    batch: pa.RecordBatch,
    places: NDArray[np.int64],
    differs: dict[str, NDArray[np.bool_]],
    result: Diff,
    shown: int,
) -> Iterator[_Found]:
    """Count a batch's differing rows; yields those that are to be shown."""
    nothing = np.zeros(batch.num_rows, bool)
    state = np.logical_or.reduce([nothing, *(differs.get(n, nothing) for n in (*ID_COLUMNS, "context"))])
    differs.pop("context", None)
    if "state_digest" in differs:
        differs["state_digest"] &= ~state
    anything = np.logical_or.reduce([state, *differs.values()])
    for row in np.flatnonzero(anything):
        counted = result.other_state if state[row] else result.other_columns
        if counted < shown:
            names = tuple(name for name, flags in differs.items() if flags[row])
            (invocation,) = invocations_from_batch(batch.slice(row, 1))
            yield _Found(int(places[row]), result.b.rows + int(row), bool(state[row]), names, invocation)
        result.other_state += int(state[row])
        result.other_columns += int(not state[row])
    result.columns.update({name: int(flags.sum()) for name, flags in differs.items() if flags.any()})


def _describe(a: Invocation, found: _Found) -> RowDifference:
    b = found.invocation
    cells = tuple(compare_cells(name, getattr(a, name), getattr(b, name)) for name in found.columns)
    return RowDifference(a.episode_id, a.invocation_index, found.row_a, found.row_b, found.other_state, cells)


def _row_dict(row: RowDifference) -> dict[str, Any]:
    return {
        "episode_id": row.episode_id,
        "invocation_index": row.invocation_index,
        "row_a": row.row_a,
        "row_b": row.row_b,
        "state": "other" if row.other_state else "same",
        "cells": [asdict(cell) for cell in row.cells],
    }


def _metadata_differences(a: TraceMetadata, b: TraceMetadata) -> Iterator[tuple[str, Any, Any]]:
    """(key, in A, in B) of all values that differ; keys of nested objects are joined by dots."""
    flat = [dict(_flatten("", m.model_dump(mode="json"))) for m in (a, b)]
    for key in sorted(flat[0].keys() | flat[1].keys()):
        values = flat[0].get(key), flat[1].get(key)
        if values[0] != values[1]:
            yield key, *values


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else key, inner)
    else:
        yield prefix, value


def _undeclared(reader: TraceReader) -> list[str]:
    names = {name for index in range(len(reader.files)) for name in reader.schema(index).names}
    return sorted(names - COLUMN.keys())


def _choose(columns: Sequence[str], ignore: Sequence[str]) -> tuple[str, ...]:
    """The columns to compare, in declared order."""
    for name in (*columns, *ignore):
        if name not in COLUMN:
            close = get_close_matches(name, COLUMN, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "`memopd-trace schema` lists the columns"
            raise UsageError(f"no column '{printable(name)}'", hint=hint)
    wanted = columns or tuple(COLUMN)
    return tuple(name for name in COLUMN if name in wanted and name not in ignore and name not in KEY)


def _keys(batch: pa.RecordBatch) -> Iterator[tuple[str, int]]:
    return zip(*(batch.column(name).to_pylist() for name in KEY), strict=True)


def _joined(batches: list[DIGESTS | None], sizes: list[int]) -> DIGESTS | None:
    """A column's digests over all batches; `None` = all null."""
    if all(batch is None for batch in batches):
        return None
    whole = [np.zeros(size, np.uint64) if b is None else b for b, size in zip(batches, sizes, strict=True)]
    return np.concatenate(whole)
