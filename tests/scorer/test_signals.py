"""Signals are what a dense float64 softmax over the real vocabulary says, for every head the scorer claims."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_scorer import PADDED, SIZE, growing_episode, memory_episode, sibling

from memopd_scorer import signals as module
from memopd_scorer.plan import Pack, plan
from memopd_scorer.signals import Head, compute_signals
from memopd_trace.errors import InputError, UsageError

ALL = ("sampled", "topk", "hidden", "full")


def a_pack() -> Pack:
    rng = np.random.default_rng(0)
    rollout = memory_episode(rng, "m", group="group")
    (pack,) = plan([rollout, sibling(rollout, "n"), growing_episode(rng, "g")])
    counts = np.bincount(pack.target_row_M)
    assert counts.max() > 1, "no row serves two targets"
    return pack


def a_head(*, bias: bool = False, scale: float = 1.0, softcap: float | None = None) -> Head:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(PADDED, 16, generator=generator)
    return Head(weight, torch.randn(PADDED, generator=generator) if bias else None, scale, softcap, SIZE)


HEADS = [
    pytest.param({}, id="plain"),
    pytest.param({"bias": True}, id="bias"),
    pytest.param({"scale": 0.25}, id="scale"),
    pytest.param({"softcap": 5.0}, id="softcap"),
    pytest.param({"bias": True, "scale": 2.0, "softcap": 7.0}, id="all"),
]


@pytest.mark.parametrize("options", HEADS)
@pytest.mark.parametrize("chunk_cells", [SIZE, 5 * SIZE, 10**9], ids=["row by row", "5 rows", "one chunk"])
def test_signals_equal_a_dense_float64_reference(
    options: dict[str, float], chunk_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_CELLS", chunk_cells)
    pack, head = a_pack(), a_head(**options)  # type: ignore[arg-type]
    hidden = torch.randn(len(pack.rows_R), 16, generator=torch.Generator().manual_seed(1))
    found = compute_signals(hidden, head, pack, ALL, topk=5)

    bias = 0 if head.bias_V is None else head.bias_V.double()
    logits = head.logit_scale * (hidden.double() @ head.weight_VD.double().T + bias)
    if head.softcap:
        logits = torch.tanh(logits / head.softcap) * head.softcap
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
