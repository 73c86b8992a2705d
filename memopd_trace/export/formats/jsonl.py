"""JSON Lines: the trace itself as text, one line a call, after one line with the file's metadata. Nothing is lost.

    {"memopd_trace": {the file metadata}}
    {"episode_id": "e", "invocation_index": 0, "model_id": "m", "prompt_ids": [1, 2], "output_ids": [3], …}

Null columns are left out, and only those: an empty list stays. Bytes are hex, times ISO 8601, and numbers that JSON
does not have are the texts "-inf", "inf" and "nan". `read_jsonl` gives back the metadata and the rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from memopd_trace.errors import InputError, first_line
from memopd_trace.export.format import Context, Field, Format, Sample, Sink
from memopd_trace.invocation import Invocation, Media, Sampling, Segment
from memopd_trace.metadata import KEY, TraceMetadata, parse_metadata
from memopd_trace.schema import TRACE_COLUMNS, Column

HEAD = KEY.decode()
MAX_LINE = 2**30  # bytes
FIELDS = tuple(Field(c.name, c.type, c.doc, (c.name,)) for c in TRACE_COLUMNS)
STRUCTS = {"segments": Segment, "media": Media}


class JsonlSink:
    """Rows to a file, line by line."""

    def __init__(self, out: IO[bytes], metadata: TraceMetadata) -> None:
        self._out = out
        self._write({HEAD: metadata.model_dump(mode="json")})

    def add(self, sample: Sample) -> None:
        """Take one row."""
        self._write(to_json(sample.invocation))

    def close(self, notes: dict[str, Any]) -> None:
        """Nothing is left to write: a trace needs no notes."""

    def abort(self) -> None:
        """Nothing is held."""

    def _write(self, value: dict[str, Any]) -> None:
        self._out.write(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n")


def to_json(invocation: Invocation) -> dict[str, Any]:
    """A row as plain values."""
    found = {}
    for column in TRACE_COLUMNS:
        value = getattr(invocation, column.name)
        if column.name == "state_digest" and value is None:
            value = invocation.compute_digest()
        if value is not None:
            found[column.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        cells = value.tolist()  # None where it is masked
        finite = value.dtype.kind != "f" or np.isfinite(np.ma.getdata(value)).all()
        return cells if finite else [_plain(cell) for cell in cells]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Segment | Media | Sampling):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


def read_jsonl(path: str | os.PathLike[str]) -> tuple[TraceMetadata, Iterator[Invocation]]:
    """The metadata and the rows of an exported file; `memopd_trace.write(out, *read_jsonl(path))` makes a trace of it.

    Raises:
        InputError: a file that is missing or no export; while iterating, a line that is damaged, with its number.
    """
    file = Path(path)
    try:
        with file.open("rb") as lines:
            head = json.loads(lines.readline(MAX_LINE))[HEAD]
    except FileNotFoundError:
        raise InputError(f"{file}: no such file", code="E-NO-INPUT") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{file}: no export of a trace: {first_line(error)}",
            code="E-UNREADABLE",
            hint=f"its first line holds the metadata under '{HEAD}'",
        ) from None
    metadata = parse_metadata({KEY: json.dumps(head).encode()}, where=str(file))
    return metadata, _rows(file)


def _rows(file: Path) -> Iterator[Invocation]:
    with file.open("rb") as lines:
        lines.readline(MAX_LINE)
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE), b""), 2):
            try:
                yield from_json(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
                raise InputError(f"{file}:{number}: {first_line(error)}", code="E-UNREADABLE") from None


def from_json(row: dict[str, Any]) -> Invocation:
    """The row that `to_json` said; names that are no columns (of a newer minor version, say) are passed over.

    Raises:
        ValueError, TypeError, KeyError: it is another thing.
    """
    known = {c.name: c for c in TRACE_COLUMNS}
    return Invocation(**{name: _read(value, known[name]) for name, value in row.items() if name in known})


def _read(value: Any, column: Column) -> Any:
    if column.name in STRUCTS:
        kind: Any = STRUCTS[column.name]
        return tuple(kind(**{k: bytes.fromhex(v) if k == "sha256" else v for k, v in part.items()}) for part in value)
    if column.name == "sampling":
        return Sampling(**{name: _number(v) for name, v in value.items()})
    if pa.types.is_fixed_size_binary(column.type):
        return bytes.fromhex(value)
    if pa.types.is_timestamp(column.type):
        return datetime.fromisoformat(value)
    if column.name == "rewards":
        return {name: _number(v) for name, v in value.items()}
    if pa.types.is_list(column.type) and pa.types.is_floating(column.type.value_type):
        return [_number(v) for v in value]
    return _number(value) if pa.types.is_floating(column.type) else value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def open_sink(out: Any, context: Context) -> Sink:
    """One text file."""
    return JsonlSink(out, context.metadata)


FORMAT = Format(
    name="jsonl",
    title="the trace itself as JSON Lines, after a line with its metadata",
    fields=FIELDS,
    open=open_sink,
    suffix=".jsonl",
    takes_scores=False,
    lossless=True,
    note="`memopd_trace.export.read_jsonl` reads it back, every column as it was.",
)
