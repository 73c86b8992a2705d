"""`Invocation` and `Episode`: rows of a trace as Python objects.

An `Invocation` mirrors the columns one to one. `None` is null; an empty array is empty; a masked entry of
`output_logprobs` or `output_kept_logmass` is a null inside the list, and NaN stays NaN (and is a fault).
Defaults (positions 0…n-1, plain causal visibility, everything sampled) are written out by the methods, never
stored.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from memopd_trace.conform import iter_list_values
from memopd_trace.digest import state_digest
from memopd_trace.errors import UsageError, printable
from memopd_trace.schema import TRACE_COLUMNS, Column

IDS = NDArray[np.int32]
MaskedFloats = np.ma.MaskedArray[Any, np.dtype[np.float32]]
ITEM_COLUMNS = tuple(
    c.name
    for c in TRACE_COLUMNS
    if pa.types.is_list(c.type)
    or pa.types.is_map(c.type)
    or pa.types.is_string(c.type)
    or pa.types.is_dictionary(c.type)
)
ARRAY_COLUMNS = tuple(c for c in TRACE_COLUMNS if pa.types.is_list(c.type) and c.name not in ("segments", "media"))
MAX_ITEMS = 2**31 - 1  # Arrow's offsets are int32


@dataclass(frozen=True, slots=True)
class Segment:
    """A span `[start, stop)` of the sequence. With a source it claims to be an id-for-id copy of the stretch that
    begins at `source_start` in the sequence of invocation `source_index` of the same episode."""

    start: int
    stop: int
    kind: str
    source_index: int | None = None
    source_start: int | None = None


@dataclass(frozen=True, slots=True)
class Media:
    """A run `[start, stop)` of placeholder ids in the prompt and the SHA-256 of what it stands for."""

    start: int
    stop: int
    sha256: bytes
    mime: str | None = None
    uri: str | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the output was sampled; `None` = not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Invocation:
    """One model call. Field meanings are the columns' (`memopd_trace.schema.TRACE_COLUMNS`).

    Id arrays become int32, masks bool, logprobs masked float32 (nats; masked = null).

    Raises:
        ValueError: an array that is not one-dimensional or does not fit its dtype.
    """

    episode_id: str
    invocation_index: int
    model_id: str
    prompt_ids: IDS
    output_ids: IDS
    parent_index: int | None = None
    relation: str | None = None
    rewrite_kind: str | None = None
    rewrite_evidence: str | None = None
    segments: Sequence[Segment] | None = None
    group_id: str | None = None
    task_id: str | None = None
    agent_id: str | None = None
    attempt: int | None = None
    accepted: bool | None = None
    position_ids: IDS | None = None
    visible_from: IDS | None = None
    visible_until: IDS | None = None
    output_slots: IDS | None = None
    media: Sequence[Media] | None = None
    state_digest: bytes | None = None
    output_logprobs: MaskedFloats | None = None
    logprob_kind: str | None = None
    output_kept_logmass: MaskedFloats | None = None
    output_sampled: NDArray[np.bool_] | None = None
    output_loss_mask: NDArray[np.bool_] | None = None
    sampling: Sampling | None = None
    policy_version: int | None = None
    output_policy_versions: NDArray[np.int64] | None = None
    kv_policy_version: int | None = None
    routed_experts: NDArray[np.int16] | None = None
    finish_reason: str | None = None
    token_source: str | None = None
    reward: float | None = None
    rewards: dict[str, float] | None = None
    terminated: bool | None = None
    truncated: bool | None = None
    prompt_text: str | None = None
    output_text: str | None = None
    messages: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    extra: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for column in ARRAY_COLUMNS:
            value = getattr(self, column.name)
            if value is not None:
                object.__setattr__(self, column.name, as_array(value, column))

    @property
    def key(self) -> tuple[str, int]:
        """`(episode_id, invocation_index)`."""
        return self.episode_id, self.invocation_index

    @property
    def name(self) -> str:
        """The row as messages name it, whatever the episode's id holds."""
        return f"episode '{printable(self.episode_id)}', invocation {self.invocation_index}"

    @property
    def sequence_ids(self) -> IDS:
        """int32[n]: what the model held when the call ended: prompt + output, or the prompt as it was for in-place
        generation (the tokens still in their slots)."""
        if self.output_slots is not None:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, self.output_ids])

    def __len__(self) -> int:
        """n, the length of the sequence in tokens."""
        return len(self.prompt_ids) + (0 if self.output_slots is not None else len(self.output_ids))

    def positions(self) -> IDS:
        """int32[n], the default written out."""
        return np.arange(len(self), dtype=np.int32) if self.position_ids is None else self.position_ids

    def visibility(self) -> tuple[IDS, IDS]:
        """(visible_from int32[n], visible_until int32[n]), defaults written out."""
        n = len(self)
        start = np.arange(n, dtype=np.int32) if self.visible_from is None else self.visible_from
        until = np.full(n, n, dtype=np.int32) if self.visible_until is None else self.visible_until
        return start, until

    def sampled(self) -> NDArray[np.bool_]:
        """bool[len(output)], the default (all true) written out."""
        return np.ones(len(self.output_ids), bool) if self.output_sampled is None else self.output_sampled

    def loss_mask(self) -> NDArray[np.bool_]:
        """bool[len(output)]: tokens to train on: the mask (default: the sampled ones), none of a rejected attempt."""
        if self.accepted is False:
            return np.zeros(len(self.output_ids), bool)
        return self.sampled() if self.output_loss_mask is None else self.output_loss_mask

    def compute_digest(self) -> bytes:
        """The state digest of this row (32 bytes)."""
        return state_digest(
            self.prompt_ids,
            self.output_ids,
            self.position_ids,
            self.visible_from,
            self.visible_until,
            self.output_slots,
            [(m.start, m.stop, m.sha256) for m in self.media or ()],
        )

    def replace(self, **changes: Any) -> Invocation:
        """A copy with other field values. `state_digest` is dropped unless given: it may no longer hold."""
        changes.setdefault("state_digest", None)
        return dataclasses.replace(self, **changes)


