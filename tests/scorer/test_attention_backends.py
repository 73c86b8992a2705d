"""Every attention backend computes what the dense reference computes, or refuses by name.

The packs hold a shared prefix, forks of forks, evictions, look-ahead and position gaps; the models grouped queries,
windows along the branch, softcaps and sinks. `flash` runs with a kernel in plain torch behind the same call.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from helpers_scorer import SIZE, tiny_model
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedModel

from memopd_scorer.attention import Visibility, choose, spans, states_at_rows, varlen
from memopd_scorer.attention.flex import BLOCK, block_mask
from memopd_scorer.attention.visibility import UnsupportedAttentionError, grouped
from memopd_scorer.plan import Pack, plan_states
from memopd_scorer.states import State
from memopd_trace.errors import UsageError

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


def plain_kernel(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window, softcap):  # type: ignore[no-untyped-def]
    """`varlen.Kernel`, sequence by sequence: the reference of the call's meaning."""
    found = []
    for i in range(len(ends_q) - 1):
        own, keys = slice(*ends_q[i : i + 2].tolist()), slice(*ends_k[i : i + 2].tolist())
        query, key, value = q[own], k[keys], v[keys]
        assert len(query) <= longest_q and len(key) <= longest_k
        each = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(each, 1) for t in (key, value))
        scores = torch.einsum("qhe,khe->hqk", query, key) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        at_q = torch.arange(len(query))[:, None] + len(key) - len(query)
        at_k = torch.arange(len(key))[None]
        seen = (at_k <= at_q) & (at_k > at_q - (window or len(key)))
        found.append(torch.einsum("hqk,khe->qhe", scores.masked_fill(~seen, -torch.inf).softmax(-1), value))
    return torch.cat(found)


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "kernel", lambda: plain_kernel)


def assert_equal_states(model: PreTrainedModel, pack: Pack, backend: str, error: float) -> None:
    with torch.no_grad():
        expected = states_at_rows(model, pack, backend="eager")
        found = states_at_rows(model, pack, backend=backend)  # type: ignore[arg-type]
    assert float((found - expected).abs().max() / expected.abs().max()) <= error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_sdpa_equals_the_dense_reference_under_any_visibility(kind: str, dtype: torch.dtype) -> None:
    for pack in (pack_of(visibility=True, positions=True), pack_of(visibility=False)):
        assert_equal_states(model_of(kind, dtype), pack, "sdpa", ERROR[dtype])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("kind", "dtype"), [*((k, torch.float64) for k in KINDS), ("llama", torch.float32)])
def test_flex_equals_the_dense_reference_under_any_visibility(kind: str, dtype: torch.dtype) -> None:
    assert_equal_states(model_of(kind, dtype), pack_of(visibility=True, positions=True), "flex", ERROR[dtype])


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "softcap"])
def test_flash_equals_the_dense_reference_on_causal_trees(kind: str, flash_on_cpu: None) -> None:
    assert_equal_states(model_of(kind), pack_of(visibility=False, positions=True), "flash", ERROR[torch.float64])


def test_flash_names_what_it_cannot_run(flash_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedAttentionError, match="'flash' cannot run recorded visibility"):
        states_at_rows(model_of("llama"), pack_of(visibility=True), backend="flash")
    with pytest.raises(UnsupportedAttentionError, match="'flash' cannot run attention sinks"):
        states_at_rows(model_of("sinks"), pack_of(visibility=False), backend="flash")
    monkeypatch.setattr(varlen, "kernel", lambda: varlen.torch_kernel)
    with pytest.raises(UnsupportedAttentionError, match="'flash' cannot run a softcap"):
        states_at_rows(model_of("softcap"), pack_of(visibility=False), backend="flash")


@pytest.mark.parametrize("kind", ["llama", "gemma3", "softcap", "sinks"])
def test_gradients_of_sdpa_equal_the_dense_reference(kind: str) -> None:
    assert_equal_gradients(kind, pack_of(visibility=True), "sdpa")


def test_gradients_of_flash_equal_the_dense_reference(flash_on_cpu: None) -> None:
    assert_equal_gradients("llama", pack_of(visibility=False), "flash")


def assert_equal_gradients(kind: str, pack: Pack, backend: str) -> None:
    found = []
    for name in ("eager", backend):
        model = model_of(kind)
        states_at_rows(model, pack, backend=name).pow(3).sum().backward()  # type: ignore[arg-type]
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 10
    largest = max(float(g.abs().max()) for g in found[0])
    assert max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)) / largest <= 1e-6


def test_flex_on_a_cpu_says_that_it_has_no_backward() -> None:
    with pytest.raises(UsageError, match="'flex' has no backward on a CPU"):
        states_at_rows(model_of("llama"), pack_of(visibility=False), backend="flex")


