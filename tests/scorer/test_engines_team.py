"""What the ranks of torchrun tell each other: all hear all, one that fails ends all, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from memopd_scorer.engines import team as module
from memopd_scorer.engines.team import Team
from memopd_trace.errors import InputError, TraceError, UsageError


def ranks(size: int, work: Callable[[Team], Any]) -> list[Any]:
    """What `work` returns or raises on each rank; the ranks are threads that share a store."""
    store, results = HashStore(), [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = work(Team(store, rank, size))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.0)


def test_every_rank_hears_all_in_the_order_of_ranks() -> None:
    def work(team: Team) -> list[Any]:
        return [team.gather({"rank": team.rank}), team.share([7, None] if team.leads else "ignored")]

    for heard in ranks(3, work):
        assert heard == [[{"rank": 0}, {"rank": 1}, {"rank": 2}], [7, None]]


def test_packs_of_all_ranks_are_one_count_which_who_waits_is_told() -> None:
    told: list[int] = []

    def work(team: Team) -> None:
        if team.leads:
            team.on_progress = told.append
        for _ in range(10):
            team.count(2)
            time.sleep(0.02 * team.rank)
        team.meet()

    ranks(2, work)
    assert told == sorted(told) and told[-1] <= 40 and len(set(told)) > 5
    assert max(told) > 20, "the lead was done at 20 of its own, and heard of the other's"


def test_an_error_ends_all_ranks_with_its_code_and_one_of_them_says_why() -> None:
    def work(team: Team) -> None:
        with team.together():
            if team.rank == 1:
                raise InputError("no such folder", code="E-MODEL-LOAD", hint="look again")
            team.meet()

    lead, failed, other = ranks(3, work)
    assert isinstance(failed, InputError) and str(failed) == "[E-MODEL-LOAD] rank 1: no such folder (look again)"
    for ended in (lead, other):
        assert isinstance(ended, SystemExit) and ended.code == 3


def test_ranks_that_fail_at_once_say_it_once() -> None:
    def work(team: Team) -> None:
        with team.together():
            raise UsageError("all the same")

    results = ranks(4, work)
    assert sum(isinstance(r, UsageError) for r in results) == 1
    assert sum(isinstance(r, SystemExit) and r.code == 2 for r in results) == 3


def test_a_rank_that_works_hears_of_a_failure_at_its_next_pack() -> None:
    done: list[int] = []

    def work(team: Team) -> None:
        with team.together():
            if team.rank == 1:
                raise InputError("broken")
            while True:
                team.count(1)
                done.append(1)
                time.sleep(0.01)

    lead, _ = ranks(2, work)
    assert isinstance(lead, SystemExit) and lead.code == 3 and len(done) < 1000


def test_a_rank_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.3)

    def work(team: Team) -> None:
        if team.leads:
            team.meet()

    (lead, _) = ranks(2, work)
    assert isinstance(lead, TraceError) and "rank 1 has not come" in str(lead)


def test_who_waits_is_patient_while_packs_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.4)

    def work(team: Team) -> bool:
        for _ in range(10 * team.rank):
            team.count(1)
            time.sleep(0.1)
        team.meet()
        return True

    assert ranks(2, work) == [True, True]


def test_without_torchrun_there_is_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="torchrun --nproc-per-node N -m memopd_scorer -- TRACE"):
        Team.join()
