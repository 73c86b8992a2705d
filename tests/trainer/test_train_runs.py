"""Runs of the trainer from start to end: seeds, stops, going on, what is drawn, and what stops them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_trainer import Setup, equal_weights, make_setup, rewarded_groups

from memopd_trace.errors import CheckFailed, UsageError
from memopd_trace.invocation import Episode
from memopd_trainer import evaluate_kl, train
from memopd_trainer.metrics import StepMetrics
from memopd_trainer.recipes.drawing import draw_groups


def without_seconds(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Two groups of two memory-rewriting rollouts; one token forced, one masked out, one attempt rejected."""
    episodes = [list(e) for e in rewarded_groups()]
    episodes[0][0] = episodes[0][0].replace(output_sampled=[True, True, False, True, True, True])
    episodes[1][0] = episodes[1][0].replace(output_loss_mask=[False, True, True, True, True, True])
    episodes[2][1] = episodes[2][1].replace(accepted=False)
    made = [Episode(e[0].episode_id, tuple(e)) for e in episodes]
    return make_setup(tmp_path_factory.mktemp("train"), made)


def test_same_seed_is_equal_bit_for_bit_and_another_seed_draws_other_groups(setup: Setup, tmp_path: Path) -> None:
    def run(name: str, seed: int) -> Path:
        config = setup.config(output=str(tmp_path / name), steps=3, groups_per_step=1, seed=seed)
        return train(config).checkpoint

    a, b, c = run("a", 0), run("b", 0), run("c", 4)
    assert equal_weights(a, b) and not equal_weights(a, c)
    assert without_seconds(a.parent / "metrics.jsonl") == without_seconds(b.parent / "metrics.jsonl")


def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(setup: Setup, tmp_path: Path) -> None:
    shared = {
        "groups_per_step": 1,
        "save_every": 2,
        "warmup_steps": 4,
        "weight_decay": 0.1,
        "held_out": {"trace": str(setup.trace), "scores": str(setup.scores)},
    }
    whole = setup.config(output=str(tmp_path / "whole"), steps=5, **shared)
    parts = setup.config(output=str(tmp_path / "parts"), steps=5, **shared)
    uninterrupted = train(whole)

    def stop(metrics: StepMetrics) -> None:
        if metrics.step == 3:  # one step after the checkpoint: that step is lost and made again
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(parts, on_step=stop)
    steps: list[int] = []
    resumed = train(parts, on_step=lambda m: steps.append(m.step))

    assert steps == [3, 4, 5] and resumed.resumed_from == 2 and uninterrupted.resumed_from == 0
    assert equal_weights(uninterrupted.checkpoint, resumed.checkpoint)
    assert not equal_weights(setup.student, resumed.checkpoint)
    states = [
        torch.load(r.checkpoint / "trainer_state.pt", weights_only=True)["optimizer"]["state"]
        for r in (uninterrupted, resumed)
    ]
    assert states[0].keys() == states[1].keys() and len(states[0]) > 10
    for key, values in states[0].items():
        assert all(torch.equal(v, states[1][key][name]) for name, v in values.items())
    assert without_seconds(tmp_path / "whole/metrics.jsonl") == without_seconds(tmp_path / "parts/metrics.jsonl")
    assert resumed.held_out_before == uninterrupted.held_out_before
    assert resumed.held_out_after == uninterrupted.held_out_after != resumed.held_out_before


def test_a_finished_run_is_left_as_it_is_and_can_be_prolonged(setup: Setup, tmp_path: Path) -> None:
    config = setup.config(output=str(tmp_path / "run"), steps=2)
    first = train(config)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    again = train(config)
    assert again.checkpoint == first.checkpoint and again.first is None and again.resumed_from == 2
    assert (tmp_path / "run/metrics.jsonl").read_text() == before
    longer = train(setup.config(output=str(tmp_path / "run"), steps=3))
    assert longer.first is not None and longer.first.step == 3
    with pytest.raises(UsageError, match="is at step 3"):
        train(config)


