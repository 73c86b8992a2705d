"""What is kept of a trace's rows while they pass, so that views and scores, in any order, can be held against them.

90 bytes a row in memory; 9 bytes an output token in a file without a name, which the system may keep in memory or not.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from memopd_trace.invocation import invocations_from_batch
from memopd_trace.metadata import Model, TraceMetadata
from memopd_trace.places import Place
from memopd_trace.rules.batch import Batch, Ints

ROW = np.dtype(
    [
        ("key", "S16"),  # of episode and index, see `keys_of`
        ("digest", "S32"),  # the state digest: of the file, or computed
        ("row", "<i8"),  # in its file
        ("first", "<i8"),  # its first output token among all
        ("version", "<i8"),  # of the policy, -1 = not given
        ("temperature", "<f4"),  # of sampling, NaN = not given
        ("outputs", "<i4"),
        ("file", "<i4"),
        ("model", "<i2"),  # index into `RowIndex.models`, -1 = unknown
        ("prompt", "?"),  # the prompt holds a token
        ("slots", "?"),  # generated in place
        ("sound", "?"),  # its arrays fit together, so it can be judged
    ]
)
ROWS_AT_ONCE = 4096
TOKEN = np.dtype([("id", "<i4"), ("logprob", "<f4"), ("trained", "?")])  # logprob: recorded and raw, else NaN


class RowIndex:
    """The rows of one trace by (episode_id, invocation_index); rows with a key that came before are left out.

    `models` are those of the metadata, `files` the trace's. Add batches in file order; reading closes it.
    """

    def __init__(self, metadata: TraceMetadata, files: Sequence[Place]) -> None:
        self.metadata, self.files = metadata, files
        self.models: list[Model] = list(metadata.models.values())
        self._parts: list[NDArray[Any]] = []
        self._tokens: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the index
        self._count = 0

    def add(self, batch: Batch, file: int, rows: Ints) -> None:
        """Sound rows and their row numbers in file number `file`."""
        part = self._part(batch.table, file, rows)
        names = pa.array(list(self.metadata.models), pa.string())
        part["model"] = np.asarray(pc.fill_null(pc.index_in(batch.strings("model_id"), names), -1))
        part["digest"] = _digests(batch.table)
        part["outputs"], part["prompt"] = batch.output_lengths, batch.prompt_lengths > 0
        part["first"] = self._count + np.cumsum(batch.output_lengths) - batch.output_lengths
        part["slots"], part["sound"] = batch.given("output_slots"), True
        part["temperature"] = batch.numbers("sampling", "temperature", np.nan)
        part["version"] = batch.numbers("policy_version", default=-1)
        tokens = np.empty(int(batch.output_lengths.sum()), TOKEN)
        tokens["id"], tokens["trained"] = batch.lists("output_ids").values, batch.trained
        recorded = batch.output("output_logprobs")
        raw = recorded.given & batch.equals("logprob_kind", "raw")[batch.row_of_output]
        tokens["logprob"] = np.where(raw, recorded.values, np.nan)
        self._tokens.write(tokens.tobytes())
        self._count += len(tokens)

    def add_unsound(self, table: pa.RecordBatch, file: int, rows: Ints) -> None:
        """Rows that are there and cannot be judged; those without a whole key stay unknown."""
        keyed = np.asarray(pc.and_(table.column("episode_id").is_valid(), table.column("invocation_index").is_valid()))
        self._part(table.filter(pa.array(keyed)), file, rows[keyed])

    def find(self, keys: NDArray[Any]) -> Ints:
        """Indices into `rows` of keys (`keys_of`), -1 where the trace holds no such row."""
        known = self.rows["key"]
        if not len(known):
            return np.full(len(keys), -1, np.int64)
        at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        return np.where(known[at] == keys, at, -1)

    @cached_property
    def rows(self) -> NDArray[Any]:
        """Every row (`ROW`), sorted by key."""
        parts, self._parts = self._parts, []
        rows = np.concatenate(parts) if parts else np.empty(0, ROW)
        _, first = np.unique(rows["key"], return_index=True)
        return rows[first]

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """Every output token (`TOKEN`) of sound rows, in file order."""
        self._tokens.flush()
        return np.memmap(self._tokens, TOKEN, "r") if self._count else np.empty(0, TOKEN)

    def trained(self, size: int) -> NDArray[np.int32]:
        """[rows]: tokens to be trained that a teacher with `size` real ids can score: such an id, after some token."""
        rows, counts = self.rows, np.zeros(len(self.rows), np.int32)
        order = np.argsort(rows["first"], kind="stable")
        order = order[rows["outputs"][order] > 0]
        for start in range(0, len(order), ROWS_AT_ONCE):
            some = order[start : start + ROWS_AT_ONCE]
            first = rows["first"][some]
            tokens = self.tokens[first[0] : first[-1] + rows["outputs"][some[-1]]]
            wanted = tokens["trained"] & (tokens["id"] < size)
            wanted[first - first[0]] &= rows["prompt"][some] | rows["slots"][some]
            bounds = np.stack([first, first + rows["outputs"][some]], axis=1).ravel() - first[0]
            counts[some] = np.add.reduceat(np.r_[wanted, False].astype(np.int32), bounds)[::2]
        return counts

    def _part(self, table: pa.RecordBatch, file: int, rows: Ints) -> NDArray[Any]:
        part = np.zeros(table.num_rows, ROW)
        part["key"], part["file"], part["row"], part["model"] = keys_of(table), file, rows, -1
        self._parts.append(part)
        return part


def keys_of(table: pa.RecordBatch) -> NDArray[Any]:
    """S16[B]: 128 bits of (episode_id, invocation_index)."""
    episodes = table.column("episode_id").to_pylist()
    pairs = zip(episodes, table.column("invocation_index").to_pylist(), strict=True)
    return _fixed((hashlib.blake2b(f"{i} {e}".encode(), digest_size=16).digest() for e, i in pairs), "S16")


def digest_cells(column: pa.Array) -> NDArray[Any]:
    """S32[B]: a digest column, zeros where it is null."""
    return _fixed((d or bytes(32) for d in column.to_pylist()), "S32")


def digest_hex(cell: bytes) -> str:
    """A cell of `digest_cells` in hex; numpy leaves out the zeros at its end."""
    return bytes(cell).ljust(32, b"\0").hex()


def _digests(table: pa.RecordBatch) -> NDArray[Any]:
    column = table.column("state_digest")
    cells = digest_cells(column)
    if column.null_count:
        missing = np.asarray(column.is_null())
        rows = invocations_from_batch(table.filter(pa.array(missing)))
        cells[missing] = [i.compute_digest() for i in rows]
    return cells


def _fixed(values: Iterable[bytes], kind: str) -> NDArray[Any]:
    return np.array(list(values), kind)
