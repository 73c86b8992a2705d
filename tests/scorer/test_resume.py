"""Killed at any point and run again, a scores folder ends byte for byte as if nothing had happened."""

from __future__ import annotations

import json
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers_forks import Ended, Forks
from helpers_resume import check_nothing_is_half_done, files_of, make_toy, shards_of

from memopd_trace.scorefolder import open_scores

RUNS: dict[str, dict[str, Any]] = {
    "states": {"max_tokens": 100, "shard_bytes": 3_000},
    "states in a tier": {"max_tokens": 100, "shard_bytes": 1_000, "states": "int8"},
    "topk under a view": {
        "layout": "single",
        "shard_bytes": 700,
        "signals": ["topk"],
        "topk": 4,
        "view": "persistent-history",
    },
}


@dataclass
class Runs:
    """Runs over one toy trace in children of one warm process; `whole` are the files of undisturbed ones."""

    forks: Forks
    trace: Path
    folder: Path
    whole: dict[str, dict[str, bytes]] = field(default_factory=dict)
    size: dict[str, Ended] = field(default_factory=dict)

    def run(self, kind: str, out: Path, **kill: Any) -> Ended:
        return self.forks.run(
            "helpers_resume:score_in_child", trace=str(self.trace), out=str(out), **RUNS[kind], **kill
        )

    def undisturbed(self, kind: str) -> Ended:
        """How a run ends that nobody disturbs."""
        if kind not in self.size:
            out = self.folder / f"whole {kind}"
            self.size[kind] = self.run(kind, out, count=True)
            assert self.size[kind].error == "" and self.size[kind].result["shards"] > 4, self.size[kind]
            self.whole[kind] = files_of(out)
        return self.size[kind]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("runs")
    teacher, trace = make_toy(folder)
    with Forks("helpers_resume:load_teacher", teacher=str(teacher)) as forks:
        yield Runs(forks, trace, folder)


def kill_again_and_again(runs: Runs, kind: str, out: Path, draw: Callable[[], dict[str, Any]], kills: int) -> set[str]:
    """Kill runs, each continuing the one before it, until `kills` have died and one has finished; all that finish are
    compared. Returns what lay in the folder when runs were killed."""
    runs.undisturbed(kind)
    died, seen, rounds = 0, set(), 0
    while True:
        ended = runs.run(kind, out / str(rounds), **(draw() if died < kills else {}))
        assert ended.error == ""
        if ended.killed:
            assert ended.killed == signal.SIGKILL
            died += 1
            check_nothing_is_half_done(out / str(rounds))
            seen |= {_kind_of(f.name) for f in (out / str(rounds)).glob("*")}
            continue
        assert files_of(out / str(rounds)) == runs.whole[kind]
        rounds += 1
        if died >= kills:
            return seen


def _kind_of(name: str) -> str:
    return "temporary" if name.endswith(".tmp") else name.split("-")[0]


def test_killed_before_random_calls_it_ends_byte_for_byte_the_same(runs: Runs, tmp_path: Path) -> None:
    rng, calls = random.Random(0), runs.undisturbed("states").calls
    draw = lambda: {"at_call": rng.randrange(calls)}  # noqa: E731
    seen = kill_again_and_again(runs, "states", tmp_path, draw, kills=5)
    assert {"run.json", "shard"} <= seen, "nobody was killed at work"


def test_killed_before_random_disk_steps_it_ends_byte_for_byte_the_same(runs: Runs, tmp_path: Path) -> None:
    rng, steps = random.Random(1), runs.undisturbed("topk under a view").steps
    assert steps > 20
    draw = lambda: {"at_step": rng.randrange(steps)}  # noqa: E731
    seen = kill_again_and_again(runs, "topk under a view", tmp_path, draw, kills=5)
    assert {"shard", "temporary"} <= seen, "nobody was killed between writing a file and naming it"


def test_killed_while_the_manifest_is_written_it_is_finished_without_scoring(runs: Runs, tmp_path: Path) -> None:
    steps = runs.undisturbed("states").steps
    for before_the_end in (3, 2, 1):  # the sync, the rename, the sync of the folder
        out = tmp_path / str(before_the_end)
        assert runs.run("states", out, at_step=steps - before_the_end).killed
        listed = (out / "manifest.json").exists()
        assert len(shards_of(out)) == runs.undisturbed("states").result["shards"]
        assert not listed or files_of(out) == runs.whole["states"]
        assert runs.run("states", out).result["scored"] == 0
        assert files_of(out) == runs.whole["states"]
    assert listed, "the last kill came after the rename"


