"""What the tests of `stats`, `show` and `diff` share: small traces, made by hand or by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from memopd_trace import Invocation, Media, TraceMetadata
from memopd_trace.metadata import Model, Producer, Tokenizer
from memopd_trace.storage import TraceWriter

TOKENIZER = Tokenizer(fingerprint="f", size=100, vocab_size=100, eos_ids=[2], stop_ids=[2])
METADATA = TraceMetadata(
    producer=Producer(name="test"), models={"m": Model(name="m", tokenizer=TOKENIZER)}, required_features=["visibility"]
)
Rows = list[Invocation]


def row(episode: str, index: int, prompt: Sequence[int], output: Sequence[int] = (2,), **more: Any) -> Invocation:
    more.setdefault("model_id", "m")
    return Invocation(
        episode_id=episode,
        invocation_index=index,
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.array(output, np.int32),
        **more,
    )


def save(path: Path, rows: Sequence[Invocation], metadata: TraceMetadata = METADATA) -> Path:
    with TraceWriter(path, metadata, overwrite=True) as writer:
        for invocation in rows:
            writer.write(invocation)
    return path


@st.composite
def invocations(draw: st.DrawFn, episode: str, index: int, group: str | None, *, plain: bool) -> Invocation:
    """A row over three ids, so that prefixes meet often; unless `plain`, with explicit state and routes at times."""
    ids = st.lists(st.integers(0, 2), max_size=6)
    prompt, output = draw(ids), draw(ids.filter(len))
    n = len(prompt) + len(output)
    more: dict[str, Any] = {"group_id": group, "model_id": draw(st.sampled_from(["m", "m", "m", "other"]))}
    if draw(st.integers(0, 3)) == 0:
        more["position_ids"] = np.arange(n, dtype=np.int32) + draw(st.integers(0, 2))
    if prompt and draw(st.integers(0, 3)) == 0:
        more["media"] = (Media(0, 1, bytes([draw(st.integers(0, 1))]) * 32),)
    if not plain:
        keys = np.arange(n)
        if draw(st.booleans()):
            more["visible_from"] = [draw(st.integers(max(0, k - 1), k)) for k in keys]
        if draw(st.booleans()):
            more["visible_until"] = [draw(st.sampled_from([n, n, n, k + 1])) for k in keys]
        if draw(st.booleans()):
            more["routed_experts"] = [draw(st.integers(0, 1)) for _ in range((n - 1) * 2)]
    return row(episode, index, prompt, output, **more)


@st.composite
def traces(draw: st.DrawFn, *, plain: bool = False) -> Rows:
    """Episodes of groups that stand together."""
    rows: Rows = []
    for number in range(draw(st.integers(0, 4))):
        group = draw(st.sampled_from([None, "g", "h"]))
        for index in range(draw(st.integers(1, 3))):
            rows.append(draw(invocations(f"e{number}", index, group, plain=plain)))
    return rows
