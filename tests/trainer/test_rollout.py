"""Rollouts in lock step: valid traces, the same under one seed, whatever the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_models import STOP, tiny_tokenizer
from helpers_scorer import tiny_model
from transformers import PreTrainedModel

from memopd_trace import Episode, Invocation, Sampling, read, validate
from memopd_trace.errors import UsageError
from memopd_trace.record import Prompt
from memopd_trace.record.fingerprint import tokenizer_fingerprint, weights_digest
from memopd_trace.record.transformers import generate
from memopd_trainer.environments import Outcome, Turn
from memopd_trainer.environments.reading import ReadingEnvironment, ReadingTask
from memopd_trainer.rollout import RolloutSummary, call_seed, collect

TOKENIZER = tiny_tokenizer()
TASKS = [
    ReadingTask("q1", "Who rang?", ("the goat",), ("A goat came.", "It rang the bell.")),
    ReadingTask("q2", "What colour?", ("red",), ("The door was red.", "It was shut.", "The rain fell.")),
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(vocab_size=len(TOKENIZER) + 7)


def run(model: PreTrainedModel, path: Path, **more: Any) -> RolloutSummary:
    settings: dict[str, Any] = {
        "rollouts_per_task": 3,
        "sampling": Sampling(temperature=1.0),
        "max_new_tokens": 12,
        "batch_size": 4,
        "seed": 5,
    }
    make = more.pop("make_environment", lambda: ReadingEnvironment(TOKENIZER))
    return collect(model, TOKENIZER, make, more.pop("tasks", TASKS), out_path=path, **{**settings, **more})


def recorded(path: Path) -> list[Episode]:
    return list(read(path).iter_episodes())


def sampled(path: Path) -> list[tuple[str, int, list[int], list[int]]]:
    rows = read(path).iter_invocations()
    return [(r.episode_id, r.invocation_index, r.prompt_ids.tolist(), r.output_ids.tolist()) for r in rows]


def test_rollouts_validate_under_train_and_say_where_they_come_from(model: PreTrainedModel, tmp_path: Path) -> None:
    calls: list[int] = []
    summary = run(model, tmp_path / "t.parquet", policy_version=4, on_calls=calls.append)
    report = validate(tmp_path / "t.parquet", "train")
    assert report.clean, report.to_text()

    episodes = recorded(tmp_path / "t.parquet")
    assert [e.episode_id for e in episodes] == ["q1/0", "q1/1", "q1/2", "q2/0", "q2/1", "q2/2"]
    assert [e.group_key[1] for e in episodes] == ["q1"] * 3 + ["q2"] * 3, "a group's rollouts are neighbours"
    assert [len(e) for e in episodes] == [3] * 3 + [4] * 3, "one call a part, and the answer"
    rows = [row for e in episodes for row in e]
    assert {r.policy_version for r in rows} == {4} and {r.task_id for r in rows} == {"q1", "q2"}
    assert [r.relation for r in episodes[0]] == ["root", "rewrite", "rewrite"]
    assert all(r.started_at and r.ended_at and r.started_at <= r.ended_at for r in rows)
    assert all(r.output_text == TOKENIZER.decode(r.output_ids.tolist()) for r in rows), "the mirror, not the state"
    assert all(e.invocations[-1].rewards is not None and e.invocations[-1].terminated for e in episodes)

    described = read(tmp_path / "t.parquet").metadata.models["policy"]
    assert described.tokenizer.fingerprint == tokenizer_fingerprint(TOKENIZER)
    assert described.policies["4"].weights_digest == weights_digest(model)

    assert (summary.episodes, summary.invocations, sum(calls)) == (6, 21, 21)
    assert summary.prompt_tokens == sum(len(r.prompt_ids) for r in rows)
    assert summary.output_tokens == sum(len(r.output_ids) for r in rows)
    assert summary.mean_reward == pytest.approx(np.mean([e.episode_return for e in episodes]))


def test_ids_of_the_padded_vocabulary_are_never_sampled(model: PreTrainedModel, tmp_path: Path) -> None:
    run(model, tmp_path / "t.parquet", sampling=Sampling(temperature=5.0), max_new_tokens=40)
    rows = list(read(tmp_path / "t.parquet").iter_invocations())
    assert sum(len(r.output_ids) for r in rows) > 400
    assert max(int(r.output_ids.max()) for r in rows) < len(TOKENIZER) < model.config.vocab_size


def test_one_seed_gives_one_trace_whatever_the_batch_size(model: PreTrainedModel, tmp_path: Path) -> None:
    for name, more in (("a", {}), ("b", {}), ("c", {"batch_size": 1}), ("d", {"seed": 6})):
        run(model, tmp_path / f"{name}.parquet", **more)
    first = sampled(tmp_path / "a.parquet")
    assert sampled(tmp_path / "b.parquet") == first
    assert sampled(tmp_path / "c.parquet") == first
    assert sampled(tmp_path / "d.parquet") != first
    outputs = [tuple(output) for *_, output in first]
    assert len(set(outputs)) > len(outputs) / 2, "rollouts of one task differ from each other"
    logprobs = [
        [r.output_logprobs for r in read(tmp_path / f"{name}.parquet").iter_invocations()] for name in ("a", "b", "c")
    ]
    for a, b, c in zip(*logprobs, strict=True):
        assert np.array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=0, atol=1e-5)


def test_any_recorded_call_can_be_repeated_from_its_own_row(model: PreTrainedModel, tmp_path: Path) -> None:
    run(model, tmp_path / "t.parquet", sampling=Sampling(temperature=0.8, top_k=20))
    rows = list(read(tmp_path / "t.parquet").iter_invocations())
    assert len({r.sampling.seed for r in rows if r.sampling}) == len(rows)
    for row in rows[::5]:
        assert row.sampling is not None and row.sampling.seed is not None
        (again,) = generate(
            model,
            [row.prompt_ids],
            sampling=row.sampling,
            seeds=[row.sampling.seed],
            max_new_tokens=12,
            stop_ids=[STOP],
            size=len(TOKENIZER),
        )
        assert again.output_ids.tolist() == row.output_ids.tolist()
        np.testing.assert_allclose(again.logprobs, row.output_logprobs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(again.kept_logmass, row.output_kept_logmass, rtol=0, atol=1e-5)


def test_every_copied_memory_equals_what_was_sampled(model: PreTrainedModel, tmp_path: Path) -> None:
    run(model, tmp_path / "t.parquet")
    seen = 0
    for episode in recorded(tmp_path / "t.parquet"):
        for row in episode.invocations[1:]:
            before = episode.invocations[row.invocation_index - 1]
            written = before.output_ids.tolist()
            memory = [s for s in row.segments or () if s.kind == "memory"]
            text = [row.prompt_ids[s.start : s.stop].tolist() for s in memory[:1]]
            kept = written[:-1] if before.finish_reason == "stop" else written
            assert text == ([kept] if kept else [])
            seen += len(kept)
    assert seen > 50


@dataclass(frozen=True)
class Sum:
    task_id: str
    turns: int


class Growing:
    """An environment of one's own: a history that only grows, a reward on the way, a limit at the end."""

    def reset(self, task: Sum) -> Turn:
        self.left = task.turns
        return Turn(Prompt().add("task", [5, 6]))

    def step(self, invocation: Invocation) -> Turn | Outcome:
        self.left -= 1
        if not self.left:
            return Outcome(1.0, truncated=True)
        return Turn(Prompt().copy("history", invocation).add("user", [7]), reward=0.25)


