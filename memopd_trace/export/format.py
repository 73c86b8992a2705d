"""What an export format is: one entry, its columns, and where its rows go.

Shape legend: n tokens of the sequence (P of the prompt, m of the output), K ids that a teacher answered for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memopd_trace.invocation import IDS, Invocation
from memopd_trace.metadata import ScoresMetadata, TraceMetadata
from memopd_trace.schema import type_name

FLOATS = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """What a teacher says of one row's output tokens: of the sampled ids, and of K others.

    `scored` bool[m]; `logprob` float32[m], nats, of the sampled id; `ids` int32[m, K] and `logprobs` float32[m, K],
    `None` without the signal `topk`. What is not scored holds 0.
    """

    scored: NDArray[np.bool_]
    logprob: FLOATS
    ids: NDArray[np.int32] | None
    logprobs: FLOATS | None


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One row as every target takes it.

    mask: bool[m], what is to be trained.
    logprobs: float32[m], nats, over the whole vocabulary at `temperature`; 0 where the mask is false; `None` = there
        are none of that kind.
    group: by what rollouts are compared. episode_return: the sum of the episode's rewards, `None` = not scored.
    teacher: `None` without scores.
    """

    invocation: Invocation
    mask: NDArray[np.bool_]
    logprobs: FLOATS | None
    temperature: float | None
    group: str
    episode_return: float | None
    teacher: Teacher | None

    @property
    def full_teacher(self) -> Teacher | None:
        """The teacher, if it answered for every token that is to be trained."""
        teacher = self.teacher
        return teacher if teacher is not None and not (self.mask & ~teacher.scored).any() else None

    def over_sequence(self, output: NDArray[Any], fill: float = 0) -> NDArray[Any]:
        """[n, …]: values of output tokens at the tokens themselves, `fill` at the prompt's."""
        head = np.full((len(self.invocation.prompt_ids), *output.shape[1:]), fill, output.dtype)
        return np.concatenate([head, output])

    def over_queries(self, output: NDArray[Any], fill: float = 0) -> NDArray[Any]:
        """[n, …]: values of output tokens at the tokens that predict them, one before; `fill` elsewhere."""
        return np.concatenate(
            [self.over_sequence(output, fill)[1:], np.full((1, *output.shape[1:]), fill, output.dtype)]
        )


@dataclass(frozen=True, slots=True)
class Field:
    """One column of a target: `of` names the trace's columns that it carries, `of_scores` those of scores."""

    name: str
    type: pa.DataType
    doc: str
    of: Sequence[str] = ()
    of_scores: Sequence[str] = ()

    @property
    def type_name(self) -> str:
        """As a document writes it."""
        return type_name(self.type).replace(" | null", "")


@dataclass(frozen=True, slots=True)
class Context:
    """What all rows of an export share. `longest`: tokens of the longest row, where the format asks for it."""

    metadata: TraceMetadata
    scores: ScoresMetadata | None
    longest: int


class Sink(Protocol):
    """Where rows go."""

    def add(self, sample: Sample) -> None:
        """Take one row."""

    def close(self, notes: dict[str, Any]) -> None:
        """Write what is left, and beside it `notes`: what the file is, and what it lacks."""

    def abort(self) -> None:
        """Write nothing more: what was written is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One export format.

    name: as the command line takes it.
    title: whose, and of which version it was read.
    fields: its columns.
    open: (a binary file, or with `folder` a folder; the context) -> the sink.
    marker: a file of such a folder, by which an earlier export is known from a folder of something else.
    needs_scores: a row without a teacher's signal has nothing to say here.
    takes_scores: whether scores have a place at all.
    lossless: every column is carried; nothing is refused, left out or flattened.
    sampled_only: without top-k, the sampled id's log-probability takes the place of theirs.
    pads: rows are made equally long, so the longest is looked for first.
    note: what else a person has to know.
    """

    name: str
    title: str
    fields: Sequence[Field]
    open: Callable[[Any, Context], Sink]
    suffix: str = ".parquet"
    folder: bool = False
    marker: str = ""
    needs_scores: bool = False
    takes_scores: bool = True
    lossless: bool = False
    sampled_only: bool = False
    pads: bool = False
    note: str = ""

    def carries(self, column: str) -> bool:
        """Whether it has a place for a column of the trace."""
        return self.lossless or any(column in f.of for f in self.fields)

    def carries_score(self, column: str) -> bool:
        """Whether it has a place for a column of scores."""
        return any(column in f.of_scores for f in self.fields)

    def to_json(self) -> dict[str, Any]:
        """What a person has to know, as plain values."""
        return {
            "name": self.name,
            "title": self.title,
            "written": "folder" if self.folder else f"file ({self.suffix})",
            "scores": "needed" if self.needs_scores else "optional" if self.takes_scores else "none",
            "columns": [{"name": f.name, "type": f.type_name, "holds": f.doc} for f in self.fields],
            "note": self.note,
        }


def ids_of(invocation: Invocation) -> IDS:
    """int32[n]: prompt and output."""
    return np.concatenate([invocation.prompt_ids, invocation.output_ids])
