"""Advantages and token weights: an episode counts once, however it was cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_trace.errors import InputError
from memopd_trace.invocation import Episode, Invocation
from memopd_trainer.advantages import group_advantages, token_weights, trained_mask


def invocation(episode: str, index: int, tokens: int, **fields: object) -> Invocation:
    values = {"prompt_ids": [1, 2], "output_ids": [3] * tokens} | fields
    return Invocation(episode_id=episode, invocation_index=index, model_id="m", **values)


def episode(name: str, *tokens: int, reward: float | None = None) -> Episode:
    last = len(tokens) - 1
    rows = [invocation(name, i, n, reward=reward if i == last else None) for i, n in enumerate(tokens)]
    return Episode(name, tuple(rows))


def test_advantage_is_the_return_less_the_mean_of_its_own_group() -> None:
    groups = [
        [episode("a", 1, reward=1.0), episode("b", 1, reward=0.0), episode("c", 1, reward=0.5)],
        [episode("d", 1, reward=10.0), episode("e", 1, reward=20.0)],
    ]
    assert group_advantages(groups).by_episode == {"a": 0.5, "b": -0.5, "c": 0.0, "d": -5.0, "e": 5.0}


def test_the_return_is_the_sum_over_invocations() -> None:
    rows = (invocation("a", 0, 1, reward=0.25), invocation("a", 1, 1), invocation("a", 2, 1, reward=0.5))
    result = group_advantages([[Episode("a", rows), episode("b", 1, reward=0.0)]])
    assert result.by_episode == {"a": 0.375, "b": -0.375}


def test_a_group_of_one_has_advantage_zero_and_is_counted() -> None:
    for normalise in (False, True):
        result = group_advantages(
            [[episode("a", 1, reward=7.0)], [episode("b", 1, reward=1.0), episode("c", 1, reward=0.0)]],
            normalise_std=normalise,
        )
        assert result.by_episode["a"] == 0.0 and result.alone == 1


def test_normalised_advantages_have_unit_spread_and_equal_returns_stay_zero() -> None:
    spread = [episode(str(i), 1, reward=float(r)) for i, r in enumerate((0, 1, 5, 9))]
    values = list(group_advantages([spread], normalise_std=True).by_episode.values())
    assert np.std(values) == pytest.approx(1.0, rel=1e-5) and np.mean(values) == pytest.approx(0.0, abs=1e-12)
    # 0.1 + 0.2 is not 0.3: a rounding difference must not become an advantage
    near = [episode("a", 1, reward=0.3), episode("b", 1, reward=0.1 + 0.2)]
    assert max(map(abs, group_advantages([near], normalise_std=True).by_episode.values())) < 1e-9


def test_a_missing_return_is_refused_and_not_taken_for_zero() -> None:
    with pytest.raises(InputError, match=r"E-NEEDS-REWARD.*'b'"):
        group_advantages([[episode("a", 1, reward=1.0), episode("b", 1)]])


def test_an_episode_with_neither_reward_nor_trained_token_is_not_compared_with() -> None:
    silent = Episode("s", (invocation("s", 0, 4, accepted=False),))
    result = group_advantages([[episode("a", 1, reward=1.0), episode("b", 1, reward=0.0), silent], [silent]])
    assert result.by_episode == {"a": 0.5, "b": -0.5}


def test_forced_masked_rejected_and_unpredicted_tokens_are_not_trained() -> None:
    assert trained_mask(invocation("a", 0, 3)).tolist() == [True] * 3
    assert trained_mask(invocation("a", 0, 3, output_sampled=[True, False, True])).tolist() == [
        True,
        False,
        True,
    ]
    masked = invocation("a", 0, 3, output_loss_mask=[False, True, True], output_sampled=[True, True, False])
    assert trained_mask(masked).tolist() == [False, True, False]
    assert not trained_mask(invocation("a", 0, 3, accepted=False, output_loss_mask=[True] * 3)).any()
    assert trained_mask(invocation("a", 0, 3, prompt_ids=[])).tolist() == [False, True, True]
    in_place = invocation("a", 0, 2, prompt_ids=[7, 8], output_slots=[0, 1])
    assert trained_mask(in_place).tolist() == [True, True], "a slot predicts its own token"


def test_weights_by_hand_are_per_episode_then_per_group() -> None:
    groups = [[episode("a", 50, 100), episode("b", 30)], [episode("c", 40)]]
    assert token_weights(groups) == pytest.approx({"a": 1 / (2 * 2 * 150), "b": 1 / (2 * 2 * 30), "c": 1 / (2 * 40)})


def test_an_episode_without_trained_tokens_neither_counts_nor_divides_by_zero() -> None:
    silent = Episode("s", (invocation("s", 0, 4, accepted=False),))
    assert token_weights([[episode("a", 2), silent], [silent]]) == {"a": 0.5, "s": 0.0}


cuts = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(groups=st.lists(st.lists(cuts, min_size=1, max_size=4), min_size=1, max_size=4), data=st.data())
@settings(max_examples=100, deadline=None)
def test_cutting_an_episode_differently_changes_no_weight(groups: list[list[list[int]]], data: st.DataObject) -> None:
    def build(recut: bool) -> list[list[Episode]]:
        made = []
        for g, members in enumerate(groups):
            row = []
            for e, tokens in enumerate(members):
                pieces = [1] * sum(tokens) if recut and data.draw(st.booleans()) else tokens
                row.append(episode(f"{g}.{e}", *pieces))
            made.append(row)
        return made

    whole, cut = build(recut=False), build(recut=True)
    assert token_weights(whole) == token_weights(cut)
    total = sum(token_weights(whole)[e.episode_id] * sum(len(i.output_ids) for i in e) for g in whole for e in g)
    assert total == pytest.approx(1.0)
