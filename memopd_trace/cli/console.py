"""What all commands share: the global settings, notices and progress on stderr."""

from __future__ import annotations

import codecs
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING

import pyarrow as pa

from memopd_trace.errors import MissingExtraError, printable

if TYPE_CHECKING:  # commands import it where they print with it: a clean `validate` starts without
    from rich.console import Console
    from rich.progress import Progress


class OutputFormat(StrEnum):
    """How a result is printed."""

    text = "text"
    json = "json"


class Profile(StrEnum):
    """What must be present."""

    core = "core"
    lineage = "lineage"
    policy = "policy"
    train = "train"


@dataclass
class Settings:
    """Set once by the global options."""

    quiet: bool = False
    debug: bool = False


settings = Settings()

ESCAPE = "memopd-escape"


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""What an encoding has no byte for, as `\\uXXXX`: plain to read in text, and the same string in JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    escaped = "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
    return escaped, error.end


codecs.register_error(ESCAPE, _escape)


def make_streams_safe() -> None:
    """Let stdout and stderr take any text: closed ones lead nowhere, and what cannot be encoded is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - open until the process ends
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=ESCAPE)


def spare_pandas() -> None:
    """Make up Arrow's mind that there is no pandas in this process: it would load it, where it is installed, only to
    ask whether some list is one of its series, and take longer for that than a small trace takes to check."""
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _NoPandas)
        pa.array([0])
        sys.meta_path.remove(_NoPandas)


class _NoPandas(MetaPathFinder):
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def stderr(quiet: bool | None = None) -> Console:
    """A console on stderr; silent under `--quiet` unless told otherwise."""
    from rich.console import Console

    return Console(stderr=True, quiet=settings.quiet if quiet is None else quiet, highlight=False, soft_wrap=True)


def notice(message: str) -> None:
    """One line for the person at the terminal; never part of the result. A trace's strings may be in it."""
    stderr().print(printable(message, limit=None), markup=False)


def require(module: str, extra: str, what: str) -> ModuleType:
    """Import `module`, which `what` (e.g. "this command") needs.

    Raises:
        MissingExtraError: something that it imports is not installed; `extra` is the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{what} needs '{error.name}'", hint=f"pip install 'memopd-trace[{extra}]', or '.[{extra}]' in a clone"
        ) from None


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Progress]:
    """A progress bar on stderr that vanishes when done, and is not there when stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = stderr()
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=settings.quiet or not console.is_terminal,
    ) as bar:
        bar.add_task(label, total=total)
        yield bar
