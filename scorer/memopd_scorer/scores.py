"""Reading scores: rows by invocation, the teacher's head, and the whole vocabulary rebuilt from both.

Nothing is believed: shards are checked against the hash in their name, the head against its digest, and a few rows
against (state, head) on opening.

Shape legend: M targets of a row, K chosen ids, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from memopd_scorer.signals import Head
from memopd_scorer.store import head_is_whole, load_head
from memopd_trace.conform import iter_list_values
from memopd_trace.errors import InputError, UsageError
from memopd_trace.metadata import ScoresMetadata
from memopd_trace.scorefolder import HEAD, read_run, shard_fault
from memopd_trace.storage import read_manifest

SELF_CHECK_ROWS = 8


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRow:
    """One teacher's signals for one invocation; arrays over its M scored tokens, absent signals `None`."""

    episode_id: str
    invocation_index: int
    state_digest: bytes
    output_index: np.ndarray  # int32 [M]
    logprob: np.ndarray  # float32 [M], nats
    logsumexp: np.ndarray  # float32 [M]
    entropy: np.ndarray  # float32 [M], nats
    topk_ids: np.ndarray | None  # int32 [M, K]
    topk_logprobs: np.ndarray | None  # float32 [M, K], nats
    tail_logprob: np.ndarray | None  # float32 [M], nats
    hidden: Tensor | None  # [M, D] in the teacher's dtype
    logits: np.ndarray | None  # float32 [M, size]


