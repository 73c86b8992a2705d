"""What differs between two traces, for a person: a summary, then the first rows of each sort."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from memopd_trace.errors import printable
from memopd_trace.look.cells import Cell
from memopd_trace.look.diff import Diff, RowDifference, Side
from memopd_trace.schema import COLUMN


def lines(diff: Diff) -> Iterator[Text]:
    """The result as lines, the summary first."""
    for name, side in (("A", diff.a), ("B", diff.b)):
        yield Text(f"{name}: {printable(side.path, None)}: {_count(side.rows, 'row')}" + _skipped(side))
    yield _summary(diff)
    for key, a, b in diff.metadata:
        yield Text(f"metadata {printable(key)}: ", style="cyan").append(f"{_value(a)} -> {_value(b)}", style="default")
    for name, side in (("A", diff.a), ("B", diff.b)):
        yield from _only(name, side)
    for row in diff.rows:
        yield _row(row)
    left = diff.other_state + diff.other_columns - len(diff.rows)
    if left:
        yield Text(f"and {_count(left, 'more row')} that differ", style="dim")


def _summary(diff: Diff) -> Text:
    if diff.equal:
        order = "" if diff.same_order else ", in another order"
        return Text(f"equal: {_count(diff.same, 'row')}{order}", style="bold green")
    parts = [
        f"{_count(diff.other_state, 'row')} in another state",
        f"{_count(diff.other_columns, 'row')} in the same state with other columns",
        f"{diff.a.only:,} only in A",
        f"{diff.b.only:,} only in B",
        f"{_count(len(diff.metadata), 'value')} of the metadata",
    ]
    columns = diff.to_dict()["columns"]
    named = f"; columns: {', '.join(f'{name} {rows:,}' for name, rows in columns.items())}" if columns else ""
    listed = ", ".join(part for part in parts if not part.startswith("0 "))
    return Text(f"different: {listed}; {_count(diff.same, 'row')} equal{named}", style="bold red")


def _only(name: str, side: Side) -> Iterator[Text]:
    for episode, index in side.only_first:
        yield Text(f"only in {name}: ", style="yellow").append(f"{_key(episode, index)}", style="default")
    if side.only > len(side.only_first):
        yield Text(f"and {side.only - len(side.only_first):,} more only in {name}", style="dim")


def _row(row: RowDifference) -> Text:
    what, style = ("another state", "red") if row.other_state else ("same state, other columns", "cyan")
    line = Text(f"{_key(row.episode_id, row.invocation_index)}: ").append(what, style=style)
    for cell in row.cells:
        line.append("\n    " + _cell(cell))
    return line


def _cell(cell: Cell) -> str:
    place = "" if cell.index is None else f"[{cell.index}]"
    a, b = (_value(v, cell, n) for v, n in ((cell.a, cell.length_a), (cell.b, cell.length_b)))
    text = f"{cell.column}{place}: {a} -> {b}"
    if cell.length_a != cell.length_b:
        lengths = ("null" if n is None else f"{n:,}" for n in (cell.length_a, cell.length_b))
        text += f" (length {' -> '.join(lengths)})"
    unit = COLUMN[cell.column].unit
    return text + (f" {unit}" if unit == "nats" else "")


def _value(value: Any, cell: Cell | None = None, length: int | None = None) -> str:
    """A value as JSON writes it; `nothing` beyond the end of a list."""
    if cell is not None and cell.index is not None and length is not None and cell.index >= length:
        return "nothing"
    return printable(json.dumps(value, ensure_ascii=False))


def _key(episode: str, index: int) -> str:
    return f"episode '{printable(episode)}', invocation {index}"


def _skipped(side: Side) -> str:
    if not side.not_compared:
        return ""
    return f"; not compared: {', '.join(printable(name, 40) for name in side.not_compared)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
