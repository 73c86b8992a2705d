"""The plan shares every prefix it may, none it may not, and says for each target which row predicts it.

The oracle is the states themselves: for every target, the packed tokens visible to its prediction row must be, in path
order, exactly the tokens, positions and visibility of its own invocation.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers_plan import call, calls, dense_mask, episode, span_mask
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_scorer.plan import Layout, plan
from memopd_scorer.states import state_of
from memopd_scorer.summary import PlanSummary
from memopd_trace.errors import UsageError
from memopd_trace.invocation import Episode, Invocation, Media


@settings(max_examples=400, deadline=None)
@given(calls(), st.sampled_from(["tree", "packed", "single"]), st.integers(1, 40))
def test_every_target_is_predicted_under_its_own_state(
    invocations: list[Invocation], layout: Layout, max_tokens: int
) -> None:
    targets = 0
    for pack in plan(episode(*invocations), layout=layout, max_tokens=max_tokens):
        mask = dense_mask(pack)
        np.testing.assert_array_equal(mask, span_mask(pack))
        longest = max(len(i) for i in invocations)
        assert len(pack) <= (max_tokens if longest <= max_tokens else longest + max_tokens // 4)
        for number, state in enumerate(pack.states):
            source = invocations[state.invocation_index]
            start, until = source.visibility()
            mine = pack.target_state_M == number
            for row, output, target in zip(
                pack.rows_R[pack.target_row_M[mine]],
                pack.target_output_M[mine],
                pack.target_ids_M[mine],
                strict=True,
            ):
                seen = np.flatnonzero(mask[row])
                seen = seen[np.argsort(pack.path_T[seen])]
                q = pack.path_T[row]
                expected = [k for k in range(len(source)) if start[k] <= q < until[k]]
                assert q == len(source.prompt_ids) + output - 1
                np.testing.assert_array_equal(pack.path_T[seen], expected)
                np.testing.assert_array_equal(pack.token_ids_T[seen], source.sequence_ids[expected])
                np.testing.assert_array_equal(pack.positions_T[seen], source.positions()[expected])
                assert target == source.output_ids[output]
                targets += 1
    without_context = sum(len(i.prompt_ids) == 0 for i in invocations)
    assert targets == sum(len(i.output_ids) for i in invocations) - without_context


@settings(max_examples=100, deadline=None)
@given(calls(), st.randoms(use_true_random=False))
def test_the_order_of_calls_changes_no_row(invocations: list[Invocation], random: object) -> None:
    shuffled = list(invocations)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def executed(rows: list[Invocation]) -> int:
        return sum(len(p) for p in plan(episode(*rows), max_tokens=1000))

    assert executed(shuffled) == executed(invocations)


def test_the_documented_example() -> None:
    (pack,) = plan(episode(call([7, 8, 9], [1]), call([7, 8, 9], [2, 3], 1), call([7, 8, 5], [4], 2)))
    assert pack.token_ids_T.tolist() == [7, 8, 5, 4, 9, 1, 2, 3]
    assert pack.path_T.tolist() == [0, 1, 2, 3, 2, 3, 3, 4]
    assert pack.visible_until_T.tolist() == [8, 8, 4, 4, 8, 6, 8, 8]
    assert pack.token_ids_T[pack.rows_R].tolist() == [5, 9, 2]
    assert pack.rows_R[pack.target_row_M].tolist() == [2, 4, 4, 6]  # one row serves two targets


def test_positions_of_a_branch_are_its_depth_not_its_packed_index() -> None:
    (pack,) = plan(episode(call([1, 2], [3, 4]), call([1, 2], [5], 1)))
    assert pack.token_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert pack.positions_T.tolist() == [0, 1, 2, 3, 2]


def test_a_tree_of_two_levels_has_the_right_pairs() -> None:
    # P -> A -> {R0, R1}, P -> B -> {R2}; one token each: 1 + 2 + 3 + 3 + 2 + 3 visible pairs
    rows = [[1, 10, 20], [1, 10, 21], [1, 11, 22]]
    (pack,) = plan(episode(*(call(r[:-1], r[-1:], i) for i, r in enumerate(rows))))
    assert len(pack) == 6
    assert dense_mask(pack).sum() == 14


@pytest.mark.parametrize(
    ("field", "value", "shared"),
    [
        ("position_ids", [0, 1, 7, 8], 2),
        ("visible_until", [4, 2, 4, 4], 1),
        ("visible_from", [0, 1, 1, 3], 1),
        ("media", [{"start": 0, "stop": 1}], 0),
        ("routed_experts", [1, 2, 3], 0),
        ("model_id", "other", 0),
    ],
)
def test_equal_ids_are_not_shared_where_the_state_differs(field: str, value: object, shared: int) -> None:
    plain = call([1, 2, 3], [4])
    if field == "media":
        value = [Media(0, 1, b"\1" * 32)]
    other = call([1, 2, 3], [4], 1)
    other = other.replace(**{field: value})
    (pack,) = plan(episode(plain, other))
    assert len(pack) == 8 - shared
    (twice,) = plan(episode(plain, call([1, 2, 3], [4], 1)))
    assert len(twice) == 4  # the same ids in the same state are


def test_sharing_stops_before_the_query_that_looks_ahead() -> None:
    # key 3 is visible from query 1 on, so query 1 is not the plain causal token it seems to be
    assert state_of(call([1, 2, 3, 4], [5], visible_from=[0, 1, 2, 1, 4])).shareable == 1


def test_a_diffusion_token_is_predicted_by_its_own_slot() -> None:
    slots = call([1, 0, 0, 2], [8, 9], output_slots=[2, 1], visible_from=[0, 0, 0, 0])
    (pack,) = plan(episode(slots))
    assert len(pack) == 4
    assert pack.rows_R[pack.target_row_M].tolist() == [2, 1]
    assert pack.target_ids_M.tolist() == [8, 9]
    assert dense_mask(pack).all()


def test_forced_tokens_are_context_and_no_targets() -> None:
    (pack,) = plan(episode(call([1, 2], [3, 4, 5], output_sampled=[True, False, True])))
    assert pack.target_output_M.tolist() == [0, 2]
    assert pack.token_ids_T.tolist() == [1, 2, 3, 4, 5]


def test_a_first_token_without_context_is_no_target() -> None:
    (pack,) = plan(episode(call([], [3, 4])))
    assert pack.target_output_M.tolist() == [1]


def test_rollouts_of_one_group_share_and_groups_do_not_tear() -> None:
    def rollout(name: str, group: str, last: int) -> Episode:
        prompt = [1] * 10 if group == "a" else [2] * 10
        row = Invocation(
            episode_id=name,
            invocation_index=0,
            model_id="m",
            prompt_ids=prompt,
            output_ids=[last],
            group_id=group,
        )
        return Episode(name, (row,))

    episodes = [rollout(f"{g}{i}", g, i) for g in "ab" for i in range(3)]
    assert [len(p) for p in plan(episodes, max_tokens=20)] == [13, 13]
    assert [len(p) for p in plan(episodes, max_tokens=26)] == [26]


def test_a_state_longer_than_the_budget_gets_a_pack_of_its_own() -> None:
    packs = list(plan(episode(call([1] * 50, [2]), call([3, 3], [4], 1)), max_tokens=8))
    assert sorted(len(p) for p in packs) == [3, 51]
    (pack,) = plan(episode(call([1] * 50, [2]), call([1] * 47, [3, 3], 1)), max_tokens=8)
    assert len(pack) == 51 + 2  # but with a quarter of the budget beside it


def test_the_digest_sees_layout_budget_and_content() -> None:
    def digest(rows: list[Invocation], layout: Layout = "tree", max_tokens: int = 100) -> str:
        summary = PlanSummary(layout, max_tokens)
        for pack in plan(episode(*rows), layout=layout, max_tokens=max_tokens):
            summary.add(pack)
        return summary.digest

    base = [call([1, 2], [3]), call([1, 2], [4], 1)]
    digests = {
        digest(base),
        digest(base, "packed"),
        digest(base, max_tokens=99),
        digest([base[0], call([1, 2], [5], 1)]),
        digest([base[0], call([1, 2], [4], 1, position_ids=[0, 1, 5])]),
    }
    assert len(digests) == 5
    assert digest(base) == digest(list(base))


def test_an_unknown_layout_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="layout 'rows'"):
        list(plan([], layout="rows"))  # type: ignore[arg-type]


def test_expert_routes_are_compared_token_by_token() -> None:
    a = call([1, 2, 3], [4], routed_experts=[0, 1, 2, 3, 4, 5])  # three positions of two ids
    b = call([1, 2, 3], [5], 1, routed_experts=[0, 1, 2, 9, 4, 5])
    (pack,) = plan(episode(a, b))
    assert len(pack) == 8 - 1  # the second token went elsewhere
    (same,) = plan(episode(a, b.replace(routed_experts=a.routed_experts)))
    assert len(same) == 8 - 3


def test_pairs_count_what_is_visible() -> None:
    summary = PlanSummary("tree", 100)
    for pack in plan(episode(call([1, 0, 0, 2], [8], output_slots=[1], visible_from=[0] * 4))):
        summary.add(pack)
    assert summary.pairs == 16  # all four see all four


def test_groups_without_a_state_are_passed_over() -> None:
    empty = Invocation(episode_id="a", invocation_index=0, model_id="m", prompt_ids=[], output_ids=[])
    full = Invocation(episode_id="b", invocation_index=0, model_id="m", prompt_ids=[1], output_ids=[2])
    (pack,) = plan([Episode("a", (empty,)), Episode("b", (full,)), Episode("a", (empty,))])
    assert len(pack) == 2
    assert list(plan([Episode("a", (empty,))])) == []
