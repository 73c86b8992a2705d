"""Files and folders that are whole or not there, and one process at a time in a folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from memopd_trace.errors import UsageError


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file open for writing under a temporary name; synced and renamed on leaving, removed on an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
    with (folder / ".lock").open("w") as handle:
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


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
