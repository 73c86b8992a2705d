"""Collect on-policy rollouts: many episodes in lock step, sampled in batches, recorded call by call.

In each round every running episode makes one call. The random numbers of a call follow from (seed, episode, call)
alone, so neither the batch size nor the other episodes change what is drawn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedModel

from memopd_trace import __version__
from memopd_trace.errors import UsageError, first_line, printable
from memopd_trace.invocation import IDS, Invocation, Sampling
from memopd_trace.metadata import Producer, TraceMetadata
from memopd_trace.record import EpisodeRecorder, TraceRecorder
from memopd_trace.record.fingerprint import tokenizer_size
from memopd_trace.record.sampling import Generated
from memopd_trace.record.transformers import generate, model_metadata
from memopd_trace.rules.registry import Profile
from memopd_trainer.environments import Environment, Outcome, Task, Turn
from memopd_trainer.eviction import Eviction, generate_evicting
from memopd_trainer.quarantine import BadEpisode, Reason

TaskType = TypeVar("TaskType", bound=Task)


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """What was collected; lengths in tokens, time in seconds."""

    path: Path
    episodes: int
    invocations: int
    prompt_tokens: int
    output_tokens: int
    mean_reward: float
    seconds: float


def collect(
    model: PreTrainedModel,
    tokenizer: Any,
    make_environment: Callable[[], Environment[TaskType]],
    tasks: Sequence[TaskType],
    *,
    out_path: str | os.PathLike[str],
    rollouts_per_task: int,
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int = 32,
    seed: int = 0,
    policy_version: int = 0,
    model_name: str = "policy",
    stop_ids: Sequence[int] | None = None,
    eviction: Eviction | None = None,
    on_calls: Callable[[int], None] | None = None,
    on_bad: Callable[[BadEpisode], None] | None = None,
    overwrite: bool = False,
    profile: Profile = "train",
) -> RolloutSummary:
    """Run `rollouts_per_task` episodes of every task and record them as a trace at `out_path`.

    The rollouts of a task are episodes `task_id/0`, `task_id/1`…, neighbours in the file, with the task as their
    group. `stop_ids` are the tokenizer's end of sequence unless given. With `eviction`, calls forget while they write,
    one at a time, and their rows say what (`memopd_trainer.eviction`). `on_calls` is told how many calls each batch
    has added. `profile` is what each episode must satisfy (`policy`: no reward is needed).
    An exception leaves nothing at `out_path`; but with `on_bad`, one that an environment raises, a call that does not
    validate or a prompt beyond the model's positions ends that episode alone, which is handed over and not recorded.

    Raises:
        UsageError: no task, no stop id, a target that exists, or what `generate` and `TraceRecorder` refuse.
    """
    if not tasks or rollouts_per_task < 1 or batch_size < 1:
        raise UsageError(f"{len(tasks)} tasks, {rollouts_per_task} rollouts, batches of {batch_size}: nothing to do")
    if stop_ids is None:
        stop_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if not stop_ids:
        raise UsageError("the tokenizer has no end-of-sequence id", hint="give stop_ids")
    began = time.monotonic()
    described = model_metadata(model, tokenizer, name=model_name, stop_ids=stop_ids, policy_version=policy_version)
    metadata = TraceMetadata(
        producer=Producer(name="memopd-trace", version=__version__),
        required_features=[] if eviction is None else ["visibility"],
        models={model_name: described},
    )
    sampler = _Sampler(model, tokenizer, sampling, max_new_tokens, list(stop_ids), seed, eviction)
    with TraceRecorder(out_path, metadata, overwrite=overwrite, profile=profile) as recorder:
        runs = [
            _Run(n * rollouts_per_task + k, make_environment(), _open(recorder, task, k, policy_version), task, on_bad)
            for n, task in enumerate(tasks)
            for k in range(rollouts_per_task)
        ]
        running = [run for run in runs if run.turn is not None]
        while running:
            for batch in _batches(running, batch_size):
                sampler.advance([run for run in batch if sampler.has_room(run)])
                if on_calls is not None:
                    on_calls(len(batch))
            running = [run for run in running if run.turn is not None]
    runs = [run for run in runs if not run.bad]
    rows = [row for run in runs for row in run.rows]
    return RolloutSummary(
        path=Path(out_path),
        episodes=len(runs),
        invocations=len(rows),
        prompt_tokens=sum(len(row.prompt_ids) for row in rows),
        output_tokens=sum(len(row.output_ids) for row in rows),
        mean_reward=float(np.mean([run.reward for run in runs])) if runs else 0.0,
        seconds=time.monotonic() - began,
    )


class _Run:
    """One episode under way: `turn` is the call it waits for, `None` once it has ended."""

    def __init__(
        self,
        number: int,
        environment: Environment[TaskType],
        episode: EpisodeRecorder,
        task: TaskType,
        on_bad: Callable[[BadEpisode], None] | None,
    ) -> None:
        self.number, self._environment, self._episode, self._on_bad = number, environment, episode, on_bad
        self.reward, self.bad = 0.0, False
        self.turn: Turn | None = None
        with self._failing_alone():
            self.turn = environment.reset(task)

    @property
    def rows(self) -> tuple[Invocation, ...]:
        return self._episode.invocations

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Whatever is raised ends this episode alone, where somebody takes bad ones."""
        try:
            yield
        except Exception as error:  # an environment is a program of the user's: it may raise anything
            if self._on_bad is None:
                raise
            self.fail(f"{type(error).__name__}: {first_line(error)}", getattr(error, "code", None))

    def fail(self, message: str, code: str | None = None) -> None:
        """End the episode as a bad one."""
        assert self._on_bad is not None
        rows, self.turn, self.bad = self.rows, None, True
        if not self._episode.closed:
            self._episode.discard()
        reason = Reason(self._episode.episode_id, printable(message), code, len(rows) - 1 if rows else None)
        self._on_bad(BadEpisode(reason, rows))

    def take(self, generated: Generated, **columns: Any) -> None:
        """Record the call that was waited for, and ask the environment what comes next."""
        with self._failing_alone():
            self._take(generated, **columns)

    @property
    def may_fail(self) -> bool:
        """Whether somebody takes bad episodes."""
        return self._on_bad is not None

    def _take(self, generated: Generated, **columns: Any) -> None:
        assert self.turn is not None
        row = self._episode.record(
            self.turn.prompt,
            generated.output_ids,
            logprobs=generated.logprobs,
            kept_logmass=generated.kept_logmass,
            sampling=generated.sampling,
            finish_reason=generated.finish_reason,
            output_kind=self.turn.output_kind,
            rewrite_kind=self.turn.rewrite_kind,
            **columns,
        )
        answer = self._environment.step(row)
        if isinstance(answer, Outcome):
            self.turn, self.reward = None, self.reward + (answer.reward or 0.0)
            self._episode.finish(reward=answer.reward, rewards=answer.rewards, truncated=answer.truncated)
            return
        self.turn = answer
        if answer.reward is not None:
            self.reward += answer.reward
            self._episode.amend(row, reward=answer.reward)


