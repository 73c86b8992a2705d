"""A scores folder, on disk or in a store, as far as it can be read without the teacher's head (no torch).

run.json                       what the run is (`ScoresMetadata`), written first
head.safetensors               the teacher's output head, when states are stored
shard-000003-<sha256>.parquet  a run of consecutive packs; its name carries the first 16 hex digits of its hash
manifest.json                  files, rows, `complete: true`; written last
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from memopd_trace.arrowfile import file_schema
from memopd_trace.conform import Misfit, conform_batch
from memopd_trace.errors import InputError
from memopd_trace.metadata import MAX_METADATA_BYTES, SCORES_KEY, ScoresMetadata, check_version, first_error
from memopd_trace.places import Place, file_sha256, open_arrow
from memopd_trace.schema import SCORES_COLUMNS
from memopd_trace.storage import read_manifest, trace_files

RUN, HEAD = "run.json", "head.safetensors"
OF_ANOTHER_RUN = "it is a shard of another run"
PLAIN_COLUMNS = [c for c in SCORES_COLUMNS if c.name != "hidden"]  # its type is the run's, see `_states`
STATE_VALUES = {
    "float64": pa.float64(),
    "float32": pa.float32(),
    "float16": pa.float16(),
    "bfloat16": pa.uint16(),
    "int8": pa.int8(),
}
SHARD_NAME = re.compile(r"shard-(\d{6,})-([0-9a-f]{16})\.parquet")


@dataclass(frozen=True, slots=True)
class ScoresFolder:
    """A finished scores folder: its metadata, its manifest, and the shards that it lists, in order."""

    path: Place
    metadata: ScoresMetadata
    manifest: dict[str, Any]
    files: tuple[Place, ...]

    @property
    def rows(self) -> int:
        """How many rows the manifest says that there are; 0 where it is no number."""
        rows = self.manifest.get("rows")
        return rows if isinstance(rows, int) else 0


def open_scores(folder: Place) -> ScoresFolder:
    """A scores folder whose manifest is complete.

    Raises:
        InputError: `E-NO-INPUT`, `E-UNREADABLE` (it is a file), `E-INCOMPLETE`, `E-META-INVALID`, `E-VERSION-MAJOR`.
    """
    try:
        if trace_files(folder) == [folder]:
            raise InputError(f"{folder}: is a file", code="E-UNREADABLE", hint="scores are a folder")
        manifest = read_manifest(folder)
    except InputError as error:
        if error.code != "E-INCOMPLETE":
            raise
        begun = (folder / RUN).is_file()
        hint = "scores are unfinished: run the same `memopd-trace score` again" if begun else "it is no scores folder"
        raise InputError(error.message, code=error.code, hint=hint) from None
    return ScoresFolder(folder, read_run(folder), manifest, tuple(folder / part["name"] for part in manifest["files"]))


def read_run(folder: Place) -> ScoresMetadata:
    """What a scores folder's run is.

    Raises:
        InputError: `E-INCOMPLETE`, `E-META-INVALID` or `E-VERSION-MAJOR`.
    """
    file = folder / RUN
    if not file.is_file():  # reading a FIFO would wait for ever
        raise InputError(f"{folder}: no {RUN}", code="E-INCOMPLETE", hint="it is no scores folder")
    try:
        if file.stat().st_size > MAX_METADATA_BYTES:
            raise ValueError(f"{file.stat().st_size} bytes, limit {MAX_METADATA_BYTES}")
        metadata = ScoresMetadata.model_validate_json(file.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{file}: {first_error(error)}", code="E-META-INVALID") from None
    check_version(metadata.spec_version, where=str(file))
    return metadata


def shard_fault(file: Place, metadata: ScoresMetadata) -> str | None:
    """What is wrong with a shard: its bytes do not match the hash in its name, or it is of another run.

    Reads all of it, a few MiB at a time: a remote shard is fetched.
    """
    name = SHARD_NAME.fullmatch(file.name)
    if name is None or not file.is_file() or file_sha256(file)[:16] != name[2]:
        return "missing, or its bytes do not match the hash in its name"
    return run_fault(file, metadata)


def run_fault(file: Place, metadata: ScoresMetadata) -> str | None:
    """What is wrong with a shard as far as its footer says: it is no Parquet file, or of another run."""
    try:
        raw = (file_schema(file).metadata or {}).get(SCORES_KEY, b"")
        theirs = ScoresMetadata.model_validate_json(raw)
    except (InputError, ValidationError, RecursionError) as error:
        return f"it is no shard: {first_error(error)}"
    return None if same_run(theirs, metadata) else OF_ANOTHER_RUN


def same_run(a: ScoresMetadata, b: ScoresMetadata) -> bool:
    """Whether two runs can continue each other: all but the producer is equal."""
    return a.model_copy(update={"producer": b.producer}) == b


def open_shard(file: Place) -> pq.ParquetFile:
    """A shard, open for reading columns whole: in few requests where it is remote. Close it after use."""
    return pq.ParquetFile(open_arrow(file), pre_buffer=True, page_checksum_verification=True)


def measured_kl(files: Iterable[Place]) -> dict[str, float] | None:
    """`mean` and `max`, in nats, of what a tier cost at the targets of shards; `None` where there is no target."""
    total, largest, count = 0.0, 0.0, 0
    for file in files:
        with open_shard(file) as shard:
            kl_M = shard.read(columns=["hidden_kl"]).column(0).combine_chunks().flatten().to_numpy()
        if len(kl_M):
            total += float(kl_M.sum(dtype=np.float64))
            largest, count = max(largest, float(kl_M.max())), count + len(kl_M)
    return {"mean": total / count, "max": largest} if count else None


def conform_scores(raw: pa.RecordBatch, run: ScoresMetadata) -> tuple[pa.RecordBatch, list[Misfit]]:
    """The batch with every declared column, and what does not fit the table or the run."""
    table, misfits = conform_batch(raw, PLAIN_COLUMNS)
    names = raw.schema.names
    for name in run.signal_columns:
        if name not in names:
            misfits.append(Misfit(name, "missing", "the run's signals " + ", ".join(run.signals), "no such column"))
    if run.hidden_dtype is None or "hidden" not in names:
        return table, misfits
    if names.count("hidden") > 1:
        return table, [*misfits, Misfit("hidden", "missing", "one column of states", "the name twice")]
    states, misfit = _states(raw.column("hidden"), run)
    if misfit is not None:
        return table, [*misfits, misfit]
    return table.append_column("hidden", states), misfits


def _states(column: pa.Array, run: ScoresMetadata) -> tuple[pa.Array, Misfit | None]:
    """The states as they are, if they are lists of the run's type and width."""
    width, value = run.teacher.head.width, STATE_VALUES[run.hidden_type or ""]
    kind = column.type
    fits = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_fixed_size_list(kind.value_type)
    fits = fits and kind.value_type.list_size == width and kind.value_type.value_type == value
    if fits and not _has_nulls(column):
        return column, None
    actual = str(kind) if not fits else "a null among the states"
    return column, Misfit("hidden", "type", f"list<fixed_size_list<{value}>[{width}]>", actual)


def _has_nulls(column: pa.Array) -> bool:
    states = column.flatten()
    return bool(column.null_count or states.null_count or states.flatten().null_count)
