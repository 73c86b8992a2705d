"""The configuration of `validate`: `memopd-trace.toml`, or a table of `pyproject.toml`.

    # memopd-trace.toml                   # pyproject.toml
    [validate]                            [tool.memopd-trace.validate]
    profile = "train"                     profile = "train"

The keys are the command's options (`Settings`); what the command line says wins. It is looked for in the current folder
and, inside a repository, in those above up to its root; outside of one nobody's file but the current folder's counts.
In one folder `memopd-trace.toml` goes before `pyproject.toml`. Paths and globs count from the file's folder.
"""

from __future__ import annotations

import difflib
import glob
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from memopd_trace import rules
from memopd_trace.disk import is_node
from memopd_trace.errors import UsageError
from memopd_trace.limits import MEMORY
from memopd_trace.report import Format, Severity
from memopd_trace.report.locations import repository
from memopd_trace.rules.registry import Profile

OWN_FILE, PROJECT_FILE = "memopd-trace.toml", "pyproject.toml"
MAX_MEMORY = 2**32  # GiB: what a size of 64 bits can say
MAX_BYTES = 2**20  # no project needs as many


class Settings(BaseModel):
    """The keys of the table; what is not given stays the command's default."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=lambda name: name.replace("_", "-"))

    profile: Profile = "core"
    select: list[str] = []
    ignore: list[str] = []
    fail_on: Severity = "error"
    max_findings: int = Field(100, ge=0)
    format: Format = "text"
    max_memory: float = Field(MEMORY / 2**30, ge=0, le=MAX_MEMORY)  # GiB
    scores: list[Annotated[Path, Strict(False)]] = []
    views: Annotated[Path | None, Strict(False)] = None
    tokenizer: Annotated[Path | None, Strict(False)] = None
    sample: int | None = Field(None, ge=1)
    jobs: int | None = Field(None, ge=1)
    per_file_ignores: dict[str, list[str]] = {}


@dataclass(frozen=True)
class Config:
    """A configuration that was found. `options` holds what was given, by the names of the command's parameters."""

    path: Path
    options: dict[str, Any] = field(default_factory=dict)
    per_file_ignores: dict[str, list[str]] = field(default_factory=dict)


def find_config(folder: Path) -> Config | None:
    """The configuration that holds in `folder`.

    Raises:
        UsageError: a file that would hold cannot be read, is not TOML, or its table is wrong.
    """
    root = repository(folder) or folder
    for place in (folder, *folder.parents):
        for name in (OWN_FILE, PROJECT_FILE):
            # os.path: a folder that may not be looked into holds nothing
            if os.path.isfile(place / name) and (config := _load(place / name)) is not None:  # noqa: PTH113
                return config
        if place == root:
            break
    return None


def load_config(path: Path) -> Config:
    """The configuration of one file, a `pyproject.toml` or of the form of `memopd-trace.toml`.

    Raises:
        UsageError: it cannot be read, is not TOML, has no table, or a wrong one.
    """
    config = _load(path)
    if config is None:
        raise UsageError(f"{path}: has no table [{'.'.join(_table(path))}]", hint="or leave --config out")
    return config


def _load(path: Path) -> Config | None:
    raw = _read(path)
    try:
        found: Any = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number without end
        raise UsageError(f"{path}: is not TOML: {error}", hint="mend it, or give --no-config") from None
    *above, last = _table(path)
    for key in above:
        found = found.get(key, {}) if isinstance(found, dict) else {}
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {'.'.join(above)} is no table")
    _refuse_unknown(path, "".join(f"{key}." for key in above), found, [last])
    return _parse(path, found[last]) if last in found else None


def _read(path: Path) -> bytes:
    if is_node(path):  # a FIFO would be waited for
        raise UsageError(f"{path}: is no regular file", hint="save the configuration to a file first")
    try:
        with path.open("rb") as source:
            raw = source.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: {why}", hint="give another --config, or --no-config") from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{path}: more than {MAX_BYTES} bytes, the limit of a configuration", hint="give --no-config")
    return raw


def _table(path: Path) -> tuple[str, ...]:
    return ("tool", "memopd-trace", "validate") if path.name == PROJECT_FILE else ("validate",)


def _parse(path: Path, table: Any) -> Config:
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {'.'.join(_table(path))} is no table")
    keys = [info.alias or name for name, info in Settings.model_fields.items()]
    _refuse_unknown(path, f"{'.'.join(_table(path))}.", table, keys)
    try:
        settings = Settings.model_validate(table)
        for patterns in (settings.select, settings.ignore, *settings.per_file_ignores.values()):
            rules.match(patterns)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from None
    options = settings.model_dump(exclude_unset=True)
    ignores = options.pop("per_file_ignores", {})
    return Config(path, dict(_placed(path.parent, options)), {_below(path.parent, g): c for g, c in ignores.items()})


def _refuse_unknown(path: Path, prefix: str, table: dict[str, Any], keys: list[str]) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key.replace("_", "-"), keys, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(keys)}"
            raise UsageError(f"{path}: no key {prefix}{key}", hint=hint)


def _placed(folder: Path, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if name == "scores":
            value = [folder / path for path in value]
        yield name, folder / value if isinstance(value, Path) else value


def _below(folder: Path, pattern: str) -> str:
    return f"{glob.escape(str(folder))}/{pattern}"
