"""Files and folders that are whole or not there, and one process at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from memopd_trace.errors import UsageError

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


@contextmanager
def atomic_file(path: Path, *, new: bool = False) -> Iterator[IO[bytes]]:
    """A file open for writing under a temporary name; synced and renamed on leaving, removed on an exception.

    A symlink stays: what it leads to is written. A device or a FIFO stays too: it is opened and written through,
    and what was written before an exception cannot be taken back. With `new` nothing is ever replaced: if the name
    is taken on leaving, the finished file is kept beside it under a name that the error tells.

    Raises:
        UsageError: `path` is a folder, or a symlink that leads in a circle; with `new`, it is there on leaving.
    """
    if is_node(path):
        with path.open("wb") as out:
            yield out
        return
    path = regular_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        if new:
            _publish_new(temporary, path)
        else:
            temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that killed writers left; of a folder that this process holds (`exclusive`)."""
    for file in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(file.name):
            file.unlink(missing_ok=True)


def is_node(path: Path) -> bool:
    """Whether `path` (or what it links to) is neither a regular file nor a folder: a device, a FIFO, a socket."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # the latter for a zero byte in the name
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def regular_target(path: Path) -> Path:
    """The path with symlinks followed, if a regular file is or can be there.

    Raises:
        UsageError: it is a folder, or a symlink that leads in a circle.
    """
    real = Path(os.path.realpath(path))
    if real.is_symlink():
        raise UsageError(f"{path}: a symlink that leads in a circle", hint="remove it or write elsewhere")
    if real.is_dir():
        raise UsageError(f"{path}: is a folder, and a file is to be written", hint="give the name of a file")
    return real


def _publish_new(temporary: Path, path: Path) -> None:
    """Give a finished file its name unless the name is taken; a rename would replace what is there."""
    try:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: reserve the name, then fill it
            path.touch(exist_ok=False)
            temporary.replace(path)
    except FileExistsError:
        kept = path.with_name(f"{path.stem}.{secrets.token_hex(4)}{path.suffix}")
        temporary.rename(kept)
        raise UsageError(
            f"{path}: exists already, written by another meanwhile; it was left as it is, this one is {kept.name}",
            hint="rename it, or write elsewhere",
        ) from None
    temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`; its files are synced and it is renamed on leaving, and removed on an exception.

    Raises:
        UsageError: `path` exists.
    """
    if path.exists():
        raise UsageError(f"{path}: exists already", hint="remove it or write elsewhere")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for entry in (*temporary.rglob("*"), temporary):
            sync_folder(entry)  # of a file it syncs the content
        temporary.rename(path)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def exclusive(folder: Path, doing: str) -> Iterator[None]:
    """Hold a folder (made if need be) for one process; `doing` is what the message says the other one does.

    Raises:
        UsageError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # neither led to another file by a symlink nor waiting for the other end of a FIFO
    with os.fdopen(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", 0) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"{folder}: another process is {doing} it", hint="wait for it, or use another folder"
            ) from None
        yield


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
