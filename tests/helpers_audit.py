"""A student, a trace that it sampled, and ways to spoil the trace, for the tests of the audit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_scorer import (
    SIZE,
    growing_episode,
    memory_episode,
    oracle,
    save_model,
    tiny_model,
    write_trace,
)

from memopd_scorer.head import head_of
from memopd_scorer.teacher import LoadedModel, load
from memopd_trace.invocation import Invocation
from memopd_trace.storage import read, write

CALLS, TOKENS = 4, 6


@pytest.fixture(scope="module", name="student")
def make_student(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(save_model(tiny_model("llama", seed=5), tmp_path_factory.mktemp("toy") / "student"))


@pytest.fixture(scope="module", name="folder")
def make_folder(student: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student's folder, for the command line."""
    return save_model(tiny_model("llama", seed=5), tmp_path_factory.mktemp("folder") / "student")


@pytest.fixture(scope="module", name="trace")
def make_trace(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Memory-rewriting episodes of two groups and a growing one, recorded as they were sampled."""
    rng = np.random.default_rng(2)
    data = [memory_episode(rng, f"m{i}", calls=CALLS, group=f"g{i // 2}") for i in range(3)]
    data.append(growing_episode(rng, "grown"))
    return write_trace(tmp_path_factory.mktemp("trace") / "t.parquet", folder, tiny_model("llama", seed=5), data)


def changed(trace: Path, path: Path, change: Callable[[Invocation], Invocation]) -> Path:
    """The trace with `change` applied to every row."""
    reader = read(trace)
    write(path, reader.metadata, [change(i) for i in reader.iter_invocations()])
    return path


def resampled(trace: Path, path: Path, temperature: float, kept: bool = False, **columns: object) -> Path:
    """The trace with log-probabilities at a temperature; `kept`: conditional on the five best ids and the sampled."""
    model = tiny_model("llama", seed=5)
    head, rows, reader = head_of(model, SIZE), [], read(trace)
    by_key = {i.key: i for i in reader.iter_invocations()}
    for pack, hidden in oracle(model, list(reader.iter_episodes())):
        row = by_key[pack.states[0].episode_id, pack.states[0].invocation_index]
        logprobs = (head.logits(hidden).detach() / temperature).log_softmax(-1)
        ids = torch.from_numpy(row.output_ids).long()[:, None]
        chosen, mass = logprobs.gather(1, ids)[:, 0], torch.zeros(len(ids))
        if kept:
            mask = torch.zeros_like(logprobs, dtype=torch.bool)
            mask = mask.scatter(1, logprobs.topk(5).indices, True).scatter(1, ids, True)
            mass = logprobs.masked_fill(~mask, -torch.inf).logsumexp(-1)
        rows.append(row.replace(output_logprobs=chosen.numpy() - mass.numpy(), **columns))
        if kept and "output_kept_logmass" not in columns:
            rows[-1] = rows[-1].replace(output_kept_logmass=mass.numpy())
    write(path, reader.metadata, rows)
    return path
