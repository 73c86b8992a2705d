"""The suite is checked: without any one rule, or any one refusal, a vector notices.

A rule that is new is covered as soon as it is registered. `tests/mutants.py` goes further and bends single
comparisons, operators and numbers.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers_mutants import WithoutRaise, changed_functions, disabled, functions, tree_of
from helpers_trace import VECTORS, build, builder, inputs

import memopd_trace
from memopd_trace import disk, lineage, validate
from memopd_trace.lineage import common_prefix
from memopd_trace.rules import RULES, batch, files

CHECKED = [code for code, rule in RULES.items() if rule.phase not in ("open", "run")]
REFUSED = [code for code, rule in RULES.items() if rule.phase == "open"]
SECONDS = 3.0  # in which a damaged validator has to answer
RUN = [code for code, rule in RULES.items() if rule.phase == "run"]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[dict[str, Any], Path, dict[str, Any]]]]:
    """By code: the vectors that show it, built, with what they want beside the trace."""
    found: dict[str, list[tuple[dict[str, Any], Path, dict[str, Any]]]] = {}
    for path in sorted((VECTORS / "invalid").glob("*.json")):
        vector = builder.load(path)
        folder = tmp_path_factory.mktemp(path.stem)
        for code in {*vector["codes"], vector.get("read")} - {None}:
            found.setdefault(code, []).append((vector, build(vector, folder), inputs(vector, folder)))
    return found


def damaged_outcome(*case: Any) -> object:
    """What comes of a vector; `TimeoutError` where it takes more than some seconds, as without a limit it may."""

    def stop(*signal: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return outcome(*case)
    except TimeoutError:
        return TimeoutError
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(vector: dict[str, Any], path: Path, given: dict[str, Any]) -> object:
    """What the validator, and where the vector asks for it a reader, makes of it; an exception by its type."""
    try:
        codes = validate(path, vector["profile"], **given).codes
    except Exception as error:
        return type(error)  # of the time too
    return codes, _read(path) if "read" in vector else None


def expected(vector: dict[str, Any]) -> object:
    """What the vector says they make of it."""
    return set(vector["codes"]), vector.get("read")


def _read(path: Path) -> str | None:
    try:
        list(memopd_trace.read(path).iter_invocations())
    except Exception as error:
        return getattr(error, "code", type(error).__name__)
    return None


@pytest.mark.parametrize("code", CHECKED)
def test_without_a_rule_a_vector_notices(code: str, vectors: dict[str, Any]) -> None:
    assert all(outcome(*v) == expected(v[0]) for v in vectors[code])
    with disabled(RULES[code]):
        assert all(damaged_outcome(*v) != expected(v[0]) for v in vectors[code])
    assert outcome(*vectors[code][0]) == expected(vectors[code][0][0])


@pytest.mark.parametrize("code", REFUSED)
def test_without_a_refusal_a_vector_notices(code: str, vectors: dict[str, Any]) -> None:
    assert all(outcome(*v) == expected(v[0]) for v in vectors[code])
    with ExitStack() as stack:
        changed = 0
        for module in modules():
            if f'"{code}"' in Path(str(module.__file__)).read_text(encoding="utf-8"):
                tree = WithoutRaise(code).visit(tree_of(module))
                changed += stack.enter_context(changed_functions(module, tree))
        assert changed, f"nothing raises {code}"
        assert any(damaged_outcome(*v) != expected(v[0]) for v in vectors[code])


@pytest.mark.parametrize("code", RUN)
def test_a_code_of_scorer_or_trainer_is_named_by_a_test_of_theirs(code: str) -> None:
    tests = Path(__file__).parents[1]
    files = [f for part in ("scorer", "trainer", "trace") for f in (tests / part).glob("test_*.py")]
    assert any(re.search(rf"\b{code}\b", f.read_text(encoding="utf-8")) for f in files), code


def test_a_changed_function_does_what_its_new_source_says() -> None:
    """A method that many modules have imported, changed and put back."""
    assert {"Batch.given", "Batch.sampled", "Batch.__len__"} <= set(functions(batch))
    assert "no_rows" in functions(files) and "atomic_file" in functions(disk)
    ids = np.arange(3, dtype=np.int32)
    tree = tree_of(lineage)
    (function,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "common_prefix"]
    whole = next(n for n in ast.walk(function) if isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.Eq))
    whole.ops = [ast.NotEq()]
    assert common_prefix(ids, ids) == 3
    with changed_functions(lineage, tree) as changed:
        assert changed == 1 and common_prefix(ids, ids) == 0
    assert common_prefix(ids, ids) == 3


def modules() -> list[ModuleType]:
    """The modules that read and judge a trace."""
    names = [m.name for m in pkgutil.walk_packages(memopd_trace.__path__, "memopd_trace.")]
    heavy = ("record", "cli", "testing", "__main__")
    return [importlib.import_module(n) for n in names if not set(n.split(".")) & set(heavy)]
