"""What is set aside on disk, so that a conversion's memory does not grow with its input.

Two things are known only at the end of a log: which calls belong to one episode (calls of several may interleave), and
what the metadata has to say (models, the largest id, gaps). So drafts are set aside first, and rows, as the batches
that the trace will hold, before they are written.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
import pyarrow as pa

from memopd_trace.batching import WaitingRows
from memopd_trace.disk import sync_folder
from memopd_trace.invocation import Invocation
from memopd_trace.schema import arrow_schema


class Spool:
    """A temporary file in `folder`; objects are kept under keys, keys in the order in which they first came."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed on leaving
        self._places: dict[str, list[int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

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


class RowSpool:
    """Rows set aside in their order in a file; they come back once, as batches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = WaitingRows()
        self._schema = arrow_schema()
        self._stream = pa.ipc.new_stream(str(path), self._schema)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def add(self, row: Invocation) -> None:
        """Set a row aside."""
        if not self._waiting.take(row):
            self._flush()
            self._waiting.take(row)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """All rows."""
        if len(self._waiting):
            self._flush()
        self._stream.close()
        with pa.OSFile(str(self.path)) as file:
            yield from pa.ipc.open_stream(file)

    def _flush(self) -> None:
        self._stream.write_table(pa.Table.from_batches([self._waiting.batch()]).cast(self._schema))


class SideFile:
    """JSON Lines, packed with zstd, of what is too large for its row; without any there is no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._stream: pa.NativeFile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, row: Invocation, extra: dict[str, Any]) -> None:
        """What belongs to a row."""
        if self._stream is None:
            sink = self._stack.enter_context(pa.OSFile(str(self.path), "wb"))
            self._stream = self._stack.enter_context(pa.CompressedOutputStream(sink, "zstd"))
        value = {"episode_id": row.episode_id, "invocation_index": row.invocation_index, "extra": extra}
        options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
        self._stream.write(orjson.dumps(value, default=repr, option=options))

    def finish(self) -> bool:
        """Close and sync the file; whether there is one."""
        self._stack.close()
        if self._stream is not None:
            sync_folder(self.path)  # of a file it syncs the content
        return self._stream is not None
