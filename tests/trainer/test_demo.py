"""The demo, on fewer rollouts of the real model: the recorded state is the true one, and training lowers the KL."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

from memopd_trace.invocation import Invocation
from memopd_trace.storage import read
from memopd_trainer import demo as module

pytestmark = pytest.mark.slow


def test_the_whole_pipeline_on_the_real_pair(
    smollm2: Path, half_smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "demo"
    shutil.copytree(smollm2, out / "models" / "teacher")
    shutil.copytree(half_smollm2, out / "models" / "student")
    sizes = {"TRAIN_TASKS": 2, "TRAIN_ROLLOUTS": 2, "HELD_OUT_TASKS": 2, "HELD_OUT_ROLLOUTS": 1, "STEPS": 3}
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)
    report = module.demo(out)

    rows = report.rows
    assert rows["rollouts"] == 4
    assert rows["tokens executed"] < rows["tokens logical"]
    assert rows["audit, recorded state: max |Δ logprob|"] <= 1e-3
    assert rows["audit, recorded state: false-clip rate"] == 0.0
    assert rows["audit, persistent history: max |Δ logprob|"] > 0.1
    assert rows["audit, persistent history: false-clip rate"] > 0.05
    before, after = (v for k, v in rows.items() if k.startswith("held-out reverse KL"))
    assert after < before
    assert json.loads((out / "report.json").read_text())["rows"] == rows
    assert (Path(rows["checkpoint"]) / "model.safetensors").is_file()
    assert all(memory_was_copied(e.invocations) for e in read(out / "train.parquet").iter_episodes())

    told: list[tuple[str, float | None]] = []
    # everything is there: no stage does its work again, the numbers are the same
    again = module.demo(out, on_stage=lambda *stage: told.append(stage))
    assert again.rows == rows
    assert again.seconds["rollouts"] < 1
    assert told == [each for name, s in again.seconds.items() for each in ((name, None), (name, s))], "begin and end"


def memory_was_copied(calls: tuple[Invocation, ...]) -> bool:
    """Each later prompt holds the output before it, id for id, at the segment that says so."""
    for before, call in itertools.pairwise(calls):
        (memory,) = (
            s
            for s in call.segments or ()
            if s.kind == "memory" and s.source_index is not None and s.stop <= len(call.prompt_ids)
        )
        copied = call.prompt_ids[memory.start : memory.stop]
        if memory.source_index != before.invocation_index or not len(copied):
            return False
        if copied.tolist() != before.output_ids[: len(copied)].tolist():
            return False
    return len(calls) > 2
