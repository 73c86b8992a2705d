"""Run the package with a function changed: its syntax tree is altered, compiled, and its code put in place of the old.

The function object stays the same one, so that whoever imported it meets the change.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from memopd_trace.rules.registry import Rule


def functions(module: ModuleType) -> dict[str, FunctionType]:
    """Every function and method that a module defines, by its qualified name; of a rule, its check."""
    found: dict[str, FunctionType] = {}
    for value in vars(module).values():
        members = vars(value).values() if inspect.isclass(value) and value.__module__ == module.__name__ else [value]
        for member in members:
            function = _plain(member)
            if function is not None and function.__module__ == module.__name__:
                found[function.__qualname__] = function
    return found


def tree_of(module: ModuleType) -> ast.Module:
    """The module's source as a syntax tree."""
    assert module.__file__ is not None
    return ast.parse(Path(module.__file__).read_text(encoding="utf-8"))


@contextmanager
def changed_functions(module: ModuleType, tree: ast.Module) -> Iterator[int]:
    """Meanwhile the module's functions do what `tree` says; yields how many differ."""
    old = _codes(compile(tree_of(module), str(module.__file__), "exec"))
    new = _codes(compile(ast.fix_missing_locations(tree), str(module.__file__), "exec"))
    before = {}
    for name, function in functions(module).items():
        if name in new and new[name] != old[name]:
            before[function] = function.__code__
            function.__code__ = new[name]
    try:
        yield len(before)
    finally:
        for function, code in before.items():
            function.__code__ = code


@contextmanager
def disabled(rule: Rule) -> Iterator[None]:
    """Meanwhile the rule finds nothing, wherever it is referred to."""
    check = rule.check
    object.__setattr__(rule, "check", lambda *what: ())
    try:
        yield
    finally:
        object.__setattr__(rule, "check", check)


class WithoutRaise(ast.NodeTransformer):
    """Take out every statement that raises an error with a code."""

    def __init__(self, code: str) -> None:
        self.code = code

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        keywords = node.exc.keywords if isinstance(node.exc, ast.Call) else []
        codes = [k.value for k in keywords if k.arg == "code"]
        raises = any(isinstance(code, ast.Constant) and code.value == self.code for code in codes)
        return ast.copy_location(ast.Pass(), node) if raises else node


def _plain(member: Any) -> FunctionType | None:
    """The function behind a rule, a property, a class method or a decorator."""
    for unwrap in _UNWRAP:
        member = unwrap(member)
    return member if isinstance(member, FunctionType) else None


_UNWRAP: tuple[Callable[[Any], Any], ...] = (
    lambda m: m.check if isinstance(m, Rule) else m,
    lambda m: m.fget if isinstance(m, property) else m,
    lambda m: m.func if isinstance(m, cached_property) else m,
    lambda m: m.__func__ if isinstance(m, classmethod | staticmethod) else m,
    lambda m: getattr(m, "__wrapped__", m) if callable(m) and not inspect.isclass(m) else m,
)


def _codes(code: CodeType) -> dict[str, CodeType]:
    found = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found[constant.co_qualname] = constant
            found |= {name: c for name, c in _codes(constant).items() if "<locals>" not in name}
    return found