@pytest.mark.parametrize("window", [None, 8, 150])
@pytest.mark.parametrize("visibility", [True, False])
def test_the_block_mask_is_the_interval_rule(window: int | None, visibility: bool) -> None:
    pack = pack_of(visibility=visibility, scale=20)
    seen = Visibility.of(pack, CPU)
    mask = block_mask(seen, window)
    tokens, blocks = len(pack), -(-len(pack) // BLOCK)
    at = torch.arange(tokens)
    start, until, path = seen.visible_from_T, seen.visible_until_T, seen.path_T
    rule = (start[None] <= at[:, None]) & (at[:, None] < until[None])
    if window is not None:
        rule &= path[None] > path[:, None] - window
    visited = {"partial": 0, "full": 0}
    for q in range(blocks):
        partial = set(mask.kv_indices[0, 0, q, : mask.kv_num_blocks[0, 0, q]].tolist())
        full = set(mask.full_kv_indices[0, 0, q, : mask.full_kv_num_blocks[0, 0, q]].tolist())
        for k in range(blocks):
            cells = rule[q * BLOCK : (q + 1) * BLOCK, k * BLOCK : (k + 1) * BLOCK]
            assert not full & partial
            assert k not in full or bool(cells.all())
            assert k in full | partial or not bool(cells.any()), (q, k)
        visited["partial"] += len(partial)
        visited["full"] += len(full)
    assert visited["partial"] < blocks * blocks / 2, "a tree skips most blocks"
    assert visited["full"] > 0 or window is not None


def test_a_growing_history_is_one_causal_span_without_a_mask() -> None:
    ids = np.random.default_rng(0).integers(3, SIZE, 60)
    (pack,) = plan_states([[state(i, ids[:n]) for i, n in enumerate((20, 33, 60))]])
    assert len(pack.states) == 3
    (span,) = pack.spans
    assert [b.mask_QJ for b in spans._blocks(span, Visibility.of(pack, CPU), None)] == [None]
    assert_equal_states(model_of("llama"), pack, "sdpa", 1e-10)


def test_keys_are_repeated_without_a_copy_and_no_mask_is_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.zeros(1, 6, 10, 4), torch.zeros(1, 2, 10, 4)
    _, wide, _ = grouped(query, key, key)
    assert wide.shape == (2, 3, 10, 4) and wide.data_ptr() == key.data_ptr() and wide.stride(1) == 0
    monkeypatch.setattr(spans, "MASK_CELLS", 100)
    seen = Visibility.of(pack_of(visibility=True), CPU)
    blocks = [b for span in seen.spans for b in spans._blocks(span, seen, None) if b.mask_QJ is not None]
    assert len(blocks) > len(seen.spans)
    assert max(b.mask_QJ.numel() for b in blocks) <= 100
    assert_equal_states(model_of("llama"), pack_of(visibility=True), "sdpa", 1e-10)


CALL = {"scale": 0.3, "window": None, "softcap": None}


def call() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    ends_q, ends_k = torch.tensor([0, 5, 8], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
    return torch.randn(8, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8), ends_q, ends_k, 5, 7  # type: ignore[return-value]


@pytest.mark.parametrize("options", [CALL, {**CALL, "window": 3}, {**CALL, "softcap": 1.5}])
def test_the_call_of_flash_attn_means_what_the_backend_means(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flash_attn_varlen_func(  # the package's own signature  # type: ignore[no-untyped-def]
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, return_attn_probs=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, block_table=None,
    ):  # fmt: skip
        assert causal and dropout_p == 0.0 and window_size[1] <= 0
        window = None if window_size[0] < 0 else window_size[0] + 1  # the package counts keys before the query's own
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return plain_kernel(q, k, v, *ends, scale=softmax_scale, window=window, softcap=softcap or None)

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    torch.testing.assert_close(varlen.flash_attn_kernel(*call(), **options), plain_kernel(*call(), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [CALL, {**CALL, "window": 3}])
def test_the_call_of_torchs_kernel_means_what_the_backend_means(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention import varlen as theirs

    signature = inspect.signature(theirs.varlen_attn)

    def varlen_attn(*args: object, **named: object) -> torch.Tensor:
        given = SimpleNamespace(**signature.bind(*args, **named).arguments)
        assert given.enable_gqa and given.window_size[1] == 0
        window = None if given.window_size[0] < 0 else given.window_size[0] + 1
        ends = (given.cu_seq_q, given.cu_seq_k, given.max_q, given.max_k)
        return plain_kernel(given.query, given.key, given.value, *ends, scale=given.scale, window=window, softcap=None)

    monkeypatch.setattr(theirs, "varlen_attn", varlen_attn)
    torch.testing.assert_close(varlen.torch_kernel(*call(), **options), plain_kernel(*call(), **options))  # type: ignore[arg-type]


def test_auto_chooses_by_device_and_dtype_and_says_why() -> None:
    (cpu,) = choose("auto", CPU, torch.float32)
    assert (cpu.backend, cpu.for_pack(is_causal=False)) == ("sdpa", "sdpa") and "the device is 'cpu'" in cpu.reason
    flash, then = choose("auto", torch.device("cuda:0"), torch.bfloat16)
    assert (flash.backend, flash.for_pack(is_causal=False), then.backend) == ("flash", "sdpa", "sdpa")
    assert "bfloat16 on a CUDA device" in flash.reason
    (wide,) = choose("auto", torch.device("cuda:0"), torch.float32)
    assert wide.backend == "sdpa" and "float32" in wide.reason
    (asked,) = choose("flash", torch.device("cuda:0"), torch.float16)
    assert asked.for_pack(is_causal=False) == "flash", "what was asked for refuses by name; it is not replaced"
    for wanted, device, dtype, named in (
        ("flash", "cpu", torch.bfloat16, "cannot run bfloat16 on 'cpu'"),
        ("flash", "cuda:0", torch.float32, "cannot run float32 on 'cuda:0'"),
        ("native", "cpu", torch.float32, "unknown attention backend 'native'"),
    ):
        with pytest.raises(UsageError, match=named):
            choose(wanted, torch.device(device), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "flex", "flash"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_backends_on_the_device_equal_the_dense_reference(kind: str, backend: str) -> None:
    dtype = torch.bfloat16 if backend == "flash" else torch.float32
    model = tiny_model(kind, dtype).cuda()
    visibilities = (False,) if backend == "flash" else (False, True)
    for visibility in visibilities:
        assert_equal_states(
            model, pack_of(visibility=visibility, scale=20), backend, 3e-2 if backend == "flash" else 1e-4
        )
