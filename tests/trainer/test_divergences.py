"""Divergences from the teacher's top-k and from the sampled token alone, against dense references in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_trainer import Setup, exact, make_setup
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memopd_scorer import signals
from memopd_scorer.head import Head
from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_trace.errors import InputError, UsageError
from memopd_trainer import train
from memopd_trainer.advantages import trained_mask
from memopd_trainer.batch import load_rollouts
from memopd_trainer.divergences import DivergenceKind, SampledKind, divergence, sampled_divergence, topk_divergence
from memopd_trainer.losses import Teacher, TeacherRows, row_losses
from memopd_trainer.metrics import StepSums
from memopd_trainer.objective import make_teacher, pack_loss
from memopd_trainer.packs import make_packs

KINDS: list[tuple[DivergenceKind, float]] = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.5), ("jsd", 0.2)]
SAMPLED: list[SampledKind] = ["k1", "k2", "k3"]
C, V = 9, 13


def logits(seed: int, rows: int = C) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def chosen(seed: int, k: int) -> Tensor:
    """`k` distinct ids of each row, in no order."""
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(V, generator=g)[:k] for _ in range(C)])


def dense(p: Tensor, q: Tensor, kind: str, beta: float) -> Tensor:
    """The formulas over the probabilities of the outcomes, differentiated by autograd."""
    forward, reverse = (q * (q / p).log()).sum(1), (p * (p / q).log()).sum(1)
    if kind != "jsd":
        return reverse if kind == "reverse_kl" else forward
    m = beta * q + (1 - beta) * p
    return beta * (q * (q / m).log()).sum(1) + (1 - beta) * (p * (p / m).log()).sum(1)


def merged(probabilities: Tensor, ids: Tensor) -> Tensor:
    """[C, K + 1]: those of the ids, and all others as one outcome."""
    kept = probabilities.gather(1, ids)
    return torch.cat([kept, (1 - kept.sum(1))[:, None]], 1)


@pytest.mark.parametrize("k", [1, 4, V - 1])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_topk_is_the_dense_divergence_of_merged_outcomes(kind: DivergenceKind, beta: float, k: int) -> None:
    student, teacher, ids = logits(1).requires_grad_(), logits(2), chosen(3, k)
    q = merged(teacher.softmax(1), ids)
    value = topk_divergence(student, ids, q[:, :-1].log(), q[:, -1].log(), kind, beta)
    expected = dense(merged(student.softmax(1), ids), q, kind, beta)
    assert expected.max() > 1e-3 and (value - expected).abs().max() <= 1e-10
    (gradient,) = torch.autograd.grad(value.sum(), student)
    (reference,) = torch.autograd.grad(expected.sum(), student)
    assert reference.abs().max() > 1e-3 and (gradient - reference).abs().max() <= 1e-10


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_topk_of_every_id_is_the_whole_vocabulary(kind: DivergenceKind, beta: float) -> None:
    student, teacher, ids = logits(1), logits(2), chosen(3, V)
    empty = torch.full((C,), -torch.inf, dtype=torch.float64)
    value = topk_divergence(student, ids, teacher.log_softmax(1).gather(1, ids), empty, kind, beta)
    assert (value - divergence(student, teacher, kind, beta)).abs().max() <= 1e-12


@given(seed=st.integers(0, 2**20), k=st.integers(1, V - 2), kind=st.sampled_from(KINDS))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_merging_never_raises_a_divergence(seed: int, k: int, kind: tuple[DivergenceKind, float]) -> None:
    student, teacher, ids = logits(seed), logits(seed + 1), chosen(seed, k)
    q = merged(teacher.softmax(1), ids)
    coarse = topk_divergence(student, ids, q[:, :-1].log(), q[:, -1].log(), *kind)
    whole = divergence(student, teacher, *kind)
    assert (coarse <= whole + 1e-12).all() and (coarse >= -1e-12).all() and (coarse < whole - 1e-6).any()


@pytest.mark.parametrize("kind", SAMPLED)
def test_over_all_tokens_the_estimators_have_the_gradient_of_what_they_name(kind: SampledKind) -> None:
    """Every id in turn is the sampled one, weighted with its probability: an expectation without sampling noise."""
    student, teacher = logits(1).requires_grad_(), logits(2)
    log_p, log_q = student.log_softmax(1), teacher.log_softmax(1)
    values = sampled_divergence(log_p.reshape(-1), log_q.reshape(-1), kind).reshape(C, V)
    weights = log_p.detach().exp()
    (gradient,) = torch.autograd.grad((weights * values).sum(), student)
    named: DivergenceKind = "forward_kl" if kind == "k3" else "reverse_kl"
    target = logits(1).requires_grad_()
    (reference,) = torch.autograd.grad(divergence(target, teacher, named).sum(), target)
    assert reference.abs().max() > 1e-2 and (gradient - reference).abs().max() <= 1e-12
    gap = (log_p - log_q).detach()
    formula = {"k1": gap, "k2": gap**2 / 2, "k3": (-gap).exp() - 1 + gap}[kind]
    assert (values.detach() - formula).abs().max() <= 1e-12
    off = ((weights * values).sum(1).detach() - divergence(logits(1), teacher, "reverse_kl")).abs().max()
    assert (off <= 1e-12) == (kind != "k2"), "k1 and k3 are unbiased estimates of the reverse KL, k2 is not"
    assert kind == "k1" or bool((values >= 0).all())


def test_both_signals_take_the_student_at_the_temperature_of_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "CHUNK_CELLS", 4 * V)
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(C, 6, generator=g, dtype=torch.float64)
    head = Head(torch.randn(V, 6, generator=g, dtype=torch.float64), None, 1.0, None, V)
    ids, z, q, few = torch.arange(C) % V, head.logits(hidden) / 0.7, logits(2).log_softmax(1), chosen(3, 4)
    sampled = q.gather(1, ids[:, None])[:, 0]
    out = row_losses(head, hidden, ids, teacher=Teacher("k3", temperature=0.7), rows=TeacherRows(logprob_M=sampled))
    own = z.log_softmax(1).gather(1, ids[:, None])[:, 0]
    assert out.divergence_M is not None and out.teacher_logsumexp_M is None
    assert (out.divergence_M - sampled_divergence(own, sampled, "k3")).abs().max() <= 1e-12
    said = TeacherRows(None, few, q.gather(1, few), q.scatter(1, few, -torch.inf).logsumexp(1))
    out = row_losses(head, hidden, ids, teacher=Teacher("jsd", 0.2, temperature=0.7), rows=said)
    expected = dense(merged(z.softmax(1), few), merged(q.exp(), few), "jsd", 0.2)
    assert out.divergence_M is not None and (out.divergence_M - expected).abs().max() <= 1e-12
    with pytest.raises(AssertionError, match="'k3' needs the sampled token"):
        row_losses(head, hidden, ids, teacher=Teacher("k3"), rows=said)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    setup = make_setup(tmp_path_factory.mktemp("setup"))
    score(setup.trace, setup.teacher, setup.root / "topk", signals=("topk",), topk=5, dtype="float64")
    return setup


@pytest.mark.parametrize(("signal", "kind"), [("topk", "reverse_kl"), ("topk", "forward_kl"), ("sampled", "k2")])
def test_a_step_on_scores_without_states_equals_the_formulas(setup: Setup, signal: str, kind: str) -> None:
    given = {"scores": str(setup.root / "topk"), "divergence__signal": signal, "divergence__kind": kind}
    config = setup.config(**given, ppo__weight=0, divergence__importance_clip=1.01)
    rollouts = load_rollouts(config.trace, config.scores, policy=True, signal=config.divergence.signal)
    student, reader = exact(config.student), ScoresReader(setup.root / "topk")
    sums, teacher = StepSums(), make_teacher(rollouts, config, torch.device("cpu"))
    for pack in make_packs(rollouts, rollouts.groups, {}):
        pack_loss(student, teacher, pack, config, sums)
    total, clipped = 0.0, 0
    for episode in setup.episodes:
        tokens = sum(int(trained_mask(i).sum()) for i in episode)
        for i in episode:
            z = student.model(torch.from_numpy(i.sequence_ids.astype(np.int64))[None]).logits[0].detach()
            z = z[:, : rollouts.tokenizer.size]
            row = reader.get(*i.key)
            assert row is not None and row.topk_ids is not None and row.hidden is None
            for at, m in enumerate(row.output_index):
                if not trained_mask(i)[m]:
                    continue
                p = z[len(i.prompt_ids) + m - 1].softmax(0)
                chance = p[int(i.output_ids[m])]
                ratio = float(chance / np.exp(np.float64(i.output_logprobs[m])))  # type: ignore[index]
                clipped += ratio > 1.01
                few = torch.from_numpy(row.topk_ids[at].astype(np.int64))[None]
                q = torch.from_numpy(np.append(row.topk_logprobs[at], row.tail_logprob[at]).astype(np.float64)).exp()  # type: ignore[index]
                value = float(dense(merged(p[None], few), q[None], kind, 0.5))
                if signal == "sampled":
                    value = float((chance.log() - float(row.logprob[at])) ** 2 / 2)
                total += min(ratio, 1.01) * value / (len(setup.episodes) * tokens)
    assert total > 1e-3 and clipped > 3, "something is learnt, and some weights are cut"
    assert sums.loss == pytest.approx(total, rel=1e-6)  # stored signals are float32


@pytest.mark.parametrize("signal", ["topk", "sampled"])
def test_training_on_scores_without_states_lowers_the_divergence(setup: Setup, signal: str, tmp_path: Path) -> None:
    kind = {"divergence__kind": "k3"} if signal == "sampled" else {}
    scores = {"scores": str(setup.root / "topk"), "divergence__signal": signal, **kind}
    held_out = {"held_out__trace": str(setup.trace), "held_out__scores": str(setup.scores)}
    result = train(setup.config(**scores, **held_out, ppo__weight=0, steps=8, output=str(tmp_path / "run")))
    assert result.held_out_before is not None and result.held_out_after is not None
    assert (
        result.held_out_after["forward_kl"] < (0.9 if signal == "topk" else 0.98) * result.held_out_before["forward_kl"]
    )


def test_a_signal_that_is_not_there_or_does_not_fit_is_refused(setup: Setup, tmp_path: Path) -> None:
    score(setup.trace, setup.teacher, tmp_path / "plain", signals=("sampled",), dtype="float64")
    with pytest.raises(InputError, match="a score without the signal 'topk'") as caught:
        train(setup.config(scores=str(tmp_path / "plain"), divergence__signal="topk", output=str(tmp_path / "run")))
    assert caught.value.code == "E-SCORES-MISSING"
    for signal, kind in (("sampled", "reverse_kl"), ("hidden", "k3"), ("topk", "k1")):
        with pytest.raises(UsageError, match=f"kind '{kind}' is not taken from the signal '{signal}'"):
            setup.config(divergence__signal=signal, divergence__kind=kind)


def test_as_an_advantage_the_teacher_is_inside_the_clipped_policy_loss(setup: Setup) -> None:
    given = {"scores": str(setup.root / "topk"), "divergence__signal": "sampled", "divergence__kind": "advantage"}
    config = setup.config(**given, divergence__weight=0.3, ppo__weight=0.5, ppo__clip=0.01)
    rollouts = load_rollouts(config.trace, config.scores, policy=True, signal="sampled")
    advantages = {e.episode_id: 1.0 if e.episode_return else -1.0 for e in setup.episodes}
    student, reader = exact(config.student), ScoresReader(setup.root / "topk")
    sums, teacher = StepSums(), make_teacher(rollouts, config, torch.device("cpu"))
    for pack in make_packs(rollouts, rollouts.groups, advantages):
        pack_loss(student, teacher, pack, config, sums)
    total, signs = 0.0, set()
    for episode in setup.episodes:
        tokens = sum(int(trained_mask(i).sum()) for i in episode)
        for i in episode:
            z = student.model(torch.from_numpy(i.sequence_ids.astype(np.int64))[None]).logits[0].detach()
            logprobs = z[:, : rollouts.tokenizer.size].log_softmax(1)
            row = reader.get(*i.key)
            assert row is not None and i.output_logprobs is not None
            for at, m in enumerate(row.output_index):
                old, q = float(i.output_logprobs[m]), float(row.logprob[at])
                a = 0.5 * advantages[episode.episode_id] + 0.3 * (q - old)
                ratio = np.exp(float(logprobs[len(i.prompt_ids) + m - 1, int(i.output_ids[m])]) - old)
                total -= min(ratio * a, np.clip(ratio, 0.99, 1.01) * a) / (len(setup.episodes) * tokens)
                signs.add(np.sign(a) != np.sign(advantages[episode.episode_id]))
    assert signs == {True, False}, "somewhere the teacher outweighs the reward"
    assert sums.loss == pytest.approx(total, rel=1e-6) and sums.clipped > 5 and sums.divergence is not None
    with pytest.raises(UsageError, match="clipped with the policy term"):
        setup.config(**given, divergence__importance_clip=2.0)


def test_an_advantage_at_another_temperature_than_behaviour_is_refused(tmp_path: Path) -> None:
    tempered = make_setup(tmp_path, behaviour="tempered")
    given = {"divergence__signal": "sampled", "divergence__kind": "advantage", "output": str(tmp_path / "run")}
    with pytest.raises(UsageError, match=r"behaviour is at temperature 0\.7, the scores are at 1\.0"):
        train(tempered.config(**given))