def test_an_environment_of_ones_own_needs_only_reset_and_step(model: PreTrainedModel, tmp_path: Path) -> None:
    tasks = [Sum("a", 3), Sum("b", 1)]
    summary = run(model, tmp_path / "t.parquet", make_environment=Growing, tasks=tasks, rollouts_per_task=2)
    assert validate(tmp_path / "t.parquet", "train").clean
    episodes = recorded(tmp_path / "t.parquet")
    assert [[r.relation for r in e] for e in episodes] == [["root", "extend", "extend"]] * 2 + [["root"]] * 2
    assert [[r.reward for r in e] for e in episodes] == [[0.25, 0.25, 1.0]] * 2 + [[1.0]] * 2
    last = episodes[0].invocations[-1]
    assert (last.terminated, last.truncated) == (False, True)
    assert summary.mean_reward == 1.25


class Failing(Growing):
    def step(self, invocation: Invocation) -> Turn | Outcome:
        raise RuntimeError("the environment broke")


def test_an_environment_that_breaks_leaves_no_trace(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broke"):
        run(model, tmp_path / "t.parquet", make_environment=Failing, tasks=[Sum("a", 2)])
    assert list(tmp_path.iterdir()) == []


def test_collections_that_cannot_be_are_refused_before_anything_is_sampled(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    for more in ({"tasks": []}, {"rollouts_per_task": 0}, {"batch_size": 0}):
        with pytest.raises(UsageError, match="nothing to do"):
            run(model, tmp_path / "t.parquet", **more)
    with pytest.raises(UsageError, match="no end-of-sequence id"):
        run(model, tmp_path / "t.parquet", stop_ids=[])
    (tmp_path / "there.parquet").write_bytes(b"x")
    with pytest.raises(UsageError, match="exists already"):
        run(model, tmp_path / "there.parquet")
    with pytest.raises(UsageError, match="'q1/0' was opened before"):
        run(model, tmp_path / "t.parquet", tasks=[TASKS[0], TASKS[0]])
    assert (tmp_path / "there.parquet").read_bytes() == b"x"
    assert not (tmp_path / "t.parquet").exists()


def test_seeds_of_calls_are_distinct_and_fit_the_column() -> None:
    seeds = {call_seed(s, e, c) for s in range(5) for e in range(20) for c in range(5)}
    assert len(seeds) == 500
    assert all(0 <= s < 2**63 for s in seeds)
