"""`ViewBatch` and `ScoreBatch`: rows of views and scores beside the trace rows that they name, as flat arrays.

Legend: B rows, M per-token items of all rows in order (output tokens of a view's rows, targets of a score's rows),
N sequence tokens, K chosen ids, V real ids, D width of the teacher's states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memopd_trace.conform import Misfit, iter_list_values
from memopd_trace.digest import state_digest
from memopd_trace.invocation import read_column
from memopd_trace.metadata import ScoresMetadata, ViewsMetadata
from memopd_trace.places import Place
from memopd_trace.rules.batch import Array, Batch, Bools, Ints
from memopd_trace.rules.registry import Hit
from memopd_trace.rules.rowindex import RowIndex, digest_cells, digest_hex
from memopd_trace.rules.state import DIGESTED
from memopd_trace.schema import COLUMN, PERSISTENT_HISTORY, RECORDED
from memopd_trace.scorefolder import HEAD, ScoresFolder
from memopd_trace.tiers import rebuild

LAGS = (-1, 0, 1)
CHUNK = 2**20  # tokens compared at once
EXCUSED = 2**30  # more tokens than a row has


@dataclass(slots=True)
class ViewsContext:
    """A views file being checked, and what was counted while its rows passed.

    `digests` maps a view to S32[rows of the index], the digest of each viewed sequence (empty = no such row).
    """

    path: Place
    metadata: ViewsMetadata
    index: RowIndex
    wanted: frozenset[str] = frozenset()  # views whose digests are needed whether rows give them or not
    rows: int = 0
    misfits: dict[str, Misfit] = field(default_factory=dict)
    first_value: dict[str, int] = field(default_factory=dict)
    models: set[int] = field(default_factory=set)
    digests: dict[str, NDArray[Any]] = field(default_factory=dict)

    def digests_of(self, view: str) -> NDArray[Any]:
        """S32[rows of the index] of a view."""
        return self.digests.setdefault(view, np.zeros(len(self.index.rows), "S32"))


@dataclass(slots=True)
class ScoresContext:
    """A scores folder being checked, and what was counted while its rows passed.

    `covered` [rows of the index] counts the trained tokens that have a score. `lags` are sums and counts of
    |logprob[i] - recorded[i + lag]| over the tokens that the teacher's own weights sampled, for each lag of `LAGS`.
    `logprobs` holds the logprob of every token of the index (NaN = none) where several folders are given, `others` the
    same of earlier folders of the same teacher and view. `headless` says why the head cannot be used.
    """

    folder: ScoresFolder
    index: RowIndex
    views: ViewsContext | None
    covered: NDArray[np.int32]
    faults: dict[Place, str] = field(default_factory=dict)
    misfits: dict[Place, list[Misfit]] = field(default_factory=dict)
    rows: dict[Place, int] = field(default_factory=dict)
    models: set[int] = field(default_factory=set)
    tempered: bool = False
    lags: NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(LAGS), 2)))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    others: list[tuple[ScoresFolder, NDArray[np.float32]]] = field(default_factory=list)
    headless: str | None = None
    _head: Any = None

    def differences(self, half: float) -> Iterator[tuple[Place, float, int]]:
        """(folder, largest difference in nats, tokens beyond the limit) of each earlier folder that disagrees."""
        for other, logprobs in self.others:
            limit = max(self.run.tolerance, other.metadata.tolerance)
            limit = half if self.run.teacher.dtype in ("float16", "bfloat16") else limit
            largest, count = 0.0, 0
            for start in range(0, len(logprobs), CHUNK):
                apart = np.abs(self.logprobs[start : start + CHUNK] - logprobs[start : start + CHUNK])
                apart = apart[apart > limit]  # NaN, no score in one of them, is not
                largest, count = max(largest, float(apart.max(initial=0))), count + len(apart)
            if count:
                yield other.path, largest, count

    @property
    def run(self) -> ScoresMetadata:
        """What the run is."""
        return self.folder.metadata

    @property
    def of_every_row(self) -> bool:
        """Whether every row has the run's view: the recorded states, or what is built without a file."""
        of_file = self.views is not None and self.run.view in self.views.metadata.views
        return self.run.view in (RECORDED, PERSISTENT_HISTORY) and not of_file

    def head(self) -> Any:
        """The stored output head (`memopd_scorer.head.Head`), unchecked; needs the extra `score`."""
        if self._head is None:
            from memopd_scorer.headfile import load_head

            self._head = load_head(self.folder.path / HEAD, self.run)
        return self._head


