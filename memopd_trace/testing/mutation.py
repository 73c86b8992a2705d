"""What a mutation is: a small function that breaks one clause of a valid trace, and the code of that clause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from memopd_trace.invocation import Episode, Invocation, Sampling, batch_from_invocations, group_episodes
from memopd_trace.metadata import KEY, Model, TraceMetadata
from memopd_trace.rules.registry import Profile
from memopd_trace.schema import arrow_schema
from memopd_trace.storage import TraceWriter
from memopd_trace.testing.strategies import declared

Level = Literal["rows", "metadata", "table", "file", "folder"]
Rows = list[Invocation]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One way to break the clause of `code`.

    The broken trace breaks no other clause: a validator finds `code` in it and nothing else under `profile`, which is
    the weakest that turns the rule on. What `change` is given, and gives back, depends on the level:

        rows      (metadata, invocations) -> invocations
        metadata  (the metadata's JSON document) -> such a document
        table     (pyarrow.Table) -> pyarrow.Table
        file      (path of a Parquet file) -> the path, changed on disk
        folder    (path of a folder with one part an episode) -> the path, changed on disk

    Each may give `None`: this trace has no place for the fault.
    """

    code: str
    change: Callable[..., Any]
    level: Level = "rows"
    profile: Profile = "core"

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.change.__name__)

    def __str__(self) -> str:
        return f"{self.code}:{self.name}"

    def write(self, metadata: TraceMetadata, invocations: Sequence[Invocation], folder: Path) -> Path | None:
        """Write the broken trace as `trace.parquet` or the folder `trace` under `folder` (which must not hold one).

        Returns its path, or `None`, with nothing written, where this trace has no place for the fault.
        """
        if self.level == "folder":
            return self._folder(metadata, invocations, folder / "trace")
        table = self._table(metadata, list(invocations))
        if table is None:
            return None
        path = folder / "trace.parquet"
        pq.write_table(table, path)
        return self.change(path) if self.level == "file" else path

    def _table(self, metadata: TraceMetadata, rows: Rows) -> pa.Table | None:
        if self.level == "rows":
            changed = self.change(metadata, rows)
            return None if changed is None else table_of(declared(metadata, changed), changed)
        table = table_of(metadata, rows)
        if self.level == "metadata":
            document = self.change(json.loads(table.schema.metadata[KEY]))
            return None if document is None else table.replace_schema_metadata({KEY: json.dumps(document)})
        return self.change(table) if self.level == "table" else table

    def _folder(self, metadata: TraceMetadata, rows: Sequence[Invocation], path: Path) -> Path | None:
        with TraceWriter(path, metadata, rows_per_part=1) as writer:
            for row in rows:
                writer.write(row)
        if self.change(path) is None:
            shutil.rmtree(path)
            return None
        return path


def breaks(code: str, level: Level = "rows", *, profile: Profile = "core") -> Callable[[Callable[..., Any]], Mutation]:
    """Turn a function into a `Mutation`."""

    def make(change: Callable[..., Any]) -> Mutation:
        return Mutation(code, change, level, profile)

    return make


def table_of(metadata: TraceMetadata, invocations: Sequence[Invocation]) -> pa.Table:
    """The rows as an Arrow table with the trace's schema and metadata, in the order given, whatever it is."""
    schema = arrow_schema("trace", metadata.to_schema_metadata())
    return (
        pa.Table.from_batches([batch_from_invocations(invocations)]).cast(schema)
        if invocations
        else schema.empty_table()
    )


def edit(rows: Rows, at: int | None, **changes: Any) -> Rows | None:
    """The rows with changes to row `at`; `None` where there is no such row."""
    return None if at is None else [*rows[:at], rows[at].replace(**changes), *rows[at + 1 :]]


def where(rows: Rows, wanted: Callable[[Invocation], bool]) -> int | None:
    """The first row that is wanted."""
    return next((at for at, row in enumerate(rows) if wanted(row)), None)


def edit_episode(rows: Rows, wanted: Callable[[Episode], bool], **changes: Any) -> Rows | None:
    """The rows with changes to every row of the first episode that is wanted."""
    for episode in group_episodes(rows):
        if wanted(episode):
            own = {id(row) for row in episode}
            return [row.replace(**changes) if id(row) in own else row for row in rows]
    return None


@dataclass(frozen=True, slots=True)
class Site:
    """Where `tail` puts its calls: the first one's index, their model, and three different ids.

    The ids control nothing, and no prompt of the episode begins with one."""

    index: int
    model: Model
    ids: tuple[int, int, int]

    @property
    def stops(self) -> list[int]:
        """The ids that end an output of the model."""
        return self.model.tokenizer.stops


def site(metadata: TraceMetadata, rows: Rows) -> Site:
    """The site in a trace: the last call of the first episode."""
    last = rows[_first_episode(rows) - 1]
    model = metadata.models[last.model_id]
    taken = set(model.tokenizer.controls)
    taken |= {int(row.prompt_ids[0]) for row in rows if row.episode_id == last.episode_id and len(row.prompt_ids)}
    a, b, c = [i for i in range(model.tokenizer.size) if i not in taken][-3:]
    return Site(last.invocation_index, model, (a, b, c))


def _first_episode(rows: Rows) -> int:
    return next((at for at, row in enumerate(rows) if row.episode_id != rows[0].episode_id), len(rows))


def tail(metadata: TraceMetadata, rows: Rows, *calls: dict[str, Any]) -> Rows:
    """The rows with the first episode's last one replaced by plain calls, one a dict of columns to change.

    Without changes the trace stays valid under every profile: prompt and output are the site's ids, the second call is
    a fork of the first. A function in place of a value is given the `Site`.
    """
    stop, at = _first_episode(rows), site(metadata, rows)
    last = rows[stop - 1]
    made = []
    for number, changes in enumerate(calls):
        ends = last if number == len(calls) - 1 else None
        columns: dict[str, Any] = {
            **{name: getattr(last, name) for name in ("episode_id", "model_id", "group_id", "task_id")},
            "invocation_index": at.index + number,
            "prompt_ids": at.ids,
            "output_ids": at.ids,
            "relation": "fork" if number else "root",
            "parent_index": at.index + number - 1 if number else None,
            "output_logprobs": [-0.1, -0.2, -0.3],
            "logprob_kind": "raw",
            "sampling": Sampling(temperature=1.0),
            "policy_version": 0,
            "token_source": "engine",
            **{name: getattr(ends, name, None) for name in ("reward", "terminated", "truncated")},
        }
        columns |= {name: value(at) if callable(value) else value for name, value in changes.items()}
        made.append(Invocation(**columns))
    return [*rows[: stop - 1], *made, *rows[stop:]]


def on_tail(code: str, name: str, first: dict[str, Any] | None = None, /, **columns: Any) -> Mutation:
    """A mutation that gives the last call of the first episode these columns, and puts a call of the columns `first`
    (if they are given) in front of it; see `tail`."""

    def change(metadata: TraceMetadata, rows: Rows) -> Rows:
        return tail(metadata, rows, *([] if first is None else [first]), columns)

    change.__name__ = name
    return Mutation(code, change)
