"""Recipes: methods of the field as configurations of this one trainer.

A recipe is a YAML file of this folder whose values are the defaults of a configuration with `recipe: NAME`; its first
line says what it is. What a recipe does beyond other keys' values has a section of its own in the configuration
(`memopd_trainer.recipes.sections`), and may be used with any recipe or none:

    which tokens of a step are trained   `tcod`, `reopd`, `one_shot`   memopd_trainer.recipes.drawing
    weights of the teacher's term        `prune_opd`                   memopd_trainer.recipes.pruning
    what is measured beside              `prune_opd`, `one_shot`       memopd_trainer.recipes.measures
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import yaml

from memopd_trace.errors import UsageError, printable

ORDER = ("ppo", "opd", "memopd", "persistent_history", "one_shot", "reopd", "prune_opd", "tcod", "sdpo")


def recipes() -> dict[str, str]:
    """What each recipe is, in one line, by name."""
    return {name: source(name).splitlines()[0].removeprefix("# ") for name in ORDER}


def source(name: object) -> str:
    """The YAML file of a recipe.

    Raises:
        UsageError: there is no such recipe, naming the nearest one.
    """
    if name not in ORDER:
        near = difflib.get_close_matches(str(name).lower().replace("-", "_"), ORDER, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"one of {', '.join(ORDER)}"
        raise UsageError(f"no recipe '{printable(str(name))}'", hint=hint)
    return (files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")


def preset(name: object) -> dict[str, Any]:
    """The values of a recipe.

    Raises:
        UsageError: as `source`.
    """
    values: dict[str, Any] = yaml.safe_load(source(name))
    return values


def with_defaults(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with what it does not say taken from `defaults`, section by section."""
    merged = dict(defaults)
    for key, value in data.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = with_defaults(value, below) if both else value  # type: ignore[arg-type]
    return merged
