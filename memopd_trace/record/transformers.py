"""Sample from a Transformers causal LM and keep what a trace needs: the ids, and exact raw log-probabilities.

One short loop over a key/value cache, left-padded, with explicit position ids, so that a row of a batch is what it
would be alone, to rounding. Each prompt has its own stream of random numbers: neither the batch it is in nor its
place there changes what is drawn, and one call can be repeated alone from its recorded seed.

Cost: one forward over the distinct prompts, then one forward over one token per row and step. Logits exist for one
position a row: [B, V].

Shape legend: B prompts, P padded prompt length, V vocabulary, K candidates (V, or top-k).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedModel

from memopd_trace.invocation import Sampling
from memopd_trace.metadata import Model, Policy
from memopd_trace.record.fingerprint import config_digest, tokenizer_metadata, weights_digest
from memopd_trace.record.prompt import as_ids
from memopd_trace.record.sampling import Forward, Generated, Output, check_call, check_finite, draw


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[ArrayLike],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    seeds: Sequence[int] | None = None,
    size: int | None = None,
) -> list[Generated]:
    """Sample one output for each prompt (int[any length >= 1]), together.

    Restrictions are applied in the order temperature, top-k, top-p, min-p; temperature 0 takes the most likely id
    (and the others do not matter). `seeds`, one a prompt, are needed for any other temperature. With `size`, the
    vocabulary is the first `size` logits: a model's padding ids are then neither sampled nor counted.

    Raises:
        UsageError: settings or lengths that cannot be run, a model in training mode or without a key/value cache.
        InputError: the model's logits are not numbers.
    """
    ids = [as_ids(p, f"prompt {i}") for i, p in enumerate(prompts)]
    check_call(model, ids, sampling, max_new_tokens, seeds)
    if not ids:
        return []
    seeds = [0] * len(ids) if seeds is None else seeds
    uniform_B = [np.random.default_rng(seed).random(max_new_tokens) for seed in seeds]
    forward = Forward(model, ids, size)
    rows = [Output(sampling, seed) for seed in seeds]
    alive = list(range(len(ids)))
    logits_BV = forward.prefill()
    for step in range(max_new_tokens):
        check_finite(logits_BV, alive, step)
        drawn = draw(logits_BV, sampling, np.array([uniform_B[i][step] for i in alive]))
        for number, token, logprob, kept in zip(alive, *drawn, strict=True):
            rows[number].append(token, logprob, kept)
        keep = [n for n, i in enumerate(alive) if rows[i].ids[-1] not in stop_ids]
        if not keep or step + 1 == max_new_tokens:
            break
        alive = [alive[n] for n in keep]
        logits_BV = forward.step(drawn[0], keep)
    return [row.finish(stop_ids) for row in rows]


def model_metadata(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str,
    stop_ids: Sequence[int] | None = None,
    policy_version: int | None = None,
) -> Model:
    """A model and its tokenizer as the file metadata names them; hashes every weight (about 1 GB/s).

    With `policy_version`, the weights are entered as that policy's, too.
    """
    weights = weights_digest(model)
    policies = {} if policy_version is None else {str(policy_version): Policy(weights_digest=weights)}
    width = model.get_input_embeddings().weight.shape[0]
    return Model(
        name=name,
        weights_digest=weights,
        config_digest=config_digest(model),
        dtype=str(model.dtype).removeprefix("torch."),
        tokenizer=tokenizer_metadata(tokenizer, vocab_size=width, stop_ids=stop_ids),
        policies=policies,
    )
