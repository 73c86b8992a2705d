"""A toy run to hand to every engine, and processes that score it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from helpers_scorer import growing_episode, memory_episode, save_model, tiny_model, write_trace

SCORE = "from memopd_trace.cli import main; main()"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Toy:
    """A teacher folder and a trace of 4 * `rollouts` + 4 invocations, which make about `rollouts` shards."""

    def __init__(self, folder: Path, rollouts: int = 6, layers: int = 3) -> None:
        rng = np.random.default_rng(1)
        episodes = [memory_episode(rng, f"m{i}", group=f"g{i // 2}") for i in range(rollouts)]
        model = tiny_model("llama", seed=3, layers=layers)
        self.folder = folder
        self.teacher = save_model(model, folder / "teacher")
        self.trace = write_trace(folder / "trace.parquet", self.teacher, model, [*episodes, growing_episode(rng, "g")])

    def options(self, out: Path, *more: str) -> list[str]:
        """Options of `memopd-trace score` for packs and shards of about a rollout each."""
        small = ["--max-tokens", "60", "--shard-tokens", "60", "--signal", "sampled,topk,hidden"]
        return [str(self.trace), "--teacher", str(self.teacher), "-o", str(out), *small, *more]


def run(arguments: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """A Python process that ends within `timeout` seconds; a hang is an error."""
    return subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=timeout
    )


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """A Python process, in a group of its own so that it can be ended with all that it started."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, by name: the same for whoever scored it."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name != ".lock"}


def shards(folder: Path) -> int:
    """How many shards are there."""
    return len(list(folder.glob("shard-*.parquet")))


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 240) -> None:
    """Wait for something that a running process does."""
    deadline = time.monotonic() + timeout
    while not true():
        assert process.poll() is None, f"it ended before: {process.communicate()}"
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
