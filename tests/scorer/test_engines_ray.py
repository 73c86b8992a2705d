"""Two Ray actors: the folder that one process leaves, an actor that is killed, and runs that go from hand to hand."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers_engines import SCORE, TORCHRUN, Toy, content, run, shards, start, wait_until
from helpers_scorer import save_model, tiny_model

from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score

pytestmark = pytest.mark.ray
RAY = ("--engine", "ray", "--workers", "2", "--format", "json")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Some hundred shards: time to kill an actor among them."""
    return Toy(tmp_path_factory.mktemp("large"), rollouts=200, layers=6)


@pytest.fixture(autouse=True)
def _no_cluster_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def local(toy: Toy) -> dict[str, bytes]:
    signals = ("sampled", "topk", "hidden")
    score(toy.trace, toy.teacher, toy.folder / "local", signals=signals, max_tokens=60, shard_tokens=60)
    return content(toy.folder / "local")


def actors(driver: int) -> Iterator[psutil.Process]:
    """The actors that a driver's cluster runs now."""
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if "MapWorker" in " ".join(process.cmdline()):
                yield process
        except psutil.Error:  # it ended meanwhile
            continue


def works(process: psutil.Process) -> bool:
    """Whether a process runs still; one that nobody has waited for does not."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_two_actors_leave_the_folder_that_one_process_leaves(toy: Toy, tmp_path: Path) -> None:
    expected = local(toy)
    ended = run(["-c", SCORE, "score", *toy.options(tmp_path / "s", *RAY)])
    assert ended.returncode == 0, ended.stderr
    assert len(expected) > 8 and content(tmp_path / "s") == expected
    printed = json.loads(ended.stdout)  # and nothing of Ray's
    assert printed["shards"] == printed["shards_scored_now"] == len(expected) - 3
    assert printed["attention"].startswith("sdpa") and printed["sharing"] > 1


def test_a_killed_actor_loses_nothing_and_doubles_nothing(large: Toy, tmp_path: Path) -> None:
    expected = local(large)
    out = tmp_path / "s"
    running = start(["-c", SCORE, "score", *large.options(out, *RAY)])
    wait_until(lambda: shards(out) >= 5, running)
    before = {p.pid for p in actors(running.pid)}
    assert len(before) == 2, "two actors work"
    os.kill(min(before), signal.SIGKILL)
    at_kill = shards(out)
    wait_until(lambda: shards(out) >= at_kill + 20, running)
    stdout, stderr = running.communicate(timeout=300)
    assert running.returncode == 0, stderr
    assert at_kill < len(expected) - 3, "it was killed among its shards"
    assert content(out) == expected
    assert json.loads(stdout)["shards_scored_now"] == len(expected) - 3
    assert "Traceback" not in stderr  # Ray says in words of its own, and not always, that an actor died
    assert len(ScoresReader(out)) == 200 * 4 + 4


def test_other_engines_go_on_where_ray_was_killed(large: Toy, tmp_path: Path) -> None:
    expected = local(large)
    out = tmp_path / "s"
    running = start(["-c", SCORE, "score", *large.options(out, *RAY)])
    wait_until(lambda: shards(out) >= 5, running)
    workers, cluster = list(actors(running.pid)), psutil.Process(running.pid).children(recursive=True)
    os.kill(running.pid, signal.SIGKILL)
    for stream in (running.stdout, running.stderr):  # Ray's own processes hold the other ends for a while
        assert stream is not None
        stream.close()
    assert running.wait(60) == -signal.SIGKILL
    ends = time.monotonic() + 60
    while time.monotonic() < ends and any(works(p) for p in workers):
        time.sleep(0.1)
    assert len(workers) == 2 and not any(works(p) for p in workers), (
        "no actor goes on without the process that holds the folder"
    )
    for process in cluster:  # agents of Ray that take their time
        if works(process):
            process.kill()
    kept = shards(out)
    assert 5 <= kept < len(expected) - 3
    torchrun = start([*TORCHRUN, "-m", "memopd_scorer", "--", *large.options(out)])
    wait_until(lambda: shards(out) >= kept + 5, torchrun)
    os.killpg(torchrun.pid, signal.SIGKILL)
    torchrun.communicate(timeout=60)
    ended = run(["-c", SCORE, "score", *large.options(out, *RAY)])
    assert ended.returncode == 0, ended.stderr
    assert content(out) == expected


def test_what_a_worker_refuses_is_one_line_and_its_exit_code(toy: Toy, tmp_path: Path) -> None:
    other = save_model(tiny_model("llama", seed=3), tmp_path / "other", words="x")
    arguments = ["score", str(toy.trace), "--teacher", str(other), "-o", str(tmp_path / "s"), "--engine", "ray"]
    ended = run(["-c", SCORE, *arguments])
    assert ended.returncode == 3 and not ended.stdout
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert "E-TOKENIZER-MISMATCH" in line and "Traceback" not in ended.stderr
    assert not shards(tmp_path / "s") and not (tmp_path / "s" / "run.json").exists()


_TWO_RUNS = """
import sys
import ray
from memopd_scorer.scoring import score
trace, teacher, out = sys.argv[1:]
ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
done = []
for name in "ab":
    score(trace, teacher, out + name, max_tokens=60, shard_tokens=60, engine="ray", workers=2,
          on_pack=lambda now, total: done.append((now, total)))
    assert ray.is_initialized(), "a cluster of the caller's is left alone"
assert done.count((0, done[0][1])) == 2 and done[-1][0] == done[-1][1]
"""


def test_a_cluster_that_is_there_is_used_and_left(toy: Toy, tmp_path: Path) -> None:
    ended = run(["-c", _TWO_RUNS, str(toy.trace), str(toy.teacher), str(tmp_path / "s")])
    assert ended.returncode == 0, ended.stderr
    assert content(tmp_path / "sa") == content(tmp_path / "sb")
