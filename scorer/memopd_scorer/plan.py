"""From invocations to packed trees: which tokens are run, who sees whom, and which row predicts what.

The plan is one pure value that scorer, audit and trainer share; nobody computes "the last n tokens" again.
numpy only, no torch.

Invocations of a group are sorted, so that equal prefixes meet, and packed depth first: each adds only the
tokens that the branch before it does not share. Two states share a token only if the id, the position id, the
visibility so far and the realm (model, media, expert routes) agree.

Example: A = [7 8 9 | 1], B = [7 8 9 | 2 3], C = [7 8 5 | 4] (prompt | output), layout `tree`:

    packed index   0 1  2 3  4 5 6     sorted: C, A, B; C shares nothing, A shares [7 8] with C, B [7 8 9] with A
    token          7 8  5 4  9 1 2 3   (8 tokens run instead of 13)
    path index     0 1  2 3  2 3 3 4
    visible until  8 8  4 4  8 6 8 8
    B's targets 2, 3 are predicted by the rows of tokens 9 and 2; A's target 1 by the row of 9 as well.

Shape legend: T packed tokens, S states of the pack, M targets (sampled tokens to be scored), R prediction rows
(distinct packed tokens that predict a target; R <= M).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memopd_scorer.states import State, first, shareable_length, state_of
from memopd_trace.errors import UsageError
from memopd_trace.invocation import IDS, Episode, Invocation

Layout = Literal["tree", "packed", "single"]
LAYOUTS: tuple[Layout, ...] = ("tree", "packed", "single")
GROUP_TOKENS = 64 * 2**20  # a group larger than this is planned in parts, so that memory stays bounded


@dataclass(frozen=True, slots=True)
class Span:
    """Packed tokens `[start, stop)` that one state added. They see the `ancestors` (packed ranges, in path order)
    whole, and each other causally (`causal`) or as `visible_from_T`/`visible_until_T` say."""

    start: int
    stop: int
    ancestors: tuple[tuple[int, int], ...]
    causal: bool


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """What one forward runs. Visibility: query q sees key k iff `visible_from_T[k] <= q < visible_until_T[k]`,
    all packed indices."""

    states: tuple[State, ...]  # [S]
    token_ids_T: IDS
    positions_T: IDS
    path_T: IDS  # index along its own branch: what a sliding window counts
    visible_from_T: IDS
    visible_until_T: IDS
    spans: tuple[Span, ...]
    rows_R: IDS  # packed indices
    target_row_M: IDS  # index into rows_R
    target_state_M: IDS  # index into states
    target_output_M: IDS  # index into that state's output_ids
    target_ids_M: IDS

    def __len__(self) -> int:
        return len(self.token_ids_T)

    @property
    def logical_tokens(self) -> int:
        """Tokens of its states when each is run alone."""
        return sum(len(s) for s in self.states)

    @property
    def is_plain(self) -> bool:
        """One state with default positions and plain causal visibility: any model runs it as it is."""
        return (
            len(self.states) == 1
            and all(s.causal for s in self.spans)
            and np.array_equal(self.positions_T, self.path_T)
        )

    def update_digest(self, h: hashlib._Hash) -> None:
        """Add everything that determines this pack's scores to a hash."""
        for state in self.states:
            h.update(f"{state.episode_id}\0{state.invocation_index}\0".encode() + state.digest)
        for array in (self.token_ids_T, self.positions_T, self.visible_from_T, self.visible_until_T):
            h.update(np.ascontiguousarray(array, "<i4").tobytes())
        for array in (self.rows_R, self.target_row_M, self.target_output_M):
            h.update(np.ascontiguousarray(array, "<i4").tobytes())


