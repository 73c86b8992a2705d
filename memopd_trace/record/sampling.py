"""The steps that sampling from a Transformers causal LM is made of: run, restrict, draw, keep.

Shape legend: B rows, P padded prompt length, V vocabulary, K candidates (V, or top-k), M tokens of an output, U prompts
that differ.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from memopd_trace.behaviour import restricts
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import IDS, Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """What one call sampled.

    `output_ids` int32[M], the stop id included. `logprobs` [M]: raw log-probabilities in nats (temperature 1,
    whole vocabulary), computed in float32, or in float64 for a float64 model. `kept_logmass` [M]: log of the
    mass, after temperature, of what top-k, top-p and min-p left; `None` where none of them was set. `sampling`
    holds the call's own seed (`None` for greedy decoding).
    """

    output_ids: IDS
    logprobs: NDArray[np.float64]
    kept_logmass: NDArray[np.float64] | None
    finish_reason: str
    sampling: Sampling


@dataclass(slots=True)
class Output:
    """One prompt's output as it grows."""

    sampling: Sampling
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)

    def append(self, token: int, logprob: float, kept_logmass: float) -> None:
        """Take one more token."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.kept.append(kept_logmass)

    def finish(self, stop_ids: Sequence[int]) -> Generated:
        """The whole of it."""
        stopped = bool(self.ids) and self.ids[-1] in stop_ids
        return Generated(
            output_ids=np.array(self.ids, dtype=np.int32),
            logprobs=np.array(self.logprobs),
            kept_logmass=np.array(self.kept) if restricts(self.sampling) else None,
            finish_reason="stop" if stopped else "length",
            sampling=dataclasses.replace(self.sampling, seed=self.seed if self.sampling.temperature else None),
        )


class Forward:
    """The model, its cache, and where each row stands."""

    def __init__(self, model: PreTrainedModel, prompts: list[IDS], size: int | None) -> None:
        self._model, self._prompts, self._size = model, prompts, size
        parameters = inspect.signature(model.forward).parameters
        self._cache = DynamicCache(config=model.config)
        cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed in Transformers 5.20
        self._always: dict[str, Any] = {cache_name: self._cache, "use_cache": True}
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def prefill(self) -> Tensor:
        """logits_BV after each prompt. Equal prompts are run once and their cache is copied."""
        distinct: dict[bytes, int] = {}
        which_B = [distinct.setdefault(p.tobytes(), len(distinct)) for p in self._prompts]
        unique = [np.frombuffer(p, np.int32) for p in distinct]
        longest = max(map(len, unique))
        ids_UP = torch.zeros(len(unique), longest, dtype=torch.long)
        self._mask_BP = torch.zeros(len(unique), longest, dtype=torch.long)
        for n, ids in enumerate(unique):
            ids_UP[n, longest - len(ids) :] = torch.from_numpy(ids.astype(np.int64))
            self._mask_BP[n, longest - len(ids) :] = 1
        positions_UP = (self._mask_BP.cumsum(1) - 1).clamp(min=0)
        self._next_B = positions_UP[:, -1] + 1
        logits_UV = self._run(ids_UP, positions_UP)
        if len(unique) == len(which_B):
            return logits_UV
        self._select(which_B)
        return logits_UV[which_B]

    def step(self, tokens_B: list[int], keep: list[int]) -> Tensor:
        """logits_BV after one more token in each row; only the rows `keep` of the last step go on."""
        tokens = [tokens_B[n] for n in keep]
        if len(keep) < len(tokens_B):
            self._select(keep)
        self._mask_BP = torch.cat([self._mask_BP, torch.ones(len(keep), 1, dtype=torch.long)], dim=1)
        logits_BV = self._run(torch.tensor(tokens)[:, None], self._next_B[:, None])
        self._next_B = self._next_B + 1
        return logits_BV

    def _select(self, rows: list[int]) -> None:
        index = torch.tensor(rows)
        self._mask_BP, self._next_B = self._mask_BP[index], self._next_B[index]
        self._cache.batch_select_indices(index.to(self._model.device))

    def _run(self, ids_BP: Tensor, positions_BP: Tensor) -> Tensor:
        device = self._model.device
        output = self._model(
            ids_BP.to(device),
            attention_mask=self._mask_BP.to(device),
            position_ids=positions_BP.to(device),
            **self._always,
            **self._last_only,
        )
        layers = self._cache.layers
        if not layers or not all(hasattr(layer, "batch_select_indices") for layer in layers):
            raise UsageError(
                f"{type(self._model).__name__} does not keep all of its state in a key/value cache",
                hint="recurrent models cannot be sampled here; record them through their own engine",
            )
        logits_BV = output.logits[:, -1]
        if self._size is not None:
            logits_BV = logits_BV[:, : self._size]
        return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))


def draw(
    logits_BV: Tensor, sampling: Sampling, uniform_B: NDArray[np.float64]
) -> tuple[list[int], list[float], list[float]]:
    """One id a row by inverse transform, its raw log-probability, and the log mass of what could be drawn."""
    raw_BV = logits_BV.log_softmax(-1)
    if not sampling.temperature:
        ids_B = logits_BV.argmax(-1)
        kept_B = torch.zeros_like(raw_BV[:, 0])
    else:
        logprobs_BV = raw_BV if sampling.temperature == 1 else (logits_BV / sampling.temperature).log_softmax(-1)
        candidates_BK, ids_BK = _restrict(logprobs_BV, sampling)
        cumulative_BK = candidates_BK.exp().double().cumsum(-1)
        total_B1 = cumulative_BK[:, -1:]
        point_B1 = torch.from_numpy(uniform_B)[:, None].to(total_B1.device) * total_B1
        point_B1 = torch.minimum(point_B1, total_B1.nextafter(torch.zeros_like(total_B1)))
        chosen_B1 = torch.searchsorted(cumulative_BK, point_B1, right=True)
        ids_B = (chosen_B1 if ids_BK is None else ids_BK.gather(1, chosen_B1))[:, 0]
        kept_B = candidates_BK.logsumexp(-1).clamp(max=0)
    return ids_B.tolist(), raw_BV.gather(1, ids_B[:, None])[:, 0].tolist(), kept_B.tolist()


def _restrict(logprobs_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """(log-probabilities of the candidates, -inf where they may not be drawn; their ids, or `None` for all in
    order). top-p counts the mass of what top-k left; a tie at the edge goes to the id that sorts first."""
    logprobs_BK, ids_BK = logprobs_BV, None
    if sampling.top_k:
        logprobs_BK, ids_BK = logprobs_BV.topk(min(sampling.top_k, logprobs_BV.shape[1]), dim=-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        if ids_BK is None:
            logprobs_BK, ids_BK = logprobs_BV.sort(dim=-1, descending=True, stable=True)
        mass_BK = logprobs_BK.softmax(-1)
        before_BK = mass_BK.cumsum(-1) - mass_BK
        logprobs_BK = logprobs_BK.masked_fill(before_BK >= sampling.top_p, -math.inf)
    if sampling.min_p:
        floor_B1 = logprobs_BK.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logprobs_BK = logprobs_BK.masked_fill(logprobs_BK < floor_B1, -math.inf)
    return logprobs_BK, ids_BK


def check_call(
    model: PreTrainedModel, prompts: list[IDS], sampling: Sampling, max_new_tokens: int, seeds: Sequence[int] | None
) -> None:
    """Raises:
    UsageError: what `generate` refuses.
    """
    if model.training:
        raise UsageError("the model is in training mode, so dropout would be on", hint="call model.eval() first")
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens}", hint="at least 1")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise UsageError(f"prompt {i} is empty")
    longest = max(map(len, prompts), default=0) + max_new_tokens
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise UsageError(f"prompt and output would have {longest} tokens, the model has {limit} positions")
    if sampling.temperature is None or not 0 <= sampling.temperature < math.inf:
        raise UsageError(f"temperature is {sampling.temperature}", hint="0 for greedy decoding, else above it")
    if sampling.repetition_penalty not in (None, 1):
        raise UsageError(f"repetition_penalty {sampling.repetition_penalty} is not supported", hint="leave it out")
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        raise UsageError(f"top_p is {sampling.top_p}", hint="above 0, at most 1")
    if sampling.min_p is not None and not 0 <= sampling.min_p <= 1:
        raise UsageError(f"min_p is {sampling.min_p}", hint="from 0 to 1")
    if sampling.top_k is not None and sampling.top_k < 0:
        raise UsageError(f"top_k is {sampling.top_k}", hint="0 or left out = all")
    if sampling.temperature and (seeds is None or len(seeds) != len(prompts)):
        raise UsageError(f"{0 if seeds is None else len(seeds)} seeds for {len(prompts)} prompts")
    for seed in seeds or ():
        if not 0 <= seed < 2**63:
            raise UsageError(f"seed {seed} is not in [0, 2^63)")


def check_finite(logits_BV: Tensor, alive: list[int], step: int) -> None:
    """Raises:
    InputError: logits of a row that are not numbers.
    """
    bad = torch.nonzero(logits_BV.isnan().any(-1) | logits_BV.isposinf().any(-1))
    if len(bad):
        raise InputError(
            f"prompt {alive[int(bad[0])]}: the model's logits after {step} tokens are not numbers",
            hint="its weights are damaged, or its dtype overflows",
        )
