"""What the tests of the validator share: the vectors' builder, and traces made with plain pyarrow."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from memopd_trace import Report, validate

VECTORS = Path(__file__).parent.parent / "spec" / "vectors"


def script(path: Path) -> ModuleType:
    """A script of `spec/`, which is no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"spec_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


builder = script(VECTORS / "build.py")


def valid(name: str) -> dict[str, Any]:
    """A loaded valid vector, free to be changed."""
    vector: dict[str, Any] = builder.load(VECTORS / "valid" / f"{name}.json")
    return vector


def build(vector: dict[str, Any], folder: Path, name: str = "trace") -> Path:
    """The vector as a trace under `folder`."""
    path: Path = builder.build(vector, folder, name)
    return path


def inputs(vector: dict[str, Any], folder: Path, name: str = "trace") -> dict[str, Any]:
    """What a vector wants beside the trace, as options of `validate`; views and scores are written under `folder`."""
    tokenizer = {"tokenizer": VECTORS / vector["tokenizer"]} if "tokenizer" in vector else {}
    return {**tokenizer, **builder.build_inputs(vector, folder, name)}


def judge(vector: dict[str, Any], folder: Path, profile: str | None = None, **options: Any) -> Report:
    """The report on a vector."""
    return validate(build(vector, folder), profile or vector["profile"], **{**inputs(vector, folder), **options})


def changed(name: str, *changes: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    """The rows of a valid vector with some cells replaced."""
    vector = valid(name)
    for row, cells in changes:
        vector["rows"][row].update(cells)
    return vector
