"""Where packs begin, and which worker runs which: the least work that a budget allows, spread evenly.

A pack that begins inside a tree runs the shared prefix of its first branch again. Of all ways to cut a group that is
too large for one pack, `fit` takes the one that runs least twice, a pack itself counting as `PACK_TOKENS` more.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from memopd_scorer.prefixes import Branch
from memopd_scorer.states import pairs_of_prefix

PACK_TOKENS = 256  # a forward's own cost, in tokens: fewer run twice are not worth another pack
BESIDE = 4  # a state beyond the budget may have a quarter of the budget beside it in its pack


class Load(NamedTuple):
    """What a pack runs: packed tokens and visible (query, key) pairs."""

    tokens: int = 0
    pairs: int = 0

    def plus(self, other: Load) -> Load:
        """Both together."""
        return Load(self.tokens + other.tokens, self.pairs + other.pairs)

    def within(self, limit: Load) -> bool:
        """Whether it keeps to a limit in both."""
        return self.tokens <= limit.tokens and self.pairs <= limit.pairs


def fit(branches: Sequence[Branch], used: Load, limit: Load) -> tuple[list[int], Load]:
    """Before which branches of a group a new pack begins, when the pack being filled holds `used`; and the load of the
    last pack then.

    A group that fits into a pack is not torn. Where a state of it is beyond the limit, packs of this group may hold as
    much as that state, which needs the memory anyway, and a little beside it: calls of a long history share most of it.
    """
    limit = Load(
        _stretched(limit.tokens, max(len(state) for state, _ in branches)),
        _stretched(limit.pairs, max(state.pairs for state, _ in branches)),
    )
    own = [_own_load(branch) for branch in branches]
    total = _sum(own)
    if used.plus(total).within(limit):
        return [], used.plus(total)
    if total.within(limit):
        return [0], total
    front = [used] if used.tokens else []  # what is pending is one more branch, and shares nothing with the group
    loads = front + own
    again = [Load()] * len(front) + [_prefix_load(shared) for _, shared in branches]
    begins = _cheapest(loads, again, limit)
    last = _sum(loads[begins[-1] :]).plus(again[begins[-1]])
    return [n - len(front) for n in begins if n], last


def deal(costs: Iterable[float], workers: int) -> Iterator[int]:
    """For each piece of work, in order, the worker that runs it: the one with the least so far.

    Every worker can deal for itself and take its own. No two workers differ by more than the largest piece.
    """
    heap = [(0.0, worker) for worker in range(workers)]
    for cost in costs:
        done, worker = heap[0]
        heapq.heapreplace(heap, (done + cost, worker))
        yield worker


def _stretched(limit: int, largest: int) -> int:
    return limit if largest <= limit else largest + limit // BESIDE


def _sum(loads: Sequence[Load]) -> Load:
    return Load(sum(load.tokens for load in loads), sum(load.pairs for load in loads))


def _own_load(branch: Branch) -> Load:
    """What a branch adds to the one before it."""
    state, shared = branch
    return Load(len(state) - shared, state.pairs - pairs_of_prefix(shared))


def _prefix_load(shared: int) -> Load:
    return Load(shared, pairs_of_prefix(shared))


def _cheapest(loads: Sequence[Load], again: Sequence[Load], limit: Load) -> list[int]:
    """Items at which packs begin (the first is 0), so that the sum of `again` over them, and of PACK_TOKENS, is least.

    `price[i]`: the least cost of a pack that begins at item i and of all before it. A pack's load shrinks when it
    begins later, so the beginnings that item j can have are a window that only moves on; its cheapest one is at the
    front of a queue with rising prices.
    """
    tokens = [0, *accumulate(load.tokens for load in loads)]
    pairs = [0, *accumulate(load.pairs for load in loads)]
    price: list[int] = []
    begin: list[int] = []
    window = deque[int]()

    def fits(first: int, last: int) -> bool:
        one = Load(tokens[last + 1] - tokens[first], pairs[last + 1] - pairs[first])
        return one.plus(again[first]).within(limit)

    for item in range(len(loads)):
        before = price[begin[-1]] if begin else 0
        price.append(before + again[item].tokens + PACK_TOKENS)
        while window and price[window[-1]] > price[item]:
            window.pop()
        window.append(item)
        while window[0] < item and not fits(window[0], item):
            window.popleft()
        begin.append(window[0])
    begins, item = [], len(loads) - 1
    while item >= 0:
        begins.append(begin[item])
        item = begin[item] - 1
    return begins[::-1]
