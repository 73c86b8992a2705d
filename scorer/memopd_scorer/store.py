"""Writing scores: shards that appear whole or not at all, so that a killed run loses one shard's work.

`memopd_trace.scorefolder` says which files a folder holds, and reads what needs no torch. Continuing a run verifies
every finished shard against the hash in its name and scores the others. Rows are keyed by (episode_id,
invocation_index) and carry the trace row's state digest.

One process is the `lead` of a folder: it begins or continues the run, and finishes it when all shards are there. Where
several work on one run, the others `follow`: each writes shards of its own, and nothing else. A folder in a store
cannot be held by one lead; two that write the same run into it do the work twice and leave the same rows behind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from memopd_scorer.head import Head
from memopd_scorer.headfile import head_is_whole, write_head
from memopd_scorer.job import Planned
from memopd_scorer.plan import Pack
from memopd_scorer.shardrows import shard_rows
from memopd_scorer.signals import Signals
from memopd_trace.errors import InputError, UsageError
from memopd_trace.metadata import ScoresMetadata
from memopd_trace.places import Place, atomic_file, remove_leftovers
from memopd_trace.scorefolder import (
    HEAD,
    OF_ANOTHER_RUN,
    RUN,
    SHARD_NAME,
    measured_kl,
    open_shard,
    read_run,
    run_fault,
    same_run,
    shard_fault,
)
from memopd_trace.storage import MANIFEST, read_manifest

GROUP_BYTES = 4 * 2**20  # of a row group: what a reader holds at a time
OTHER_RUN = "E-SCORES-OTHER-RUN"


def check_folder(folder: Place) -> None:
    """Score only into a new folder, an empty one, or one that holds a run (or shards of one that lost its `run.json`).

    Raises:
        UsageError: it holds other things (a trace, a model), or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file", hint="scores are a folder")
    for name in (RUN, HEAD, MANIFEST):  # to read or write a FIFO would wait for ever
        if (folder / name).exists() and not (folder / name).is_file():
            raise UsageError(f"{folder / name}: is no file", hint="remove it, or score into another folder")
    if not folder.is_dir() or (folder / RUN).is_file():
        return
    names = {f.name for f in folder.iterdir() if f.name != ".lock" and not f.name.endswith(".tmp")}
    shards = {name for name in names if SHARD_NAME.fullmatch(name)}
    others = sorted(names - shards - ({HEAD, MANIFEST} if shards else set()))
    if others:
        raise UsageError(f"{folder}: holds '{others[0]}' but no {RUN}", hint="score into a folder of its own")


def lead(folder: Place, metadata: ScoresMetadata, head: Head, *, repair: bool = False) -> ScoresWriter:
    """Begin or continue a run in a folder, which the caller holds (`memopd_trace.places.exclusive`).

    Verifies every shard that is there, a few MiB in memory at a time (remote ones are fetched for it), and writes the
    run and the head where they are missing.

    Raises:
        InputError: `E-SCORES-OTHER-RUN` when the folder holds another run. Without `repair`, which removes or writes
            anew what is wrong: `E-SCORES-DAMAGED` for a shard that is not of this run or changed, `E-META-INVALID` or
            `E-INCOMPLETE` for a `run.json` that is damaged or missing.
    """
    remove_leftovers(folder)
    _begin(folder, metadata, repair)
    writer = ScoresWriter(folder, metadata, repair=repair)
    writer.verify()
    if metadata.hidden_dtype is not None and not head_is_whole(folder / HEAD, metadata):
        with atomic_file(folder / HEAD) as out:
            write_head(out, head)
    return writer


def follow(folder: Place, metadata: ScoresMetadata, *, repair: bool = False) -> ScoresWriter:
    """Join the run that a lead has begun in a folder, as one more worker; what it verified is not verified again.

    Raises:
        InputError: `E-INCOMPLETE` when there is no run, `E-SCORES-OTHER-RUN` when it is another one.
    """
    fault = _run_fault(folder, metadata)
    if fault is not None:
        raise fault
    return ScoresWriter(folder, metadata, repair=repair)


