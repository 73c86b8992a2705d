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
import pyarrow.parquet as pq
from pydantic import ValidationError

from memopd_trace.arrowfile import file_schema
from memopd_trace.errors import InputError
from memopd_trace.metadata import MAX_METADATA_BYTES, SCORES_KEY, ScoresMetadata, check_version, first_error
from memopd_trace.places import Place, file_sha256, open_arrow
from memopd_trace.storage import read_manifest, trace_files

RUN, HEAD = "run.json", "head.safetensors"
OF_ANOTHER_RUN = "it is a shard of another run"
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
    if trace_files(folder) == [folder]:
        raise InputError(f"{folder}: is a file", code="E-UNREADABLE", hint="scores are a folder")
    manifest = read_manifest(folder)
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

    Reads all of it, a chunk at a time: a remote shard is fetched.
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
