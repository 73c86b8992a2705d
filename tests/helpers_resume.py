"""Runs that are stopped, damaged and continued: a toy teacher, its trace, and folders compared byte for byte."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from helpers_scorer import growing_episode, memory_episode, save_model, tiny_model, write_trace

from memopd_scorer.scoring import score
from memopd_scorer.teacher import LoadedModel, load
from memopd_trace.invocation import Episode
from memopd_trace.scorefolder import SHARD_NAME, open_scores, shard_fault
from memopd_trace.scorefolder import read_run as read_run_of


def episodes(count: int = 4) -> list[Episode]:
    """Memory-rewriting rollouts in groups of two, and one growing history: count * 4 + 4 invocations."""
    rng = np.random.default_rng(1)
    rollouts = [memory_episode(rng, f"m{i}", group=f"g{i // 2}") for i in range(count)]
    return [*rollouts, growing_episode(rng, "grow")]


def make_toy(folder: Path, count: int = 4) -> tuple[Path, Path]:
    """(teacher folder, trace of `episodes(count)`)."""
    model = tiny_model("llama", seed=3)
    teacher = save_model(model, folder / "teacher")
    return teacher, write_trace(folder / "trace.parquet", teacher, model, episodes(count))


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def shards_of(folder: Path) -> list[Path]:
    """The files of a folder that have a shard's name."""
    return sorted(f for f in folder.iterdir() if SHARD_NAME.fullmatch(f.name))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Every stored row of a finished folder, in order, as plain data."""
    return [row for file in open_scores(folder).files for row in pq.read_table(file).to_pylist()]


def check_nothing_is_half_done(folder: Path) -> None:
    """What has its final name is whole, whenever the run was stopped."""
    if (folder / "run.json").exists():
        metadata = read_run_of(folder)
        assert all(shard_fault(file, metadata) is None for file in shards_of(folder))
    else:
        assert not folder.exists() or all(n == ".lock" or n.endswith(".tmp") for n in files_of(folder))


# what a forked process does (`helpers_forks`)


def load_teacher(teacher: str) -> LoadedModel:
    """The teacher, once for all children."""
    return load(teacher)


def score_in_child(teacher: LoadedModel, trace: str, out: str, **options: Any) -> dict[str, int]:
    """Score; how many shards there are, and were scored now."""
    result = score(trace, teacher, out, **options)
    return {"shards": result.shards, "scored": result.shards_scored}


def command_in_child(teacher: LoadedModel, arguments: list[str], errors: str) -> int:
    """The command line with this teacher; its exit code. Its stderr goes to the file `errors`."""
    from memopd_scorer import scoring
    from memopd_trace.cli import main

    scoring.load = lambda *path, **options: teacher  # type: ignore[assignment]
    sys.argv = ["memopd-trace", *arguments]
    with Path(errors).open("w") as sys.stderr:
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0)
    return -1


def command_as_nobody(teacher: LoadedModel, arguments: list[str], errors: str, writable: str) -> int:
    """The same, with `-o` last in `arguments`, by a user who owns nothing, where this is root; who first scores into a
    folder that is `writable`: what Python has yet to import may be out of reach later."""
    assert command_in_child(teacher, [*arguments[:-1], writable], errors) == 0
    os.seteuid(os.geteuid() or 65534)
    return command_in_child(teacher, arguments, errors)
