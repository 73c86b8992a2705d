"""Environments by name, with their tasks: what a configuration's `environment` and `options` stand for.

A suite of one's own is a function `module:name` that takes the tokenizer and the options and returns a `Suite`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memopd_trace.errors import UsageError, first_line, printable
from memopd_trainer.environments import Environment, Task
from memopd_trainer.environments.knowledge import make_knowledge
from memopd_trainer.environments.multi_objective_qa import QaEnvironment, qa_tasks
from memopd_trainer.environments.reading import ReadingEnvironment, reading_tasks
from memopd_trainer.environments.search import Search


@dataclass(frozen=True, slots=True)
class Suite:
    """Tasks, and how to make one environment that runs them; many are made, which run side by side."""

    make_environment: Callable[[], Environment[Any]]
    tasks: Sequence[Task]


def open_suite(name: str, tokenizer: Any, options: Mapping[str, Any]) -> Suite:
    """The suite of a name, `reading` or `multi_objective_qa`, or of a function `module:name`.

    Raises:
        UsageError: there is none, an option that it does not take, or tasks without which nothing can be done.
    """
    make = _BUILT_IN.get(name) or _imported(name)
    try:
        suite = make(tokenizer, **options)
    except TypeError as error:
        raise UsageError(f"environment '{printable(name)}': {printable(first_line(error))}") from None
    if not isinstance(suite, Suite) or not suite.tasks:
        raise UsageError(f"environment '{printable(name)}': gives no Suite with tasks")
    return suite


def reading_suite(tokenizer: Any, *, split: Any = "train") -> Suite:
    """`memopd_trainer.environments.reading`."""
    return Suite(lambda: ReadingEnvironment(tokenizer), reading_tasks(split))


def qa_suite(
    tokenizer: Any,
    *,
    tasks: int = 64,
    objectives: int = 2,
    hops: int = 2,
    split: Any = "train",
    seed: int = 0,
    ships: int = 64,
    memory_tokens: int = 64,
    found: int = 1,
    max_turns: int | None = None,
    reward: Any = "f1",
) -> Suite:
    """`memopd_trainer.environments.multi_objective_qa`; `seed` is that of the knowledge base and of the tasks."""
    knowledge = make_knowledge(seed, ships)
    search = Search(knowledge.documents)

    def make() -> QaEnvironment:
        return QaEnvironment(tokenizer, search, memory_tokens, found, max_turns, reward)

    return Suite(make, qa_tasks(knowledge, tasks, objectives=objectives, hops=hops, split=split, seed=seed))


_BUILT_IN: Mapping[str, Callable[..., Suite]] = {"reading": reading_suite, "multi_objective_qa": qa_suite}


def _imported(name: str) -> Callable[..., Suite]:
    module, colon, function = name.partition(":")
    if not colon:
        raise UsageError(
            f"no environment '{printable(name)}'", hint=f"one of {', '.join(_BUILT_IN)}, or your own as module:function"
        )
    try:
        made: Callable[..., Suite] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"environment '{printable(name)}': {printable(first_line(error))}") from None
    return made
