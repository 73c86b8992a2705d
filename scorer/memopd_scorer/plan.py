"""From invocations to packed trees: which tokens are run, who sees whom, and which row predicts what.

The plan is one pure value that scorer, audit and trainer share; nobody computes "the last n tokens" again.
numpy only, no torch.

Invocations of a group are sorted, so that equal prefixes meet (`memopd_scorer.prefixes`), cut where packs begin
(`memopd_scorer.fit`), and packed depth first: each adds only the tokens that the branch before it does not share. Two
states share a token only if the id, the position id, the visibility so far and the realm (model, media, expert routes)
agree.

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
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memopd_scorer.deep import DEEP_TOKENS, Deep
from memopd_scorer.fit import fit
from memopd_scorer.prefixes import Branch, arrange
from memopd_scorer.states import State, state_of
from memopd_trace.errors import UsageError
from memopd_trace.invocation import IDS, Episode, Invocation

Layout = Literal["tree", "packed", "single"]
INDICES = NDArray[np.int64]
LAYOUTS: tuple[Layout, ...] = ("tree", "packed", "single")
GROUP_TOKENS = 16 * 2**20  # a group larger than this is planned in parts, so that memory stays bounded


@dataclass(frozen=True, slots=True)
class Span:
    """Packed tokens `[start, stop)` that follow each other on one path. They see the `ancestors` (packed ranges, in
    path order, none touching the next) whole, and each other causally (`causal`) or as `visible_from_T` and
    `visible_until_T` say."""

    start: int
    stop: int
    ancestors: tuple[tuple[int, int], ...]
    causal: bool


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """What is run together: in one forward, or in passes that keep keys and values (`memopd_scorer.passes`).

    Visibility: query q sees key k iff `visible_from_T[k] <= q < visible_until_T[k]`, all packed indices.
    """

    states: tuple[State, ...]  # [S]
    shared_S: IDS  # leading tokens that a state has in common with the one before it, and does not add
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
    repeated: int = 0  # its first tokens that an earlier pack of the group runs as well
    spared: int = 0  # tokens that the packs of a torn group would have run again, where a deep pack begins it
    pass_tokens: int | None = None  # of a forward; None = all at once

    def __len__(self) -> int:
        return len(self.token_ids_T)

    @property
    def logical_tokens(self) -> int:
        """Tokens of its states when each is run alone."""
        return sum(len(s) for s in self.states)

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs."""
        return int(self.visible_until_T.sum(dtype=np.int64) - self.visible_from_T.sum(dtype=np.int64))

    @property
    def is_causal(self) -> bool:
        """No recorded look-ahead or eviction: every span sees its ancestors whole and itself causally."""
        return all(s.causal for s in self.spans)

    @property
    def is_plain(self) -> bool:
        """One state with default positions and plain causal visibility: any model runs it as it is."""
        return len(self.states) == 1 and self.is_causal and np.array_equal(self.positions_T, self.path_T)

    def update_digest(self, h: hashlib._Hash) -> None:
        """Add everything that determines this pack's scores to a hash. A state's digest stands for its ids, positions
        and visibility, so a token that is run is not hashed again."""
        names = [
            f"{s.episode_id}\0{s.invocation_index}\0".encode() + s.digest + (s.view_digest or b"") for s in self.states
        ]
        passes = np.array([self.pass_tokens or 0])
        arrays = (self.shared_S, self.target_state_M, self.target_output_M, passes)
        h.update(b"".join([*names, *(a.astype("<i4", copy=False).tobytes() for a in arrays)]))


def plan(
    episodes: Iterable[Episode],
    *,
    layout: Layout = "tree",
    max_tokens: int = 8192,
    deep: Deep | None = None,
    vocabulary: int | None = None,
) -> Iterator[Pack]:
    """The packs of a trace's recorded states, in order; streams by group, deterministic.

    A pack holds at most `max_tokens` packed tokens; in a group with a state beyond that, as many as this state and a
    quarter of the budget. With `deep`, a group of which tokens would be run again, or that has such a state, becomes
    packs of up to `DEEP_TOKENS`, to be run in passes of `max_tokens`, wherever that pays. Nothing is cut off. The trace
    must be valid (`memopd_trace.validate.require_valid`); `vocabulary` is that of `state_of`, and `STATE_COLUMNS` are
    what is read.
    """
    groups = ([state_of(i, vocabulary=vocabulary) for i in group] for group in iter_groups(episodes))
    return plan_states(groups, layout=layout, max_tokens=max_tokens, deep=deep)


def plan_states(
    groups: Iterable[Sequence[State]],
    *,
    layout: Layout = "tree",
    max_tokens: int = 8192,
    deep: Deep | None = None,
) -> Iterator[Pack]:
    """As `plan`, for groups of states that were made already (under a view, say).

    Raises:
        UsageError: an unknown layout or a budget below 1.
    """
    if layout not in LAYOUTS or max_tokens < 1:
        raise UsageError(
            f"layout '{layout}', max_tokens {max_tokens}", hint=f"one of {LAYOUTS}, a budget of at least 1"
        )
    pending: list[Branch] = []
    repeated = used = 0
    for group in groups:
        states = [s for s in group if len(s)]
        branches = arrange(states) if layout == "tree" else [(state, 0) for state in states]
        if layout == "single":
            yield from (build_pack([branch]) for branch in branches)
            continue
        if not branches:
            continue
        begins, filled = fit(branches, used, max_tokens)
        if deep is not None and deep.pays(branches, begins, max_tokens):
            if pending:
                yield build_pack(pending, repeated)
            yield from _deep_packs(branches, sum(branches[n][1] for n in begins), max_tokens)
            pending, repeated, used = [], 0, 0
            continue
        used, at = filled, 0
        for begin in begins:
            yield build_pack(pending + branches[at:begin], repeated)
            state, repeated = branches[begin]
            pending, at = [(state, 0)], begin + 1
        pending += branches[at:]
    if pending:
        yield build_pack(pending, repeated)


