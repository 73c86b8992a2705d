"""`flash` means what the dense reference means, and calls the kernels as they are to be called.

There is no kernel for a CPU: a function in plain torch stands behind the same call, or behind the signatures of
flash-attn and of torch, which are the packages' own.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers_architectures import tiny
from helpers_attention import ERROR, assert_equal_gradients, assert_equal_states, model_of, pack_of

from memopd_scorer.attention import flash, states_at_rows
from memopd_scorer.attention.visibility import UnsupportedAttentionError


def plain_kernel(call: flash.Call) -> torch.Tensor:
    """`flash.Kernel`, sequence by sequence: what a call means, and that it is one."""
    for ends, tensor, longest in ((call.ends_q, call.q, call.longest_q), (call.ends_k, call.k, call.longest_k)):
        assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == len(tensor)
        assert int(ends.diff().min()) > 0 and int(ends.diff().max()) == longest
        assert tensor.is_contiguous() and tensor.ndim == 3
    assert call.k.shape == call.v.shape and len(call.ends_q) == len(call.ends_k)
    found = []
    for i in range(len(call.ends_q) - 1):
        query = call.q[slice(*call.ends_q[i : i + 2].tolist())]
        key, value = (t[slice(*call.ends_k[i : i + 2].tolist())] for t in (call.k, call.v))
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
        scores = torch.einsum("qhe,khe->hqk", query, key) * call.scale
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        at_q = torch.arange(len(query))[:, None] + len(key) - len(query)
        at_k = torch.arange(len(key))[None]
        seen = (at_k <= at_q) & (at_k > at_q - (call.window or len(key)))
        found.append(torch.einsum("hqk,khe->qhe", scores.masked_fill(~seen, -torch.inf).softmax(-1), value))
    return torch.cat(found)


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "kernel", lambda: plain_kernel)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "softcap"])
def test_flash_equals_the_dense_reference_on_causal_trees(kind: str, flash_on_cpu: None) -> None:
    assert_equal_states(model_of(kind), pack_of(visibility=False, positions=True), "flash", ERROR[torch.float64])


def test_flash_names_what_it_cannot_run(flash_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedAttentionError, match="'flash' cannot run recorded visibility"):
        states_at_rows(model_of("llama"), pack_of(visibility=True), backend="flash")
    with pytest.raises(UnsupportedAttentionError, match="'flash' cannot run attention sinks"):
        states_at_rows(model_of("sinks"), pack_of(visibility=False), backend="flash")
    with pytest.raises(UnsupportedAttentionError, match="'flash' cannot run keys of size 12 with values of size 8"):
        states_at_rows(tiny("deepseek_v3"), pack_of(visibility=False), backend="flash")
    monkeypatch.setattr(flash, "kernel", lambda: flash.torch_kernel)
    with pytest.raises(UnsupportedAttentionError, match="'flash' cannot run a softcap"):
        states_at_rows(model_of("softcap"), pack_of(visibility=False), backend="flash")


def test_gradients_of_flash_equal_the_dense_reference(flash_on_cpu: None) -> None:
    assert_equal_gradients("llama", pack_of(visibility=False), "flash")


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "softcap"])
def test_flash_attn_is_called_as_its_signature_wants(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def flash_attn_varlen_func(  # the package's own signature  # type: ignore[no-untyped-def]
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert causal and dropout_p == 0.0 and window_size[1] <= 0
        window = None if window_size[0] < 0 else window_size[0] + 1  # the package counts keys before the query's own
        seen.update({window, softcap})
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return plain_kernel(flash.Call(q, k, v, *ends, softmax_scale, window, softcap or None))

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(flash, "kernel", lambda: flash.flash_attn_kernel)
    assert_equal_states(model_of(kind), pack_of(visibility=False, positions=True), "flash", ERROR[torch.float64])
    windows = {None, 8} if kind in ("gemma3", "softcap") else {None}
    assert seen == windows | {1.0 if kind == "softcap" else 0.0}


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_torchs_kernel_is_called_as_its_signature_wants(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen as theirs

    signature, seen = inspect.signature(theirs.varlen_attn), set()

    def varlen_attn(*args: object, **named: object) -> torch.Tensor:
        given = SimpleNamespace(**signature.bind(*args, **named).arguments)
        assert given.window_size[1] == 0, "causal"
        assert given.enable_gqa == (given.query.shape[1] != given.key.shape[1])
        window = None if given.window_size[0] < 0 else given.window_size[0] + 1
        seen.update({window, given.enable_gqa})
        ends = (given.cu_seq_q, given.cu_seq_k, given.max_q, given.max_k)
        return plain_kernel(flash.Call(given.query, given.key, given.value, *ends, given.scale, window, None))

    monkeypatch.setattr(theirs, "varlen_attn", varlen_attn)
    monkeypatch.setattr(flash, "kernel", lambda: flash.torch_kernel)
    assert_equal_states(model_of(kind), pack_of(visibility=False, positions=True), "flash", ERROR[torch.float64])
    assert seen == {"llama": {None, True}, "gemma3": {None, 8, True}, "gpt2": {None, False}}[kind]
