"""What all commands share: the global settings, notices and progress on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class OutputFormat(StrEnum):
    """How a result is printed."""

    text = "text"
    json = "json"


@dataclass
class Settings:
    """Set once by the global options."""

    quiet: bool = False
    debug: bool = False


settings = Settings()


def stderr(quiet: bool | None = None) -> Console:
    """A console on stderr; silent under `--quiet` unless told otherwise."""
    return Console(stderr=True, quiet=settings.quiet if quiet is None else quiet, highlight=False, soft_wrap=True)


def notice(message: str) -> None:
    """One line for the person at the terminal; never part of the result."""
    stderr().print(message, markup=False)


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Progress]:
    """A progress bar on stderr that vanishes when done, and is not there when stderr is no terminal."""
    console = stderr()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=settings.quiet or not console.is_terminal,
    ) as bar:
        bar.add_task(label, total=total)
        yield bar
