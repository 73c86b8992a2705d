"""Signals are what a dense float64 softmax over the real vocabulary says, for every head the scorer claims."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_scorer import PADDED, SIZE, tiny_model
from helpers_signals import HEADS, a_head, a_pack, reference_logits
from torch.utils._python_dispatch import TorchDispatchMode

from memopd_scorer import signals as module
from memopd_scorer.head import Head, head_of
from memopd_scorer.signals import compute_signals
from memopd_trace.errors import InputError, UsageError

ALL = ("sampled", "topk", "hidden", "full")


@pytest.mark.parametrize("options", HEADS)
@pytest.mark.parametrize("chunk_cells", [SIZE, 5 * SIZE, 10**9], ids=["row by row", "5 rows", "one chunk"])
def test_signals_equal_a_dense_float64_reference(
    options: dict[str, float], chunk_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_CELLS", chunk_cells)
    pack, head = a_pack(), a_head(**options)  # type: ignore[arg-type]
    hidden = torch.randn(len(pack.rows_R), 16, generator=torch.Generator().manual_seed(1))
    found = compute_signals(hidden, head, pack, ALL, topk=5)

    logits = reference_logits(hidden, head, padded=True)
    real = logits[:, :SIZE][torch.from_numpy(pack.target_row_M).long()]
    logprobs = real.log_softmax(-1)
    ids = torch.from_numpy(pack.target_ids_M).long()
    np.testing.assert_allclose(found.logprob_M, logprobs.gather(1, ids[:, None])[:, 0], atol=1e-5)
    np.testing.assert_allclose(found.logsumexp_M, real.logsumexp(-1), rtol=1e-6)
    np.testing.assert_allclose(found.entropy_M, -(logprobs.exp() * logprobs).sum(-1), atol=1e-5)
    values, top = logprobs.topk(5, dim=-1)
    np.testing.assert_array_equal(found.topk_ids_MK, top)
    np.testing.assert_allclose(found.topk_logprobs_MK, values, atol=1e-5)
    tail = torch.log1p(-values.exp().sum(-1))
    np.testing.assert_allclose(found.tail_logprob_M, tail, atol=1e-3, rtol=1e-3)
    np.testing.assert_allclose(found.logits_MV, real, rtol=1e-5, atol=1e-5)
    assert found.hidden_MD is not None
    assert torch.equal(found.hidden_MD, hidden[torch.from_numpy(pack.target_row_M).long()])
    padded = logits.softmax(-1)[:, SIZE:].sum(-1).max()
    assert found.padded_mass == pytest.approx(float(padded), rel=1e-4)


def test_logits_are_cut_before_the_softmax() -> None:
    # teacher logits [2, 1, 0, -1 | -3, -3]: with the padded ids kept, the mass of the real ones would be .9914
    head = Head(torch.tensor([2.0, 1, 0, -1, -3, -3])[:, None], None, 1.0, None, 4)
    logprobs = head.logits(torch.ones(1, 1)).log_softmax(-1)
    assert float(logprobs.exp().sum()) == pytest.approx(1.0)
    mass = head.padded_mass(torch.ones(1, 1), head.logits(torch.ones(1, 1)).logsumexp(-1))
    assert float(mass) == pytest.approx(0.0086, abs=1e-4)


def test_k_beyond_the_vocabulary_takes_all_and_leaves_no_tail() -> None:
    pack = a_pack()
    hidden = torch.zeros(len(pack.rows_R), 16)
    found = compute_signals(hidden, a_head(), pack, ("topk",), topk=10_000)
    assert found.topk_ids_MK is not None and found.topk_ids_MK.shape[1] == SIZE
    assert found.tail_logprob_M is not None and np.isneginf(found.tail_logprob_M).all()


def test_states_keep_the_teachers_dtype() -> None:
    pack = a_pack()
    hidden = torch.randn(len(pack.rows_R), 16).bfloat16()
    found = compute_signals(hidden, a_head(), pack, ("hidden",))
    assert found.hidden_MD is not None and found.hidden_MD.dtype == torch.bfloat16
    assert found.topk_ids_MK is None and found.logits_MV is None


def test_a_logit_that_is_not_finite_names_the_row() -> None:
    pack = a_pack()
    hidden = torch.randn(len(pack.rows_R), 16)
    hidden[3] = torch.nan
    with pytest.raises(InputError, match=r"E-NONFINITE.*episode '[mng]', invocation \d"):
        compute_signals(hidden, a_head(), pack, ALL)


def test_unknown_signals_and_ids_are_usage_errors() -> None:
    pack = a_pack()
    hidden = torch.zeros(len(pack.rows_R), 16)
    with pytest.raises(UsageError, match="unknown signal 'logits'"):
        compute_signals(hidden, a_head(), pack, ("logits",))
    small = Head(torch.zeros(10, 16), None, 1.0, None, 10)
    with pytest.raises(UsageError, match="the head has 10 real ids"):
        compute_signals(hidden, small, pack, ("sampled",))


def test_an_id_of_probability_zero_adds_nothing_to_the_entropy() -> None:
    pack = a_pack()
    bias = torch.zeros(PADDED)
    bias[5] = -torch.inf  # a model that bans an id
    head = Head(torch.zeros(PADDED, 16), bias, 1.0, None, SIZE)
    found = compute_signals(torch.zeros(len(pack.rows_R), 16), head, pack, ("sampled",))
    np.testing.assert_allclose(found.entropy_M, np.log(SIZE - 1), rtol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_signals_of_a_real_head_are_those_of_the_models_own_logits(kind: str, tied: bool) -> None:
    """float64: GPT-2's head shares its weights by default, Gemma's has a softcap, Llama's has neither."""
    model = tiny_model(kind, dtype=torch.float64)
    embedding, layer = model.get_input_embeddings().weight, model.get_output_embeddings()
    layer.weight = embedding if tied else torch.nn.Parameter(torch.randn_like(embedding) * 0.2)
    pack = a_pack()
    hidden = torch.randn(len(pack.rows_R), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = compute_signals(hidden, head_of(model, SIZE), pack, ALL, topk=5)
    padded = layer(hidden).detach()
    softcap = getattr(model.config, "final_logit_softcapping", None)
    assert (softcap is not None) == (kind == "gemma3")
    padded = padded if softcap is None else torch.tanh(padded / softcap) * softcap
    assert padded.shape[1] == PADDED
    real = padded[:, :SIZE][torch.from_numpy(pack.target_row_M).long()]
    logprobs = real.log_softmax(-1)
    ids = torch.from_numpy(pack.target_ids_M).long()
    np.testing.assert_allclose(found.logprob_M, logprobs.gather(1, ids[:, None])[:, 0], rtol=1e-6)
    np.testing.assert_allclose(found.logits_MV, real, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(found.topk_ids_MK, logprobs.topk(5).indices)
    rest = logprobs.scatter(1, logprobs.topk(5).indices, -torch.inf).logsumexp(-1)
    np.testing.assert_allclose(found.tail_logprob_M, rest, rtol=1e-6)
    assert found.hidden_MD is not None and found.hidden_MD.dtype == torch.float64


class Largest(TorchDispatchMode):
    """The number of items of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.items = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.items = max(self.items, tensor.numel())
        return made


@pytest.mark.parametrize("tier", ["exact", "float16", "int8"])
def test_no_tensor_holds_the_vocabulary_of_all_rows(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_CELLS", 20 * SIZE)
    pack, head = a_pack(), a_head(bias=True)
    hidden = torch.randn(len(pack.rows_R), 16)
    assert hidden.numel() < 20 * SIZE < len(pack.rows_R) * SIZE
    with Largest() as largest:
        compute_signals(hidden, head, pack, ("sampled", "topk", "hidden"), topk=5, tier=tier)
    assert 5 * SIZE <= largest.items <= 20 * SIZE
    with Largest() as largest:
        compute_signals(hidden, head, pack, ("full",))
    assert largest.items <= 20 * SIZE, "even then only what is stored holds it, and that is no tensor"


@pytest.mark.parametrize("chunk_cells", [SIZE, 5 * SIZE, 10**9], ids=["row by row", "5 rows", "one chunk"])
def test_ids_that_somebody_else_chose_come_with_the_teachers_values_and_tail(
    chunk_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_CELLS", chunk_cells)
    pack, head = a_pack(), a_head(bias=True)
    hidden = torch.randn(len(pack.rows_R), 16, generator=torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(5)
    chosen = torch.stack([torch.randperm(SIZE, generator=generator)[:7] for _ in pack.target_ids_M])
    rows = torch.from_numpy(pack.target_row_M).long()
    first, second = torch.nonzero(rows == rows.bincount().argmax())[:2, 0]
    assert not torch.equal(chosen[first], chosen[second]), "two targets of one row have ids of their own"
    found = compute_signals(hidden, head, pack, ("topk",), topk=7, chosen_MK=chosen)
    logprobs = reference_logits(hidden, head).log_softmax(-1)[rows]
    np.testing.assert_array_equal(found.topk_ids_MK, chosen)
    np.testing.assert_allclose(found.topk_logprobs_MK, logprobs.gather(1, chosen), atol=1e-5)
    tail = logprobs.scatter(1, chosen, -torch.inf).logsumexp(-1)
    np.testing.assert_allclose(found.tail_logprob_M, tail, atol=1e-5)
    assert bool((logprobs.gather(1, chosen).diff() > 0).any()), "they are not in the teacher's order"
