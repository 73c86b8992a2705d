"""Scores folders that somebody changed after they were written, hashes and all."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def rewritten(scored: Path, out: Path, change: Callable[[dict[str, Any]], None], row: int | None = None) -> Path:
    """A copy of a scores folder with one row (or every row) of its first shard changed, hashes and all."""
    shutil.copytree(scored, out)
    manifest = json.loads((out / "manifest.json").read_text())
    for part in manifest["files"][: 1 if row is not None else None]:
        old = out / part["name"]
        table = pq.read_table(old)
        rows = table.to_pylist()
        for each in rows if row is None else rows[row : row + 1]:
            change(each)
        changed = pa.Table.from_pylist(rows, table.schema)
        old.unlink()
        new = out / "new.parquet"
        pq.write_table(changed, new)
        name = old.name[: len("shard-000000-")] + hashlib.sha256(new.read_bytes()).hexdigest()[:16] + ".parquet"
        new.rename(out / name)
        part["name"] = name
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def roll(*names: str) -> Callable[[dict[str, Any]], None]:
    """Each of these lists turned by one: every target has its neighbour's value."""

    def change(row: dict[str, Any]) -> None:
        for name in names:
            row[name] = [*row[name][1:], row[name][0]]

    return change


def item(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Item 1 of a list replaced."""

    def change(row: dict[str, Any]) -> None:
        row[name][1] = value

    return change
