"""A loop of tiny models in an environment of its own, here or in a forked process that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from helpers_models import tiny_tokenizer
from helpers_scorer import tiny_model

from memopd_trace import Invocation
from memopd_trace.record import Prompt
from memopd_trainer.environments import Outcome, Turn
from memopd_trainer.environments.suites import Suite
from memopd_trainer.loop import loop
from memopd_trainer.loop_config import parse_loop_config


class Number:
    """A task of these tests' own environment; `bad` rollouts of it fail, one way or another."""

    def __init__(self, task_id: str, how: str = "") -> None:
        self.task_id, self.how = task_id, how


class Counting:
    """Two calls; the reward is the share of even ids, so that rollouts differ."""

    def reset(self, task: Number) -> Turn:
        self.task, self.calls = task, 0
        if task.how == "reset":
            raise ConnectionError("the tool is away")
        return Turn(Prompt().add("task", [5, 6, 7]))

    def step(self, invocation: Invocation) -> Turn | Outcome:
        self.calls += 1
        if self.task.how == "step":
            raise RuntimeError("the environment broke")
        if self.calls == 2:
            even = float((invocation.output_ids % 2 == 0).mean())
            return Outcome(float("nan") if self.task.how == "reward" else even, {"even": even})
        long = [9] * (600 if self.task.how == "long" else 2)
        return Turn(Prompt().copy_output("memory", invocation).add("user", long), rewrite_kind="memory")


def counting(tokenizer: Any, *, bad: tuple[str, ...] = (), good: int = 3) -> Suite:
    tasks = [Number(f"n{n}") for n in range(good)] + [Number(f"bad-{how}", how) for how in bad]
    return Suite(Counting, tasks)


def make_models(folder: str) -> str:
    """Student and teacher, tiny, in a folder."""
    tokenizer = tiny_tokenizer()
    for seed, name in enumerate(("student", "teacher"), 1):
        tiny_model(vocab_size=len(tokenizer), seed=seed, layers=2).save_pretrained(Path(folder) / name)
        tokenizer.save_pretrained(Path(folder) / name)
    return folder


def settings(models: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """A loop of two iterations of two steps."""
    data: dict[str, Any] = {
        "student": str(models / "student"),
        "output": str(output),
        "iterations": 2,
        "seed": 4,
        "rollouts": {"environment": "helpers_loop:counting", "tasks": 2, "per_task": 2, "max_new_tokens": 6},
        "score": {"teacher": str(models / "teacher")},
        "train": {"steps": 2, "lr": 1e-3, "warmup_steps": 3},
    }
    for key, value in changes.items():
        *outer, last = key.split("__")
        place = data
        for part in outer:
            place = place[part]
        place[last] = value
    return data


def warm(folder: str) -> str:
    """Loads what a child needs: torch imports much of itself with the first update."""
    model = tiny_model()
    model(torch.tensor([[1, 2]])).logits.sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    return folder


def loop_in_child(folder: str, output: str, at: list[Any] | None) -> int:
    """Loop; with `at`, [iteration, stage, text], kill -9 when that is told."""

    def told(number: int, stage: str, text: str) -> None:
        if at is not None and [number, stage] == at[:2] and text.startswith(at[2]):
            os.kill(os.getpid(), signal.SIGKILL)

    result = loop(parse_loop_config(settings(Path(folder), Path(output))), on_stage=told)
    return result.made
