"""Objects set aside on disk, so that a conversion's memory does not grow with its input.

Two things are known only at the end of a log: which calls belong to one episode (calls of several may interleave), and
what the metadata has to say (models, the largest id, gaps). So drafts are set aside first, and rows before they are
written. The file has no name: nothing is left behind, whatever happens.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any


class Spool:
    """A temporary file in `folder`; objects are kept under keys, keys in the order in which they first came."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, prefix=".memopd-trace-")  # noqa: SIM115 - closed on leaving
        self._places: dict[str, list[int]] = {}

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def add(self, key: str, value: Any) -> None:
        """Set an object aside."""
        self._places.setdefault(key, []).append(self._file.tell())
        pickle.dump(value, self._file, protocol=5)

    def __iter__(self) -> Iterator[list[Any]]:
        """The objects of each key, in their order. Reads only what this process wrote."""
        for places in self._places.values():
            yield [self._load(at) for at in places]
        self._file.seek(0, 2)

    def _load(self, at: int) -> Any:
        if self._file.tell() != at:
            self._file.seek(at)
        return pickle.load(self._file)