_SLOTS = {c.name: vars(Invocation)[c.name] for c in TRACE_COLUMNS}


@dataclass(frozen=True, slots=True)
class Episode:
    """The invocations of one episode, in commit order."""

    episode_id: str
    invocations: tuple[Invocation, ...]

    @property
    def group_key(self) -> tuple[str, str]:
        """What its rollouts are compared by: the group, else the task, else nothing but itself.

        `("group", group_id)`, `("task", task_id)` or `("episode", episode_id)`; in a valid trace an episode's rows
        agree.
        """
        first = self.invocations[0]
        if first.group_id is not None:
            return "group", first.group_id
        return ("episode", self.episode_id) if first.task_id is None else ("task", first.task_id)

    @property
    def episode_return(self) -> float | None:
        """Sum of the rewards of its invocations; `None` when not one was scored."""
        rewards = [i.reward for i in self.invocations if i.reward is not None]
        return float(sum(rewards)) if rewards else None

    def __iter__(self) -> Iterator[Invocation]:
        return iter(self.invocations)

    def __len__(self) -> int:
        return len(self.invocations)


def invocations_from_batch(batch: pa.RecordBatch, columns: Collection[str] | None = None) -> Iterator[Invocation]:
    """The rows of a conformed batch (`memopd_trace.conform.conform_batch`) as invocations; arrays are copies.

    With `columns`, only these are read, as views of the batch that cannot be written to; asking for another one
    raises AttributeError.
    """
    chosen = [c for c in TRACE_COLUMNS if columns is None or c.name in columns]
    rows = [object.__new__(Invocation) for _ in range(batch.num_rows)]  # nothing for __post_init__ to do
    for column in chosen:
        cells = read_column(batch.column(column.name), column, copy=columns is None)
        deque(map(_SLOTS[column.name].__set__, rows, cells), maxlen=0)  # a loop over rows that Python does not run
    yield from rows


def batch_from_invocations(invocations: Sequence[Invocation]) -> pa.RecordBatch:
    """One conformed record batch. A missing `state_digest` is computed.

    Raises:
        UsageError: a column would hold more items (or bytes of text) than the offsets of one batch can count.
    """
    totals = sum((item_counts(i) for i in invocations), np.zeros(len(ITEM_COLUMNS), np.int64))
    if totals.max() > MAX_ITEMS:
        name, total = ITEM_COLUMNS[totals.argmax()], totals.max()
        raise UsageError(
            f"column '{name}': {total} items in {len(invocations)} rows, limit {MAX_ITEMS} in one batch",
            hint="write fewer rows at once",
        )
    arrays = [write_column([_cell(i, c.name) for i in invocations], c) for c in TRACE_COLUMNS]
    return pa.RecordBatch.from_arrays(arrays, names=[c.name for c in TRACE_COLUMNS])


def item_counts(invocation: Invocation) -> NDArray[np.int64]:
    """[ITEM_COLUMNS]: how many items (of a text: bytes) the row adds to each column that is stored with offsets."""
    return np.array([_items(getattr(invocation, name)) for name in ITEM_COLUMNS], np.int64)


def group_episodes(invocations: Iterable[Invocation]) -> Iterator[Episode]:
    """Runs of rows with one `episode_id`, as episodes."""
    run: list[Invocation] = []
    for invocation in invocations:
        if run and invocation.episode_id != run[0].episode_id:
            yield Episode(run[0].episode_id, tuple(run))
            run = []
        run.append(invocation)
    if run:
        yield Episode(run[0].episode_id, tuple(run))


def _items(value: Any) -> int:
    if value is None:
        return 0
    return len(value.encode()) if isinstance(value, str) and not value.isascii() else len(value)