class ScoresWriter:
    """A folder of a run that was begun: says which shards are finished, and writes others. Made by `lead` or `follow`;
    it knows of the shards that were there when it was made, and of its own."""

    def __init__(self, folder: Place, metadata: ScoresMetadata, *, repair: bool = False) -> None:
        self.folder, self.metadata, self._repair = folder, metadata, repair
        self._there = _shards(folder)
        self._sound: set[Place] = set()  # verified or written by this process

    def verify(self) -> None:
        """Verify every shard, and withdraw a manifest that does not hold.

        Raises:
            InputError: `E-SCORES-DAMAGED`, unless it is to be repaired.
        """
        for file in [file for files in self._there.values() for file in files]:
            fault = shard_fault(file, self.metadata)
            if fault is None:
                self._sound.add(file)
            else:
                self._damaged(file, fault)
        if not self._manifest_holds():
            (self.folder / MANIFEST).unlink(missing_ok=True)

    def left(self, planned: Planned) -> list[int]:
        """The shards of a plan that are not finished. Packs are made anew only for those that are there.

        Raises:
            InputError: as `has`.
        """
        return [n for n in range(len(planned.shards)) if not (self._there.get(n) and self.has(n, planned.shard(n)))]

    def has(self, number: int, packs: list[Pack]) -> bool:
        """Whether shard `number` is finished; its rows must be those of `packs`.

        Raises:
            InputError: `E-SCORES-DAMAGED` when they are not, unless it is to be repaired.
        """
        planned = [(s.episode_id, s.invocation_index, s.digest) for p in packs for s in p.states]
        for file in list(self._there.get(number, ())):
            if _keys(file) != planned:
                self._damaged(file, "its rows are not those of the plan")
        return bool(self._there.get(number))

    def write_shard(self, number: int, packs: Iterable[tuple[Pack, Signals]]) -> None:
        """Write one shard: a row for every state of its packs, in plan order.

        Raises:
            InputError: `E-INCOMPLETE` when the run is gone from the folder.
            OSError: the disk is full or failed; nothing appears.
        """
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
            writer.write_table(table, row_group_size=max(1, table.num_rows * GROUP_BYTES // max(1, table.nbytes)))
        data = sink.getvalue()
        file = self.folder / f"shard-{number:06d}-{hashlib.sha256(data).hexdigest()[:16]}.parquet"
        if not (self.folder / RUN).is_file():  # or the folder would be made anew, with this shard alone in it
            raise InputError(
                f"{self.folder}: {RUN} is gone: was the folder removed meanwhile?",
                code="E-INCOMPLETE",
                hint="run the same command again",
            )
        with atomic_file(file) as out:
            out.write(data)
        self._there[number] = sorted({*self._there.get(number, ()), file}, key=str)
        self._sound.add(file)

    def finish(self, planned: Planned) -> None:
        """Write the manifest over all shards of a plan, whoever wrote them. Only the lead does.

        Where a shard is there twice, both are right, and the first in the order of names is taken; others are removed.

        Raises:
            InputError: `E-SCORES-OTHER-RUN`; `E-INCOMPLETE` when a shard is missing; `E-SCORES-DAMAGED` when one does
                not belong there, unless it is to be repaired, or when the rows are not as many.
        """
        shards = len(planned.shards)
        fault = _run_fault(self.folder, self.metadata)
        if fault is not None:
            raise fault
        self._there = _shards(self.folder)
        for number, files in list(self._there.items()):
            for file in list(files):
                wrong = self._fault_at_the_end(file, number, shards)
                if wrong is not None:
                    self._damaged(file, wrong)
        files = [self._there[n][0] for n in range(shards) if self._there.get(n)]
        if len(files) < shards:
            raise InputError(
                f"{self.folder}: {shards - len(files)} of {shards} shards are missing",
                code="E-INCOMPLETE",
                hint="did a worker end early? run the same command again",
            )
        self._write_manifest(files, planned.plan.invocations)
        for file in {file for files in self._there.values() for file in files}.difference(files):
            file.unlink(missing_ok=True)  # another that finishes the same run removes the same

    def _fault_at_the_end(self, file: Place, number: int, shards: int) -> str | None:
        if number >= shards:
            return f"the plan has only {shards} shards"
        if file in self._sound:
            return None
        alone = len(self._there[number]) == 1  # as another worker put it there: whole
        return run_fault(file, self.metadata) if alone else shard_fault(file, self.metadata)

    def _write_manifest(self, files: list[Place], rows: int) -> None:
        counts = []
        for file in files:
            with open_shard(file) as shard:
                counts.append(shard.metadata.num_rows)
        if sum(counts) != rows:
            raise InputError(
                f"{self.folder}: its shards hold {sum(counts)} rows, the plan {rows}",
                code="E-SCORES-DAMAGED",
                hint="shards of two releases? score into another folder",
            )
        manifest: dict[str, Any] = {
            "format": "memopd-trace-scores",
            "spec_version": self.metadata.spec_version,
            "files": [{"name": f.name, "rows": n} for f, n in zip(files, counts, strict=True)],
            "rows": rows,
            "complete": True,
        }
        if self.metadata.hidden_tier != "exact":
            manifest["hidden_kl"] = measured_kl(files)
        with atomic_file(self.folder / MANIFEST) as out:
            out.write(json.dumps(manifest, indent=1).encode())

    def _manifest_holds(self) -> bool:
        try:
            listed = {part["name"] for part in read_manifest(self.folder)["files"]}
        except InputError:
            return False
        return listed <= {file.name for file in self._sound}

    def _damaged(self, file: Place, fault: str) -> None:
        if not self._repair:
            raise InputError(
                f"{file}: {fault}",
                code="E-SCORES-DAMAGED",
                hint="run the same command with --repair to score this shard again",
            )
        (self.folder / MANIFEST).unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        self._there = {n: [f for f in files if f != file] for n, files in self._there.items()}
        self._sound.discard(file)


def _shards(folder: Place) -> dict[int, list[Place]]:
    """The files with a shard's name, by its number; those of one number in the order of their names."""
    found: dict[int, list[Place]] = {}
    files: list[Place] = sorted(folder.glob("shard-*.parquet"), key=str)
    for file in files:
        name = SHARD_NAME.fullmatch(file.name)
        if name is not None:
            found.setdefault(int(name[1]), []).append(file)
    return found


def _keys(file: Place) -> list[tuple[str, int, bytes]] | None:
    """(episode, invocation, state) of a shard's rows; `None` when they cannot be read."""
    try:
        with open_shard(file) as shard:
            table = shard.read(columns=["episode_id", "invocation_index", "state_digest"]).to_pydict()
    except pa.ArrowException:
        return None
    return list(zip(*table.values(), strict=True))


def _begin(folder: Place, metadata: ScoresMetadata, repair: bool) -> None:
    """See to it that `run.json` is there and says what this run is."""
    fault = _run_fault(folder, metadata)
    if fault is None:
        return
    shards = [file for files in _shards(folder).values() for file in files]
    if shards or (folder / RUN).exists():
        if not repair:
            raise fault
        _check_shards_are_of(folder, shards, metadata, fault)
    with atomic_file(folder / RUN) as out:
        out.write(metadata.model_dump_json(indent=1).encode())


def _check_shards_are_of(folder: Place, shards: list[Place], metadata: ScoresMetadata, fault: InputError) -> None:
    """A `run.json` may be written anew when no whole shard is of another run and, if it can be read, one is of this."""
    faults = {shard_fault(file, metadata) for file in shards}
    readable = fault.code in (OTHER_RUN, "E-VERSION-MAJOR")
    if readable and (OF_ANOTHER_RUN in faults or None not in faults):
        raise fault
    if OF_ANOTHER_RUN in faults:
        raise InputError(f"{folder}: holds shards of another run", code=OTHER_RUN, hint="score into another folder")


def _run_fault(folder: Place, metadata: ScoresMetadata) -> InputError | None:
    """What is wrong with the run that a folder says it holds: missing, unreadable, or another one."""
    try:
        there = read_run(folder)
    except InputError as error:
        hint = f"run the same command with --repair to write {RUN} anew, if its shards are of this run"
        return InputError(error.message, code=error.code, hint=hint)
    if same_run(there, metadata):
        return None
    part = first_difference(there.model_dump(exclude={"producer"}), metadata.model_dump(exclude={"producer"}))
    return InputError(f"{folder}: holds another run: {part}", code=OTHER_RUN, hint="score into another folder")


def first_difference(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> str:
    """The first field that differs, with both values."""
    name = next(key for key in here if there.get(key) != here[key])
    if isinstance(there.get(name), dict) and isinstance(here[name], dict):
        return first_difference(there[name], here[name], f"{prefix}{name}.")
    return f"{prefix}{name} is {there.get(name)!r} there and {here[name]!r} now"
