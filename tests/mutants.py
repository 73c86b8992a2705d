"""Bend single comparisons, operators and numbers of the rules, and see which of these mutants no vector notices.

    python tests/mutants.py [--modules memopd_trace.lineage …] [--every N] [--tests FILE …]

A mutant is one change in one function; it is killed if any vector gives other codes, an exception, or no answer in some
seconds. With `--tests` the survivors are tried against these test files as well, in forked processes. It prints the
survivors as `module:line: function: old -> new`, and the share of mutants that survive.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import pkgutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers_mutants import changed_functions, tree_of
from helpers_trace import VECTORS, build, builder, inputs

import memopd_trace
from memopd_trace import rules, validate

SECONDS = 5.0
TEST_SECONDS = 600
TARGETS = ["memopd_trace.lineage", "memopd_trace.digest", "memopd_trace.conform"]
NOT_RULES = {"__main__", "clauses", "refusals", "registry"}
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Mult: ast.FloorDiv,
}
Case = tuple[dict[str, Any], Path, dict[str, Any]]


def mutants(module: ModuleType) -> Iterator[tuple[str, ast.Module]]:
    """(where and what, the module's tree with one change) of every change."""
    tree = tree_of(module)
    for function in _functions(tree):
        for node in _inside(function):
            for what in _changes(node):
                before = ast.unparse(_shown(node))
                undo = copy.copy(vars(node))
                _apply(node, what)
                place = f"{module.__name__}:{getattr(node, 'lineno', function.lineno)}: {function.name}"
                yield f"{place}: {before} -> {ast.unparse(_shown(node))}", copy.deepcopy(tree)
                vars(node).update(undo)


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef)]
    return [n for body in (tree, *classes) for n in body.body if isinstance(n, ast.FunctionDef)]


def _inside(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body; texts and annotations are no conditions."""
    types = [n.annotation for n in ast.walk(function) if isinstance(n, ast.AnnAssign)]
    unwanted = {id(n) for annotation in types for n in ast.walk(annotation)}
    for statement in function.body:
        yield from (n for n in ast.walk(statement) if isinstance(n, ast.expr) and id(n) not in unwanted)


def _changes(node: ast.AST) -> list[Any]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        return [SWAPS[type(node.ops[0])]()]
    if isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPS:
        return [SWAPS[type(node.op)]()]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        return [ast.UAdd()]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return [not node.value] if isinstance(node.value, bool) else [node.value + 1]
    return []


def _apply(node: Any, change: Any) -> None:
    if isinstance(node, ast.Compare):
        node.ops = [change]
    elif isinstance(node, ast.Constant):
        node.value = change
    elif isinstance(node, ast.UnaryOp):  # `not x` becomes `bool(x)`, `~x` becomes `x`
        node.op, node.operand = (
            (ast.Not(), ast.UnaryOp(ast.Not(), node.operand))
            if isinstance(node.op, ast.Not)
            else (ast.Invert(), ast.UnaryOp(ast.Invert(), node.operand))
        )
    else:
        node.op = change


def _shown(node: ast.AST) -> ast.AST:
    return ast.fix_missing_locations(copy.deepcopy(node))


def cases(folder: Path) -> list[Case]:
    """Every vector, built, with what it wants beside the trace."""
    found = []
    for path in [p for kind in ("valid", "invalid", "future") for p in sorted((VECTORS / kind).glob("*.json"))]:
        vector = builder.load(path)
        place = folder / path.parent.name / path.stem
        place.mkdir(parents=True)
        found.append((vector, build(vector, place), inputs(vector, place)))
    return found


def outcome(case: Case, seconds: float = SECONDS) -> object:
    """The codes that a vector gives, or the exception's type; `TimeoutError` where it takes too long."""
    vector, path, given = case
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return validate(path, vector["profile"], **given).codes
    except Exception as error:
        return type(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def killed_by_vectors(ordered: list[Case], wanted: list[object]) -> bool:
    """Whether a vector notices; one that does comes first the next time."""
    for at, case in enumerate(ordered):
        if outcome(case) != wanted[at]:
            ordered.insert(0, ordered.pop(at))
            wanted.insert(0, wanted.pop(at))
            return True
    return False


def killed_by_tests(files: list[str]) -> bool:
    """Whether a test of these files fails in a copy of this process."""
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - until the process ends
        signal.alarm(TEST_SECONDS)
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files])))
    return os.waitpid(child, 0)[1] != 0


def modules(names: list[str]) -> list[ModuleType]:
    """The modules to bend: those named, or the rules and what decides about states."""
    found = [m.name for m in pkgutil.iter_modules(rules.__path__, "memopd_trace.rules.")]
    return [
        importlib.import_module(n) for n in names or TARGETS + [n for n in found if n.split(".")[-1] not in NOT_RULES]
    ]


def _stop(*_: object) -> None:
    raise TimeoutError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="*", default=[])
    parser.add_argument("--every", type=int, default=1, help="try one mutant of so many")
    parser.add_argument("--tests", nargs="*", default=[], help="files to try on what survives the vectors")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _stop)
    tried = survived = 0
    if options.tests and killed_by_tests(options.tests):
        print("the tests fail without any change")
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        ordered, began = cases(Path(scratch)), time.monotonic()
        wanted = [outcome(case, seconds=0) for case in ordered]  # 0 = without a limit: the first one imports
        for module in modules(options.modules):
            for number, (what, tree) in enumerate(mutants(module)):
                if number % options.every:
                    continue
                with changed_functions(module, tree) as changed:
                    if not changed:  # in a function that is made anew each time, or not found
                        continue
                    tried += 1
                    if not killed_by_vectors(ordered, wanted) and not (
                        options.tests and killed_by_tests(options.tests)
                    ):
                        survived += 1
                        print(f"survives: {what}", flush=True)
    by = "vectors and tests" if options.tests else "vectors"
    share = 100 * survived / max(1, tried)
    print(f"{tried} mutants, {survived} survive the {by} ({share:.1f} %); {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    assert memopd_trace.__file__
    sys.exit(main())
