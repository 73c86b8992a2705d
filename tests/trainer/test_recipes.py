"""Recipes: their values, and the schedules, draws and weights that they give, by the numbers of their sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_trainer import rewarded_groups

from memopd_trace.cli import run
from memopd_trace.errors import UsageError
from memopd_trainer.advantages import token_weights
from memopd_trainer.config import TrainConfig, parse_config
from memopd_trainer.losses import topk_overlap
from memopd_trainer.recipes import ORDER, preset, recipes
from memopd_trainer.recipes.coverage import fit_clusters, k_means, nearest, sample
from memopd_trainer.recipes.drawing import chosen_turns, curriculum_depth, draw, replay_probabilities
from memopd_trainer.recipes.pruning import Length, effective_lengths, next_length, prune_weights
from memopd_trainer.recipes.sections import LengthConfig, PruneConfig, TcodConfig

NEEDED = {"student": "s", "trace": "t", "scores": "c", "output": "o", "steps": 4}


def config(recipe: str, **changes: Any) -> TrainConfig:
    return parse_config({**NEEDED, "recipe": recipe, **changes})


@pytest.mark.parametrize("name", ORDER)
def test_a_recipe_says_what_it_is_and_is_a_whole_configuration(name: str) -> None:
    assert config(name).recipe == name
    assert 20 < len(recipes()[name]) < 130 and "recipe" not in preset(name)
    files = {f.stem for f in Path(__import__("memopd_trainer.recipes").recipes.__file__).parent.glob("*.yaml")}
    assert files == set(ORDER)


def test_the_values_are_those_of_the_sources() -> None:
    ppo = config("ppo")  # MEM1
    critic = ppo.ppo.critic
    assert (ppo.lr, ppo.ppo.clip, critic.gamma, critic.lam, critic.lr) == (1e-6, 0.2, 1, 1, 1e-5)
    assert ppo.ppo.has_critic and ppo.divergence.weight == 0
    opd = config("opd")
    assert opd.ppo.weight == 0 and (opd.divergence.kind, opd.divergence.signal) == ("reverse_kl", "hidden")
    memopd, control = config("memopd"), config("persistent_history")
    both = ("view", "student_view", "recipe")
    assert memopd.model_dump(exclude=set(both)) == control.model_dump(exclude=set(both))  # the states alone differ
    assert memopd.ppo == ppo.ppo and memopd.lr == ppo.lr and memopd.divergence == opd.divergence
    assert [getattr(memopd, k) for k in both[:2]] == ["recorded"] * 2
    assert [getattr(control, k) for k in both[:2]] == ["persistent-history"] * 2
    for name in ("tcod", "reopd", "one_shot"):
        term = config(name).divergence
        assert (term.signal, term.kind, term.weight) == ("sampled", "advantage", 1)
        assert config(name).ppo.weight == 0 and config(name).lr == 1e-6
    assert config("tcod").tcod == TcodConfig(order="f2b", k_start=1, eta=2)
    reopd = config("reopd")
    assert reopd.reopd is not None and reopd.reopd.kappa == 0.6 and reopd.weight_decay == 0.1
    prune = config("prune_opd").prune_opd
    assert prune is not None and (prune.k, prune.gamma, prune.w_drop, prune.w_base) == (16, 0.7, 0.01, 0.5)
    assert prune.length.model_dump() == {
        "initial": 2048, "minimum": 1024, "maximum": 12288, "step": 100, "margin": 100, "hit_ratio": 0.1, "patience": 3
    }  # fmt: skip
    sdpo = config("sdpo")
    assert (sdpo.divergence.kind, sdpo.divergence.beta, sdpo.divergence.importance_clip) == ("jsd", 0.5, 2)
    assert sdpo.leave_out_unscored and sdpo.ppo.weight == 0 and sdpo.lr == 1e-5
    one = config("one_shot").one_shot
    assert one is not None and (one.rollouts, one.clusters) == (64, 200)


def test_what_is_given_comes_before_the_recipe_and_the_recipe_before_the_defaults() -> None:
    changed = config("tcod", tcod={"order": "b2f"}, lr=1e-4)
    assert changed.tcod == TcodConfig(order="b2f", k_start=1, eta=2) and changed.lr == 1e-4
    assert changed.ppo.weight == 0 and parse_config(NEEDED).ppo.weight == 1
    assert config("tcod", tcod=None).tcod is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": "memodp"}, "did you mean 'memopd'"),
        ({"recipe": "persistent-history"}, "did you mean 'persistent_history'"),
        ({"recipe": ["ppo"]}, "no recipe"),
        ({"recipe": "tcod", "tcod": {"ordre": "f2b"}}, "did you mean 'tcod.order'"),
        ({"recipe": "tcod", "reopd": {}}, "give one"),
        ({"recipe": "prune_opd", "divergence": {"signal": "sampled", "kind": "k1"}}, "signal hidden"),
        ({"recipe": "prune_opd", "prune_opd": {"length": {"initial": 10}}}, "minimum <= initial"),
        ({"recipe": "one_shot", "groups_per_step": 2}, "one_shot.rollouts"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_config({**NEEDED, **changes})


def test_the_command_line_lists_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(ORDER)
    assert run(["recipes", "tcod", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == preset("tcod")
    assert run(["recipes", "tcdo"]) == 2
    assert "did you mean 'tcod'" in capsys.readouterr().err


# tcod: k = k_start + floor(n / eta)


def test_the_curriculum_grows_by_a_turn_every_eta_steps() -> None:
    assert [curriculum_depth(step, TcodConfig()) for step in range(1, 8)] == [1, 1, 2, 2, 3, 3, 4]
    assert [curriculum_depth(step, TcodConfig(k_start=2, eta=4)) for step in range(1, 7)] == [2, 2, 2, 2, 3, 3]


@pytest.mark.parametrize(("order", "at_3"), [("f2b", {0, 1}), ("b2f", {2, 3})])
def test_the_first_or_the_last_turns_are_trained(order: str, at_3: set[int]) -> None:
    (group,) = rewarded_groups(groups=1, calls=4)[:1]
    settings = config("tcod", tcod={"order": order})
    chosen = [chosen_turns([[group]], step, settings) or frozenset() for step in range(1, 10)]
    assert {index for _, index in chosen[2]} == at_3
    assert [len(c) for c in chosen] == [1, 1, 2, 2, 3, 3, 4, 4, 4]


def test_a_turn_without_a_trained_token_is_none() -> None:
    (episode,) = rewarded_groups(groups=1, per_group=1, calls=3)
    first = episode.invocations[0].replace(accepted=False)
    cut = type(episode)(episode.episode_id, (first, *episode.invocations[1:]))
    assert chosen_turns([[cut]], 1, config("tcod")) == {(episode.episode_id, 1)}


def test_weights_of_the_chosen_turns_sum_to_one() -> None:
    episodes = rewarded_groups(groups=2, calls=3)
    groups = [episodes[:2], episodes[2:]]
    chosen = chosen_turns(groups, 1, config("tcod"))
    assert chosen is not None and len(chosen) == 4
    weights = token_weights(groups, chosen)
    tokens = {e.episode_id: len(e.invocations[0].output_ids) for e in episodes}
    assert weights == pytest.approx({key: 1 / (2 * 2 * n) for key, n in tokens.items()})


# reopd: turn t with a probability proportional to kappa^t


def test_turns_are_drawn_by_powers_of_kappa() -> None:
    assert replay_probabilities(3, 0.6) == pytest.approx(np.array([1, 0.6, 0.36]) / 1.96)
    assert replay_probabilities(4, 1.0) == pytest.approx([0.25] * 4)
    episodes = rewarded_groups(groups=1, per_group=2, calls=3)
    settings = config("reopd")
    draws = [chosen_turns([episodes], step, settings) or frozenset() for step in range(1, 1001)]
    assert all(sorted(e for e, _ in d) == ["g0e0", "g0e1"] for d in draws)  # one turn of each
    share = np.bincount([i for d in draws for _, i in d], minlength=3) / 2000
    assert share == pytest.approx(np.array([1, 0.6, 0.36]) / 1.96, abs=0.04)  # 3.5 standard deviations
    assert draws[:20] == [chosen_turns([episodes], step, settings) for step in range(1, 21)]
    other = config("reopd", seed=1)
    assert draws[:20] != [chosen_turns([episodes], step, other) for step in range(1, 21)]


# prune_opd: w = clip(1 - w_drop * bad so far, 0, 1) + w_base


def test_pruning_counts_bad_tokens_along_each_output() -> None:
    settings = PruneConfig(w_drop=0.25)
    overlap = np.array([0.6, 1.0, 0.7, 0.5, 0.0, 0.0, 0.0, 0.9])
    state = np.array([0, 0, 0, 0, 0, 0, 0, 1])
    weights = prune_weights(overlap, state, np.array([0, 1, 2, 3, 4, 5, 6, 0]), settings)
    assert weights.tolist() == [0.75, 0.75, 0.75, 0.5, 0.25, 0.0, 0.0, 1.0]  # 0.7 is not below gamma
    assert effective_lengths(weights, state) == [5, 1]
    back = np.arange(7)[::-1]  # targets of a pack stand in any order
    assert prune_weights(overlap[back], state[back], back, settings).tolist() == weights[back].tolist()


def test_with_the_papers_numbers_an_output_counts_for_a_hundred_bad_tokens() -> None:
    weights = prune_weights(np.zeros(300), np.zeros(300, int), np.arange(300), PruneConfig())
    assert weights[0] == pytest.approx(0.99) and weights[49] == pytest.approx(0.5) and weights[99:].max() <= 1e-8
    assert effective_lengths(weights, np.zeros(300, int)) == [99]  # the hundredth bad one has none
    assert (weights + 0.5).min() == 0.5


def test_common_ids_are_counted_whatever_their_order() -> None:
    student = torch.tensor([[5.0, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]])
    teacher = torch.tensor([[0.0, 5, 4, 3, 0, 0], [0, 1, 2, 3, 4, 5]])
    assert topk_overlap(student, teacher, 3).tolist() == [2, 3]
    assert topk_overlap(student, teacher, 6).tolist() == [6, 6]


def test_the_length_grows_on_hits_and_shrinks_after_misses_in_a_row() -> None:
    c = LengthConfig()
    assert next_length(Length(2048), [1948, *[0] * 9], c) == Length(2148)  # a tenth comes within the margin
    assert next_length(Length(2048), [1947, *[0] * 9], c) == Length(2048, 1)
    assert next_length(Length(2048), [1948, *[0] * 10], c) == Length(2048, 1)
    assert next_length(Length(2048, 2), [0], c) == Length(1948)
    assert next_length(Length(2048, 2), [2048], c) == Length(2148)  # a hit ends the row of misses
    assert next_length(Length(12250), [12250], c).tokens == 12288
    assert next_length(Length(1050, 2), [0], c).tokens == 1024
    assert next_length(Length(1024, 2), [1024], c).tokens == 1124  # at the least, the least is a hit


# one_shot


def test_one_task_is_drawn_and_its_rollouts_in_turn() -> None:
    episodes = rewarded_groups(groups=2, per_group=6)
    groups = [episodes[:6], episodes[6:]]
    settings = config("one_shot", one_shot={"task": "group1", "rollouts": 2})
    drawn = [draw(groups, step, settings) for step in range(1, 4)]
    assert all(len(groups) == 1 and len(groups[0]) == 2 for groups in drawn)
    assert {e.episode_id for (group,) in drawn for e in group} == {f"g1e{n}" for n in range(6)}
    (everything,) = draw(groups[:1], 1, config("one_shot"))  # 64 wanted, 6 there
    assert len(everything) == 6
    for task, said in ((None, "trains on one task"), ("group2", "no task 'group2'")):
        with pytest.raises(UsageError, match=said):
            draw(groups, 1, config("one_shot", one_shot={"task": task}))


def test_clusters_are_found_where_there_are_some() -> None:
    g = torch.Generator().manual_seed(0)
    centres = 10 * torch.randn(5, 8, generator=g, dtype=torch.float64)
    points = torch.cat([c + 0.1 * torch.randn(40, 8, generator=g, dtype=torch.float64) for c in centres])
    found = fit_clusters(points, 5, 4, seed=0)
    own = found.of(points)
    assert found.basis_DP.shape == (8, 4)
    assert all(len(set(own[40 * n : 40 * n + 40].tolist())) == 1 for n in range(5)) and len(set(own.tolist())) == 5
    means = k_means(points, 5, seed=3)
    assert torch.allclose(means[nearest(points[:1], means)][0], points[:40].mean(0))
    with pytest.raises(UsageError, match="distinct"):
        fit_clusters(points[:3], 5, 4, seed=0)


def test_a_sample_holds_each_state_as_likely() -> None:
    rows = [torch.arange(10 * n, 10 * n + 10, dtype=torch.float64)[:, None] for n in range(10)]
    assert sample(rows, 100, 0).flatten().tolist() == list(range(100))
    counts = np.zeros(100)
    for seed in range(400):
        picked = sample(rows, 20, seed).flatten().long().numpy()
        assert len(set(picked)) == 20
        counts[picked] += 1
    assert abs(counts[:50].sum() - counts[50:].sum()) < 4 * np.sqrt(8000 * 0.2)
    assert counts.min() > 40 and counts.max() < 120  # 80 expected