def test_held_out_data_that_come_later_are_not_said_to_be_of_the_untrained_student(
    setup: Setup, tmp_path: Path
) -> None:
    """A run that goes on with held-out data it did not begin with is measured where it stands, not at step 0."""
    held_out = {"trace": str(setup.trace), "scores": str(setup.scores)}
    first = train(setup.config(output=str(tmp_path / "run"), steps=2))
    there = evaluate_kl(first.checkpoint, setup.trace, setup.scores, dtype="float64")
    longer = train(setup.config(output=str(tmp_path / "run"), steps=3, held_out=held_out))
    assert longer.held_out_before == there != longer.held_out_after
    lines = [m for m in without_seconds(tmp_path / "run/metrics.jsonl") if "held_out" in m]
    assert [m["step"] for m in lines] == [2, 3]


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_episodes(setup: Setup, tmp_path: Path) -> None:
    config = setup.config(output=str(tmp_path / "run"), lr=1e200, grad_clip=1e300, steps=4, save_every=1)
    with pytest.raises(CheckFailed, match=r"step 2: the .* is (nan|inf).*'g0e0'"):
        train(config)
    assert (tmp_path / "run/step-000001").is_dir() and not (tmp_path / "run/step-000002").exists()


def test_a_gradient_that_overflows_under_a_finite_loss_stops_the_run(setup: Setup, tmp_path: Path) -> None:
    config = setup.config(output=str(tmp_path / "run"), divergence__weight=1e200)
    with pytest.raises(CheckFailed, match=r"step 1: the gradient norm is (nan|inf), episodes 'g0e0'"):
        train(config)
    assert not (tmp_path / "run/step-000002").exists()


def test_an_epoch_draws_every_group_once_and_depends_on_seed_and_step_alone() -> None:
    def epochs(seed: int) -> Iterator[list[int]]:
        for epoch in range(3):
            yield [g for step in range(1, 4) for g in draw_groups(7, 2, epoch * 3 + step, seed)]

    for drawn in epochs(0):
        assert len(drawn) == len(set(drawn)) == 6
    assert len({tuple(d) for d in epochs(0)}) == 3 and list(epochs(0)) != list(epochs(1))
    assert sorted(draw_groups(3, 3, 5, 0)) == [0, 1, 2]


def test_more_groups_a_step_than_there_are_is_refused(setup: Setup, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="groups_per_step is 3, the trace has 2 groups"):
        train(setup.config(output=str(tmp_path / "run"), groups_per_step=3))


def test_gradient_checkpointing_changes_no_bit(setup: Setup, tmp_path: Path) -> None:
    plain, again = (
        train(setup.config(output=str(tmp_path / str(on)), gradient_checkpointing=on)).checkpoint
        for on in (False, True)
    )
    assert equal_weights(plain, again) and not equal_weights(plain, setup.student)


def test_the_learning_rate_warms_up(setup: Setup, tmp_path: Path) -> None:
    seen: list[float] = []
    config = setup.config(output=str(tmp_path / "run"), steps=4, lr=1e-4, warmup_steps=3)
    train(config, on_step=lambda m: seen.append(m.lr))
    assert seen == pytest.approx([1e-4 / 3, 2e-4 / 3, 1e-4, 1e-4])


@pytest.mark.parametrize(
    ("decay", "expected"),
    [("linear", [0.5, 1, 0.75, 0.5, 0.25, 0, 0]), ("cosine", [0.5, 1, 0.853553, 0.5, 0.146447, 0, 0])],
)
def test_the_learning_rate_falls_to_nothing_at_the_step_that_is_given(
    setup: Setup, decay: str, expected: list[float]
) -> None:
    config = setup.config(warmup_steps=2, decay_steps=6, lr_decay=decay)
    assert [config.lr_factor(step) for step in range(1, 8)] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(UsageError, match="decay_steps 2 end before warmup_steps 2 are over"):
        setup.config(warmup_steps=2, decay_steps=2)


def test_the_optimiser_takes_its_betas(setup: Setup, tmp_path: Path) -> None:
    runs = [
        train(setup.config(output=str(tmp_path / str(beta)), steps=3, betas=[0.9, beta])).checkpoint
        for beta in (0.999, 0.98)
    ]
    assert not equal_weights(*runs)
    state = torch.load(runs[1] / "trainer_state.pt", weights_only=True)
    assert {group["betas"] for group in state["optimizer"]["param_groups"]} == {(0.9, 0.98)}