def _deep_packs(branches: list[Branch], torn: int, pass_tokens: int) -> Iterator[Pack]:
    """A group in packs of up to DEEP_TOKENS, of which `torn` tokens would be run again in smaller ones."""
    begins = [0, *fit(branches, 0, DEEP_TOKENS)[0]]
    spared = torn - sum(branches[n][1] for n in begins)
    for begin, end in pairwise([*begins, len(branches)]):
        state, shared = branches[begin]
        packed = [(state, 0), *branches[begin + 1 : end]]
        yield replace(build_pack(packed, shared), spared=0 if begin else spared, pass_tokens=pass_tokens)


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


def build_pack(branches: Sequence[Branch], repeated: int = 0) -> Pack:
    """Pack (state, tokens shared with the branch before it) pairs depth first. The first shares nothing."""
    states = tuple(s for s, _ in branches)
    shared_S = np.array([shared for _, shared in branches], np.int64)
    own_S = np.array([len(s) for s in states], np.int64) - shared_S
    stops_S = np.cumsum(own_S)
    starts, stops, total = (stops_S - own_S).tolist(), stops_S.tolist(), int(stops_S[-1])
    shift_S = stops_S - own_S - shared_S  # packed index of a branch's own token, minus its path index
    path = (np.arange(total) - np.repeat(shift_S, own_S)).astype(np.int32)
    positions, seen_from = path.copy(), np.arange(total, dtype=np.int32)
    seen_until, spans, parents = _depth_first(branches, starts, stops)
    for (state, shared), start, stop in zip(branches, starts, stops, strict=True):
        if state.positions is not None:
            positions[start:stop] = state.positions[shared:]
        if state.visible_from is not None:
            seen_from[start:stop] = state.visible_from[shared:] - shared + start
        if state.visible_until is not None:  # a recorded eviction ends earlier than the subtree
            until = state.visible_until[shared:]
            evicted = until < len(state)
            seen_until[start:stop][evicted] = until[evicted] - shared + start
    target_state: INDICES = np.repeat(np.arange(len(states)), [len(s.target_ids) for s in states])
    rows = _packed_rows(np.concatenate([s.row_of_target for s in states]), target_state, shared_S, shift_S, parents)
    predicts = np.zeros(total, bool)
    predicts[rows] = True
    return Pack(
        states=states,
        shared_S=shared_S.astype(np.int32),
        token_ids_T=np.concatenate([s.ids[shared:] for s, shared in branches]),
        positions_T=positions,
        path_T=path,
        visible_from_T=seen_from,
        visible_until_T=seen_until,
        spans=tuple(spans),
        rows_R=np.flatnonzero(predicts).astype(np.int32),
        target_row_M=(np.cumsum(predicts, dtype=np.int32) - 1)[rows],
        target_state_M=target_state.astype(np.int32),
        target_output_M=np.concatenate([s.output_index for s in states]),
        target_ids_M=np.concatenate([s.target_ids for s in states]),
        repeated=repeated,
    )


def _depth_first(branches: Sequence[Branch], starts: list[int], stops: list[int]) -> tuple[IDS, list[Span], INDICES]:
    """([T] where each token's subtree ends, the spans, [S] the branch whose path each branch left).

    `path` holds the current branch as ranges that touch nowhere: [path index, packed start, packed stop, last branch].
    """
    until: IDS = np.full(stops[-1], stops[-1], np.int32)
    spans: list[Span] = []
    parents: INDICES = np.zeros(len(branches), np.int64)
    path: list[list[int]] = []
    for number, ((state, shared), start, stop) in enumerate(zip(branches, starts, stops, strict=True)):
        while path and (beyond := path[-1][0] + path[-1][2] - path[-1][1] - shared) > 0:
            top = path[-1]  # later packed tokens do not see what lies beyond the shared ones
            cut = max(top[1], top[2] - beyond)
            until[cut : top[2]] = start
            top[2] = cut
            if cut == top[1]:
                path.pop()
        parents[number] = path[-1][3] if path else 0
        if stop == start:
            continue
        causal = state.causal
        if path and path[-1][2] == start:  # it goes on where the branch before it ended
            path[-1][2:] = stop, number
            if causal and spans[-1].causal:
                spans[-1] = Span(spans[-1].start, stop, spans[-1].ancestors, True)
                continue
            ancestors = [*path[:-1], [0, path[-1][1], start, 0]]
        else:
            ancestors = path.copy()
            path.append([shared, start, stop, number])
        spans.append(Span(start, stop, tuple((a, b) for _, a, b, _ in ancestors), causal))
    return until, spans, parents


def _packed_rows(rows_M: IDS, state_M: INDICES, shared_S: INDICES, shift_S: INDICES, parents_S: INDICES) -> INDICES:
    """[M] packed index of each target's path index: in the branch that runs it, its own or one that it left."""
    branch_M = state_M
    while (above := rows_M < shared_S[branch_M]).any():
        branch_M = np.where(above, parents_S[branch_M], branch_M)
    return rows_M + shift_S[branch_M]