class JoinedBatch(Batch):
    """Rows that name rows of a trace. `at` [B] are indices into `index.rows`, -1 = unknown; `row` the rows in their
    file; `repeated` and `backwards` [B] say whether the key came before, and whether an earlier row is of a later one.
    """

    def __init__(
        self, table: pa.RecordBatch, index: RowIndex, at: Ints, row: Ints, repeated: Bools, backwards: Bools
    ) -> None:
        super().__init__(table, index.metadata)
        self.index, self.at, self.row, self.repeated, self.backwards = index, at, row, repeated, backwards

    @cached_property
    def known(self) -> NDArray[Any]:
        """The trace's rows (`ROW`), [B]; of an unknown one all zeros."""
        rows = np.zeros(len(self), self.index.rows.dtype)
        rows[self.at >= 0] = self.index.rows[self.at[self.at >= 0]]
        return rows

    def keep(self, rows: Bools) -> Any:
        """Only these rows [B]."""
        if rows.all():
            return self
        picked = (a[rows] for a in (self.at, self.row, self.repeated, self.backwards))
        return self._like(self.table.filter(pa.array(rows)), *picked)

    def excuse(self, rows: Bools) -> None:
        """Rows [B] that are reported and not judged further."""

    def unknown_hits(self) -> Iterator[Hit]:
        """One hit per row that names no row of the trace."""
        for row in np.flatnonzero(self.at < 0):
            yield Hit(int(row), "the trace has no such row", "invocation_index")

    def state_hits(self) -> Iterator[Hit]:
        """One hit per row with another state digest than the trace's row."""
        stated, known = digest_cells(self.column("state_digest")), self.known["digest"]
        for row in np.flatnonzero(stated != known):
            message = "the trace's row has another state"
            yield Hit(int(row), message, "state_digest", digest_hex(known[row]), digest_hex(stated[row]))

    def _like(self, table: pa.RecordBatch, *columns: Any) -> Any:
        raise NotImplementedError


class ViewBatch(JoinedBatch):
    """Rows of a views file. Arrays of length `output` and `sequence` are as long as the trace row's output says."""

    def __init__(self, context: ViewsContext, table: pa.RecordBatch, *columns: Any) -> None:
        super().__init__(table, context.index, *columns)
        self.context = context

    def _like(self, table: pa.RecordBatch, *columns: Any) -> ViewBatch:
        return ViewBatch(self.context, table, *columns)

    @cached_property
    def output_lengths(self) -> Ints:
        """Ids per output of the trace row."""
        return self.known["outputs"].astype(np.int64)

    def digest(self, row: int) -> bytes:
        """The state digest of a viewed sequence (32 bytes)."""
        first, outputs = self.known["first"][row], self.known["outputs"][row]
        lists = {name: self.lists(name).cell(row) for name in ("prompt_ids", *DIGESTED)}
        media = read_column(self.column("media").slice(row, 1), COLUMN["media"])[0] or ()
        output_ids = self.index.tokens["id"][first : first + outputs]
        return state_digest(output_ids=output_ids, media=[(m.start, m.stop, m.sha256) for m in media], **lists)


