"""Damage every vector in every storage, over and over: the validator must end with exit code 0, 1 or 3, each time.

    python tests/fuzz_vectors.py [--trials 100000] [--seed 0] [--jobs 1] [--keep FOLDER] [--only TRIAL]

A trial is a function of (seed, number): which file, which mutation, which bytes. Worker processes run under a limit of
address space and a watchdog; one that crashes, hangs or is killed costs its trial a failure and is started again behind
it. Failures are kept as files; `--only` runs one trial again in this process. Exit code 1 if any trial failed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fuzz_mutations import MUTATIONS, aims_at
from helpers_trace import VECTORS, build, builder

from memopd_trace import validate
from memopd_trace.cli import run
from memopd_trace.cli.validate import ReportFormat

MEMORY = 2 * 2**30  # address space above what a worker has after its imports
GROWTH = 512 * 2**20  # resident memory that one trial may add at its peak
SECONDS = 20.0  # after which a trial counts as hanging; other work on the machine counts too
SLOW = 5.0  # of processor time
FORMATS = ("text", "json", "text", "junit", "text", "json", "text", "github", "text", "sarif", "text")
COMMAND = 20  # every so many trials the whole command is run
BAD_WORDS = ("Traceback", "internal error", "alloc of size", "does not fit into memory", "out of memory", "bad_alloc")


@dataclass(frozen=True, slots=True)
class Sound:
    """A vector as files, before it is damaged: `files` by name; a single file has the name it is validated under."""

    name: str
    profile: str
    folder: bool
    files: dict[str, bytes]


@dataclass(slots=True)
class Tally:
    """What the trials came to."""

    exits: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    mutations: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, int] = (0.0, -1)
    peak: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)


def corpus(folder: Path) -> list[Sound]:
    """Every vector as Parquet, IPC and a folder, and the valid ones in the encodings other writers choose as well."""
    found = []
    for kind in ("valid", "invalid", "future"):
        for path in sorted((VECTORS / kind).glob("*.json")):
            vector = builder.load(path)
            stored = vector.get("storage", "parquet")
            own = stored == "folder" or "doubled" in vector  # of another storage it would be another vector
            for storage in (stored,) if own else ("parquet", "ipc", "folder"):
                if vector.get("absent") or (storage == "folder" and vector.get("damage")):
                    continue
                parts = vector.get("parts") or [len(vector["rows"])]
                place = folder / kind / storage / path.stem
                place.mkdir(parents=True)
                built = build({**vector, "storage": storage, "parts": parts}, place)
                found.append(_sound(f"{path.stem}.{storage}", vector["profile"], built))
                if kind == "valid" and storage == "parquet":
                    found += _variants(path.stem, vector["profile"], built)
    return found


def _sound(name: str, profile: str, built: Path) -> Sound:
    paths = sorted(built.iterdir()) if built.is_dir() else [built]
    return Sound(name, profile, built.is_dir(), {p.name: p.read_bytes() for p in paths})


def _variants(name: str, profile: str, built: Path) -> Iterator[Sound]:
    """One table as other writers store it."""
    table = pq.read_table(built)
    plain = {"use_dictionary": False, "write_statistics": False}
    for label, options in {
        "zstd": {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True, "row_group_size": 2},
        "v2": {"compression": "lz4", "data_page_version": "2.0", "data_page_size": 16, "write_page_index": True},
        "gzip": {"compression": "gzip", "version": "1.0", "row_group_size": 1},
        "brotli": {"compression": "brotli", **plain, "column_encoding": _delta(table.schema)},
        "none": {"compression": "none", "store_schema": False},
    }.items():
        with contextlib.suppress(pa.ArrowNotImplementedError):  # older formats lack some types
            pq.write_table(table, built, **options)
            yield _sound(f"{name}.{label}", profile, built)
    for codec in ("zstd", "lz4"):
        options = pa.ipc.IpcWriteOptions(compression=codec, unify_dictionaries=True)
        path = built.with_suffix(".arrow")
        with pa.ipc.new_file(str(path), table.schema, options=options) as writer:
            for row in range(len(table)):
                writer.write_table(table.slice(row, 1).combine_chunks())
        yield _sound(f"{name}.ipc-{codec}", profile, path)


def _delta(schema: pa.Schema) -> dict[str, str]:
    """A delta or split encoding for each leaf column that has one."""
    chosen = {}
    for leaf in _leaves(schema):
        kind = leaf[1]
        if pa.types.is_integer(kind):
            chosen[leaf[0]] = "DELTA_BINARY_PACKED"
        elif pa.types.is_string(kind):
            chosen[leaf[0]] = "DELTA_BYTE_ARRAY" if len(leaf[0]) % 2 else "DELTA_LENGTH_BYTE_ARRAY"
        elif pa.types.is_floating(kind):
            chosen[leaf[0]] = "BYTE_STREAM_SPLIT"
    return chosen


def _leaves(fields: Any, prefix: str = "") -> Iterator[tuple[str, pa.DataType]]:
    for f in fields:
        kind = f.type
        if pa.types.is_dictionary(kind):
            continue  # Arrow decodes them from plain or dictionary pages only
        if pa.types.is_list(kind):
            yield from _leaves([pa.field("element", kind.value_type)], f"{prefix}{f.name}.list.")
        elif pa.types.is_map(kind):
            entries = [pa.field("key", kind.key_type), pa.field("value", kind.item_type)]
            yield from _leaves(entries, f"{prefix}{f.name}.key_value.")
        elif pa.types.is_struct(kind):
            yield from _leaves(list(kind), f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, kind


def damaged(sounds: list[Sound], seed: int, trial: int) -> tuple[Sound, str, str, bytes]:
    """What a trial does: the vector, which of its files, the mutation's name, and that file's new bytes."""
    rng = random.Random(f"{seed}:{trial}")
    sound, other = rng.choice(sounds), rng.choice(sounds)
    name = rng.choice(list(sound.files))
    data = sound.files[name]
    apt = {n: weight for n, (_, weight) in MUTATIONS.items() if aims_at(n, data)}
    chosen = rng.choices(list(apt), list(apt.values()))[0]
    return sound, name, chosen, MUTATIONS[chosen][0](rng, data, rng.choice(list(other.files.values())))


def put(folder: Path, sound: Sound, name: str, data: bytes) -> Path:
    """The damaged vector on disk; returns the path to validate."""
    if sound.folder:
        shutil.rmtree(folder / "trace", ignore_errors=True)
        (folder / "trace").mkdir(parents=True)
        for other, content in sound.files.items():
            (folder / "trace" / other).write_bytes(content)
        (folder / "trace" / name).write_bytes(data)
        return folder / "trace"
    (folder / name).write_bytes(data)
    return folder / name


def judge(path: Path, profile: str, output: str, *, command: bool) -> tuple[int, str, str]:
    """(exit code, report, stderr) of the validator in this process: of the whole command, or (four times as fast) of
    what it does with its arguments. A warning of a library counts as an error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("error")
        if command:
            code = run(["validate", str(path), "--profile", profile, "--format", output, "--no-config"])
            return code, out.getvalue(), err.getvalue()
        try:
            report = validate(path, profile)
            return report.exit_code(), report.render(output), err.getvalue()
        except Exception:
            return 4, "", traceback.format_exc()


