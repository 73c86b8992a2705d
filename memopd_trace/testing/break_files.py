"""Mutations of whole files: columns, metadata, bytes, folders."""

# ruff: noqa: D103 - the code that each function is tied to says what it breaks
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from memopd_trace.limits import MAX_COLUMNS
from memopd_trace.metadata import KEY, TraceMetadata
from memopd_trace.places import file_sha256
from memopd_trace.schema import FEATURES
from memopd_trace.storage import MANIFEST
from memopd_trace.testing.mutation import Rows, breaks

Document = dict[str, Any]


@breaks("W-NO-ROWS")
def no_row(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return []


@breaks("E-COLUMN-MISSING", "table")
def outputs_dropped(table: pa.Table) -> pa.Table:
    return table.drop_columns(["output_ids"])


@breaks("E-COLUMN-TWICE", "table")
def column_twice(table: pa.Table) -> pa.Table:
    return table.append_column(table.schema.field("task_id"), table.column("task_id"))


@breaks("E-COLUMN-TYPE", "table")
def ids_of_64_bits(table: pa.Table) -> pa.Table:
    return _cast(table, "prompt_ids", pa.list_(pa.int64()))


@breaks("E-COLUMN-TYPE", "table")
def reward_as_text(table: pa.Table) -> pa.Table:
    return _cast(table, "reward", pa.string())


def _cast(table: pa.Table, name: str, kind: pa.DataType) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, table.column(name).cast(kind))


@breaks("W-COLUMN-UNKNOWN", "table")
def misspelt_column(table: pa.Table) -> pa.Table:
    return table.append_column("rewrd", pa.nulls(len(table), pa.float64()))


@breaks("E-LIMIT", "table")
def columns_without_end(table: pa.Table) -> pa.Table:
    wide = pa.struct([pa.field(f"f{number}", pa.bool_()) for number in range(MAX_COLUMNS + 1)])
    return table.append_column("x_wide", pa.nulls(len(table), wide))


def _null(table: pa.Table, name: str) -> pa.Table | None:
    """The column without its last value."""
    field = table.schema.field(name)
    column = pa.concat_arrays([table.column(name).combine_chunks()[:-1], pa.nulls(1, field.type)])
    return table.set_column(table.schema.get_field_index(name), field.with_nullable(True), column)


@breaks("E-NULL", "table")
def episode_unknown(table: pa.Table) -> pa.Table | None:
    return _null(table, "episode_id")


@breaks("E-NULL", "table")
def prompt_unknown(table: pa.Table) -> pa.Table | None:
    return _null(table, "prompt_ids")


@breaks("E-META-MISSING", "table")
def metadata_dropped(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata(None)


@breaks("E-META-INVALID", "metadata")
def producer_lost(document: Document) -> Document:
    return {key: value for key, value in document.items() if key != "producer"}


@breaks("E-VERSION-MAJOR", "metadata")
def major_version_of_the_future(document: Document) -> Document:
    return document | {"spec_version": "2.0"}


@breaks("W-VERSION-MINOR", "metadata")
def minor_version_of_the_future(document: Document) -> Document:
    return document | {"spec_version": "1.999"}


@breaks("E-FEATURE-UNKNOWN", "metadata")
def feature_of_the_future(document: Document) -> Document:
    return document | {"required_features": ["telepathy"]}


@breaks("E-FEATURE-UNDECLARED", "metadata")
def feature_kept_quiet(document: Document) -> Document | None:
    features = document["required_features"]
    return document | {"required_features": features[1:]} if set(features) & set(FEATURES) else None


def _tokenizer(document: Document, **changes: Any) -> Document:
    """The document with changes to the first model's tokenizer."""
    name, model = next(iter(document["models"].items()))
    changed = model | {"tokenizer": model["tokenizer"] | changes}
    return document | {"models": document["models"] | {name: changed}}


@breaks("E-TOKENIZER-SIZE", "metadata")
def tokenizer_wider_than_its_model(document: Document) -> Document:
    width = next(iter(document["models"].values()))["tokenizer"]["vocab_size"]
    return _tokenizer(document, size=width + 1)


@breaks("E-SPECIAL-ID", "metadata")
def padding_id_of_minus_one(document: Document) -> Document:
    return _tokenizer(document, pad_id=-1)


@breaks("E-NO-INPUT", "file")
def file_gone(path: Path) -> Path:
    path.unlink()
    return path


@breaks("E-UNREADABLE", "file")
def file_cut(path: Path) -> Path:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


@breaks("E-INCOMPLETE", "folder")
def manifest_not_written(path: Path) -> Path:
    (path / MANIFEST).unlink()
    return path


@breaks("E-INCOMPLETE", "folder")
def part_gone(path: Path) -> Path:
    (path / "part-00000.parquet").unlink()
    return path


def _edit_manifest(path: Path, part: int, entry: Document, **totals: Any) -> Path:
    """Change the manifest's entry of a part, and its totals."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"][part] |= entry
    (path / MANIFEST).write_text(json.dumps(manifest | totals), encoding="utf-8")
    return path


@breaks("E-MANIFEST-ROWS", "folder")
def rows_of_a_part_miscounted(path: Path) -> Path:
    return _edit_manifest(path, 0, {"rows": 1000})


@breaks("E-MANIFEST-EPISODES", "folder")
def episodes_miscounted(path: Path) -> Path:
    return _edit_manifest(path, 0, {}, episodes=1000)


@breaks("E-MANIFEST-SHA256", "folder")
def part_replaced(path: Path) -> Path:
    return _edit_manifest(path, 0, {"sha256": "0" * 64})


@breaks("W-MANIFEST-STRAY", "folder")
def part_left_over(path: Path) -> Path:
    shutil.copy(path / "part-00000.parquet", path / "part-99999.parquet")
    return path


@breaks("E-PART-METADATA", "folder")
def part_of_another_producer(path: Path) -> Path | None:
    second = path / "part-00001.parquet"
    if not second.exists():
        return None
    table = pq.read_table(second)
    document = json.loads(table.schema.metadata[KEY]) | {"producer": {"name": "another"}}
    pq.write_table(table.replace_schema_metadata({KEY: json.dumps(document)}), second)
    return _edit_manifest(path, 1, {"sha256": file_sha256(second)})