class ScoresReader:
    """A finished scores folder: look rows up by (episode_id, invocation_index), rebuild the whole vocabulary.

    Opening recomputes `logsumexp` and `logprob` of a few rows from (state, head) when states are stored.

    Raises:
        InputError: `E-NO-INPUT`, `E-INCOMPLETE`, `E-SCORES-DAMAGED`, `E-SCORES-CHECK`, or a fault of the metadata.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(f"{folder}: no such folder", code="E-NO-INPUT")
        self.metadata = read_run(self.folder)
        self.files = [self.folder / part["name"] for part in read_manifest(self.folder)["files"]]
        self._where: dict[tuple[str, int], tuple[int, int]] = {}
        for number, file in enumerate(self.files):
            fault = shard_fault(file, self.metadata)
            if fault is not None:
                raise InputError(
                    f"{file}: {fault}",
                    code="E-SCORES-DAMAGED",
                    hint="run the same `memopd-trace score` with --repair",
                )
            keys = pq.read_table(file, columns=["episode_id", "invocation_index"]).to_pydict()
            for row, key in enumerate(zip(keys["episode_id"], keys["invocation_index"], strict=True)):
                self._where[key] = (number, row)
        self._head: Head | None = None
        self._loaded: tuple[int, list[ScoreRow]] | None = None
        self._self_check()

    def __len__(self) -> int:
        return len(self._where)

    def get(self, episode_id: str, invocation_index: int) -> ScoreRow | None:
        """The row of an invocation, or `None`. Neighbouring rows come from one read."""
        place = self._where.get((episode_id, invocation_index))
        if place is None:
            return None
        number, row = place
        if self._loaded is None or self._loaded[0] != number:
            self._loaded = number, list(_read_rows(self.files[number], self.metadata))
        return self._loaded[1][row]

    def head(self) -> Head:
        """The teacher's output head, checked against its digest.

        Raises:
            InputError: `E-SCORES-DAMAGED` when the head is missing or is another one.
        """
        if self._head is None:
            if not head_is_whole(self.folder / HEAD, self.metadata):
                raise InputError(
                    f"{self.folder / HEAD}: missing, or not the head the scores were made with",
                    code="E-SCORES-DAMAGED",
                    hint="run the same `memopd-trace score` again",
                )
            self._head = load_head(self.folder / HEAD, self.metadata)
        return self._head

    def logprobs(self, row: ScoreRow, *, chunk: int = 256) -> Iterator[Tensor]:
        """Full-vocabulary log-probabilities of a row, float32 [<= chunk, size] at a time, in target order.

        Raises:
            UsageError: no states are stored.
        """
        if row.hidden is None:
            raise UsageError(f"{self.folder}: no states are stored", hint="score with --signal hidden")
        for start in range(0, len(row.hidden), chunk):
            yield self.head().logits(row.hidden[start : start + chunk]).log_softmax(-1)

    def verify(self, row: ScoreRow, target_ids: np.ndarray | None = None) -> None:
        """Recompute the first scored token of a row from (state, head).

        `target_ids` are the row's sampled ids (int32 [M], from the trace); with them `logprob` is checked as well.

        Raises:
            InputError: `E-SCORES-CHECK` with the difference in nats.
        """
        if row.hidden is None or len(row.hidden) == 0:
            return
        logits = self.head().logits(row.hidden[:1])[0].double()
        logsumexp = float(logits.logsumexp(-1))
        errors = {"logsumexp": abs(logsumexp - float(row.logsumexp[0]))}
        if target_ids is not None:
            errors["logprob"] = abs(float(logits[int(target_ids[0])]) - logsumexp - float(row.logprob[0]))
        for name, error in errors.items():
            if not error <= self.metadata.tolerance:
                raise InputError(
                    f"{self.folder}: episode '{row.episode_id}', invocation {row.invocation_index}: {name} recomputed "
                    f"from state and head is off by {error:.2e} nats (limit {self.metadata.tolerance:.0e})",
                    code="E-SCORES-CHECK",
                    hint="these scores are not of this head and these states; score again",
                )

    def _self_check(self) -> None:
        if self.metadata.hidden_dtype is None:
            return
        keys = list(self._where)
        for key in keys[:: max(1, len(keys) // SELF_CHECK_ROWS)][:SELF_CHECK_ROWS]:
            row = self.get(*key)
            assert row is not None
            self.verify(row)


def _read_rows(file: Path, metadata: ScoresMetadata) -> Iterator[ScoreRow]:
    """The rows of one shard, as views of its columns."""
    table = pq.read_table(file, page_checksum_verification=True).combine_chunks()
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    offsets, output_index = iter_list_values(columns["output_index"])
    flat: dict[str, Any] = {"output_index": output_index.to_numpy()}
    for name in ("logprob", "logsumexp", "entropy", "tail_logprob"):
        flat[name] = iter_list_values(columns[name])[1].to_numpy() if name in columns else None
    for name in ("topk_ids", "topk_logprobs", "logits"):
        flat[name] = None
        if name in columns:
            inner = iter_list_values(columns[name])[1]
            width = metadata.teacher.head.size if name == "logits" else metadata.topk or 0
            flat[name] = iter_list_values(inner)[1].to_numpy().reshape(len(inner), width)
    flat["hidden"] = None
    if "hidden" in columns:
        states = iter_list_values(columns["hidden"])[1]
        flat["hidden"] = _hidden_from_arrow(states, metadata)
    keys = [columns[n].to_pylist() for n in ("episode_id", "invocation_index", "state_digest")]
    for row, (episode_id, index, digest) in enumerate(zip(*keys, strict=True)):
        part = slice(int(offsets[row]), int(offsets[row + 1]))
        arrays: dict[str, Any] = {k: None if v is None else v[part] for k, v in flat.items()}
        yield ScoreRow(episode_id, index, digest, **arrays)


def _hidden_from_arrow(states: pa.Array, metadata: ScoresMetadata) -> Tensor:
    if states.type.list_size != metadata.teacher.head.width:
        raise InputError(
            f"stored states have width {states.type.list_size}, the head takes {metadata.teacher.head.width}",
            code="E-SCORES-DAMAGED",
        )
    flat = torch.from_numpy(states.flatten().to_numpy(zero_copy_only=False).copy())
    if metadata.hidden_dtype == "bfloat16":
        flat = flat.view(torch.bfloat16)
    return flat.reshape(len(states), metadata.teacher.head.width)
