"""Rows of Parquet files as records, for formats that are kept as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from memopd_trace.convert.losses import Issue
from memopd_trace.convert.records import Record, json_records
from memopd_trace.errors import first_line

PARQUET = ".parquet"
ROWS = 64  # at once in memory


def rows_or_json(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """A record for each row of Parquet files, as JSON would have it: times as ISO 8601 text, maps as objects. Other
    files are read as JSON."""
    for file in files:
        yield from _rows(file) if file.suffix == PARQUET else json_records([file])


def _rows(file: Path) -> Iterator[Record | Issue]:
    number = 0
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(ROWS):
                maps = {field.name for field in batch.schema if pa.types.is_map(field.type)}
                for row in batch.to_pylist():
                    yield Record(f"{file}[{number}]", {name: _plain(v, name in maps) for name, v in row.items()})
                    number += 1
    except (OSError, pa.ArrowException, UnicodeError) as error:
        yield Issue(f"{file}[{number}]", f"cannot be read to its end: {first_line(error)}")


def _plain(value: Any, is_map: bool) -> Any:
    if is_map and value is not None:
        return dict(value)
    return value.isoformat() if isinstance(value, datetime) else value
