"""Episodes of a memory agent, recorded call by call without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memopd_trace import Episode, Invocation, Sampling, TraceMetadata, read
from memopd_trace.metadata import Model, Producer, Tokenizer
from memopd_trace.record import EpisodeRecorder, Prompt, TraceRecorder

VOCAB = 100
SAMPLING = Sampling(temperature=1.0)


def metadata(*names: str) -> TraceMetadata:
    tokenizer = Tokenizer(fingerprint="f", size=VOCAB, vocab_size=VOCAB, eos_ids=[2], stop_ids=[2])
    models = {name: Model(name=name, tokenizer=tokenizer) for name in names or ("m",)}
    return TraceMetadata(producer=Producer(name="test"), models=models)


def call(episode: EpisodeRecorder, prompt: Any, output: list[int], **more: Any) -> Invocation:
    more.setdefault("logprobs", [-0.5 - 0.123456 * i for i in range(len(output))])
    return episode.record(prompt, output, sampling=SAMPLING, finish_reason="stop", **more)


def memory_run(episode: EpisodeRecorder, calls: int = 3) -> list[Invocation]:
    """Calls that each see a task, the memory that the one before wrote, and something new."""
    rows = [call(episode, Prompt().add("task", [10, 11]).add("observation", [20]), [30, 31, 2])]
    for number in range(1, calls):
        prompt = Prompt().copy("task", rows[0], 0, 2).copy_output("memory", rows[-1], 0, 2)
        prompt.add("observation", [20 + number])
        rows.append(call(episode, prompt, [30 + number, 31 + number, 2], rewrite_kind="memory"))
    return rows


def start(recorder: TraceRecorder, name: str, group: str = "g", **more: Any) -> EpisodeRecorder:
    return recorder.episode(name, group_id=group, task_id=group, policy_version=0, **more)


def recorded(path: Path) -> list[Episode]:
    return list(read(path).iter_episodes())


def extended(episode: EpisodeRecorder) -> Invocation:
    return call(episode, [5, 6], [7, 2])
