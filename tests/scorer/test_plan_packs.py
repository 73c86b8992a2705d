"""What a plan costs: everything shareable is run once, packs keep to their budgets at the least price, memory and order
play no part, and what the workers get is even."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from helpers_plan import call, calls, episode
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_scorer.cost import ModelCost
from memopd_scorer.fit import PACK_TOKENS, fit
from memopd_scorer.plan import Span, plan, plan_states
from memopd_scorer.prefixes import Branch, arrange
from memopd_scorer.states import pairs_of_prefix, state_of
from memopd_scorer.summary import PlanSummary
from memopd_trace.errors import UsageError
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.look.sharing import PrefixTree

UNBOUND = 10**6


@settings(max_examples=400, deadline=None)
@given(calls(), st.integers(1, 20))
def test_no_token_is_run_twice_that_may_be_shared(invocations: list[Invocation], max_tokens: int) -> None:
    tree = PrefixTree()
    for invocation in invocations:
        tree.add(invocation)
    tree.cut()
    assert sum(len(pack) for pack in plan(episode(*invocations), max_tokens=UNBOUND)) == tree.distinct
    torn = list(plan(episode(*invocations), max_tokens=max_tokens))
    assert sum(len(pack) - pack.repeated for pack in torn) == tree.distinct  # but for what the budget tears


def test_a_tail_that_cannot_be_shared_does_not_part_two_that_share_all_before_it() -> None:
    # sorted by all their ids, the middle one would stand between the others and end what they share
    rows = [call([1, 1, 1], [5]), call([1, 2, 1], [5], 1, visible_until=[4, 2, 4, 4]), call([1, 1, 1, 5], [6], 2)]
    rows.append(call([1, 2, 3], [4], 3))
    (pack,) = plan(episode(*rows))
    assert len(pack) == 5 + 3 + 3


@settings(max_examples=200, deadline=None)
@given(calls(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_the_order_of_calls_changes_no_pack(invocations: list[Invocation], max_tokens: int, random: object) -> None:
    shuffled = list(invocations)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def packs(rows: list[Invocation]) -> list[tuple[list[int], list[bytes], list[int]]]:
        planned = plan(episode(*rows), max_tokens=max_tokens)
        return [(p.token_ids_T.tolist(), [s.digest for s in p.states], p.target_output_M.tolist()) for p in planned]

    assert packs(shuffled) == packs(invocations)


@settings(max_examples=200, deadline=None)
@given(calls(), st.integers(1, 30), st.sampled_from(["tree", "packed", "single"]))
def test_packs_keep_to_the_budget_and_every_target_is_there_once(
    invocations: list[Invocation], max_tokens: int, layout: str
) -> None:
    seen = Counter[tuple[int, int]]()
    largest = max(len(i) for i in invocations)
    for pack in plan(episode(*invocations), layout=layout, max_tokens=max_tokens):  # type: ignore[arg-type]
        assert len(pack) <= (max_tokens if largest <= max_tokens else largest + max_tokens // 4)
        pairs = zip(pack.target_state_M.tolist(), pack.target_output_M.tolist(), strict=True)
        seen.update((pack.states[state].invocation_index, output) for state, output in pairs)
    wanted = {(i.invocation_index, n) for i in invocations for n in range(len(i.output_ids))}
    assert set(seen.values()) == {1} or not seen
    assert wanted - set(seen) == {(i.invocation_index, 0) for i in invocations if not len(i.prompt_ids)}


@st.composite
def trees(draw: st.DrawFn) -> list[Branch]:
    """Up to nine branches over two ids, arranged."""
    rows = draw(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=7), min_size=1, max_size=9))
    return arrange([state_of(call(ids[:-1], ids[-1:], n)) for n, ids in enumerate(rows)])


@settings(max_examples=300, deadline=None)
@given(trees(), st.integers(8, 20), st.integers(0, 8))
def test_a_torn_group_is_cut_where_least_is_run_twice(branches: list[Branch], max_tokens: int, used: int) -> None:
    begins, last = fit(branches, used, max_tokens)

    def price(cuts: tuple[int, ...]) -> float:
        """Tokens run beside the own ones, or infinity where a pack is too large."""
        bounds = [0, *cuts, len(branches)]
        total = 0
        for pack, (a, b) in enumerate(itertools.pairwise(bounds)):
            again = branches[a][1] if a < len(branches) else 0
            tokens = sum(len(s) - shared for s, shared in branches[a:b]) + (again if pack else used)
            if tokens > max_tokens:
                return float("inf")
            total += (again if pack else 0) + PACK_TOKENS
        return total

    ways = itertools.chain.from_iterable(
        itertools.combinations(range(len(branches)), size) for size in range(len(branches) + 1)
    )
    least = min(price(cuts) for cuts in ways if used or 0 not in cuts)
    assert price(tuple(begins)) == least < float("inf")
    begin = begins[-1] if begins else 0
    own = sum(len(s) - shared for s, shared in branches[begin:])
    assert last == own + (branches[begin][1] if begins else used)


def test_a_growing_history_beyond_the_budget_is_run_once() -> None:
    ids = list(range(100))
    history = [call(ids[:n], ids[n : n + 5], n // 10) for n in range(10, 100, 10)]
    (pack,) = plan(episode(*history), max_tokens=8)
    assert len(pack) == 95  # as many as its longest state has
    assert pack.spans == (Span(0, 95, (), True),)
    assert len(pack.target_ids_M) == 45


def test_a_group_without_a_state_comes_after_a_pack_beyond_its_budget() -> None:
    states = [state_of(call([1] * 9, [2]))]
    assert [len(p) for p in plan_states([states, [], states], max_tokens=8)] == [10, 10]


def test_a_torn_tree_says_what_it_runs_again() -> None:
    rows = [call([7, 7, 7, n], [n, n], n) for n in range(4)]  # 3 shared tokens, and 3 each
    packs = list(plan(episode(*rows), max_tokens=9))
    assert [(len(p), p.repeated) for p in packs] == [(9, 0), (9, 3)]


def test_a_long_history_that_forgets_a_little_is_run_nearly_once() -> None:
    ids = list(range(100))
    calls_of_it = [call([*ids[:n], 900 + n], [999], n) for n in range(50, 100)]  # two tokens each are in no other
    (pack,) = plan(episode(*calls_of_it[-4:]), max_tokens=32)
    assert len(pack) == 99 + 4 * 2
    packs = list(plan(episode(*calls_of_it), max_tokens=32))
    assert max(map(len, packs)) <= 101 + 8
    assert sum(map(len, packs)) < 0.3 * sum(len(i) for i in calls_of_it)


def test_a_state_beyond_the_budget_stretches_the_packs_of_its_own_group_alone() -> None:
    long = Episode("e", (call([1] * 40, [2]),))
    short = [call([3, 3, n], [n, n], n, episode_id="f") for n in range(4)]
    assert [len(p) for p in plan([long, Episode("f", tuple(short))], max_tokens=8)] == [41, 8, 8]


def test_a_fork_of_a_chain_sees_one_range_of_it() -> None:
    ids = list(range(20))
    rows = [call(ids[:4], [4]), call(ids[:9], [9], 1), call([*ids[:7], 90], [91], 2)]
    (pack,) = plan(episode(*rows))
    assert len(pack) == 12
    assert pack.spans == (Span(0, 10, (), True), Span(10, 12, ((0, 7),), True))


def test_recorded_visibility_is_counted_in_a_states_pairs() -> None:
    evicted = call([1, 2, 3], [4], visible_until=[2, 4, 4, 4])
    ahead = call([1, 2, 3], [4], 1, visible_from=[0, 0, 0, 0])
    for row, pairs in ((evicted, 8), (ahead, 16), (call([1, 2, 3], [4]), 10)):
        (pack,) = plan(episode(row))
        assert pack.pairs == state_of(row).pairs == pairs
    assert pairs_of_prefix(4) == 10


def groups(count: int, prompt_tokens: int = 200) -> Iterator[Episode]:
    """Many groups of four rollouts, made while they are asked for."""
    rng = np.random.default_rng(0)
    for number in range(count):
        prompt = rng.integers(0, 1000, prompt_tokens)
        for rollout in range(4):
            name = f"e{number}-{rollout}"
            fields = {"prompt_ids": prompt, "output_ids": rng.integers(0, 1000, 50), "group_id": f"g{number}"}
            yield Episode(name, (Invocation(episode_id=name, invocation_index=0, model_id="m", **fields),))


def peak_of_plan(count: int) -> tuple[int, int]:
    tracemalloc.start()
    try:
        packs = sum(1 for _ in plan(groups(count, 5000), max_tokens=11_000))
        return packs, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_trace() -> None:
    peak_of_plan(10)  # what is imported and cached once
    few, small = peak_of_plan(20)
    many, large = peak_of_plan(400)
    assert (few, many) == (10, 200)
    assert large < 1.3 * small


def test_a_group_too_large_for_memory_is_planned_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(plan(groups(1), max_tokens=UNBOUND))
    monkeypatch.setattr("memopd_scorer.plan.GROUP_TOKENS", 450)  # two rollouts of 250 tokens are more
    parts = list(plan(groups(1), max_tokens=UNBOUND))
    assert [sum(len(p) for p in packs) for packs in (whole, parts)] == [400, 600]
    assert sum(len(p.target_ids_M) for p in parts) == 200


def test_a_pack_comes_before_the_next_groups_are_read() -> None:
    read = 0

    def counted() -> Iterator[Episode]:
        nonlocal read
        for each in groups(100):
            read += 1
            yield each

    packs = plan(counted(), max_tokens=800)  # two groups of 400 tokens; the third says that they are all
    next(packs)
    assert read <= 3 * 4 + 1
    assert sum(len(p) for p in packs) == 98 * 400


def test_the_summary_says_how_even_the_packs_are() -> None:
    cost = ModelCost(per_token=10, per_pair=1, per_row=100, width=8)
    summary = PlanSummary("single", 100, cost)
    for pack in plan(episode(call([1, 2, 3], [4]), call([5], [6], 1)), layout="single"):
        summary.add(pack)
    assert (summary.flops, summary.most_flops) == (40 + 10 + 100 + 20 + 3 + 100, 150)
    assert summary.balance == {"tokens": 4 / 3, "pairs": 10 / 6.5, "flops": 150 / 136.5}
    assert PlanSummary("tree", 100).balance == {"tokens": 0, "pairs": 0}


def test_a_budget_below_one_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="max_tokens 0"):
        list(plan_states([], max_tokens=0))
