"""Scores on disk: shards that appear whole or not at all, so that a killed run loses one shard's work.

    run.json                       what the run is (`ScoresMetadata`), written first
    head.safetensors               the teacher's output head, when states are stored
    shard-000003-<sha256>.parquet  a run of consecutive packs; its name carries the first 16 hex digits of its hash
    manifest.json                  files, rows, hashes, `complete: true`; written last

Continuing a run verifies every finished shard against the hash in its name and scores the others. Rows are keyed by
(episode_id, invocation_index) and carry the trace row's state digest.

Shape legend: M targets of a row, K chosen ids, D model width.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save
from torch import Tensor

from memopd_scorer.plan import Pack
from memopd_scorer.signals import Head, Signals
from memopd_trace.conform import iter_list_values
from memopd_trace.errors import InputError, UsageError
from memopd_trace.metadata import ScoresMetadata, check_version, first_error
from memopd_trace.schema import SCORES_COLUMNS
from memopd_trace.storage import MANIFEST, atomic_file, read_manifest

RUN, HEAD, LOCK = "run.json", "head.safetensors", ".lock"
SHARD_BYTES = 32 * 2**20
SHARD_TOKENS = 2**20
SELF_CHECK_ROWS = 8
# |recomputed - stored| in nats that another machine's float32 arithmetic explains
SELF_CHECK_TOLERANCE = 1e-3
_SHARD_NAME = re.compile(r"shard-(\d{6,})-([0-9a-f]{16})\.parquet")


class ScoresWriter:
    """Write or continue a scores folder; one process at a time.

    Raises:
        InputError: `E-SCORES-OTHER-RUN` when the folder holds another run, `E-SCORES-DAMAGED` when a finished shard is
            damaged and `repair` is false.
        UsageError: another process is writing to the folder.
    """

    def __init__(self, folder: Path, metadata: ScoresMetadata, head: Head, *, repair: bool = False) -> None:
        self.folder, self.metadata = folder, metadata
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UsageError(f"{folder}: another process is scoring into it") from None
        self._check_same_run()
        self.finished = self._verified_shards(repair)
        if not (folder / RUN).exists():
            with atomic_file(folder / RUN) as out:
                out.write(metadata.model_dump_json(indent=1).encode())
        if metadata.hidden_dtype is not None and not _head_is_whole(folder / HEAD, metadata):
            with atomic_file(folder / HEAD) as out:
                out.write(save(_head_tensors(head)))

    def write_shard(self, number: int, packs: Iterable[tuple[Pack, Signals]]) -> None:
        """Write one shard: a row for every state of its packs, in plan order."""
        batches = [_batch(pack, signals, self.metadata) for pack, signals in packs]
        sink = pa.BufferOutputStream()
        table = pa.Table.from_batches(batches)
        with pq.ParquetWriter(
            sink,
            table.schema.with_metadata(self.metadata.to_schema_metadata()),
            compression="zstd",
            compression_level=1,
            use_dictionary=["teacher_id", "view"],
            write_page_checksum=True,
        ) as writer:
            writer.write_table(table.replace_schema_metadata(self.metadata.to_schema_metadata()))
        data = sink.getvalue()
        name = f"shard-{number:06d}-{hashlib.sha256(data).hexdigest()[:16]}.parquet"
        with atomic_file(self.folder / name) as out:
            out.write(data)
        self.finished[number] = self.folder / name

    def close(self, *, shards: int | None) -> None:
        """Release the folder; with all `shards` there, write the manifest."""
        if shards is not None:
            files = [self.finished[n] for n in range(shards)]
            rows = [pq.read_metadata(f).num_rows for f in files]
            manifest = {
                "format": "memopd-trace-scores",
                "spec_version": self.metadata.spec_version,
                "files": [{"name": f.name, "rows": r} for f, r in zip(files, rows, strict=True)],
                "rows": sum(rows),
                "complete": True,
            }
            with atomic_file(self.folder / MANIFEST) as out:
                out.write(json.dumps(manifest, indent=1).encode())
        self._lock.close()

    def _check_same_run(self) -> None:
        if not (self.folder / RUN).exists():
            return
        there = read_run(self.folder).model_dump()
        for name, value in self.metadata.model_dump().items():
            if name != "producer" and there[name] != value:
                part = _first_difference(name, there[name], value)
                raise InputError(
                    f"{self.folder}: holds another run: {part}",
                    code="E-SCORES-OTHER-RUN",
                    hint="score into another folder",
                )

    def _verified_shards(self, repair: bool) -> dict[int, Path]:
        finished: dict[int, Path] = {}
        for file in sorted(self.folder.glob("shard-*.parquet")):
            if _shard_is_whole(file):
                finished[_shard_number(file)] = file
            elif repair:
                file.unlink()
                (self.folder / MANIFEST).unlink(missing_ok=True)
            else:
                raise InputError(
                    f"{file}: its bytes do not match the hash in its name",
                    code="E-SCORES-DAMAGED",
                    hint="run the same command with --repair to score this shard again",
                )
        return finished


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
            if not file.is_file() or not _shard_is_whole(file):
                raise InputError(
                    f"{file}: missing or damaged",
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
            if not _head_is_whole(self.folder / HEAD, self.metadata):
                raise InputError(
                    f"{self.folder / HEAD}: missing, or not the head the scores were made with",
                    code="E-SCORES-DAMAGED",
                    hint="run the same `memopd-trace score` again",
                )
            self._head = _load_head(self.folder / HEAD, self.metadata)
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
            if not error <= SELF_CHECK_TOLERANCE:
                raise InputError(
                    f"{self.folder}: episode '{row.episode_id}', invocation {row.invocation_index}: {name} recomputed "
                    f"from state and head is off by {error:.2e} nats (limit {SELF_CHECK_TOLERANCE:.0e})",
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


def read_run(folder: Path) -> ScoresMetadata:
    """What a scores folder's run is.

    Raises:
        InputError: `E-INCOMPLETE`, `E-META-INVALID` or `E-VERSION-MAJOR`.
    """
    try:
        metadata = ScoresMetadata.model_validate_json((folder / RUN).read_bytes())
    except FileNotFoundError:
        raise InputError(f"{folder}: no {RUN}", code="E-INCOMPLETE", hint="it is no scores folder") from None
    except (ValidationError, RecursionError) as error:
        raise InputError(f"{folder / RUN}: {first_error(error)}", code="E-META-INVALID") from None
    check_version(metadata.spec_version, where=str(folder / RUN))
    return metadata


def iter_shards(packs: Iterable[Pack], *, bytes_per_target: int, shard_bytes: int) -> Iterator[list[Pack]]:
    """Runs of consecutive packs of about `shard_bytes` of scores (and at most SHARD_TOKENS packed tokens)."""
    run: list[Pack] = []
    size = tokens = 0
    for pack in packs:
        run.append(pack)
        size += len(pack.target_ids_M) * bytes_per_target
        tokens += len(pack)
        if size >= shard_bytes or tokens >= SHARD_TOKENS:
            yield run
            run, size, tokens = [], 0, 0
    if run:
        yield run


def _batch(pack: Pack, signals: Signals, metadata: ScoresMetadata) -> pa.RecordBatch:
    """One row a state; targets of a state are neighbours in pack order."""
    counts = np.bincount(pack.target_state_M, minlength=len(pack.states))
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    columns: dict[str, pa.Array] = {
        "episode_id": pa.array([s.episode_id for s in pack.states], pa.string()),
        "invocation_index": pa.array([s.invocation_index for s in pack.states], pa.int32()),
        "state_digest": pa.array([s.digest for s in pack.states], pa.binary(32)),
        "teacher_id": pa.array([metadata.teacher_id] * len(pack.states)).dictionary_encode(),
        "view": pa.array([metadata.view] * len(pack.states)).dictionary_encode(),
        "output_index": _lists(offsets, pa.array(pack.target_output_M, pa.int32())),
        "logprob": _lists(offsets, pa.array(signals.logprob_M)),
        "logsumexp": _lists(offsets, pa.array(signals.logsumexp_M)),
        "entropy": _lists(offsets, pa.array(signals.entropy_M)),
    }
    if signals.topk_ids_MK is not None:
        assert signals.topk_logprobs_MK is not None
        columns["topk_ids"] = _lists(offsets, _inner(signals.topk_ids_MK))
        columns["topk_logprobs"] = _lists(offsets, _inner(signals.topk_logprobs_MK))
        columns["tail_logprob"] = _lists(offsets, pa.array(signals.tail_logprob_M))
    if signals.hidden_MD is not None:
        columns["hidden"] = _lists(offsets, _hidden_to_arrow(signals.hidden_MD))
    if signals.logits_MV is not None:
        columns["logits"] = _lists(offsets, _inner(signals.logits_MV))
    return pa.RecordBatch.from_pydict({c.name: columns[c.name] for c in SCORES_COLUMNS if c.name in columns})


def _lists(offsets: pa.Array, values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(offsets, values)


def _inner(values_MK: np.ndarray) -> pa.Array:
    rows, width = values_MK.shape
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * width)
    return pa.ListArray.from_arrays(offsets, pa.array(values_MK.reshape(-1)))


def _hidden_to_arrow(hidden_MD: Tensor) -> pa.Array:
    width = hidden_MD.shape[1]
    flat = hidden_MD.contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.uint16)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.numpy()), width)


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
            flat[name] = iter_list_values(inner)[1].to_numpy().reshape(len(inner), -1)
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


def _head_tensors(head: Head) -> dict[str, Tensor]:
    tensors = {"weight": head.weight_VD.detach().cpu().contiguous()}
    if head.bias_V is not None:
        tensors["bias"] = head.bias_V.detach().cpu().contiguous()
    return tensors


def _load_head(file: Path, metadata: ScoresMetadata) -> Head:
    tensors, info = load_file(file), metadata.teacher.head
    return Head(tensors["weight"], tensors.get("bias"), info.logit_scale, info.softcap, info.size)


def _head_is_whole(file: Path, metadata: ScoresMetadata) -> bool:
    try:
        return _load_head(file, metadata).digest() == metadata.teacher.head.digest
    except Exception:  # whatever is wrong with the file, it is not the head
        return False


def _shard_is_whole(file: Path) -> bool:
    name = _SHARD_NAME.fullmatch(file.name)
    return name is not None and hashlib.sha256(file.read_bytes()).hexdigest()[:16] == name[2]


def _shard_number(file: Path) -> int:
    name = _SHARD_NAME.fullmatch(file.name)
    assert name is not None
    return int(name[1])


def _first_difference(name: str, there: Any, here: Any) -> str:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in here:
            if there.get(key) != here[key]:
                return _first_difference(f"{name}.{key}", there.get(key), here[key])
    return f"{name} is {there!r} there and {here!r} now"