def fault(code: int, out: str, err: str, seconds: float, growth: int) -> str | None:
    """Why the outcome of a trial is none that the validator may have."""
    if code not in (0, 1, 3):
        return f"exit {code}: {err.strip()[-600:]}"
    if err:
        return f"stderr: {err.strip()[:300]}"
    if word := next((w for w in BAD_WORDS if w in out), None):
        return f"'{word}' in the report: {out[:300]}"
    if growth > GROWTH:
        return f"memory grew by {growth >> 20} MiB"
    return f"slow: {seconds:.1f} s" if seconds > SLOW else None


def codes_of(output: str, out: str) -> list[str]:
    """The codes that a report names as found."""
    if output == "json":
        return [r["code"] for r in json.loads(out)["rules"] if r["count"]]
    return re.findall(r"(?:error|warning)\[([A-Z0-9-]+)\]", out) if output == "text" else []


def formats() -> list[str]:
    """The formats of `FORMATS` that the command has."""
    return [f for f in FORMATS if f in {*ReportFormat}]


def work(sounds: list[Sound], folder: Path, seed: int, trials: range) -> None:
    """Run trials in this process, one line of JSON on stdout each; it may die on the way."""
    answers = sys.stdout
    choices = formats()
    shown = judge(put(folder, sounds[0], *next(iter(sounds[0].files.items()))), sounds[0].profile, "text", command=True)
    assert shown[0] in (0, 1, 3), shown
    limit_memory()
    faulthandler.enable()
    for trial in trials:
        sound, name, mutation, data = damaged(sounds, seed, trial)
        path = put(folder, sound, name, data)
        before, began = peak(), time.process_time()
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        output = choices[trial % len(choices)]
        code, out, err = judge(path, sound.profile, output, command=trial % COMMAND == 0)
        faulthandler.cancel_dump_traceback_later()
        seconds, top = time.process_time() - began, peak()
        why = fault(code, out, err, seconds, top - before)
        found = codes_of(output, out) if not why else []
        line = {"trial": trial, "exit": code, "codes": found, "seconds": seconds, "peak": top, "why": why}
        answers.write(json.dumps({**line, "mutation": mutation, "vector": sound.name}) + "\n")
        answers.flush()


