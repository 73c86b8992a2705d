"""Fixtures that several parts share: the demo's real model pair, unpacked once into `.cache/`."""

from __future__ import annotations

import os
from pathlib import Path

# with one thread a process, two test processes do not wait for each other's
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from filelock import FileLock

CACHE = Path(__file__).parents[1] / ".cache"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in float32 (some 20 s the first time)."""
    from memopd_trainer.models import export_gguf, find_demo_gguf

    teacher = CACHE / "smollm2"
    CACHE.mkdir(exist_ok=True)
    with FileLock(CACHE / "smollm2.lock"):
        if not teacher.exists():
            export_gguf(find_demo_gguf(), teacher)
    return teacher


@pytest.fixture(scope="session")
def half_smollm2(smollm2: Path) -> Path:
    """The same model with half of its layers."""
    from memopd_trainer.models import drop_layers

    student = CACHE / "smollm2-half"
    with FileLock(CACHE / "smollm2.lock"):
        if not student.exists():
            drop_layers(smollm2, 15, student)
    return student
