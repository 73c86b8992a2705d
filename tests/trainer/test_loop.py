"""The loop: what it leaves on disk, that it goes on from a kill anywhere, and what it does about bad episodes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers_forks import Forks
from helpers_loop import make_models, settings
from helpers_models import tiny_tokenizer
from helpers_trainer import equal_weights

from memopd_scorer.scores import ScoresReader
from memopd_trace import read, validate
from memopd_trace.cli import run
from memopd_trace.errors import CheckFailed, InputError, UsageError
from memopd_trainer import loop as module
from memopd_trainer.environments import Turn
from memopd_trainer.environments.suites import open_suite
from memopd_trainer.loop import loop
from memopd_trainer.loop_config import parse_loop_config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_models(str(tmp_path_factory.mktemp("models"))))


def start(models: Path, output: Path, **changes: Any) -> module.LoopResult:
    return loop(parse_loop_config(settings(models, output, **changes)))


@pytest.fixture(scope="module")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> module.LoopResult:
    return start(models, tmp_path_factory.mktemp("loop") / "out")


def test_each_iteration_trains_on_rollouts_of_the_policy_that_the_one_before_made(
    models: Path, finished: module.LoopResult
) -> None:
    assert finished.made == 2 and [r["iteration"] for r in finished.iterations] == [0, 1]
    assert finished.policy == finished.folder / "iter-001/policy/step-000004", "steps are counted through"
    assert not equal_weights(finished.folder / "iter-000/policy/step-000002", finished.policy)
    prompts = []
    for number in range(2):
        trace = finished.folder / f"iter-{number:03d}/trace/accepted.parquet"
        assert validate(trace, "train", scores=trace.parents[1] / "scores").clean
        rows = list(read(trace).iter_invocations())
        assert {r.policy_version for r in rows} == {number}
        prompts.append([r.output_ids.tolist() for r in rows])
        weights = read(trace).metadata.models["policy"].policies[str(number)].weights_digest
        assert weights == read(trace).metadata.models["policy"].weights_digest
    assert prompts[0] != prompts[1]
    report = json.loads((finished.folder / "iter-001/iteration.json").read_text())
    assert report == finished.iterations[1] and report["episodes"] == 4 and report["calls"] == 8
    assert report["mean_reward"] == pytest.approx(report["rewards"]["even"]) and report["quarantined"] == 0


def test_the_optimiser_and_the_warm_up_go_on_from_one_iteration_to_the_next(finished: module.LoopResult) -> None:
    rates = [
        json.loads(line)["lr"]
        for number in range(2)
        for line in (finished.folder / f"iter-{number:03d}/policy/metrics.jsonl").read_text().splitlines()
    ]
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])
    import torch

    state = torch.load(finished.policy / "trainer_state.pt", weights_only=True)
    assert {int(entry["step"]) for entry in state["optimizer"]["state"].values()} == {4}


def test_a_finished_loop_does_nothing_again_and_more_iterations_go_on(
    models: Path, finished: module.LoopResult, tmp_path: Path
) -> None:
    told: list[str] = []
    config = parse_loop_config(settings(models, finished.folder))
    again = loop(config, on_stage=lambda number, stage, text: told.append(stage))
    assert again.made == 0 and not told and again.iterations == finished.iterations
    first = start(models, tmp_path / "out", iterations=1)
    longer = start(models, tmp_path / "out")
    assert first.made == longer.made == 1 and longer.iterations == finished.iterations
    assert equal_weights(longer.policy, finished.policy)


@pytest.fixture(scope="module")
def forks(models: Path) -> Iterator[Forks]:
    with Forks("helpers_loop:warm", folder=str(models)) as parent:
        yield parent


FEW = [
    (0, "rollouts", "4 more calls"),
    (0, "score", "pack 1"),
    (1, "validate", ""),
    (1, "train", "step 3"),
]
MANY = [
    (0, "rollouts", ""),
    (0, "rollouts", "4 more calls"),
    (0, "validate", ""),
    (0, "score", ""),
    (0, "score", "pack 1"),
    (0, "train", ""),
    (0, "train", "step 1"),
    (1, "rollouts", "4 more calls"),
    (1, "validate", ""),
    (1, "score", "pack 1"),
    (1, "train", "step 3"),
    (1, "train", "step 4"),
]


@pytest.mark.parametrize("stops", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_a_loop_killed_at_every_stage_ends_as_one_that_was_not(
    forks: Forks, finished: module.LoopResult, tmp_path: Path, stops: list[tuple[int, str, str]]
) -> None:
    output = tmp_path / "out"
    for stop in stops:
        ended = forks.run("helpers_loop:loop_in_child", output=str(output), at=list(stop))
        assert ended.killed == signal.SIGKILL, f"{stop}: {ended}"
    ended = forks.run("helpers_loop:loop_in_child", output=str(output), at=None)
    assert ended.result == 1, ended.error
    compare(output, finished)


@pytest.mark.slow
def test_a_kill_at_any_step_on_the_disk_does_no_harm(forks: Forks, finished: module.LoopResult, tmp_path: Path) -> None:
    counted = forks.run("helpers_loop:loop_in_child", count=True, output=str(tmp_path / "whole"), at=None)
    assert counted.steps > 60
    output = tmp_path / "out"
    killed = 0
    for at_step in np.random.default_rng(0).permutation(counted.steps)[:12]:
        killed += forks.run("helpers_loop:loop_in_child", at_step=int(at_step), output=str(output), at=None).killed != 0
    assert killed >= 2
    forks.run("helpers_loop:loop_in_child", output=str(output), at=None)
    compare(output, finished)


def compare(output: Path, finished: module.LoopResult) -> None:
    """The same tokens, reports and weights, and nothing half done."""
    for number, report in enumerate(finished.iterations):
        here, there = output / f"iter-{number:03d}", finished.folder / f"iter-{number:03d}"
        assert json.loads((here / "iteration.json").read_text()) == report
        assert equal_weights(here / report["policy"], there / report["policy"])
        digests = [
            [r.compute_digest() for r in read(f / "trace/accepted.parquet").iter_invocations()] for f in (here, there)
        ]
        assert digests[0] == digests[1]
        names = [sorted(f.name for f in folder.iterdir()) for folder in (here, there)]
        assert names[0] == names[1] == ["iteration.json", "policy", "rollouts", "scores", "trace"]


BAD = ("reset", "step", "reward", "long")


def test_bad_episodes_stop_a_loop_unless_they_are_to_be_quarantined(models: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="'bad-reset/0' failed after 0 calls: ConnectionError: the tool is away"):
        start(models, tmp_path / "a", rollouts__options={"bad": ["reset"]}, rollouts__tasks=4)
    assert not (tmp_path / "a/iter-000/rollouts").exists()

    many = {"rollouts__options": {"bad": BAD}, "rollouts__tasks": None, "iterations": 1}
    result = start(models, tmp_path / "b", on_bad="quarantine", **many)
    assert result.iterations[0]["quarantined"] == 8 and result.iterations[0]["episodes"] == 6
    trace = tmp_path / "b/iter-000/trace"
    reasons = json.loads((trace / "reasons.json").read_text())
    by_task = {r["episode_id"].split("/")[0]: r for r in reasons}
    assert len(reasons) == 8 and set(by_task) == {f"bad-{how}" for how in BAD}
    assert by_task["bad-reset"]["message"] == "ConnectionError: the tool is away"
    assert by_task["bad-step"]["message"] == "RuntimeError: the environment broke"
    assert by_task["bad-reward"]["code"] == "E-REWARD-NONFINITE"
    assert "the model has 512 positions" in by_task["bad-long"]["message"]
    kept = {r.episode_id: r for r in read(trace / "quarantined.parquet").iter_invocations()}
    assert set(kept) == {f"bad-{how}/{k}" for how in ("step", "reward", "long") for k in range(2)}
    assert not any(e.episode_id.startswith("bad") for e in read(trace / "accepted.parquet").iter_episodes())


def test_an_episode_that_does_not_validate_is_told_apart_from_the_others(models: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    config = {"iterations": 1, "on_bad": "quarantine"}
    start(models, output, **config)
    spoil(output)
    result = start(models, output, **config)
    assert result.iterations[0]["quarantined"] == 1 and result.iterations[0]["episodes"] == 3
    reasons = json.loads((output / "iter-000/trace/reasons.json").read_text())
    assert {r["episode_id"] for r in reasons} == {"n0/0"}
    found = {(r["code"], r["invocation_index"]) for r in reasons}
    assert {("E-NEEDS-LOGPROBS", 0), ("E-NEEDS-LOGPROBS", 1)} < found, "one reason for each finding"
    bad = list(read(output / "iter-000/trace/quarantined.parquet").iter_episodes())
    assert [e.episode_id for e in bad] == [reasons[0]["episode_id"]]

    start(models, tmp_path / "strict", iterations=1)
    spoil(tmp_path / "strict")
    with pytest.raises(CheckFailed, match="1 bad episodes, the first is") as caught:
        start(models, tmp_path / "strict", iterations=1)
    assert caught.value.code == reasons[0]["code"]


def spoil(output: Path) -> None:
    """Take the log-probabilities from one recorded episode, and undo what came after the recording."""
    import shutil

    from memopd_trace import write

    folder = output / "iter-000"
    for name in ("trace", "scores", "policy"):
        shutil.rmtree(folder / name)
    (folder / "iteration.json").unlink()
    reader = read(folder / "rollouts/accepted.parquet")
    rows = list(reader.iter_invocations())
    spoilt = [
        r.replace(output_logprobs=None, logprob_kind=None) if r.episode_id == rows[0].episode_id else r for r in rows
    ]
    write(folder / "rollouts/accepted.parquet", reader.metadata, spoilt, overwrite=True)


def test_a_loop_of_bad_episodes_alone_stops(models: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="no episode is good"):
        options = {"bad": ["step"], "good": 0}
        start(models, tmp_path / "out", on_bad="quarantine", rollouts__options=options, rollouts__tasks=None)


def test_without_a_teacher_nothing_is_scored(models: Path, tmp_path: Path) -> None:
    changes = {"score": None, "train": {"steps": 1, "recipe": "ppo"}, "iterations": 1}
    result = start(models, tmp_path / "out", **changes)
    assert result.made == 1 and not (tmp_path / "out/iter-000/scores").exists()


def test_a_recipe_says_which_view_and_signal_the_teacher_gives(models: Path, tmp_path: Path) -> None:
    train = {"steps": 1, "recipe": "persistent_history"}
    result = start(models, tmp_path / "out", train=train, iterations=1)
    scored = ScoresReader(result.folder / "iter-000/scores").metadata
    assert (scored.view, "hidden" in scored.signals) == ("persistent-history", True)


def test_a_critic_goes_on_and_evictions_are_trained_on(models: Path, tmp_path: Path) -> None:
    train = {"steps": 1, "lr": 1e-3, "divergence": {"weight": 0}, "ppo": {"advantage": "gae"}}
    result = start(models, tmp_path / "out", train=train, rollouts__eviction={"first": 1, "latest": 3})
    assert result.made == 2 and result.policy.name == "step-000002"
    assert (result.policy / "critic.safetensors").is_file()
    trace = tmp_path / "out/iter-001/trace/accepted.parquet"
    assert read(trace).metadata.required_features == ["visibility"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": None}, "takes a teacher's scores and there is no teacher"),
        ({"train__trace": "x"}, "train.trace is set by the loop"),
        ({"train": {"lr": 1}}, "missing train.steps"),
        ({"train__step": 1}, "unknown key 'train.step'.*did you mean 'train.steps'"),
        ({"train__lr": -1}, "lr"),
        ({"iteration": 2}, "did you mean 'iterations'"),
        ({"rollouts__per_tasks": 2}, "did you mean 'rollouts.per_task'"),
        ({"train": 3}, "train"),
        ({"train__view": "successful-peer"}, "the loop makes no view 'successful-peer'"),
    ],
)
def test_configurations_that_do_not_fit_are_refused_by_name(
    models: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        parse_loop_config(settings(models, tmp_path, **changes))


def test_a_folder_of_another_loop_is_refused(models: Path, finished: module.LoopResult) -> None:
    with pytest.raises(UsageError, match="holds a loop with seed = 4, not 5"):
        start(models, finished.folder, seed=5)
    with pytest.raises(UsageError, match="holds a loop with rollouts = "):
        start(models, finished.folder, rollouts__per_task=3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nowhere", {}, "no environment 'nowhere'.*reading, multi_objective_qa"),
        ("no_such:thing", {}, "no_such"),
        ("helpers_loop:nothing", {}, "has no attribute"),
        ("reading", {"splits": 1}, "unexpected keyword"),
        ("helpers_loop:counting", {"good": 0}, "no Suite with tasks"),
    ],
)
def test_environments_that_are_not_there_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_suite(name, tiny_tokenizer(), options)


def test_built_in_environments_open_by_name() -> None:
    for name, count in (("reading", 24), ("multi_objective_qa", 64)):
        suite = open_suite(name, tiny_tokenizer(), {})
        assert len(suite.tasks) == count
        assert isinstance(suite.make_environment().reset(suite.tasks[0]), Turn)


def test_the_command_loops_and_prints_what_came_of_it(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "loop.yaml"
    file.write_text(yaml.safe_dump(settings(models, tmp_path / "out")))
    assert run(["loop", str(file), "iterations=1", "train.lr=1e-4"]) == 0
    out, _ = capsys.readouterr()
    assert "reward" in out and "step-000002" in out
    assert run(["loop", str(file), "iterations=1", "train.lr=1e-4", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["made"] == 0
    assert run(["loop", str(file), "iteration=1"]) == 2
    assert "did you mean 'iterations'" in capsys.readouterr().err
    assert run(["loop", str(tmp_path / "none.yaml")]) == 3


def test_a_report_that_is_damaged_is_refused(models: Path, tmp_path: Path) -> None:
    start(models, tmp_path / "out", iterations=1)
    (tmp_path / "out/iter-000/iteration.json").write_text("{}")
    with pytest.raises(InputError, match="iteration.json: cannot be read"):
        start(models, tmp_path / "out", iterations=1)
