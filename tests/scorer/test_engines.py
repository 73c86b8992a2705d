"""What all engines share: shards by number, what is left of a run, and options that an engine does not have."""

from __future__ import annotations

import hashlib
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers_engines import Toy, content
from hypothesis import given
from hypothesis import strategies as st

from memopd_scorer.engines.torchrun import deal
from memopd_scorer.job import Job, Planned
from memopd_scorer.plan import Pack
from memopd_scorer.run import Run, Tally
from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_scorer.store import follow
from memopd_scorer.teacher import load
from memopd_trace.errors import InputError, UsageError
from memopd_trace.scorefolder import read_run
from memopd_trace.storage import read


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def planned(toy: Toy) -> Planned:
    return Run(Job(str(toy.trace), max_tokens=60, shard_tokens=60), load(toy.teacher), print).planned


def keys(packs: list[Pack]) -> list[tuple[str, int]]:
    return [(s.episode_id, s.invocation_index) for pack in packs for s in pack.states]


def test_a_shard_is_the_same_packs_whoever_asks_in_whatever_order(planned: Planned) -> None:
    all_of_them = [keys(packs) for packs in planned.iter_shards()]
    assert len(all_of_them) == len(planned.shards) > 5
    for number in (3, 4, 0, 5, 5, 1, len(planned.shards) - 1):
        assert keys(planned.shard(number)) == all_of_them[number]
    with pytest.raises(IndexError, match="shard 99"):
        planned.shard(99)


def test_shards_in_rising_order_are_one_walk_through_the_plan(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin = Planned.iter_shards

    def counted(self: Planned) -> Iterator[list[Pack]]:
        begun.append(1)
        return begin(self)

    monkeypatch.setattr(Planned, "iter_shards", counted)
    for number in range(0, len(planned.shards), 2):
        planned.shard(number)
    assert not begun
    planned.shard(1)
    assert begun == [1]


def test_what_a_plan_says_of_its_shards_is_what_they_hold(planned: Planned) -> None:
    for number, size in enumerate(planned.shards):
        packs = planned.shard(number)
        assert size == (len(packs), sum(len(pack) for pack in packs))
    assert sum(size.packs for size in planned.shards) == planned.plan.packs
    assert sum(size.tokens for size in planned.shards) == planned.plan.executed_tokens


def test_what_is_left_of_a_run_is_what_is_not_there(toy: Toy, planned: Planned, tmp_path: Path) -> None:
    score(toy.trace, toy.teacher, tmp_path / "s", max_tokens=60, shard_tokens=60)
    metadata = read_run(tmp_path / "s")
    assert follow(tmp_path / "s", metadata).left(planned) == []
    for number in (1, 4):
        next((tmp_path / "s").glob(f"shard-{number:06d}-*")).unlink()
    assert follow(tmp_path / "s", metadata).left(planned) == [1, 4]


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 7))
def test_dealing_is_even_to_one_piece(costs: list[int], workers: int) -> None:
    dealt = list(deal(costs, workers))
    assert dealt == list(deal(iter(costs), workers))
    assert len(dealt) == len(costs)
    loads = [sum(c for c, w in zip(costs, dealt, strict=True) if w == worker) for worker in range(workers)]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_a_shard_that_two_workers_both_wrote_is_there_once_in_the_end(toy: Toy, tmp_path: Path) -> None:
    """Devices that round differently give one shard two names; both files are whole."""
    score(toy.trace, toy.teacher, tmp_path / "s", max_tokens=60, shard_tokens=60)
    expected = content(tmp_path / "s")
    mine = next((tmp_path / "s").glob("shard-000002-*"))
    table = pq.read_table(mine)
    pq.write_table(table, tmp_path / "theirs", compression="none")
    digest = hashlib.sha256((tmp_path / "theirs").read_bytes()).hexdigest()[:16]
    theirs = mine.with_name(f"shard-000002-{digest}.parquet")
    shutil.copy(tmp_path / "theirs", theirs)
    (tmp_path / "s" / "manifest.json").unlink()
    assert score(toy.trace, toy.teacher, tmp_path / "s", max_tokens=60, shard_tokens=60).shards_scored == 0
    left = content(tmp_path / "s")
    assert len(left) == len(expected), "one of the two is gone"
    assert len(list((tmp_path / "s").glob("shard-000002-*"))) == 1
    reader = ScoresReader(tmp_path / "s")
    assert len(reader) == len(list(read(toy.trace).iter_invocations()))


def test_tallies_of_workers_add_up() -> None:
    one, two = Tally(3, 0.25, None), Tally(4, 0.5, 100)
    assert one.plus(two) == two.plus(one) == Tally(7, 0.5, 100)
    assert two.plus(Tally(1, 0.0, 50)).budget == 50 and one.plus(one).budget is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "spark"}, "unknown engine 'spark'.*local, torchrun, ray"),
        ({"workers": 2}, "the engine local has no workers.*--engine ray"),
        ({"tp_plan": "auto"}, "tensor parallelism needs a process for each part.*torchrun"),
        ({"engine": "torchrun", "device_map": "auto"}, "under torchrun every process.*--tp-plan auto"),
        ({"engine": "ray", "workers": 0}, "0 workers"),
        ({"engine": "torchrun"}, "runs in processes that torchrun starts"),
        ({"engine": "torchrun", "tp_plan": "auto"}, "runs in processes that torchrun starts"),
    ],
)
def test_what_an_engine_does_not_have_is_refused(
    options: dict[str, object], message: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match=message):
        score(toy.trace, toy.teacher, tmp_path / "s", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()


def test_rays_workers_load_their_teacher_themselves(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="load their models themselves"):
        score(toy.trace, load(toy.teacher), tmp_path / "s", engine="ray")


def test_the_module_without_torchrun_says_how_to_start_it(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["memopd_scorer", *toy.options(tmp_path / "s")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("memopd_scorer", run_name="__main__")
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    assert printed.err.startswith("error: the engine torchrun runs in processes that torchrun starts (torchrun ")


def test_a_follower_of_a_folder_without_a_run_is_refused(toy: Toy, tmp_path: Path) -> None:
    score(toy.trace, toy.teacher, tmp_path / "s", signals=("sampled",))
    metadata = read_run(tmp_path / "s")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"E-INCOMPLETE.*run\.json"):
        follow(tmp_path / "none", metadata)
