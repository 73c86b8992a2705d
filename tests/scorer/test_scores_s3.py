"""Scores in an object store, against a local server that speaks S3: written, continued, repaired, read, trained on."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_forks import Forks
from helpers_resume import files_of, make_toy
from pyarrow import fs

from memopd_scorer.job import Job
from memopd_scorer.run import Run
from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_scorer.store import follow, lead
from memopd_scorer.teacher import LoadedModel, load
from memopd_trace.cli import run
from memopd_trace.errors import InputError, UsageError
from memopd_trace.metadata import ScoresMetadata
from memopd_trace.places import atomic_file, place
from memopd_trace.scorefolder import read_run
from memopd_trace.validate import validate
from memopd_trace.viewfile import ViewsReader
from memopd_trace.views import write_persistent_history

OPTIONS: dict[str, Any] = {"max_tokens": 60, "shard_tokens": 50}
OUT = "s3://traces/scores/today"


class Toy:
    """A teacher, its trace in the store and on disk, and an undisturbed run on disk."""

    def __init__(self, folder: Path) -> None:
        self.path, self.trace = make_toy(folder)
        self.teacher: LoadedModel = load(self.path)
        self.whole = folder / "whole"
        self.shards = score(self.trace, self.teacher, self.whole, **OPTIONS).shards

    @property
    def files(self) -> dict[str, bytes]:
        return {name: data for name, data in files_of(self.whole).items() if name != ".lock"}

    @property
    def run(self) -> ScoresMetadata:
        return read_run(self.whole)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def trace(toy: Toy, store: fs.FileSystem) -> str:
    """The toy trace, in the store."""
    fs.copy_files(str(toy.trace), "traces/t.parquet", destination_filesystem=store)
    return "s3://traces/t.parquet"


def stored(store: fs.FileSystem, key: str = OUT.removeprefix("s3://")) -> dict[str, bytes]:
    """Every file of a folder of the store."""
    found = store.get_file_info(fs.FileSelector(key, recursive=True, allow_not_found=True))
    return {i.base_name: store.open_input_file(i.path).read() for i in found if i.type == fs.FileType.File}


def put(store: fs.FileSystem, name: str, data: bytes) -> None:
    with store.open_output_stream(f"traces/scores/today/{name}") as out:
        out.write(data)


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def test_the_command_scores_from_a_store_into_a_store_the_same_bytes(
    toy: Toy, trace: str, store: fs.FileSystem, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["score", trace, "--teacher", str(toy.path), "-o", OUT, "--max-tokens", "60", "--shard-tokens", "50"]
    assert run([*command, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"] == OUT
    assert stored(store) == toy.files
    assert run([*command, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["shards_scored_now"] == 0
    assert run(["validate", trace, "--scores", OUT]) == 0, capsys.readouterr().out
    assert stored(store) == toy.files


def test_the_reader_reads_from_there_what_it_reads_from_disk(toy: Toy, store: fs.FileSystem) -> None:
    score(toy.trace, toy.teacher, OUT, **OPTIONS)
    here, there = ScoresReader(toy.whole), ScoresReader(OUT)
    assert len(here) == len(there) == 20
    for key in here._where:
        mine, theirs = here.get(*key), there.get(*key)
        assert mine is not None and theirs is not None and mine.hidden is not None and theirs.hidden is not None
        np.testing.assert_array_equal(mine.logprob, theirs.logprob)
        assert bool((mine.hidden == theirs.hidden).all())
    assert there.head().digest() == toy.run.teacher.head.digest


def test_the_trainer_takes_trace_and_scores_from_there(toy: Toy, trace: str, store: fs.FileSystem) -> None:
    from memopd_trainer.batch import load_rollouts

    score(toy.trace, toy.teacher, OUT, **OPTIONS)
    rollouts = load_rollouts(trace, OUT, policy=False)
    assert rollouts.episodes == 5 and rollouts.scores is not None
    assert rollouts.data_digest == load_rollouts(toy.trace, toy.whole, policy=False).data_digest
    store.delete_file("traces/scores/today/manifest.json")
    with pytest.raises(InputError, match="E-INCOMPLETE"):
        load_rollouts(trace, OUT, policy=False)


def test_views_are_written_to_and_scored_from_a_store(toy: Toy, trace: str, store: fs.FileSystem) -> None:
    views = "s3://traces/views.parquet"
    assert write_persistent_history(trace, views) == len(list(ViewsReader(views))) == 20
    with pytest.raises(UsageError, match="exists already"):
        write_persistent_history(trace, views)
    result = score(trace, toy.teacher, OUT, view="persistent-history", views=views, **OPTIONS)
    assert result.shards > 1
    assert validate(trace, views=views, scores=OUT).clean
    with pytest.raises(UsageError, match="no view 'other'"):
        score(trace, toy.teacher, OUT, view="other", views=views, **OPTIONS)
    with pytest.raises(InputError, match=r"E-NO-INPUT.*s3://traces/none\.parquet"):
        score(trace, toy.teacher, OUT, view="other", views="s3://traces/none.parquet", **OPTIONS)


def test_a_deleted_shard_is_scored_again_and_a_damaged_one_refused_until_repaired(
    toy: Toy, store: fs.FileSystem
) -> None:
    score(toy.trace, toy.teacher, OUT, **OPTIONS)
    shards = sorted(name for name in toy.files if name.startswith("shard-"))
    store.delete_file(f"traces/scores/today/{shards[1]}")
    assert score(toy.trace, toy.teacher, OUT, **OPTIONS).shards_scored == 1
    assert stored(store) == toy.files
    put(store, shards[0], flipped(toy.files[shards[0]]))
    put(store, "head.safetensors", b"")
    put(store, "manifest.json", b"{")
    with pytest.raises(InputError, match=f"E-SCORES-DAMAGED.*{OUT}/{shards[0]}.*--repair"):
        score(toy.trace, toy.teacher, OUT, **OPTIONS)
    with pytest.raises(InputError, match="E-INCOMPLETE"):
        ScoresReader(OUT)
    assert score(toy.trace, toy.teacher, OUT, repair=True, **OPTIONS).shards_scored == 1
    assert stored(store) == toy.files


def test_another_run_and_another_content_are_refused(toy: Toy, trace: str, store: fs.FileSystem) -> None:
    score(toy.trace, toy.teacher, OUT, **OPTIONS)
    with pytest.raises(InputError, match="E-SCORES-OTHER-RUN.*max_tokens is 60 there and 70 now"):
        score(toy.trace, toy.teacher, OUT, max_tokens=70, shard_tokens=50)
    with pytest.raises(UsageError, match=r"s3://traces: holds '.*' but no run\.json"):
        score(toy.trace, toy.teacher, "s3://traces", **OPTIONS)
    with pytest.raises(UsageError, match="is a file"):
        score(toy.trace, toy.teacher, trace, **OPTIONS)
    assert stored(store) == toy.files


@pytest.fixture(scope="module")
def forks(toy: Toy) -> Iterator[Forks]:
    with Forks("helpers_resume:load_teacher", teacher=str(toy.path)) as forks:
        yield forks


@pytest.mark.slow
def test_killed_at_random_points_it_ends_byte_for_byte_the_same(
    toy: Toy, trace: str, store: fs.FileSystem, forks: Forks
) -> None:
    work = {"trace": trace, "out": OUT, "environment": {k: v for k, v in os.environ.items() if k.startswith("AWS_")}}
    calls = forks.run("helpers_resume:score_in_child", count=True, **work, **OPTIONS).calls
    assert stored(store) == toy.files
    store.delete_dir_contents("traces/scores/today")
    rng, kills, grown = random.Random(0), 0, set[int]()
    while kills < 3:
        at_call = rng.randrange(calls // 2, calls)
        ended = forks.run("helpers_resume:score_in_child", at_call=at_call, **work, **OPTIONS)
        files = stored(store)
        assert files.items() <= toy.files.items(), "what is there is whole"
        grown.add(len(files))
        kills += bool(ended.killed)
        if not ended.killed:
            assert ended.error == "" and files == toy.files
            store.delete_dir_contents("traces/scores/today")
    assert grown - {0}, "none was killed at work"
    assert forks.run("helpers_resume:score_in_child", **work, **OPTIONS).error == ""
    assert stored(store) == toy.files


# two runs at a time, which nothing prevents there


def test_two_runs_at_a_time_do_the_work_twice_and_leave_the_same_rows(toy: Toy, store: fs.FileSystem) -> None:
    inner: list[int] = []

    def second(done: int, total: int) -> None:
        if done == total // 2 and not inner:
            inner.append(-1)
            inner[0] = score(toy.trace, toy.teacher, OUT, **OPTIONS).shards_scored

    outer = score(toy.trace, toy.teacher, OUT, on_pack=second, **OPTIONS)
    assert outer.shards_scored == toy.shards and 0 < inner[0] < toy.shards
    assert stored(store) == toy.files


def other_bytes(data: bytes, name: str) -> tuple[str, bytes]:
    """A shard of the same rows whose bytes differ, as one of another device would be."""
    import hashlib

    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pq.read_table(pa.BufferReader(data)), sink, compression="none")
    again = sink.getvalue().to_pybytes()
    return f"{name[:13]}{hashlib.sha256(again).hexdigest()[:16]}.parquet", again


def test_of_two_shards_with_one_number_the_first_by_name_is_kept_by_whoever_finishes(
    toy: Toy, store: fs.FileSystem
) -> None:
    shards = sorted(name for name in toy.files if name.startswith("shard-"))
    twins = dict(other_bytes(toy.files[name], name) for name in shards[:3])
    for name, data in {"run.json": toy.files["run.json"], **twins}.items():
        put(store, name, data)

    def put_another(done: int, total: int) -> None:
        put(store, *other_bytes(toy.files[shards[3]], shards[3]))

    result = score(toy.trace, toy.teacher, OUT, on_pack=put_another, **OPTIONS)
    assert result.shards_scored == toy.shards - 3
    third = min(other_bytes(toy.files[shards[3]], shards[3])[0], shards[3])
    kept = [*sorted(twins), third, *shards[4:]]
    assert sorted(name for name in stored(store) if name.startswith("shard-")) == kept
    assert len(ScoresReader(OUT)) == 20 and validate(toy.trace, scores=OUT).clean


@pytest.mark.parametrize("at", ["s3", "disk"])
def test_a_follower_writes_what_the_lead_lists(at: str, toy: Toy, store: fs.FileSystem, tmp_path: Path) -> None:
    folder = place(OUT if at == "s3" else tmp_path / "s")
    with pytest.raises(InputError, match=r"E-INCOMPLETE.*no run\.json"):
        follow(folder, toy.run)
    first = lead(folder, toy.run, toy.teacher.head)
    planned = Run(Job(str(toy.trace), **OPTIONS), toy.teacher, print).planned
    shards = sorted(name for name in toy.files if name.startswith("shard-"))
    with pytest.raises(InputError, match=rf"E-INCOMPLETE.*{len(shards)} of {len(shards)} shards are missing"):
        first.finish(planned)
    assert follow(folder, toy.run).left(planned) == list(range(len(shards)))
    for name in shards:
        with atomic_file(folder / name) as out:
            out.write(toy.files[name])
    assert follow(folder, toy.run).left(planned) == []
    planned.plan.invocations = 21
    with pytest.raises(InputError, match="E-SCORES-DAMAGED.*hold 20 rows, the plan 21"):
        first.finish(planned)
    planned.plan.invocations = 20
    first.finish(planned)
    assert len(ScoresReader(OUT if at == "s3" else folder)) == 20
    with pytest.raises(InputError, match="E-SCORES-OTHER-RUN"):
        follow(folder, toy.run.model_copy(update={"max_tokens": 7}))


def test_a_bucket_that_is_not_there_is_one_line(
    toy: Toy, store: fs.FileSystem, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["score", str(toy.trace), "--teacher", str(toy.path), "-o", "s3://no-such-bucket/scores"]) == 3
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "no-such-bucket" in line and "Traceback" not in line