@dataclass(frozen=True, slots=True)
class _Sampler:
    """How calls are sampled."""

    model: PreTrainedModel
    tokenizer: Any
    sampling: Sampling
    max_new_tokens: int
    stop_ids: list[int]
    seed: int
    eviction: Eviction | None

    def has_room(self, run: _Run) -> bool:
        """Whether the model has positions for the call that a run waits for; a run that may fail fails."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if not run.may_fail or run.turn is None or limit is None:
            return True
        length = len(run.turn.prompt) + self.max_new_tokens
        if length > limit:
            run.fail(f"prompt and output would have {length} tokens, the model has {limit} positions")
        return length <= limit

    def advance(self, batch: list[_Run]) -> None:
        """One call of every run of the batch."""
        prompts = [run.turn.prompt.ids for run in batch if run.turn is not None]
        seeds = [call_seed(self.seed, run.number, len(run.rows)) for run in batch]
        started = datetime.now(UTC)
        calls = list(self._sample(prompts, seeds))
        ended = datetime.now(UTC)
        for run, prompt, (output, state) in zip(batch, prompts, calls, strict=True):
            run.take(
                output,
                prompt_text=self.tokenizer.decode(prompt.tolist()),
                output_text=self.tokenizer.decode(output.output_ids.tolist()),
                started_at=started,
                ended_at=ended,
                **state,
            )

    def _sample(self, prompts: list[IDS], seeds: list[int]) -> Iterator[tuple[Generated, dict[str, IDS]]]:
        """What each prompt gave, and the columns of its state that are not the default."""
        how: dict[str, Any] = {
            "sampling": self.sampling,
            "max_new_tokens": self.max_new_tokens,
            "stop_ids": self.stop_ids,
            "size": tokenizer_size(self.tokenizer),
        }
        if self.eviction is None:
            yield from ((output, {}) for output in generate(self.model, prompts, seeds=seeds, **how))
            return
        for prompt, seed in zip(prompts, seeds, strict=True):
            call = generate_evicting(self.model, prompt, self.eviction, seed=seed, **how)
            yield call.generated, {"position_ids": call.position_ids, "visible_until": call.visible_until}


def call_seed(seed: int, episode: int, call: int) -> int:
    """The seed of one call, in [0, 2^63): independent streams for every (seed, episode number, call number)."""
    return int(np.random.SeedSequence(seed, spawn_key=(episode, call)).generate_state(1, np.uint64)[0] >> 1)


def _open(recorder: TraceRecorder, task: Task, rollout: int, policy_version: int) -> EpisodeRecorder:
    return recorder.episode(
        f"{task.task_id}/{rollout}",
        group_id=task.task_id,
        task_id=task.task_id,
        policy_version=policy_version,
    )


def _batches(runs: list[_Run], size: int) -> list[list[_Run]]:
    """Runs with prompts of like length together, so that little is padded; deterministic."""
    ordered = sorted(runs, key=lambda run: (len(run.turn.prompt) if run.turn is not None else 0, run.number))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]
