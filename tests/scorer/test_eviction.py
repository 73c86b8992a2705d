"""Recorded visibility against a real decoder: a KV cache from which tokens are dropped at random while it decodes.

The decoder never sees `visible_until`: it holds keys and values, and forgets some of them before any step. The scorer
never sees the cache: it runs the recorded rows, packed into one tree, in one forward. Both must agree in float64, over
two calls of which the second goes on with what the first left in the cache.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_scorer import PADDED, SIZE, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel

from memopd_scorer.attention import states_at_rows
from memopd_scorer.head import head_of
from memopd_scorer.plan import plan
from memopd_trace import Invocation, TraceMetadata, validate, write
from memopd_trace.invocation import Episode
from memopd_trace.metadata import Model, Producer, Tokenizer

NATS = 1e-9
KINDS = ("llama", "qwen3", "gpt2", "mixtral")
BACKENDS = ("sdpa", "eager")
METADATA = TraceMetadata(
    producer=Producer(name="decoder"),
    required_features=["visibility"],
    models={"m": Model(name="m", tokenizer=Tokenizer(fingerprint="f", size=SIZE, vocab_size=PADDED))},
)


class Decoder:
    """Token by token, with a cache that holds the tokens `kept`; `until[k]` = the first step that no longer saw k."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.head, self.cache = model, head_of(model, SIZE), DynamicCache(config=model.config)
        self.kept: list[int] = []
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.until: dict[int, int] = {}

    def evict(self, places: set[int]) -> None:
        """Drop these places of the cache, but for the last: no layer is left without a key."""
        stays = [at for at in range(len(self.kept)) if at not in places] or [len(self.kept) - 1]
        for at in set(range(len(self.kept))) - set(stays):
            self.until[self.kept[at]] = len(self.ids)
        self.kept = [self.kept[at] for at in stays]
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, stays], layer.values[:, :, stays]

    @torch.no_grad()
    def feed(self, token: int, gap: int) -> torch.Tensor:
        """Run one token, `gap` positions further than need be; log-probabilities [SIZE] of the next."""
        self.kept.append(len(self.ids))
        self.ids.append(token)
        self.positions.append((self.positions[-1] + 1 if self.positions else 0) + gap)
        hidden = self.model.model if hasattr(self.model, "model") else self.model.transformer
        last = hidden(
            torch.tensor([[token]]), cache=self.cache, position_ids=torch.tensor([self.positions[-1:]]), use_cache=True
        ).last_hidden_state
        assert self.cache.get_seq_length() == len(self.kept), "the cache is the one that was cut"
        return self.head.logits(last[0, -1:])[0].log_softmax(-1)


def run(model: PreTrainedModel, data: st.DataObject) -> tuple[list[Invocation], list[list[float]]]:
    """Two calls in one cache, as rows, and what the decoder gave each sampled token."""
    decoder, rows, logprobs = Decoder(model), list[Invocation](), list[list[float]]()
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    for index, least in enumerate((2, 1)):
        prompt = rng.integers(3, SIZE, data.draw(st.integers(least, 5))).tolist()
        given: list[float] = []
        start = len(decoder.ids) + len(prompt)
        steps = len(prompt) + data.draw(st.integers(2, 5))
        following = None
        for step in range(steps):
            if step < len(prompt):
                token = prompt[step]
            else:
                assert following is not None
                token = int(rng.choice(SIZE, p=following.exp().numpy() / float(following.exp().sum())))
                given.append(float(following[token]))
            if decoder.kept and data.draw(st.booleans()):
                decoder.evict(data.draw(st.sets(st.integers(0, len(decoder.kept) - 1), max_size=3)))
            following = decoder.feed(token, data.draw(st.sampled_from([0, 0, 0, 2])))
        n = len(decoder.ids)
        until = [decoder.until.get(k, n) for k in range(n)]
        rows.append(
            Invocation(
                episode_id="e",
                invocation_index=index,
                model_id="m",
                prompt_ids=decoder.ids[:start],
                output_ids=decoder.ids[start:],
                position_ids=list(decoder.positions),
                visible_until=until,
                relation="extend" if index else "root",
                parent_index=index - 1 if index else None,
                output_logprobs=given,
            )
        )
        logprobs.append(given)
    return rows, logprobs


@torch.no_grad()
def replayed(model: PreTrainedModel, rows: list[Invocation], backend: str) -> list[list[float]]:
    """The log-probabilities of every row's output, from one packed forward."""
    head, found = head_of(model, SIZE), [list[float]() for _ in rows]
    for pack in plan([Episode("e", tuple(rows))]):
        hidden = states_at_rows(model, pack, backend=backend)[torch.from_numpy(pack.target_row_M).long()]  # type: ignore[arg-type]
        chosen = head.logits(hidden).log_softmax(-1).gather(1, torch.from_numpy(pack.target_ids_M).long()[:, None])
        for state, value in zip(pack.target_state_M, chosen[:, 0].tolist(), strict=True):
            found[pack.states[state].invocation_index].append(value)
    return found


def compare(kind: str, folder: Path, examples: int) -> None:
    model, seen = tiny_model(kind, torch.float64), Counter[str]()

    @given(st.data())
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    def holds(data: st.DataObject) -> None:
        rows, logprobs = run(model, data)
        write(folder / "t.arrow", METADATA, rows, overwrite=True)
        report = validate(folder / "t.arrow", "lineage")
        assert report.clean, report.to_text()
        for backend in BACKENDS:
            for expected, found in zip(logprobs, replayed(model, rows, backend), strict=True):
                np.testing.assert_allclose(found, expected, rtol=0, atol=NATS)
        forgotten = replayed(model, [r.replace(visible_until=None) for r in rows], "sdpa")
        evicted = [bool((r.visible_until < len(r)).any()) for r in rows]  # type: ignore[operator]
        seen["evicted in the first call"] += evicted[0]
        seen["evicted in the second call"] += len(set(rows[1].visible_until.tolist())) > 2  # type: ignore[union-attr]
        seen["it mattered"] += (
            max(abs(a - b) for x, y in zip(forgotten, logprobs, strict=True) for a, b in zip(x, y, strict=True)) > 1e-3
        )
        seen["positions with a gap"] += not np.array_equal(rows[1].positions(), np.arange(len(rows[1])))

    holds()
    assert len(seen) == 4 and min(seen.values()) >= examples // 4, seen


@pytest.mark.parametrize("kind", KINDS)
def test_any_recorded_eviction_reproduces_the_decoder(kind: str, tmp_path: Path) -> None:
    compare(kind, tmp_path, 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_recorded_evictions_reproduce_the_decoder(kind: str, tmp_path: Path) -> None:
    compare(kind, tmp_path, 300)
