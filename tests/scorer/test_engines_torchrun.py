"""Two processes of torchrun: the same folder as one process leaves, a rank that is killed, and one that is another."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from helpers_engines import SCORE, TORCHRUN, Toy, content, run, shards, start, wait_until
from helpers_scorer import save_model, tiny_model

from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Some hundred shards: time to kill a process among them."""
    return Toy(tmp_path_factory.mktemp("large"), rollouts=200, layers=6)


@pytest.fixture(scope="module")
def whole(large: Toy) -> dict[str, bytes]:
    return _local(large)


@pytest.fixture(scope="module")
def expected(toy: Toy) -> dict[str, bytes]:
    return _local(toy)


def _local(toy: Toy) -> dict[str, bytes]:
    signals = ("sampled", "topk", "hidden")
    score(toy.trace, toy.teacher, toy.folder / "local", signals=signals, max_tokens=60, shard_tokens=60)
    return content(toy.folder / "local")


def test_two_processes_leave_the_folder_that_one_leaves(toy: Toy, expected: dict[str, bytes], tmp_path: Path) -> None:
    ended = run([*TORCHRUN, "-m", "memopd_scorer", "--", *toy.options(tmp_path / "s", "--format", "json")])
    assert ended.returncode == 0, ended.stderr
    assert len(expected) > 8 and content(tmp_path / "s") == expected
    assert ended.stdout.count('"shards_scored_now"') == 1, "only rank 0 prints"
    assert f'"shards_scored_now": {len(expected) - 3}' in ended.stdout, "what both have scored"
    again = run([*TORCHRUN, "-m", "memopd_scorer", "--", *toy.options(tmp_path / "s", "--format", "json")])
    assert again.returncode == 0 and '"shards_scored_now": 0' in again.stdout


_BOTH_WORK = """
import os, sys
from memopd_scorer.scoring import score
done = []
trace, teacher, out = sys.argv[1:]
signals = ("sampled", "topk", "hidden")
result = score(trace, teacher, out, max_tokens=60, shard_tokens=60, signals=signals, engine="torchrun",
               on_pack=lambda now, total: done.append((now, total)))
rank = os.environ["RANK"]
assert (rank == "0") == bool(done), "only rank 0 is told"
if rank == "0":
    assert done == sorted(done) and done[-1] == (result.plan.packs, result.plan.packs)
print("rank", rank, result.shards_scored, result.shards)
"""


def test_every_rank_has_the_result_and_a_share_of_the_work(
    toy: Toy, expected: dict[str, bytes], tmp_path: Path
) -> None:
    program = tmp_path / "both.py"
    program.write_text(_BOTH_WORK)
    ended = run([*TORCHRUN, str(program), str(toy.trace), str(toy.teacher), str(tmp_path / "s")])
    assert ended.returncode == 0, ended.stderr
    all_of_them = len(expected) - 3
    for rank in range(2):
        assert f"rank {rank} {all_of_them} {all_of_them}" in ended.stdout
    assert content(tmp_path / "s") == expected


def test_a_rank_that_is_killed_ends_all_and_running_again_finishes(
    large: Toy, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "s"
    running = start([*TORCHRUN, "-m", "memopd_scorer", "--", *large.options(out)])
    wait_until(lambda: shards(out) >= 5, running)
    ranks = [p for p in psutil.Process(running.pid).children() if "memopd_scorer" in p.cmdline()]
    assert len(ranks) == 2
    second = next(p for p in ranks if p.environ()["RANK"] == "1")
    os.kill(second.pid, signal.SIGKILL)
    running.communicate(timeout=240)  # no rank hangs
    assert running.returncode != 0 and not any(p.is_running() for p in ranks)
    assert 5 <= shards(out) < len(whole) - 3 and not (out / "manifest.json").exists()
    kept = shards(out)
    ended = run([*TORCHRUN, "-m", "memopd_scorer", "--", *large.options(out, "--format", "json")])
    assert ended.returncode == 0, ended.stderr
    assert f'"shards_scored_now": {len(whole) - 3 - kept}' in ended.stdout
    assert content(out) == whole
    ScoresReader(out)


def test_one_process_goes_on_where_two_were_killed(large: Toy, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "s"
    running = start([*TORCHRUN, "-m", "memopd_scorer", "--", *large.options(out)])
    wait_until(lambda: shards(out) >= 3, running)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate(timeout=240)
    ended = run(["-c", SCORE, "score", *large.options(out, "--format", "json")])
    assert ended.returncode == 0, ended.stderr
    assert '"shards_scored_now": 0' not in ended.stdout
    assert content(out) == whole


def test_a_rank_with_another_teacher_is_refused_and_nothing_is_written(toy: Toy, tmp_path: Path) -> None:
    other = save_model(tiny_model("llama", seed=4), tmp_path / "other" / toy.teacher.name)
    program = tmp_path / "mixed.py"
    program.write_text(
        "import os, sys\nfrom memopd_trace.cli import run\n"
        f"teacher = {[str(toy.teacher), str(other)]}[int(os.environ['RANK'])]\n"
        f"command = ['score', {str(toy.trace)!r}, '--teacher', teacher, '-o', sys.argv[1]]\n"
        "sys.exit(run([*command, '--engine', 'torchrun']))\n"
    )
    ended = run([*TORCHRUN, str(program), str(tmp_path / "s")])
    assert ended.returncode != 0
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert "E-SCORES-OTHER-RUN" in line and "rank 1 has opened another run than rank 0" in line
    assert "weights_digest" in line
    assert "exitcode  : 3" in ended.stderr
    assert not (tmp_path / "s").exists()


def test_an_invalid_trace_is_one_line_and_the_exit_code_of_all(toy: Toy, tmp_path: Path) -> None:
    broken = shutil.copy(toy.trace, tmp_path / "t.parquet")
    Path(broken).write_bytes(b"no trace")
    arguments = [broken, "--teacher", str(toy.teacher), "-o", str(tmp_path / "s")]
    ended = run([*TORCHRUN, "-m", "memopd_scorer", "--", *arguments])
    assert ended.returncode != 0 and "exitcode  : 3" in ended.stderr
    assert len([line for line in ended.stderr.splitlines() if line.startswith("error:")]) == 1
    assert not (tmp_path / "s").exists()
