"""Running a pack in several forward passes: which tokens each runs, and which keys and values it finds kept.

A pack is depth first, so all that its tokens from `start` on still see of those before it lies on one path: from a root
to token `start`. Only these keys and values are kept from pass to pass, and every token is run once. Where passes begin
follows from lengths and visibility alone, never from ids.

Example, the pack of `memopd_scorer.plan` in passes of at most 3 tokens, [7 8 | 5 4 9 1 2 3]:

    pass       [0, 3)   [3, 6)          [6, 8)
    tokens     7 8 5    4 9 1           2 3
    kept                7 8 5           7 8 9       5 is let go where its branch has ended

numpy only, no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from memopd_scorer.plan import Pack, Span

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward: it runs the packed tokens `[start, stop)`, and finds keys and values of the packed ranges `kept`.

    Its keys are those kept, in order, and then its own.
    """

    start: int
    stop: int
    kept: tuple[Range, ...]

    @property
    def tokens_kept(self) -> int:
        """How many tokens before `start` it finds keys and values of."""
        return sum(b - a for a, b in self.kept)

    @property
    def keys(self) -> tuple[Range, ...]:
        """Packed ranges of its keys."""
        return *self.kept, (self.start, self.stop)

    def locate(self, ranges: Iterable[Range]) -> tuple[Range, ...]:
        """Where packed ranges lie among its keys; what is no key is left out, what touches there is joined."""
        keys = self.keys
        begins = [a for a, _ in keys]
        offsets = [0, *accumulate(b - a for a, b in keys)]
        found: list[Range] = []
        for start, stop in ranges:
            number = max(0, bisect_right(begins, start) - 1)
            while number < len(keys) and begins[number] < stop:
                (a, b), offset = keys[number], offsets[number]
                low, high = max(a, start) - a + offset, min(b, stop) - a + offset
                if found and found[-1][1] == low:
                    low = found.pop()[0]
                if low < high:
                    found.append((low, high))
                number += 1
        return tuple(found)

    def spans(self, pack: Pack) -> tuple[Span, ...]:
        """The pack's spans as far as this pass runs them, as ranges of its keys.

        What an earlier pass ran of a span is an ancestor here. Under recorded visibility (not `causal`) it is not seen
        whole, and has holes where nobody sees it any more.
        """
        if self.start == 0 and self.stop == len(pack):
            return pack.spans
        shift = self.start - self.tokens_kept
        first = bisect_right(pack.spans, self.start, key=lambda span: span.start) - 1
        found = []
        for span in pack.spans[first:]:
            if span.start >= self.stop:
                break
            start, stop = max(span.start, self.start), min(span.stop, self.stop)
            ancestors = self.locate([*span.ancestors, (span.start, start)])
            found.append(replace(span, start=start - shift, stop=stop - shift, ancestors=ancestors))
        return tuple(found)


def passes_of(pack: Pack, tokens: int | None) -> list[Pass]:
    """The passes that run a pack, even ones of at most `tokens` tokens (`None` = one pass).

    A pass is longer only where it cannot end: before a key that an earlier query sees.
    """
    total = len(pack)
    if tokens is None or total <= tokens:
        return [Pass(0, total, ())]
    ahead_T = np.minimum.accumulate(pack.visible_from_T[::-1])[::-1]  # the first query that sees any key from here on
    ends = np.append(np.flatnonzero(ahead_T >= np.arange(total)), total)
    borders = [0]
    while borders[-1] < total:
        left = total - borders[-1]
        aim = borders[-1] + -(-left // -(-left // tokens))
        at = int(np.searchsorted(ends, aim, side="right")) - 1
        borders.append(int(ends[at] if ends[at] > borders[-1] else ends[at + 1]))
    return [Pass(start, stop, _path_to(pack, start)) for start, stop in pairwise(borders)]


def _path_to(pack: Pack, token: int) -> tuple[Range, ...]:
    """Packed ranges before a token that it or a later one sees: its ancestors, and what is seen of its own span."""
    span = pack.spans[bisect_right(pack.spans, token, key=lambda span: span.start) - 1]
    if span.causal:
        own = [(span.start, token)] if token > span.start else []
    else:
        seen = np.concatenate([[False], pack.visible_until_T[span.start : token] > token, [False]])
        turns = span.start + np.flatnonzero(seen[1:] != seen[:-1])
        own = [(int(a), int(b)) for a, b in turns.reshape(-1, 2)]
    return (*span.ancestors, *own)