def limit_memory() -> None:
    """From here on, this process may take `MEMORY` more address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def peak() -> int:
    """Most resident memory of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Fuzz:
    """All trials, over worker processes."""

    def __init__(
        self, sounds: list[Sound], seed: int, keep: Path, folder: Path, worker: Sequence[str] = (__file__, "--worker")
    ) -> None:
        self.sounds, self.seed, self.keep, self.folder, self.worker = sounds, seed, keep, folder, worker
        self.tally, self.lock = Tally(), threading.Lock()
        (folder / "corpus.pickle").write_bytes(pickle.dumps(sounds))

    def run(self, trials: int, jobs: int) -> Tally:
        """Run trials 0 to `trials` - 1 and count what they come to."""
        slots = [threading.Thread(target=self._slot, args=(range(job, trials, jobs),)) for job in range(jobs)]
        for slot in slots:
            slot.start()
        for slot in slots:
            slot.join()
        return self.tally

    def _slot(self, trials: range) -> None:
        while trials:
            done = self._worker(trials)
            trials = trials[done:]

    def _worker(self, trials: range) -> int:
        """Run a worker until it ends; returns how many trials are done with, the one that killed it included."""
        folder = self.folder / f"worker-{trials.start}-{time.monotonic_ns()}"
        folder.mkdir()
        task = [str(self.folder / "corpus.pickle"), str(folder), str(self.seed)]
        task += [str(trials.start), str(trials.stop), str(trials.step)]
        done = 0
        with tempfile.TemporaryFile("w+") as log:
            command = [sys.executable, *self.worker, *task]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    self._count(json.loads(line))
                    done += 1
            log.seek(0)
            if done < len(trials):
                self._died(trials[done], process.returncode, log.read())
                done += 1
        shutil.rmtree(folder)
        return done

    def _count(self, line: dict[str, Any]) -> None:
        with self.lock:
            tally = self.tally
            tally.exits[str(line["exit"])] += 1
            tally.codes.update(set(line["codes"]))
            tally.mutations[line["mutation"]] += 1
            tally.slowest = max(tally.slowest, (line["seconds"], line["trial"]))
            tally.peak = max(tally.peak, line["peak"])
            if not (done := sum(tally.exits.values())) % 10_000:
                print(f"{done:,} trials", flush=True)
            if line["why"]:
                self._fail(line["trial"], line["why"])

    def _died(self, trial: int, status: int, log: str) -> None:
        why = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
        why = f"no answer after {SECONDS} s" if "Timeout" in log else why
        with self.lock:
            self.tally.exits["died"] += 1
            self._fail(trial, f"{why}\n{log[-1500:]}")

    def _fail(self, trial: int, why: str) -> None:
        sound, name, mutation, data = damaged(self.sounds, self.seed, trial)
        place = self.keep / f"{self.seed}-{trial}"
        place.mkdir(parents=True, exist_ok=True)
        put(place, sound, name, data)
        self.tally.failures.append({"trial": trial, "vector": sound.name, "mutation": mutation, "why": why})
        (place / "why.txt").write_text(f"{sound.name} {sound.profile} {mutation}\n{why}\n")
        print(f"FAILED trial {trial} ({sound.name}, {mutation}): {why.splitlines()[0]}", flush=True)


def summary(tally: Tally, seconds: float) -> str:
    """The table that the script prints."""
    trials = sum(tally.exits.values())
    lines = [
        f"trials      {trials:,} in {seconds:.0f} s",
        "exit codes  " + ", ".join(f"{code}: {count:,}" for code, count in sorted(tally.exits.items())),
        f"codes seen  {len(tally.codes)}: " + ", ".join(f"{c} {n}" for c, n in tally.codes.most_common()),
        "mutations   " + ", ".join(f"{m} {n:,}" for m, n in tally.mutations.most_common()),
        f"slowest     {tally.slowest[0]:.2f} s (trial {tally.slowest[1]})",
        f"peak memory {tally.peak >> 20} MiB",
        f"failures    {len(tally.failures)}",
    ]
    return "\n".join(lines)


def fuzz(trials: int, seed: int, jobs: int, keep: Path) -> Tally:
    """Run trials and return what they came to; files of failures go to `keep`."""
    with tempfile.TemporaryDirectory() as scratch:
        return Fuzz(corpus(Path(scratch) / "sound"), seed, keep, Path(scratch)).run(trials, jobs)


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        corpus_file, folder, seed, *numbers = sys.argv[2:]
        work(pickle.loads(Path(corpus_file).read_bytes()), Path(folder), int(seed), range(*map(int, numbers)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as scratch:
            sound, name, mutation, data = damaged(corpus(Path(scratch)), options.seed, options.only)
        path = put(options.keep, sound, name, data)
        print(sound.name, mutation, path)
        print(*judge(path, sound.profile, "text", command=True))
        return 0
    began = time.monotonic()
    tally = fuzz(options.trials, options.seed, options.jobs, options.keep)
    print(summary(tally, time.monotonic() - began))
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
