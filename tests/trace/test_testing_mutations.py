"""Every mutation breaks the clause of its code and no other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers_testing import trace_sample
from hypothesis import HealthCheck, assume, given, settings

from memopd_trace import validate, write
from memopd_trace.rules import RULES
from memopd_trace.rules.registry import PROFILES
from memopd_trace.testing import MUTATIONS, Mutation, declared, traces
from memopd_trace.testing.mutation import tail

PLACES = 2  # different traces on which each mutation is tried by default

# codes that no trace can be made to raise in the validator, and why; a rule that is new stands here or has a mutation
NOT_FROM_A_TRACE = {"E-SCHEMA": "raised by a reader; the validator says E-COLUMN-TYPE of the same file"}


@pytest.fixture(scope="module")
def pool() -> list[Any]:
    """Traces of every kind, each with two episodes at least, so that most faults have a place in most of them."""
    return [t for t in trace_sample("train") if len({row.episode_id for row in t[1]}) > 1]


def codes(mutation: Mutation, trace: Any) -> set[str] | None:
    with tempfile.TemporaryDirectory() as folder:
        path = mutation.write(*trace, Path(folder))
        if path is None:
            assert not list(Path(folder).iterdir()), "nothing is written where there is no place for the fault"
            return None
        return validate(path, mutation.profile).codes


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutation_raises_its_code_and_no_other(mutation: Mutation, pool: list[Any]) -> None:
    tried = 0
    for trace in pool:
        found = codes(mutation, trace)
        if found is not None:
            tried += 1
            assert found == {mutation.code}
        if tried == PLACES:
            return
    raise AssertionError(f"only {tried} of {len(pool)} traces had a place for it")


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutation_raises_its_code_in_any_trace(mutation: Mutation) -> None:
    @given(traces("train"))
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    def holds(trace: Any) -> None:
        found = codes(mutation, trace)
        assume(found is not None)
        assert found == {mutation.code}

    holds()


def test_every_code_of_a_trace_alone_has_a_mutation() -> None:
    wanted = {r.code for r in RULES.values() if r.phase != "run" and r.wants is None}
    have = {m.code for m in MUTATIONS}
    assert sorted(wanted - have) == sorted(NOT_FROM_A_TRACE)
    assert have <= wanted


def test_mutations_have_names_of_their_own() -> None:
    names = [m.name for m in MUTATIONS]
    assert len(set(names)) == len(names)


def test_a_mutation_is_judged_under_the_weakest_profile_that_knows_its_code() -> None:
    for mutation in MUTATIONS:
        known = [p for p in PROFILES if p in RULES[mutation.code].profiles]
        assert mutation.profile == (known[0] if known else "core"), mutation


@pytest.mark.parametrize("calls", [1, 2])
def test_the_calls_that_mutations_build_on_are_valid_themselves(calls: int, pool: list[Any], tmp_path: Path) -> None:
    for metadata, rows in pool[:10]:
        plain = tail(metadata, rows, *[{}] * calls)
        write(tmp_path / "t.arrow", declared(metadata, plain), plain, overwrite=True)
        report = validate(tmp_path / "t.arrow", "train")
        assert report.clean, report.to_text()
