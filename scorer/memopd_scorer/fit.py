"""Where packs begin: the least work that a budget allows.

A pack that begins inside a tree runs the shared prefix of its first branch again. Of all ways to cut a group that is
too large for one pack, `fit` takes the one that runs least twice, a pack itself counting as `PACK_TOKENS` more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from memopd_scorer.prefixes import Branch

PACK_TOKENS = 256  # a forward's own cost, in tokens: fewer run twice are not worth another pack
BESIDE = 4  # a state beyond the budget may have a quarter of the budget beside it in its pack


def fit(branches: Sequence[Branch], used: int, limit: int) -> tuple[list[int], int]:
    """Before which branches of a group a new pack begins, when the pack being filled holds `used` of `limit` tokens;
    and the tokens of the last pack then.

    A group that fits into a pack is not torn. Where a state of it is beyond the limit, packs of this group may hold as
    much as that state, which needs the memory anyway, and a little beside it: calls of a long history share most of it.
    """
    longest = max(len(state) for state, _ in branches)
    if longest > limit:
        limit = longest + limit // BESIDE
    own = [len(state) - shared for state, shared in branches]
    total = sum(own)
    if used + total <= limit:
        return [], used + total
    if total <= limit:
        return [0], total
    front = [used] if used else []  # what is pending is one more branch, and shares nothing with the group
    tokens = front + own
    again = [0] * len(front) + [shared for _, shared in branches]
    begins = _cheapest(tokens, again, limit)
    last = sum(tokens[begins[-1] :]) + again[begins[-1]]
    return [n - len(front) for n in begins if n], last


def _cheapest(tokens: Sequence[int], again: Sequence[int], limit: int) -> list[int]:
    """Items at which packs begin (the first is 0), so that the sum of `again` over them, and of PACK_TOKENS, is least.

    `price[i]`: the least cost of a pack that begins at item i and of all before it. A pack shrinks when it
    begins later, so the beginnings that item j can have are a window that only moves on; its cheapest one is at the
    front of a queue with rising prices.
    """
    before = [0, *accumulate(tokens)]
    price: list[int] = []
    begin: list[int] = []
    window = deque[int]()

    for item in range(len(tokens)):
        price.append((price[begin[-1]] if begin else 0) + again[item] + PACK_TOKENS)
        while window and price[window[-1]] > price[item]:
            window.pop()
        window.append(item)
        while window[0] < item and before[item + 1] - before[window[0]] + again[window[0]] > limit:
            window.popleft()
        begin.append(window[0])
    begins, item = [], len(tokens) - 1
    while item >= 0:
        begins.append(begin[item])
        item = begin[item] - 1
    return begins[::-1]
