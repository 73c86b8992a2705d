"""Views files: other prompts under which a trace's sampled tokens are to be scored, in one Parquet or Arrow IPC file.

A view changes what a teacher conditions on, never what was sampled: it names the trace row by key and by state digest,
and a row with another digest is refused. Rows stand in the order of the trace's rows, so that both are streamed side
by side; a trace row without a view in the file is simply not scored under it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import pyarrow as pa

from memopd_trace.arrowfile import file_schema, iter_file
from memopd_trace.batching import TOKENS_PER_BATCH
from memopd_trace.conform import conform_batch
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import IDS, Invocation, Media, as_array, read_column, write_column
from memopd_trace.metadata import ViewsMetadata, parse_views_metadata
from memopd_trace.parts import SUFFIXES, Part
from memopd_trace.places import PathLike, Place, place
from memopd_trace.schema import RECORDED, VIEWS_COLUMNS, arrow_schema
from memopd_trace.storage import describe, trace_files

ROWS_PER_BATCH = 4096


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class View:
    """One row of a views file. Fields are the columns' (`memopd_trace.schema.VIEWS_COLUMNS`); id arrays become int32.

    The viewed sequence is `prompt_ids` and then the trace row's `output_ids` (in-place generation: `prompt_ids` alone);
    `position_ids`, `visible_from` and `visible_until` have its length. `None` is the default, as in a trace.
    """

    episode_id: str
    invocation_index: int
    view: str
    state_digest: bytes
    prompt_ids: IDS
    position_ids: IDS | None = None
    visible_from: IDS | None = None
    visible_until: IDS | None = None
    output_slots: IDS | None = None
    media: Sequence[Media] | None = None
    view_digest: bytes | None = None

    def __post_init__(self) -> None:
        for column in VIEWS_COLUMNS:
            value = getattr(self, column.name)
            if value is not None and column.length is not None:
                object.__setattr__(self, column.name, as_array(value, column))

    @classmethod
    def of(cls, recorded: Invocation, viewed: Invocation, name: str) -> View:
        """The view `name` of a trace row: the prompt and state of `viewed`, which holds the same output tokens."""
        return cls(
            episode_id=recorded.episode_id,
            invocation_index=recorded.invocation_index,
            view=name,
            state_digest=recorded.compute_digest(),
            prompt_ids=viewed.prompt_ids,
            position_ids=viewed.position_ids,
            visible_from=viewed.visible_from,
            visible_until=viewed.visible_until,
            output_slots=viewed.output_slots,
            media=viewed.media,
            view_digest=viewed.compute_digest(),
        )

    def apply(self, recorded: Invocation) -> Invocation:
        """The trace row's output tokens under this view: same key and behaviour, another prompt and state, no lineage.

        Raises:
            InputError: `E-VIEW-STATE` when the view is for other tokens or another state than this row's.
        """
        digest = recorded.compute_digest()
        if self.state_digest != digest:
            raise InputError(
                f"{recorded.name}: the view '{self.view}' is for state {self.state_digest.hex()[:16]}, the row has "
                f"{digest.hex()[:16]}",
                code="E-VIEW-STATE",
                hint="make the views again from this trace",
            )
        return recorded.replace(
            prompt_ids=self.prompt_ids,
            position_ids=self.position_ids,
            visible_from=self.visible_from,
            visible_until=self.visible_until,
            output_slots=self.output_slots,
            media=self.media,
            routed_experts=None,  # recorded for another sequence
            segments=None,
            parent_index=None,
            relation=None,
            rewrite_kind=None,
            rewrite_evidence=None,
        )


class ViewsReader:
    """A views file opened for reading: its metadata, and its rows as batches or views, streamed.

    Raises:
        InputError: `E-NO-INPUT`, `E-UNREADABLE` (a folder, or damaged), or a fault of the metadata; while iterating:
            `E-UNREADABLE`, `E-SCHEMA` for a column that does not fit.
    """

    def __init__(self, path: PathLike | Place) -> None:
        self.path = place(path)
        if self.path.is_dir():
            raise InputError(f"{path}: is a folder", code="E-UNREADABLE", hint="views are one file")
        trace_files(self.path)
        self.schema = file_schema(self.path)
        self.metadata: ViewsMetadata = parse_views_metadata(self.schema.metadata, where=str(self.path))

    def iter_raw(self) -> Iterator[pa.RecordBatch]:
        """The record batches as stored."""
        return iter_file(self.path)

    def __iter__(self) -> Iterator[View]:
        for raw in self.iter_raw():
            batch, misfits = conform_batch(raw, VIEWS_COLUMNS)
            if misfits:
                raise InputError(f"{self.path}: {describe(misfits[0])}", code="E-SCHEMA")
            columns = {c.name: read_column(batch.column(c.name), c) for c in VIEWS_COLUMNS}
            for row in range(batch.num_rows):
                yield View(**{name: values[row] for name, values in columns.items()})


class ViewsWriter:
    """Write a views file, Parquet or Arrow IPC by its suffix; it appears whole on closing, or not at all.

    Write rows in the order of the trace's rows. Used as a context manager: leaving it by an exception leaves nothing.

    Raises:
        UsageError: an unknown suffix, an existing target (unless `overwrite`), a view that is `recorded` or that the
            metadata does not name.
    """

    def __init__(self, path: PathLike | Place, metadata: ViewsMetadata, *, overwrite: bool = False) -> None:
        self.path, self.metadata = place(path), metadata
        if self.path.suffix not in SUFFIXES:
            raise UsageError(
                f"{self.path}: unknown suffix '{self.path.suffix}'", hint=f"use one of {', '.join(SUFFIXES)}"
            )
        if self.path.exists() and not overwrite:
            raise UsageError(f"{self.path}: exists already", hint="remove it or write elsewhere")
        schema = arrow_schema("views", metadata.to_schema_metadata())
        self._part = Part(self.path, schema, SUFFIXES[self.path.suffix], new=not overwrite)
        self._buffer: list[View] = []
        self._tokens = 0

    def __enter__(self) -> ViewsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._part.abort()

    def write(self, view: View) -> None:
        """Add one row."""
        if view.view == RECORDED or view.view not in self.metadata.views:
            named = ", ".join(self.metadata.views) or "none"
            raise UsageError(f"{self.path}: no view '{view.view}'", hint=f"the metadata names {named}")
        self._buffer.append(view)
        self._tokens += len(view.prompt_ids)
        if len(self._buffer) >= ROWS_PER_BATCH or self._tokens >= TOKENS_PER_BATCH:
            self._flush()

    def close(self) -> None:
        """Write what is buffered, sync the file and put it in place."""
        self._flush()
        self._part.close()

    def _flush(self) -> None:
        rows, self._buffer, self._tokens = self._buffer, [], 0
        if rows:
            self._part.write_batch(lambda: _batch(rows))


def _batch(rows: list[View]) -> pa.RecordBatch:
    arrays = [write_column([getattr(v, c.name) for v in rows], c) for c in VIEWS_COLUMNS]
    return pa.RecordBatch.from_arrays(arrays, names=[c.name for c in VIEWS_COLUMNS])