def test_a_finished_shard_is_never_scored_again(runs: Runs, tmp_path: Path) -> None:
    shards, scored, at_step = runs.undisturbed("states").result["shards"], 0, 17
    while (ended := runs.run("states", tmp_path / "s", at_step=at_step)).killed:
        there = len(shards_of(tmp_path / "s"))
        assert there > scored
        scored = there
    assert ended.result["scored"] < shards and ended.result["scored"] == shards - scored


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_killed_before_every_disk_step_in_turn(kind: str, runs: Runs, tmp_path: Path) -> None:
    for step in range(runs.undisturbed(kind).steps):
        assert runs.run(kind, tmp_path / str(step), at_step=step).killed
        check_nothing_is_half_done(tmp_path / str(step))
        assert runs.run(kind, tmp_path / str(step)).error == ""
        assert files_of(tmp_path / str(step)) == runs.whole[kind], f"step {step}"


@pytest.mark.slow
def test_killed_after_random_times(runs: Runs, tmp_path: Path) -> None:
    rng = random.Random(2)
    kill_again_and_again(runs, "states", tmp_path, lambda: {"after": rng.random() * 0.5}, kills=60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_killed_before_many_random_calls(kind: str, runs: Runs, tmp_path: Path) -> None:
    rng, calls = random.Random(3), runs.undisturbed(kind).calls
    kill_again_and_again(runs, kind, tmp_path, lambda: {"at_call": rng.randrange(calls)}, kills=60)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_says_so_leaves_130_and_goes_on(by: int, runs: Runs, tmp_path: Path) -> None:
    out, errors = tmp_path / "s", tmp_path / "errors.txt"
    arguments = ["score", str(runs.trace), "--teacher", "toy", "-o", str(out), "--max-tokens", "60"]
    command = {"arguments": [*arguments, "--shard-tokens", "50"], "errors": str(errors)}
    ended = runs.forks.run("helpers_resume:command_in_child", at_step=25, by=by, **command)
    assert (ended.result, ended.error) == (130, "")
    assert errors.read_text() == "error: interrupted; run the same command again to go on\n"
    finished = len(shards_of(out))
    assert finished > 0 and not list(out.glob(".*.tmp")), "what was begun is removed"
    assert runs.forks.run("helpers_resume:command_in_child", **command).result == 0
    assert len(open_scores(out).files) > finished


def test_a_second_process_is_refused_while_one_scores(runs: Runs, tmp_path: Path) -> None:
    from memopd_trace.places import exclusive, place

    with exclusive(place(tmp_path / "s"), "scoring into"):
        ended = runs.run("states", tmp_path / "s")
    assert "another process is scoring into it" in ended.error
    assert runs.run("states", tmp_path / "s").error == ""


def test_what_a_killed_run_left_half_written_is_cleared_away_and_nothing_else(runs: Runs, tmp_path: Path) -> None:
    runs.undisturbed("states")
    out = tmp_path / "s"
    assert runs.run("states", out, at_step=20).killed
    (out / ".shard-000001.parquet.0123abcd.tmp").write_bytes(b"half")
    (out / ".mine.tmp").write_bytes(b"no temporary file of this project")
    assert runs.run("states", out).error == ""
    files = files_of(out)
    assert files.pop(".mine.tmp")
    assert files == runs.whole["states"]
    assert json.loads(files["manifest.json"])["complete"] is True


def test_a_folder_that_may_not_be_written_is_one_line(runs: Runs) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copy(runs.trace, folder / "trace.parquet")
        (folder / "errors.txt").touch()
        (folder / "errors.txt").chmod(0o666)
        (folder / "scores").mkdir()
        (folder / "scores").chmod(0o555)
        command = ["score", str(folder / "trace.parquet"), "--teacher", "toy", "-o", str(folder / "scores")]
        files = {"errors": str(folder / "errors.txt"), "writable": str(folder / "other")}
        ended = runs.forks.run("helpers_resume:command_as_nobody", arguments=command, **files)
        assert (ended.result, ended.error) == (3, "")
        assert (folder / "errors.txt").read_text() == f"error: {folder}/scores/.lock: Permission denied\n"
        assert not list((folder / "scores").iterdir())
