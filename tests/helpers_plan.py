"""Small invocations to plan, and what a pack's tokens see of each other."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from memopd_scorer.plan import Pack
from memopd_trace.invocation import Episode, Invocation


def call(prompt: list[int], output: list[int], index: int = 0, **fields: object) -> Invocation:
    """A row of episode "e"."""
    named: dict[str, object] = {"episode_id": "e", "model_id": "m", **fields}
    return Invocation(invocation_index=index, prompt_ids=prompt, output_ids=output, **named)  # type: ignore[arg-type]


def episode(*calls: Invocation) -> list[Episode]:
    """A trace of one episode."""
    return [Episode("e", calls)]


def dense_mask(pack: Pack) -> np.ndarray:
    """bool [T, T] from the visibility rule."""
    q, k = np.ogrid[: len(pack), : len(pack)]
    return (pack.visible_from_T[k] <= q) & (q < pack.visible_until_T[k])


def span_mask(pack: Pack) -> np.ndarray:
    """bool [T, T] from the spans, as the sdpa backend reads them."""
    mask, dense = np.zeros((len(pack), len(pack)), bool), dense_mask(pack)
    for span in pack.spans:
        own = slice(span.start, span.stop)
        for start, stop in span.ancestors:
            mask[own, start:stop] = True
        size = span.stop - span.start
        mask[own, own] = np.tril(np.ones((size, size), bool)) if span.causal else dense[own, own]
    return mask


@st.composite
def calls(draw: st.DrawFn) -> list[Invocation]:
    """Invocations over two ids, so that prefixes meet often, some with positions, visibility, experts or a
    model of their own."""
    found = []
    for index in range(draw(st.integers(1, 6))):
        prompt = draw(st.lists(st.integers(0, 1), max_size=6))
        output = draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
        n = len(prompt) + len(output)
        fields: dict[str, object] = {}
        if draw(st.integers(0, 5)) == 0:
            fields["model_id"] = "other"
        if n > 1 and draw(st.integers(0, 5)) == 0:
            fields["routed_experts"] = draw(st.lists(st.integers(0, 1), min_size=2 * n - 2, max_size=2 * n - 2))
        if draw(st.booleans()) and draw(st.booleans()):
            gap = draw(st.integers(0, n))
            fields["position_ids"] = np.arange(n) + 3 * (np.arange(n) >= gap)
        if draw(st.booleans()) and draw(st.booleans()):
            fields["visible_until"] = [draw(st.one_of(st.just(n), st.integers(k + 1, n))) for k in range(n)]
        if draw(st.booleans()) and draw(st.booleans()):
            fields["visible_from"] = [draw(st.one_of(st.just(k), st.integers(0, k))) for k in range(n)]
        found.append(call(prompt, output, index, **fields))
    return found
