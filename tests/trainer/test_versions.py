"""Which policy sampled what: too old is refused or weighed, newer than the student is refused, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_trainer import Setup, make_setup

from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Episode
from memopd_trace.storage import read, write
from memopd_trainer.train import train
from memopd_trainer.versions import check_versions, versions_of


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(tmp_path_factory.mktemp("versions"), dtype="float32")


def test_rows_older_than_allowed_are_refused_and_younger_ones_are_not(setup: Setup, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="sampled by policy version 0, the student is version 3 and max_staleness is 2"
    ):
        train(setup.config(policy_version=3, max_staleness=2, output=str(tmp_path / "a")))
    assert not (tmp_path / "a").exists()
    assert train(setup.config(policy_version=3, max_staleness=3, steps=1, output=str(tmp_path / "b"))).steps == 1
    assert train(setup.config(max_staleness=0, steps=1, output=str(tmp_path / "c"))).steps == 1, (
        "the newest is version 0"
    )


def test_old_rows_are_taken_where_their_weight_is_clipped(setup: Setup, tmp_path: Path) -> None:
    old: dict[str, Any] = {"policy_version": 9, "max_staleness": 0, "steps": 1}
    plain = train(setup.config(**old | {"max_staleness": None}, output=str(tmp_path / "a")))
    weighed = train(setup.config(**old, divergence__importance_clip=0.5, output=str(tmp_path / "b")))
    assert plain.last is not None and weighed.last is not None
    assert weighed.last.divergence == plain.last.divergence, "measured without weights"
    assert weighed.last.loss < plain.last.loss, "no weight is above the clip"


def changed(setup: Setup, **columns: Any) -> list[list[Episode]]:
    return [[Episode(e.episode_id, tuple(r.replace(**columns) for r in e))] for e in setup.episodes]


def test_versions_are_judged_token_by_token(setup: Setup) -> None:
    row = setup.episodes[0].invocations[0]
    n = len(row.output_ids)
    versions = np.array([2] * (n - 1) + [5])
    mixed = row.replace(policy_version=5, output_policy_versions=versions)
    assert versions_of(mixed).tolist() == versions.tolist()
    groups = [[Episode(row.episode_id, (mixed,))]]
    check_versions(groups, policy_version=None, max_staleness=3)
    with pytest.raises(InputError, match=rf"version 2, the student is version 5.*{n - 1} of version 2, 1 of version 5"):
        check_versions(groups, policy_version=None, max_staleness=2)


def test_a_student_older_than_what_sampled_for_it_and_rows_that_do_not_say_are_refused(setup: Setup) -> None:
    with pytest.raises(UsageError, match="said to be policy version 3, the trained tokens are .* of version 4"):
        check_versions(changed(setup, policy_version=4), policy_version=3, max_staleness=None)
    with pytest.raises(InputError, match="does not say which policy version") as caught:
        check_versions(changed(setup, policy_version=None), policy_version=None, max_staleness=1)
    assert caught.value.code == "E-NEEDS-POLICY-VERSION"
    untrained = changed(setup, policy_version=None, accepted=False)
    check_versions(untrained, policy_version=None, max_staleness=0)


def test_a_run_that_continues_another_keeps_its_optimiser_and_its_numbers(setup: Setup, tmp_path: Path) -> None:
    first = train(setup.config(output=str(tmp_path / "a"), warmup_steps=4))
    changes = {"student": str(first.checkpoint), "continues": True, "steps": 4, "warmup_steps": 4}
    second = train(setup.config(**changes, output=str(tmp_path / "b")))
    through = train(setup.config(output=str(tmp_path / "c"), steps=4, warmup_steps=4))
    assert second.first is not None and second.first.step == 3 and second.checkpoint.name == "step-000004"
    assert second.last is not None and through.last is not None
    assert second.last.loss == through.last.loss, "as if it had been one run"
    reader = read(setup.trace)
    write(tmp_path / "other.parquet", reader.metadata, list(reader.iter_invocations()))
    again = train(setup.config(**changes, output=str(tmp_path / "b")))
    assert again.first is None and again.resumed_from == 4
    with pytest.raises(InputError, match="is no checkpoint"):
        train(setup.config(continues=True, output=str(tmp_path / "d")))
