"""Writing scores: shards that appear whole or not at all, so that a killed run loses one shard's work.

`memopd_trace.scorefolder` says which files a folder holds, and reads what needs no torch. Continuing a run verifies
every finished shard against the hash in its name and scores the others. Rows are keyed by (episode_id,
invocation_index) and carry the trace row's state digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file, save
from torch import Tensor

from memopd_scorer.plan import Pack
from memopd_scorer.shardrows import shard_rows
from memopd_scorer.signals import Head, Signals
from memopd_trace.disk import atomic_file
from memopd_trace.errors import InputError, UsageError
from memopd_trace.metadata import ScoresMetadata
from memopd_trace.scorefolder import HEAD, RUN, SHARD_NAME, read_run, shard_fault
from memopd_trace.storage import MANIFEST

SHARD_BYTES = 32 * 2**20
SHARD_TOKENS = 2**18


def check_folder(folder: Path) -> None:
    """Score only into a new folder, an empty one, or one that holds a run.

    Raises:
        UsageError: it holds other things (a trace, a model), or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file", hint="scores are a folder")
    if not folder.is_dir() or (folder / RUN).is_file():
        return
    others = sorted(f.name for f in folder.iterdir() if f.name != ".lock" and not f.name.endswith(".tmp"))
    if others:
        raise UsageError(f"{folder}: holds '{others[0]}' but no {RUN}", hint="score into a folder of its own")


class ScoresWriter:
    """Write or continue a scores folder, which the caller holds (`memopd_trace.disk.exclusive`).

    Raises:
        InputError: `E-SCORES-OTHER-RUN` when the folder holds another run, `E-SCORES-DAMAGED` when a finished shard is
            not of this run, changed, or there twice, and `repair` is false.
    """

    def __init__(self, folder: Path, metadata: ScoresMetadata, head: Head, *, repair: bool = False) -> None:
        self.folder, self.metadata, self._repair = folder, metadata, repair
        self._check_same_run()
        self._finished = self._verified_shards()
        if not (folder / RUN).exists():
            with atomic_file(folder / RUN) as out:
                out.write(metadata.model_dump_json(indent=1).encode())
        if metadata.hidden_dtype is not None and not head_is_whole(folder / HEAD, metadata):
            with atomic_file(folder / HEAD) as out:
                out.write(save(_head_tensors(head)))

    def has(self, number: int, packs: list[Pack]) -> bool:
        """Whether shard `number` is finished; its rows must be those of `packs`."""
        file = self._finished.get(number)
        if file is None:
            return False
        table = pq.read_table(file, columns=["episode_id", "invocation_index", "state_digest"]).to_pydict()
        planned = [(s.episode_id, s.invocation_index, s.digest) for p in packs for s in p.states]
        if list(zip(*table.values(), strict=True)) == planned:
            return True
        self._damaged(file, "its rows are not those of the plan")
        del self._finished[number]
        return False

    def write_shard(self, number: int, packs: Iterable[tuple[Pack, Signals]]) -> None:
        """Write one shard: a row for every state of its packs, in plan order."""
        table = pa.Table.from_batches([shard_rows(pack, signals, self.metadata) for pack, signals in packs])
        table = table.replace_schema_metadata(self.metadata.to_schema_metadata())
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(
            sink,
            table.schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=["teacher_id", "view"],
            write_page_checksum=True,
        ) as writer:
            writer.write_table(table)
        data = sink.getvalue()
        name = f"shard-{number:06d}-{hashlib.sha256(data).hexdigest()[:16]}.parquet"
        with atomic_file(self.folder / name) as out:
            out.write(data)
        self._finished[number] = self.folder / name

    def finish(self, shards: int) -> None:
        """Write the manifest over all `shards`."""
        files = [self._finished[n] for n in range(shards)]
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

    def _verified_shards(self) -> dict[int, Path]:
        finished: dict[int, Path] = {}
        for file in sorted(self.folder.glob("shard-*.parquet")):
            name = SHARD_NAME.fullmatch(file.name)
            if name is None:
                continue
            fault = shard_fault(file, self.metadata)
            if fault is None and int(name[1]) in finished:
                fault = f"{finished[int(name[1])].name} is there as well"
            if fault is None:
                finished[int(name[1])] = file
            else:
                self._damaged(file, fault)
        return finished

    def _damaged(self, file: Path, fault: str) -> None:
        if not self._repair:
            raise InputError(
                f"{file}: {fault}",
                code="E-SCORES-DAMAGED",
                hint="run the same command with --repair to score this shard again",
            )
        (self.folder / MANIFEST).unlink(missing_ok=True)
        file.unlink()


def iter_shards(
    packs: Iterable[Pack], *, bytes_per_target: int, shard_bytes: int, shard_tokens: int = SHARD_TOKENS
) -> Iterator[list[Pack]]:
    """Runs of consecutive packs that reach `shard_bytes` of scores or `shard_tokens` packed tokens."""
    run: list[Pack] = []
    size = tokens = 0
    for pack in packs:
        run.append(pack)
        size += len(pack.target_ids_M) * bytes_per_target
        tokens += len(pack)
        if size >= shard_bytes or tokens >= shard_tokens:
            yield run
            run, size, tokens = [], 0, 0
    if run:
        yield run


def _head_tensors(head: Head) -> dict[str, Tensor]:
    tensors = {"weight": head.weight_VD.detach().cpu().contiguous()}
    if head.bias_V is not None:
        tensors["bias"] = head.bias_V.detach().cpu().contiguous()
    return tensors


def load_head(file: Path, metadata: ScoresMetadata) -> Head:
    """The head in a file, unchecked."""
    tensors, info = load_file(file), metadata.teacher.head
    return Head(tensors["weight"], tensors.get("bias"), info.logit_scale, info.softcap, info.size)


def head_is_whole(file: Path, metadata: ScoresMetadata) -> bool:
    """Whether a file holds the very head of the metadata."""
    try:
        return load_head(file, metadata).digest() == metadata.teacher.head.digest
    except Exception:  # whatever is wrong with the file, it is not the head
        return False


def _first_difference(name: str, there: Any, here: Any) -> str:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in here:
            if there.get(key) != here[key]:
                return _first_difference(f"{name}.{key}", there.get(key), here[key])
    return f"{name} is {there!r} there and {here!r} now"
