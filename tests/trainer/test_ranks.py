"""Two processes of torchrun train as one does."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers_engines import ENVIRONMENT, TORCHRUN, run, start, wait_until
from helpers_trainer import Setup, make_setup, rewarded_groups, weights_of

from memopd_trainer import train
from memopd_trainer.metrics import StepSums

NAMES = ("loss", "divergence", "ppo", "value_loss", "ratio", "ratio_min", "ratio_max", "entropy", "grad_norm")
COUNTS = ("step", "trained_tokens", "logical_tokens", "executed_tokens", "clip_fraction")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Four groups, in packs of less than an episode each."""
    setup = make_setup(tmp_path_factory.mktemp("ranks"), rewarded_groups(4, 2, 3))
    setup.base |= {"max_tokens": 60, "ppo": {"advantage": "gae", "critic": {"lr": 1e-2, "shared": True}}}
    return setup


def written(setup: Setup, folder: Path, **changes: Any) -> list[str]:
    """The command that trains with a configuration, on two ranks."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(setup.config(**changes).model_dump(mode="json")))
    return [*TORCHRUN, "-m", "memopd_trainer", "--", str(file), "--format", "json"]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_sums_of_parts_are_the_sums_of_the_whole() -> None:
    one, two, empty = StepSums(loss=1.0, ratio=0.5, ratio_min=0.9, ratio_max=1.5, clipped=2), StepSums(), StepSums()
    two = StepSums(loss=2.0, ratio=0.25, ratio_min=0.8, ratio_max=1.1, clipped=1, trained_tokens=7)
    both = StepSums.plus([one, empty, two])
    assert (both.loss, both.ratio, both.ratio_min, both.ratio_max) == (3.0, 0.75, 0.8, 1.5)
    assert (both.clipped, both.trained_tokens, both.divergence) == (3, 7, None)


@pytest.mark.slow
def test_two_processes_make_the_steps_that_one_makes_and_go_on_from_its_checkpoint(
    setup: Setup, tmp_path: Path
) -> None:
    alone = train(setup.config(steps=3, output=str(tmp_path / "one")))
    ended = run(written(setup, tmp_path, steps=2, output=str(tmp_path / "two")))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count('"checkpoint"') == 1, "only rank 0 prints"
    on = train(setup.config(steps=3, output=str(tmp_path / "two")))
    assert on.resumed_from == 2
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        assert all(a[name] == pytest.approx(b[name], rel=1e-9) for name in NAMES), (a, b)
        assert all(a[name] == b[name] for name in COUNTS) and a["value_loss"] > 0 and a["clip_fraction"] is not None
    left, right = weights_of(alone.checkpoint), weights_of(on.checkpoint)
    moved = weights_of(setup.student)
    for name, tensor in left.items():
        assert (tensor - right[name]).abs().max() <= 1e-9 * tensor.abs().max(), name
    assert any(not torch.equal(left[name], moved[name]) for name in left)


@pytest.mark.slow
def test_two_processes_draw_weigh_and_measure_as_one(setup: Setup, tmp_path: Path) -> None:
    """A recipe's schedule, weights and measures do not depend on who runs which pack."""
    length = {"initial": 8, "minimum": 2, "margin": 0, "step": 3, "patience": 2}
    changes: dict[str, Any] = {"recipe": "prune_opd", "reopd": {"kappa": 0.9}, "ppo": {"weight": 0}, "steps": 3}
    changes["prune_opd"] = {"w_drop": 0.3, "length": length}
    train(setup.config(**changes, output=str(tmp_path / "one")))
    ended = run(written(setup, tmp_path, **changes, output=str(tmp_path / "two")))
    assert ended.returncode == 0, ended.stderr
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for a, b in zip(one, two, strict=True):
        assert a["measured"] == pytest.approx(b["measured"], rel=1e-9) and a["measured"]["overlap"] > 0
        assert all(a[name] == pytest.approx(b[name], rel=1e-9) for name in ("loss", "divergence", "grad_norm"))
        assert a["trained_tokens"] == b["trained_tokens"] == 8 * 6  # one turn of eight episodes


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all_and_running_again_goes_on(setup: Setup, tmp_path: Path) -> None:
    import psutil

    out = tmp_path / "run"
    command = written(setup, tmp_path, steps=400, save_every=1, output=str(out))
    running = start(command)
    wait_until(lambda: len(list(out.glob("step-*"))) >= 2, running)
    ranks = [p for p in psutil.Process(running.pid).children() if "memopd_trainer" in p.cmdline()]
    assert len(ranks) == 2
    os.kill(next(p for p in ranks if p.environ()["RANK"] == "1").pid, signal.SIGKILL)
    running.communicate(timeout=240)  # no rank hangs
    assert running.returncode != 0 and not any(p.is_running() for p in ranks)
    done = max(int(f.name[5:]) for f in out.glob("step-*"))
    ended = run(written(setup, tmp_path, steps=done + 1, save_every=1, output=str(out)))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["resumed_from"] == done


@pytest.mark.slow
def test_an_error_of_the_data_is_told_once_with_its_code(setup: Setup, tmp_path: Path) -> None:
    command = written(setup, tmp_path, trace=str(tmp_path / "none.parquet"), output=str(tmp_path / "run"))
    ended = run(command)
    assert ended.returncode != 0 and "exitcode  : 3" in ended.stderr
    assert sum(line.startswith("error:") for line in ended.stderr.splitlines()) == 1
    assert "WORLD_SIZE" not in ENVIRONMENT
