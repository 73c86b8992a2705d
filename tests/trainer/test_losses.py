"""Divergences and the policy loss against dense references that use nothing of the code under test."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memopd_scorer import signals
from memopd_scorer.head import Head
from memopd_trainer.divergences import divergence
from memopd_trainer.losses import Teacher, TeacherRows, clipped_policy_loss, is_clipped, row_losses

KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.0), ("jsd", 1.0)]
V, D, E, M = 23, 7, 5, 19


def dense(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """The formulas over probabilities, differentiated by autograd."""
    p, q = student.softmax(1), teacher.softmax(1)
    forward, reverse = (q * (q / p).log()).sum(1), (p * (p / q).log()).sum(1)
    if kind == "reverse_kl" or (kind, beta) == ("jsd", 1.0):
        return reverse
    if kind == "forward_kl" or (kind, beta) == ("jsd", 0.0):
        return forward
    m = beta * q + (1 - beta) * p
    return beta * (q * (q / m).log()).sum(1) + (1 - beta) * (p * (p / m).log()).sum(1)


def make_head(width: int, *, seed: int, rows: int = V + 4, **extras: object) -> Head:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=g, dtype=torch.float64).requires_grad_()
    bias = torch.randn(rows, generator=g, dtype=torch.float64).requires_grad_()
    settings = {"logit_scale": 1.0, "softcap": None} | extras
    return Head(weight, bias, size=V, **settings)


@pytest.fixture
def rows() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(M, D, generator=g, dtype=torch.float64).requires_grad_(),
        "teacher": torch.randn(M, E, generator=g, dtype=torch.float64),
        "ids": torch.randint(V, (M,), generator=g),
        "temperature": torch.rand(M, generator=g, dtype=torch.float64) + 0.5,
        "weight": torch.rand(M, generator=g, dtype=torch.float64),
    }


def close(actual: Tensor, expected: Tensor) -> bool:
    """Within 1e-8, relative to the largest entry, which is not zero."""
    scale = expected.abs().max().item()
    assert scale > 1e-6, "the reference is zero: this comparison would prove nothing"
    return bool((actual - expected).abs().max().item() <= 1e-8 * scale)


@pytest.mark.parametrize("extras", [{}, {"logit_scale": 0.5, "softcap": 3.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("chunk", [1, 4, M, 1000])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_values_and_gradients_equal_a_dense_reference(
    rows: dict[str, Tensor],
    kind: str,
    beta: float,
    chunk: int,
    extras: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signals, "CHUNK_CELLS", chunk * V)
    student, teacher = make_head(D, seed=1, **extras), make_head(E, seed=2)
    leaves = (rows["hidden"], student.weight_VD, student.bias_V)

    out = row_losses(
        student,
        rows["hidden"],
        rows["ids"],
        temperature_M=rows["temperature"],
        teacher=Teacher(kind, beta, teacher),
        rows=TeacherRows(rows["teacher"]),
    )
    assert out.divergence_M is not None
    total = (rows["weight"] * (out.divergence_M + 2 * out.logprob_M)).sum()
    gradients = torch.autograd.grad(total, leaves)

    logits, teacher_logits = student.logits(rows["hidden"]), teacher.logits(rows["teacher"]).detach()
    tempered = (logits / rows["temperature"][:, None]).softmax(1).gather(1, rows["ids"][:, None])[:, 0].log()
    expected = dense(logits, teacher_logits, kind, beta)
    references = torch.autograd.grad((rows["weight"] * (expected + 2 * tempered)).sum(), leaves)

    assert close(out.divergence_M, expected) and close(out.logprob_M, tempered)
    for gradient, reference in zip(gradients, references, strict=True):
        assert close(gradient, reference)
    assert student.weight_VD.shape[0] > V and not gradients[1][V:].any(), "padded ids get no gradient"


def test_no_gradient_reaches_the_teacher(rows: dict[str, Tensor]) -> None:
    student, teacher = make_head(D, seed=1), make_head(E, seed=2)
    states = rows["teacher"].requires_grad_()
    out = row_losses(student, rows["hidden"], rows["ids"], teacher=Teacher(head=teacher), rows=TeacherRows(states))
    assert out.divergence_M is not None
    out.divergence_M.sum().backward()
    assert student.weight_VD.grad is not None and student.weight_VD.grad.any()
    assert teacher.weight_VD.grad is None and states.grad is None


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_have_zero_divergence_and_exactly_zero_gradient(
    kind: str, beta: float, dtype: torch.dtype
) -> None:
    logits = (torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) * 5).to(dtype).requires_grad_()
    value = divergence(logits, logits.detach().clone(), kind, beta)
    value.sum().backward()
    assert value.abs().max() <= (1e-6 if dtype == torch.float32 else 1e-15)
    assert logits.grad is not None
    if kind != "jsd" or beta in (0.0, 1.0):
        assert not value.any() and not logits.grad.any()
    else:
        assert logits.grad.abs().max() <= (1e-7 if dtype == torch.float32 else 1e-16)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_extreme_logits_stay_finite(kind: str, beta: float) -> None:
    student = torch.tensor([[800.0, 0.0, -800.0], [0.0, 0.0, 0.0]]).requires_grad_()
    value = divergence(student, torch.tensor([[0.0, 800.0, -800.0], [-900.0, 0.0, 0.0]]), kind, beta)
    value.sum().backward()
    assert value.isfinite().all() and value[0] > 0.1
    assert student.grad is not None and student.grad.isfinite().all() and student.grad.any()


def test_the_ends_of_the_jsd_are_its_scaled_limits() -> None:
    g = torch.Generator().manual_seed(5)
    p, q = (torch.randn(9, 11, generator=g, dtype=torch.float64) for _ in range(2))
    near = 1e-6
    forward, reverse = divergence(p, q, "forward_kl"), divergence(p, q, "reverse_kl")
    assert torch.allclose(divergence(p, q, "jsd", near) / near, forward, rtol=1e-4)
    assert torch.allclose(divergence(p, q, "jsd", 1 - near) / near, reverse, rtol=1e-4)
    assert (forward - reverse).abs().max() > 0.1, "the directions differ, so they cannot be confused"
    assert torch.allclose(divergence(p, q, "jsd", 0.5), divergence(q, p, "jsd", 0.5))


def test_padded_vocabulary_is_cut_before_the_softmax() -> None:
    """The numbers of a report on widths 6 and 4 with a tokenizer of 4 ids."""
    teacher = torch.tensor([[2.0, 1, 0, -1, -3, -3]], dtype=torch.float64)
    student = torch.tensor([[1.0, 1, 0, 0]], dtype=torch.float64)
    heads = [Head(z.T, None, 1.0, None, 4) for z in (student, teacher)]
    one = torch.ones(1, 1, dtype=torch.float64)
    ids = torch.tensor([0])
    out = row_losses(heads[0], one, ids, teacher=Teacher("forward_kl", head=heads[1]), rows=TeacherRows(one))
    assert out.divergence_M is not None and out.divergence_M.item() == pytest.approx(0.178075, abs=5e-7)


def test_full_vocabulary_divergence_where_a_truncated_one_turns_negative() -> None:
    student, teacher = (torch.tensor([row], dtype=torch.float64).log() for row in ((0.6, 0.3, 0.1), (0.8, 0.05, 0.15)))
    assert divergence(student, teacher, "reverse_kl").item() == pytest.approx(0.324372, abs=5e-7)


def test_temperature_scales_logits_not_log_probabilities() -> None:
    head = Head(torch.tensor([[2.0], [1.0], [0.0]], dtype=torch.float64), None, 1.0, None, 3)
    one, half = torch.ones(1, 1, dtype=torch.float64), torch.tensor([0.5])
    raw = row_losses(head, one, torch.tensor([0])).logprob_M.item()
    tempered = row_losses(head, one, torch.tensor([0]), temperature_M=half).logprob_M.item()
    assert (raw, tempered) == (pytest.approx(-0.40761, abs=5e-6), pytest.approx(-0.14293, abs=5e-6))
    assert math.exp(raw - tempered) == pytest.approx(0.76746, abs=5e-6)


def test_half_precision_states_and_heads_are_upcast_once() -> None:
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(4, D, generator=g).bfloat16(), torch.randn(V, D, generator=g).bfloat16()
    low = row_losses(Head(weight, None, 1.0, None, V), hidden, torch.arange(4))
    high = row_losses(Head(weight.float(), None, 1.0, None, V), hidden.float(), torch.arange(4))
    assert low.logprob_M.dtype == torch.float32 and torch.equal(low.logprob_M, high.logprob_M)


def test_entropy_is_of_the_student_and_carries_no_gradient(rows: dict[str, Tensor]) -> None:
    student = make_head(D, seed=1)
    out = row_losses(student, rows["hidden"], rows["ids"])
    p = student.logits(rows["hidden"]).softmax(1)
    assert close(out.entropy_M, -(p * p.log()).sum(1)) and not out.entropy_M.requires_grad
    assert out.divergence_M is None


def test_no_targets_give_empty_vectors_that_can_be_summed(rows: dict[str, Tensor]) -> None:
    out = row_losses(make_head(D, seed=1), rows["hidden"][:0], rows["ids"][:0])
    assert out.logprob_M.shape == (0,) and out.logprob_M.sum().item() == 0.0


def test_heads_of_different_real_size_and_half_a_teacher_are_refused(rows: dict[str, Tensor]) -> None:
    student, teacher = make_head(D, seed=1), replace(make_head(E, seed=2), size=V - 1)
    with pytest.raises(ValueError, match=f"{V} ids, teacher head of {V - 1}"):
        row_losses(
            student, rows["hidden"], rows["ids"], teacher=Teacher(head=teacher), rows=TeacherRows(rows["teacher"])
        )
    with pytest.raises(ValueError, match="come together"):
        row_losses(student, rows["hidden"], rows["ids"], teacher=Teacher(head=teacher))


def test_logits_of_all_targets_never_exist_at_once(rows: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither alive in the forward pass nor kept for the backward pass."""
    seen: list[int] = []
    real = Head.logits

    def counted(self: Head, hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return real(self, hidden)

    monkeypatch.setattr(Head, "logits", counted)
    monkeypatch.setattr(signals, "CHUNK_CELLS", 4 * V)
    student, teacher = make_head(D, seed=1), make_head(E, seed=2)
    kept: list[int] = []
    said = TeacherRows(rows["teacher"])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = row_losses(student, rows["hidden"], rows["ids"], teacher=Teacher(head=teacher), rows=said)
    forward_calls = len(seen)
    assert out.divergence_M is not None
    (out.divergence_M + out.logprob_M).sum().backward()
    assert max(seen) == 4 and forward_calls == 2 * math.ceil(M / 4) and len(seen) == 2 * forward_calls
    assert max(kept, default=0) < M * V


@given(old=st.floats(-5, 0), new=st.floats(-5, 0), advantage=st.floats(-3, 3), clip=st.sampled_from([0.1, 0.2]))
@settings(max_examples=200, deadline=None)
def test_policy_loss_is_the_pessimistic_one_and_clipping_is_where_its_gradient_ends(
    old: float, new: float, advantage: float, clip: float
) -> None:
    logprob = torch.tensor([new], dtype=torch.float64, requires_grad=True)
    ratio, adv = (logprob - old).exp(), torch.tensor([advantage], dtype=torch.float64)
    loss = clipped_policy_loss(ratio, adv, clip)
    loss.sum().backward()
    r = math.exp(new - old)
    clamped = min(max(r, 1 - clip), 1 + clip)
    assert loss.item() == pytest.approx(-min(r * advantage, clamped * advantage), abs=1e-12)
    assert logprob.grad is not None
    removed = bool(is_clipped(ratio.detach(), adv, clip))
    expected = 0.0 if removed else -advantage * r
    assert logprob.grad.item() == pytest.approx(expected, abs=1e-9)


def test_clipping_by_hand() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 1.5])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    assert clipped_policy_loss(ratio, advantage, 0.2).tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8, -1.1, 0.0])
    assert is_clipped(ratio, advantage, 0.2).tolist() == [True, False, False, True, False, False]


def test_the_clip_may_be_wider_above() -> None:
    ratio, advantage = torch.tensor([1.25, 1.25, 1.3, 0.7]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert clipped_policy_loss(ratio, advantage, 0.2, 0.28).tolist() == pytest.approx([-1.25, 1.25, -1.28, 0.8])
    assert is_clipped(ratio, advantage, 0.2, 0.28).tolist() == [False, False, True, True]
