"""Calls that forget while they write: tokens leave the key/value cache between two steps, and the row says which.

A policy names, before each step, which tokens of the sequence are forgotten. Their keys and values are cut out of the
cache, so the model cannot see them any more; all others keep the positions they were computed at. What was done is
recorded as `position_ids` and `visible_until` (the first place of the sequence that no longer saw a token), from which
scorer and trainer rebuild the state of each sampled token (`spec/trace.md`).

The prompt is read whole, before anything is forgotten. One call at a time: rows of a batch would forget differently.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedModel

from memopd_trace.errors import UsageError
from memopd_trace.invocation import IDS, Sampling
from memopd_trace.record.prompt import as_ids
from memopd_trace.record.sampling import Forward, Generated, Output, check_call, check_finite, draw


class Eviction(Protocol):
    """What is forgotten. It must depend on nothing else than its argument, so that a call can be repeated."""

    def forget(self, kept: Sequence[int]) -> Collection[int]:
        """`kept`: places in the sequence (prompt + output) that are still seen, ascending; which of them to forget."""


@dataclass(frozen=True, slots=True)
class Window:
    """Keeps the first `first` and the latest `latest` tokens.

    Raises:
        UsageError: no token would be kept, or a negative number.
    """

    first: int
    latest: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.latest < 1:
            raise UsageError(f"a window of {self.first} first and {self.latest} latest tokens", hint="at least 0 and 1")

    def forget(self, kept: Sequence[int]) -> Collection[int]:
        """What is neither among the first nor among the latest."""
        return [place for place in kept[: -self.latest] if place >= self.first]


@dataclass(frozen=True, slots=True, eq=False)
class EvictedCall:
    """A sampled call and the columns that describe its state, int32[prompt + output] each."""

    generated: Generated
    position_ids: IDS
    visible_until: IDS


@torch.inference_mode()
def generate_evicting(
    model: PreTrainedModel,
    prompt: ArrayLike,
    eviction: Eviction,
    *,
    sampling: Sampling,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    seed: int = 0,
    size: int | None = None,
) -> EvictedCall:
    """As `memopd_trace.record.transformers.generate` for one prompt, forgetting before each step after the first.

    Raises:
        UsageError: as `generate`; a model with windowed layers, whose cache forgets by itself; a policy that forgets
            all, or what is not kept.
        InputError: the model's logits are not numbers.
    """
    ids = as_ids(prompt, "the prompt")
    check_call(model, [ids], sampling, max_new_tokens, [seed])
    uniform = np.random.default_rng(seed).random(max_new_tokens)
    forward, row = _Forgetful(model, ids, size), Output(sampling, seed)
    logits_1V = forward.prefill()
    for step in range(max_new_tokens):
        check_finite(logits_1V, [0], step)
        (token,), (logprob,), (kept,) = draw(logits_1V, sampling, uniform[step : step + 1])
        row.append(token, logprob, kept)
        if token in stop_ids or step + 1 == max_new_tokens:
            break
        forward.forget(eviction.forget(tuple(forward.kept)))
        logits_1V = forward.step([token], [0])
        forward.kept.append(len(ids) + step)
    n = len(ids) + len(row.ids)
    until = np.full(n, n, dtype=np.int32)
    for place, first_blind in forward.until.items():
        until[place] = first_blind
    return EvictedCall(row.finish(stop_ids), np.arange(n, dtype=np.int32), until)


class _Forgetful(Forward):
    """A forward whose cache can be cut. `kept`: places that are in the cache; `until`: place -> the first place that
    did not see it."""

    def __init__(self, model: PreTrainedModel, prompt: IDS, size: int | None) -> None:
        super().__init__(model, [prompt], size)
        self.kept = list(range(len(prompt)))
        self.until: dict[int, int] = {}

    def forget(self, places: Collection[int]) -> None:
        """Cut these out of every layer."""
        if not places:
            return
        gone = set(places)
        stays = [at for at, place in enumerate(self.kept) if place not in gone]
        if not gone <= set(self.kept) or not stays:
            raise UsageError(
                f"an eviction of {len(gone)} tokens of {len(self.kept)}", hint="forget what is kept, not all"
            )
        now = self._next_B.item()
        self.until.update(dict.fromkeys(gone, int(now)))
        index = torch.tensor(stays)
        for layer in self._cache.layers:
            if getattr(layer, "is_sliding", False):
                raise UsageError(
                    f"{type(self._model).__name__} has layers that see a window: their cache forgets by itself",
                    hint="evict in a model whose layers all see everything",
                )
            at = index.to(layer.keys.device)
            layer.keys, layer.values = layer.keys.index_select(2, at), layer.values.index_select(2, at)
        self._mask_BP = self._mask_BP[:, index]
        self.kept = [self.kept[at] for at in stays]
