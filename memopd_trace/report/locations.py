"""Where a report's files are, in the words of what reads it: relative to the repository, percent-encoded."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote


def current_folder() -> Path | None:
    """The folder one is in; `None` if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def repository(start: Path) -> Path | None:
    """The nearest folder from `start` upward that holds a `.git`; `None` outside of a repository."""
    # os.path: a folder that may not be looked into holds nothing
    return next((folder for folder in (start, *start.parents) if os.path.exists(folder / ".git")), None)  # noqa: PTH110


def relative(path: str) -> str | None:
    """The path from the root of the repository one is in (else from the current folder); `None` if it is not below.

    Names count as they are given: a symlink is not followed.
    """
    here = current_folder()
    if here is None:
        return None
    full = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow symlinks
    root = repository(here) or here
    return full.relative_to(root).as_posix() if full.is_relative_to(root) else None


def uri(path: str) -> str:
    """A URI reference: relative where `relative` is, a `file:` URI where it is not; a URI stays one."""
    if "://" in path:
        return quote(path, safe=":/@")
    below = relative(path)
    if below is not None:
        return quote(os.fsencode(below))
    return "file://" + quote(os.fsencode(os.path.abspath(path)))  # noqa: PTH100
