"""Packs and models that hold all that an attention backend may meet, and the comparison with the dense reference.

The packs hold a shared prefix, forks of forks, evictions, look-ahead and position gaps; the models grouped queries,
windows along the branch, softcaps and sinks.
"""

from __future__ import annotations

import numpy as np
import torch
from helpers_scorer import SIZE, tiny_model
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedModel

from memopd_scorer.attention import states_at_rows
from memopd_scorer.plan import Pack, plan_states
from memopd_scorer.states import State

KINDS = ("llama", "gemma3", "gpt2", "softcap", "sinks")
ERROR = {torch.float64: 1e-6, torch.float32: 2e-5}  # some layers round to float32 whatever the dtype
CPU = torch.device("cpu")


def model_of(kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    if kind not in ("softcap", "sinks"):
        return tiny_model(kind, dtype)
    torch.manual_seed(0)
    windows = ["sliding_attention", "full_attention"]
    shape = {
        "vocab_size": 104,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": windows,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    if kind == "softcap":
        return Gemma2ForCausalLM(Gemma2Config(**shape, attn_logit_softcapping=1.0)).to(dtype).eval()
    model = GptOssForCausalLM(GptOssConfig(**shape, num_local_experts=4, num_experts_per_tok=2)).to(dtype).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(0.0, 2.0)
    if dtype == torch.float64:
        model.set_experts_implementation("batched_mm")
    return model


def state(index: int, ids: np.ndarray, **recorded: np.ndarray) -> State:
    rows = np.arange(len(ids) - 1, dtype=np.int32)
    fields = [recorded.get(name) for name in ("positions", "visible_from", "visible_until")]
    return State("e", index, b"", ids.astype(np.int32), *fields, rows, rows, ids[1:].astype(np.int32))


def pack_of(*, visibility: bool, positions: bool = False, scale: int = 1) -> Pack:
    """Forks of forks from one trunk, and an unrelated sequence; lengths are no multiples of any block."""
    rng = np.random.default_rng(4)
    trunk, left, right, other = (rng.integers(3, SIZE, n * scale) for n in (19, 9, 7, 11))
    sequences = [
        np.r_[trunk, left],
        np.r_[trunk, left, right],
        np.r_[trunk, left[:4], other],
        np.r_[trunk, right, other],
        np.r_[trunk, right, left],
        other,
    ]
    states = []
    for index, ids in enumerate(sequences):
        n, recorded = len(ids), {}
        if visibility:
            half = n // 2 + 2
            start, until = np.arange(n, dtype=np.int32), np.full(n, n, np.int32)
            start[half : half + 3] = half
            gone = rng.choice(np.arange(half + 3, n), 2)
            until[gone] = np.minimum(gone + 1 + rng.integers(0, 3, 2), n)
            recorded = {"visible_from": start, "visible_until": until}
        if positions:
            recorded["positions"] = (np.arange(n) + 5 + 3 * (np.arange(n) > 15)).astype(np.int32)
        states.append(state(index, ids, **recorded))
    (pack,) = plan_states([states])
    assert len(pack) < pack.logical_tokens, "nothing was shared"
    assert any(len(s.ancestors) > 1 for s in pack.spans), "no branch of a branch was seen"
    own = np.arange(len(pack))
    assert (pack.visible_from_T < own).any() == visibility, "look-ahead"
    assert (pack.visible_until_T == own + 1).sum() > len(states) or not visibility, "evictions"
    return pack


def assert_equal_states(model: PreTrainedModel, pack: Pack, backend: str, error: float) -> None:
    with torch.no_grad():
        expected = states_at_rows(model, pack, backend="eager")
        found = states_at_rows(model, pack, backend=backend)  # type: ignore[arg-type]
    assert float((found - expected).abs().max() / expected.abs().max()) <= error


def assert_equal_gradients(kind: str, pack: Pack, backend: str) -> None:
    found = []
    for name in ("eager", backend):
        model = model_of(kind)
        states_at_rows(model, pack, backend=name).pow(3).sum().backward()  # type: ignore[arg-type]
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 10
    largest = max(float(g.abs().max()) for g in found[0])
    assert max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)) / largest <= 1e-6