class ScoreBatch(JoinedBatch):
    """Rows of a scores folder. Arrays of length `output` have one item for each target."""

    def __init__(self, context: ScoresContext, table: pa.RecordBatch, *columns: Any) -> None:
        super().__init__(table, context.index, *columns)
        self.context, self.run = context, context.run
        self.size = context.run.teacher.head.size

    def excuse(self, rows: Bools) -> None:
        """Rows [B] whose fault is told: that their tokens have no sound score is not told as well."""
        at = self.at[rows]
        self.context.covered[at[at >= 0]] = EXCUSED

    def _like(self, table: pa.RecordBatch, *columns: Any) -> ScoreBatch:
        return ScoreBatch(self.context, table, *columns)

    @cached_property
    def output_lengths(self) -> Ints:
        """Targets per row."""
        return self.lists("output_index").lengths

    @cached_property
    def token(self) -> Ints:
        """[M]: each target's place among `index.tokens`."""
        return self.known["first"][self.row_of_output] + self.lists("output_index").values

    @cached_property
    def sampled_ids(self) -> Ints:
        """[M]: the trace's ids of the targets."""
        return self.index.tokens["id"][self.token].astype(np.int64)

    def vector(self, name: str) -> Array:
        """A list column's values, [M]."""
        return self.lists(name).values

    def list_lengths(self, name: str) -> Ints:
        """[B]: items of a list column, -1 where it is null."""
        lengths = np.diff(iter_list_values(self.column(name))[0])
        return np.where(self.given(name), lengths, -1)

    def wrong_width(self, name: str) -> Bools:
        """[B]: rows of a column of lists with a list that is not as wide as the run says."""
        offsets, inner = iter_list_values(self.column(name))
        wrong = np.zeros(len(self), bool)
        if pa.types.is_list(inner.type):  # a fixed-size list has its width in its type
            bad = np.diff(iter_list_values(inner)[0]) != self.run.width_of(name)
            wrong[np.repeat(np.arange(len(self)), np.diff(offsets))[bad]] = True
        return wrong

    def states(self, chosen: Bools | None = None) -> Array:
        """[M, D] of float, or of the `chosen` targets [M] alone; bfloat16 and what is rebuilt from a tier's codes come
        as float32."""
        which = slice(None) if chosen is None else chosen
        values = self.matrix("hidden")[which]
        if self.run.hidden_tier != "exact":
            return rebuild(values, self.matrix("hidden_scale")[which], self.run.hidden_tier)
        if self.run.hidden_dtype == "bfloat16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values

    def from_states(self, chosen: Bools) -> tuple[Array, Array]:
        """(logsumexp, logprob) of chosen targets [M] from state and head, float64; needs the extra `score`."""
        import torch

        states = torch.from_numpy(self.states(chosen))  # a head takes bfloat16 as float32 all the same
        logits = self.context.head().logits(states).double() / self.run.temperature
        logsumexp = logits.logsumexp(-1)
        ids = torch.from_numpy(self.sampled_ids[chosen].clip(max=self.size - 1))
        return logsumexp.numpy(), (logits.gather(1, ids[:, None])[:, 0] - logsumexp).numpy()

    def matrix(self, name: str) -> Array:
        """A list of lists' values, [M, K] or [M, V] or [M, D]; the widths are equal in rows whose shape was checked."""
        inner = iter_list_values(self.column(name))[1]
        width = self.run.width_of(name)
        flat: Array = inner.flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(-1, width) if width else flat.reshape(len(inner), 0)

    @property
    def under_view(self) -> bool:
        """Whether the run is of a view, not of the recorded states."""
        return self.run.view != RECORDED

    def each_signal(self) -> Iterator[tuple[str, Array]]:
        """The float signals that the run has, [M] or [M, width] each."""
        for name in self.run.signal_columns:
            if self.run.width_of(name) is None:
                yield name, self.vector(name)
            elif name not in ("topk_ids", "hidden"):
                yield name, self.matrix(name)

    def target_hits(self, bad: Array, column: str, what: str, *, expected: str | None = None) -> Iterator[Hit]:
        """One hit per row with a bad target: [M], or [M, width] of which the first bad item is shown."""
        if bad.ndim == 1:
            yield from self.output_hits(bad, column, what, self.vector(column), expected=expected)
            return
        values = self.matrix(column)
        shown = values[np.arange(len(values)), bad.argmax(1)] if bad.size else np.empty(len(values))
        yield from self.output_hits(np.any(bad, axis=1), column, what, shown, expected=expected)


def misfit_hit(misfit: Misfit, where: str = "") -> Hit:
    """A column that is missing, does not fit its type or holds a null, as a hit of the whole file."""
    what = {"missing": "is missing", "null": "is null in a row"}.get(misfit.kind, "does not fit its type")
    return Hit(None, f"{where}column '{misfit.column}' {what}", misfit.column, misfit.expected, misfit.actual)
