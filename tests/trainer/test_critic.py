"""Credit by a critic: advantages by their definition, tokens in the order they were sampled, values trained to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_trainer import Setup, equal_weights, exact, make_setup, rewarded_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from memopd_scorer.plan import LAYOUTS
from memopd_trace.errors import InputError
from memopd_trace.invocation import Episode
from memopd_trainer import train
from memopd_trainer.advantages import token_weights, trained_mask
from memopd_trainer.batch import load_rollouts
from memopd_trainer.checkpoint import CRITIC, load_critic, write_manifest
from memopd_trainer.critic import ValueHead, estimate_values, gae, token_credit
from memopd_trainer.metrics import StepSums
from memopd_trainer.objective import make_teacher, pack_loss
from memopd_trainer.packs import make_packs

FLOAT64, CPU = torch.float64, torch.device("cpu")
GAE = {"ppo__advantage": "gae", "ppo__critic__lr": 1e-2}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(tmp_path_factory.mktemp("setup"))


def some_critic(width: int) -> ValueHead:
    critic = ValueHead(width, FLOAT64, CPU)
    with torch.no_grad():
        critic.unit.weight.normal_(generator=torch.Generator().manual_seed(3))
        critic.unit.bias.fill_(0.25)
    return critic


@given(
    chain=st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=9),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_advantages_are_the_discounted_sums_of_their_definition(
    chain: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    rewards, values = (np.array(column) for column in zip(*chain, strict=True))
    after = np.append(values[1:], 0.0)
    delta = rewards + gamma * after - values
    n = len(rewards)
    expected = [sum((gamma * lam) ** (k - i) * delta[k] for k in range(i, n)) for i in range(n)]
    found = gae(rewards, values, gamma, lam)
    assert np.allclose(found, expected, atol=1e-12)
    if lam == 1.0:
        returns = [sum(gamma ** (k - i) * rewards[k] for k in range(i, n)) for i in range(n)]
        assert np.allclose(found + values, returns, atol=1e-12), "with lambda 1 the return is the discounted reward"


def test_a_chain_runs_over_the_trained_tokens_of_all_invocations() -> None:
    rows = list(rewarded_groups(1, 1, calls=3)[0])
    mask = np.ones(len(rows[0].output_ids), bool)
    mask[0] = False
    rows[0] = rows[0].replace(reward=0.5, output_loss_mask=mask)
    rows[1] = rows[1].replace(reward=2.0, output_loss_mask=np.zeros(len(rows[1].output_ids), bool))
    episode = Episode(rows[0].episode_id, tuple(rows))
    first, last = (int(trained_mask(rows[n]).sum()) for n in (0, 2))
    assert first and last and not trained_mask(rows[1]).any() and not trained_mask(rows[0])[0]
    values = {rows[0].key: np.arange(first, dtype=float), rows[2].key: np.full(last, 7.0)}
    credit = token_credit([[episode]], values, gamma=1.0, lam=1.0)
    assert credit.keys() == {rows[0].key, rows[2].key}, "an invocation without a trained token has no credit"
    returns = [credit[rows[n].key].return_N[trained_mask(rows[n])] for n in (0, 2)]
    assert np.allclose(returns[0], [0.5 + 2.0 + 1.0] * first), "a reward of an untrained call sits on the token before"
    assert np.allclose(returns[1], [1.0] * last)
    advantage = credit[rows[0].key].advantage_N
    assert advantage[0] == 0 and np.allclose(advantage[trained_mask(rows[0])], 3.5 - np.arange(first))


def test_whitened_advantages_have_mean_0_and_deviation_1_under_the_weights_of_the_loss() -> None:
    groups = [rewarded_groups(2, 2)[:2], rewarded_groups(2, 2)[2:]]
    rng = np.random.default_rng(0)
    values = {i.key: rng.normal(size=int(trained_mask(i).sum())) for g in groups for e in g for i in e}
    plain, white = (token_credit(groups, values, gamma=1.0, lam=0.9, normalise_std=n) for n in (False, True))
    weights = token_weights(groups)
    w, before, after = [], [], []
    for invocation in (i for g in groups for e in g for i in e):
        mask = trained_mask(invocation)
        w += [weights[invocation.episode_id]] * int(mask.sum())
        before += plain[invocation.key].advantage_N[mask].tolist()
        after += white[invocation.key].advantage_N[mask].tolist()
        assert np.array_equal(plain[invocation.key].return_N, white[invocation.key].return_N)
    assert abs(np.dot(w, after)) < 1e-9 and np.dot(w, np.square(after)) == pytest.approx(1, abs=1e-4)
    assert np.corrcoef(before, after)[0, 1] == pytest.approx(1) and abs(np.dot(w, before)) > 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_equal_the_formulas_in_every_layout(setup: Setup, layout: str) -> None:
    config = setup.config(**GAE, ppo__critic__lam=0.8, ppo__critic__shared=True, divergence__weight=0)
    rollouts = load_rollouts(config.trace, None, policy=True)
    student = exact(config.student)
    critic = some_critic(student.head.weight_VD.shape[1])
    values = estimate_values(student, critic, make_packs(rollouts, rollouts.groups, {}, layout=layout, max_tokens=60))
    credit = token_credit(rollouts.groups, values, gamma=1.0, lam=0.8)
    sums, teacher = StepSums(), make_teacher(rollouts, config, CPU)
    for pack in make_packs(rollouts, rollouts.groups, {}, credit=credit, layout=layout, max_tokens=60):
        pack_loss(student, teacher, pack, config, sums, critic).backward()
    found = {n: p.grad for n, p in student.model.named_parameters()} | {"critic": critic.unit.weight.grad}

    model, plain = exact(config.student).model, some_critic(student.head.weight_VD.shape[1])
    total = torch.zeros((), dtype=FLOAT64)
    for episode in setup.episodes:
        values_N, logprobs, old, rewards = [], [], [], []
        for i in episode:
            ids = torch.from_numpy(i.sequence_ids.astype(np.int64))[None]
            hidden = model.model(ids).last_hidden_state[0]
            logits = model.lm_head(hidden)[:, : rollouts.tokenizer.size].log_softmax(1)
            for m in np.flatnonzero(trained_mask(i)):
                row = len(i.prompt_ids) + m - 1
                values_N.append(plain(hidden[row : row + 1])[0])
                logprobs.append(logits[row, int(i.output_ids[m])])
                old.append(float(i.output_logprobs[m]))  # type: ignore[index]
                rewards.append(0.0)
            rewards[-1] += i.reward or 0.0
        value = torch.stack(values_N)
        advantage = torch.from_numpy(gae(np.array(rewards), value.detach().numpy(), 1.0, 0.8))
        ratio = (torch.stack(logprobs) - torch.tensor(old, dtype=FLOAT64)).exp()
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        off = (value - (advantage + value.detach())).square() / 2
        total = total + (policy + off).mean() / len(setup.episodes)
    total.backward()
    expected = {n: p.grad for n, p in model.named_parameters()} | {"critic": plain.unit.weight.grad}
    assert float(total.detach()) == pytest.approx(sums.loss, abs=1e-8) and abs(sums.loss) > 1e-3
    for name, reference in expected.items():
        gradient = found[name]
        assert reference is not None and gradient is not None and reference.abs().max() > 1e-9, name
        assert (gradient - reference).abs().max() <= 1e-8 * max(1.0, float(reference.abs().max())), name


def test_only_a_shared_critic_trains_the_students_layers(setup: Setup) -> None:
    for shared in (False, True):
        config = setup.config(**GAE, ppo__critic__shared=shared, divergence__weight=0)
        rollouts = load_rollouts(config.trace, None, policy=True)
        student = exact(config.student)
        critic = some_critic(student.head.weight_VD.shape[1])
        credit = token_credit(
            rollouts.groups,
            estimate_values(student, critic, make_packs(rollouts, rollouts.groups, {})),
            gamma=1.0,
            lam=1.0,
        )
        zero = {key: c._replace(advantage_N=np.zeros_like(c.advantage_N)) for key, c in credit.items()}
        for pack in make_packs(rollouts, rollouts.groups, {}, credit=zero):
            pack_loss(student, None, pack, config, StepSums(), critic).backward()
        assert critic.unit.weight.grad is not None and critic.unit.weight.grad.abs().max() > 1e-3
        moved = max(float(p.grad.abs().max()) for p in student.model.parameters() if p.grad is not None)
        assert (moved > 1e-6) == shared


def test_values_learn_the_return(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)
    changes = GAE | {"ppo__critic__lr": 0.1, "lr": 0, "divergence__weight": 0, "steps": 60}
    result = train(setup.config(**changes, output=str(tmp_path / "r")))
    assert result.first is not None and result.last is not None
    assert result.first.value_loss == pytest.approx(0.25, abs=0.01), "half the mean of squared returns 1 and 0"
    assert result.last.value_loss is not None and result.last.value_loss < 0.4 * result.first.value_loss
    assert result.last.ratio == result.first.ratio, "the student stood still"


def test_a_run_with_a_critic_goes_on_bit_for_bit_and_refuses_another_head(setup: Setup, tmp_path: Path) -> None:
    straight = train(setup.config(**GAE, steps=4, save_every=2, output=str(tmp_path / "straight"))).checkpoint
    train(setup.config(**GAE, steps=2, output=str(tmp_path / "halves")))
    halves = train(setup.config(**GAE, steps=4, output=str(tmp_path / "halves"))).checkpoint
    assert equal_weights(straight, halves)
    one, two = (load_file(folder / CRITIC) for folder in (straight, halves))
    assert one["unit.weight"].any() and all(torch.equal(one[name], two[name]) for name in one)
    with pytest.raises(InputError, match=r"critic\.safetensors: cannot be read"):
        load_critic(halves, ValueHead(3, FLOAT64, CPU))
    (halves / CRITIC).unlink()
    write_manifest(halves, 4)
    with pytest.raises(InputError, match=r"critic\.safetensors: cannot be read"):
        train(setup.config(**GAE, steps=5, output=str(tmp_path / "halves")))