def as_array(value: ArrayLike, column: Column) -> NDArray[Any]:
    """A list column's cell as an array of its dtype, masked where items may be null.

    Raises:
        ValueError: it is not one-dimensional, or values do not fit the dtype.
    """
    dtype = column.type.value_type.to_pandas_dtype()
    if column.items_nullable:
        if not isinstance(value, np.ma.MaskedArray) and not isinstance(value, np.ndarray):
            value = np.ma.masked_array(
                [0.0 if v is None else v for v in value],  # type: ignore[union-attr]
                [v is None for v in value],  # type: ignore[union-attr]
            )
        same = isinstance(value, np.ma.MaskedArray) and value.dtype == dtype
        array: NDArray[Any] = value if same else np.ma.masked_array(value, dtype=dtype)
    else:
        array = np.asarray(value)
        same = not array.size or array.dtype == dtype
        if not same and not (array.dtype.kind in "biu" and np.array_equal(array.astype(dtype), array)):
            raise ValueError(f"{column.name}: values do not fit {np.dtype(dtype)} (got {array.dtype})")
        array = array.astype(dtype, copy=False)
    if array.ndim != 1:
        raise ValueError(f"{column.name}: expected one dimension, got shape {array.shape}")
    return array


def _cell(invocation: Invocation, name: str) -> Any:
    if name == "state_digest" and invocation.state_digest is None:
        return invocation.compute_digest()
    return getattr(invocation, name)


def read_column(array: pa.Array, column: Column, *, copy: bool = True) -> Sequence[Any]:
    """The cells of a conformed column as Python values: structs are `Segment`, `Media`, `Sampling`; without `copy`,
    arrays are views of Arrow's memory where they can be."""
    if array.null_count == len(array):
        return [None] * len(array)
    if column.name in ("segments", "media"):
        return _read_structs(array, Segment if column.name == "segments" else Media)
    if column.name == "sampling":
        return [None if v is None else Sampling(**v) for v in array.to_pylist()]
    if pa.types.is_map(column.type):
        return [None if v is None else dict(v) for v in array.to_pylist()]
    if pa.types.is_list(column.type):
        return _read_lists(array, column, copy)
    cells: list[Any] = array.to_pylist()
    return cells


def _read_structs(array: pa.ListArray, kind: type[Segment] | type[Media]) -> list[tuple[Segment | Media, ...] | None]:
    offsets, flat = iter_list_values(array)
    parts = list(map(kind, *(flat.field(name).to_pylist() for name in kind.__slots__)))
    return [None if cell is None else tuple(cell) for cell in _split(parts, offsets, array)]


def _read_lists(array: pa.ListArray, column: Column, copy: bool) -> list[NDArray[Any] | None]:
    offsets, flat = iter_list_values(array)
    if column.items_nullable:
        mask = np.asarray(flat.is_null())
        values: NDArray[Any] = np.ma.masked_array(np.asarray(flat.fill_null(0)), mask, copy=copy)
    else:
        values = flat.to_numpy(zero_copy_only=False)
        values = values.astype(column.type.value_type.to_pandas_dtype(), copy=copy)
    return _split(values, offsets, array)


def _split(values: Any, offsets: NDArray[np.int64], array: pa.ListArray) -> list[Any]:
    """One slice of the flat `values` a row; `None` where the row is null."""
    cells = [values[start:stop] for start, stop in pairwise(offsets.tolist())]
    if array.null_count:
        return [cell if valid else None for cell, valid in zip(cells, array.is_valid().to_pylist(), strict=True)]
    return cells


@lru_cache
def _null(kind: pa.DataType) -> pa.Array:
    """Most columns of a row that is judged alone: cheaper kept than made."""
    return pa.nulls(1, kind)


def write_column(cells: list[Any], column: Column) -> pa.Array:
    """The cells that `read_column` gives as an Arrow array."""
    kind = column.type
    if all(c is None for c in cells):
        return _null(kind) if len(cells) == 1 else pa.nulls(len(cells), kind)
    if pa.types.is_dictionary(kind):
        return pa.array(cells, pa.string()).dictionary_encode()
    if column.name in ("segments", "media"):
        cells = [None if v is None else [_values(s) for s in v] for v in cells]
    elif column.name == "sampling":
        cells = [None if v is None else _values(v) for v in cells]
    elif pa.types.is_map(kind):
        cells = [None if v is None else list(v.items()) for v in cells]
    elif pa.types.is_list(kind):
        return _write_lists(cells, column)
    return pa.array(cells, kind)


def _values(part: Segment | Media | Sampling) -> tuple[Any, ...]:
    """A struct's values in the order of its fields."""
    return tuple(getattr(part, name) for name in part.__slots__)


def _write_lists(cells: list[NDArray[Any] | None], column: Column) -> pa.Array:
    item = column.type.value_type
    present = [c for c in cells if c is not None]
    flat = np.ma.concatenate(present) if column.items_nullable else np.concatenate(present)
    if column.items_nullable:
        values = pa.array(np.ma.getdata(flat), item, mask=np.ma.getmaskarray(flat))
    else:
        values = pa.array(flat, item)
    lengths = [0 if c is None else len(c) for c in cells]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    mask = pa.array([c is None for c in cells]) if len(present) < len(cells) else None
    return pa.ListArray.from_arrays(offsets, values, type=column.type, mask=mask)