@dataclass(slots=True)
class PlanSummary:
    """What a plan costs, counted while its packs pass by.

    `pairs` counts visible (query, key) pairs; `left_out` the sampled tokens that are no target.
    """

    layout: Layout
    max_tokens: int
    packs: int = 0
    invocations: int = 0
    logical_tokens: int = 0
    executed_tokens: int = 0
    targets: int = 0
    left_out: int = 0
    prediction_rows: int = 0
    pairs: int = 0
    longest_pack: int = 0
    _hash: hashlib._Hash = field(default_factory=lambda: hashlib.sha256(b"memopd-trace/plan/1"), repr=False)

    def add(self, pack: Pack) -> None:
        """Count one pack."""
        self.packs += 1
        self.invocations += len(pack.states)
        self.logical_tokens += pack.logical_tokens
        self.executed_tokens += len(pack)
        self.targets += len(pack.target_ids_M)
        self.left_out += sum(s.left_out for s in pack.states)
        self.prediction_rows += len(pack.rows_R)
        self.pairs += int(np.sum(pack.visible_until_T - pack.visible_from_T, dtype=np.int64))
        self.longest_pack = max(self.longest_pack, len(pack))
        pack.update_digest(self._hash)

    @property
    def sharing(self) -> float:
        """Logical over executed tokens; 1 = nothing was shared."""
        return self.logical_tokens / max(1, self.executed_tokens)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of layout, budget and all packs."""
        h = self._hash.copy()
        h.update(f"{self.layout}\0{self.max_tokens}".encode())
        return h.hexdigest()


def plan(
    episodes: Iterable[Episode], *, layout: Layout = "tree", max_tokens: int = 8192, vocabulary: int | None = None
) -> Iterator[Pack]:
    """The packs of a trace's recorded states, in order; streams by group, deterministic.

    A pack holds at most `max_tokens` packed tokens; a longer state gets a pack of its own, whole. The trace must be
    valid (`memopd_trace.validate.require_valid`); `vocabulary` is that of `state_of`.
    """
    groups = ([state_of(i, vocabulary=vocabulary) for i in group] for group in iter_groups(episodes))
    return plan_states(groups, layout=layout, max_tokens=max_tokens)


def plan_states(
    groups: Iterable[Sequence[State]], *, layout: Layout = "tree", max_tokens: int = 8192
) -> Iterator[Pack]:
    """As `plan`, for groups of states that were made already (under a view, say).

    Raises:
        UsageError: an unknown layout or a budget below 1 token.
    """
    if layout not in LAYOUTS or max_tokens < 1:
        raise UsageError(f"layout '{layout}', max_tokens {max_tokens}", hint=f"one of {LAYOUTS}, at least 1 token")
    pending: list[tuple[State, int]] = []
    used = 0
    for group in groups:
        ordered = _arrange([s for s in group if len(s)], layout)
        cost = sum(len(state) - shared for state, shared in ordered)
        # a group that fits into one pack is not torn apart only because the last one is half full
        if pending and used + cost > max_tokens and cost <= max_tokens:
            yield build_pack(pending)
            pending, used = [], 0
        for state, shared in ordered:
            full = used + len(state) - shared > max_tokens or layout == "single"
            if pending and full:
                yield build_pack(pending)
                pending, used = [], 0
            shared = shared if pending else 0
            pending.append((state, shared))
            used += len(state) - shared
    if pending:
        yield build_pack(pending)


def iter_groups(episodes: Iterable[Episode]) -> Iterator[list[Invocation]]:
    """Invocations that may share prefixes: those of neighbouring episodes of one group (or task)."""
    for _, run in groupby(episodes, key=lambda e: e.group_key):
        group: list[Invocation] = []
        tokens = 0
        for episode in run:
            group.extend(episode)
            tokens += sum(len(i) for i in episode)
            if tokens > GROUP_TOKENS:
                yield group
                group, tokens = [], 0
        if group:
            yield group


def build_pack(branches: Sequence[tuple[State, int]]) -> Pack:
    """Pack (state, tokens shared with the branch before it) pairs depth first. The first shares nothing."""
    total = sum(len(s) - shared for s, shared in branches)
    token_ids, positions, path, seen_from, seen_until = (np.empty(total, np.int32) for _ in range(5))
    seen_from[:] = np.arange(total)
    spans, rows = [], []
    open_ranges: list[tuple[int, int, int]] = []  # (path index, packed start, packed stop) of the current branch
    at = 0
    for state, shared in branches:
        open_ranges = _close_beyond(open_ranges, shared, at, seen_until)
        start, at = at, at + len(state) - shared
        own = slice(start, at)
        token_ids[own] = state.ids[shared:]
        path[own] = np.arange(shared, len(state))
        positions[own] = path[own] if state.positions is None else state.positions[shared:]
        if at > start:
            causal = _set_visible_from(state, shared, start, seen_from)
            spans.append(Span(start, at, tuple((a, b) for _, a, b in open_ranges), causal))
            open_ranges = [*open_ranges, (shared, start, at)]
        rows.append(_packed_rows(state.row_of_target, open_ranges))
    _close_beyond(open_ranges, 0, total, seen_until)
    for (state, shared), (start, stop) in zip(branches, _own_ranges(branches), strict=True):
        if state.visible_until is not None:  # a recorded eviction ends earlier than the subtree
            until = state.visible_until[shared:] - shared + start
            evicted = state.visible_until[shared:] < len(state)
            seen_until[start:stop][evicted] = until[evicted]
    all_rows = np.concatenate(rows) if rows else np.empty(0, np.int32)
    rows_R, target_row = np.unique(all_rows, return_inverse=True)
    states = tuple(s for s, _ in branches)
    counts = [len(s.target_ids) for s in states]
    return Pack(
        states=states,
        token_ids_T=token_ids,
        positions_T=positions,
        path_T=path,
        visible_from_T=seen_from,
        visible_until_T=seen_until,
        spans=tuple(spans),
        rows_R=rows_R.astype(np.int32),
        target_row_M=target_row.astype(np.int32),
        target_state_M=np.repeat(np.arange(len(states), dtype=np.int32), counts),
        target_output_M=np.concatenate([s.output_index for s in states]).astype(np.int32),
        target_ids_M=np.concatenate([s.target_ids for s in states]).astype(np.int32),
    )


def _arrange(states: list[State], layout: Layout) -> list[tuple[State, int]]:
    """Sort states so that equal prefixes meet; pair each with what it shares with the one before it."""
    if layout != "tree" or not states:
        return [(s, 0) for s in states]
    keyed = sorted(((s.realm, _tokens_key(s).tobytes()), i) for i, s in enumerate(states))
    ordered = [states[i] for _, i in keyed]
    limits = [shareable_length(s) for s in ordered]
    shared = [0]
    for i in range(1, len(ordered)):
        a, b = ordered[i - 1], ordered[i]
        common = _common_prefix(_tokens_key(a), _tokens_key(b)) if a.realm == b.realm else 0
        shared.append(min(common, _common_routes(a, b), limits[i - 1], limits[i]))
    return list(zip(ordered, shared, strict=True))


def _common_routes(a: State, b: State) -> int:
    """How many leading tokens went to the same experts, as far as that was recorded."""
    if a.routes is None and b.routes is None:
        return len(a)
    if a.routes is None or b.routes is None or a.routes.shape[1] != b.routes.shape[1]:
        return 0
    return _common_prefix(a.routes, b.routes)


def _tokens_key(state: State) -> NDArray[np.int32]:
    """[n, 2] big-endian (id, position): as bytes they sort so that equal prefixes are neighbours."""
    positions = np.arange(len(state)) if state.positions is None else state.positions
    return np.stack([state.ids, positions], axis=1).astype(">i4")


def _common_prefix(a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]) -> int:
    """How many leading rows of two tables agree."""
    m = min(len(a), len(b))
    return first((a[:m] != b[:m]).any(axis=1), m)


def _close_beyond(
    ranges: list[tuple[int, int, int]], shared: int, at: int, seen_until: IDS
) -> list[tuple[int, int, int]]:
    """End the subtree of every path token at depth >= `shared`: later packed tokens (from `at`) do not see it."""
    kept = []
    for depth, start, stop in ranges:
        cut = max(start, min(stop, start + shared - depth))
        seen_until[cut:stop] = at
        if cut > start:
            kept.append((depth, start, cut))
    return kept


def _set_visible_from(state: State, shared: int, start: int, seen_from: IDS) -> bool:
    """Write the recorded `visible_from` of a state's own tokens; returns whether its visibility is plain causal."""
    stop = start + len(state) - shared
    if state.visible_from is not None:
        seen_from[start:stop] = state.visible_from[shared:] - shared + start
    return shareable_length(state) == len(state)


def _own_ranges(branches: Sequence[tuple[State, int]]) -> Iterator[tuple[int, int]]:
    at = 0
    for state, shared in branches:
        yield at, at + len(state) - shared
        at += len(state) - shared


def _packed_rows(path_rows: IDS, ranges: list[tuple[int, int, int]]) -> IDS:
    """Packed index of each path index of the current branch."""
    depths = np.array([d for d, _, _ in ranges], np.int64)
    starts = np.array([s for _, s, _ in ranges], np.int64)
    which = np.searchsorted(depths, path_rows, side="right") - 1
    return (starts[which] + path_rows - depths[which]).astype(np.int32)
