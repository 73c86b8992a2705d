"""The parent that ids show: by definition, at the cost of the ids alone, and the same for recorders and converters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memopd_trace import Invocation
from memopd_trace.causes import HEADER
from memopd_trace.convert.lineage import Declared, resolve
from memopd_trace.convert.losses import Losses
from memopd_trace.invocation import Media
from memopd_trace.lineage import common_prefix, inherited
from memopd_trace.parents import OTHERS, Parent, Parents
from memopd_trace.prefixtree import Match, PrefixTree
from memopd_trace.record.call import CallRecord, Labels, Sampled
from memopd_trace.record.proxy.server import make_metadata
from memopd_trace.record.rows import Earlier, make_row

Ids = list[int]
METADATA = make_metadata(["m"], None)


def row(index: int, prompt: Ids, output: Ids, **more: Any) -> Invocation:
    ids = {"prompt_ids": np.array(prompt, np.int32), "output_ids": np.array(output, np.int32)}
    return Invocation(episode_id="e", invocation_index=index, model_id="m", **ids, **more)


def parents_of(*rows: Invocation) -> Parents:
    found = Parents()
    for r in rows:
        found.add(r, r.parent_index)
    return found


LONG = list(range(100, 130))
FIRST = row(0, LONG, [7, 8], relation="root")


@pytest.mark.parametrize(
    ("prompt", "relation"),
    [
        ([*LONG, 7, 8, 9], "extend"),
        ([*LONG, 7, 8], "extend"),  # nothing new behind it: its whole state all the same
        (LONG, "fork"),
        (LONG[:20], "fork"),  # a prefix of its prompt
        ([*LONG, 7], "rewrite"),  # ends in what it answered: no prefix of its prompt
        ([*LONG[:20], 5, 6], "rewrite"),
        ([*LONG[:18], *LONG[20:], 7, 8, 9], "rewrite"),
        ([*LONG[:3], *range(200, 230)], "root"),
        ([1, 2, 3], "root"),
        ([], "root"),
    ],
)
def test_each_relation_is_what_the_format_calls_so(prompt: Ids, relation: str) -> None:
    found = parents_of(FIRST).find(row(1, prompt, [1]))
    assert found == Parent(relation, None if relation == "root" else 0)


def test_an_attempt_that_was_given_up_is_followed_only_by_its_retry() -> None:
    left = FIRST.replace(accepted=False)
    for known in (parents_of(left), parents_of(FIRST)):
        known.give_up(0)
        assert known.find(row(1, LONG, [1])) == Parent("retry", 0)
        assert known.find(row(1, [*LONG, 7, 8, 9], [1])) == Parent("root")
    again = row(1, LONG, [7, 8], relation="retry", parent_index=0, accepted=False)
    assert parents_of(left, again).find(row(2, LONG, [1])) == Parent("retry", 1)
    assert parents_of(FIRST).find(row(1, LONG, [1]), again=True) == Parent("retry", 0)


def test_branches_that_the_prompt_follows_as_well_are_told_and_ancestors_are_not() -> None:
    second = row(1, [*LONG, 7, 8, 9], [3], relation="extend", parent_index=0)
    twin = row(2, [*LONG, 7, 8, 9], [3], relation="fork", parent_index=1)
    child = row(3, [*LONG, 7, 8, 9, 3, 4], [1])
    assert parents_of(FIRST, second).find(child) == Parent("extend", 1)
    assert parents_of(FIRST, second, twin).find(child) == Parent("extend", 2, (1,))  # one state, two calls that gave it


def test_equal_ids_under_another_state_are_no_extension() -> None:
    picture = row(0, LONG, [7, 8], media=(Media(0, 2, b"a" * 32),))
    child = row(1, [*LONG, 7, 8, 9], [1], media=(Media(0, 2, b"b" * 32),))
    assert parents_of(picture).find(child) == Parent("rewrite", 0)
    assert parents_of(picture).find(child.replace(media=picture.media)) == Parent("extend", 0)


def test_a_call_without_an_output_is_gone_on_from_only_where_none_with_one_is() -> None:
    empty = row(1, [*LONG, 7, 8, 9, 9], [], relation="extend", parent_index=0)
    child = row(2, [*LONG, 7, 8, 9, 9, 4], [1])
    assert parents_of(FIRST, empty).find(child) == Parent("extend", 0)
    assert parents_of(empty.replace(invocation_index=0)).find(child) == Parent("extend", 0)


STEPS = ("root", "extend", "change", "cut", "fork", "retry")


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 10**6), st.booleans()), max_size=16))
def test_a_history_made_by_known_steps_is_found_again(steps: list[tuple[str, int, bool]]) -> None:
    """New ids occur once, so that nothing is in doubt: the very step and the very call come back."""
    fresh = count(1000)
    rows: list[Invocation] = []
    known = Parents()
    for step, pick, kept in [("root", 0, True), *steps]:
        new = [next(fresh) for _ in range(HEADER + 4)]
        usable = [i for i in rows if (i.accepted is False) == (step == "retry")]
        prompt, expected = _step(step, usable[pick % len(usable)], new, rows) if usable else (new, Parent("root"))
        if known.same_prompt(row(0, prompt, [1])) and step not in ("fork", "retry"):
            continue  # that step was made before
        found = known.find(row(len(rows), prompt, [1]))
        assert found == expected, step
        output = [next(fresh) for _ in range(3)]
        rows.append(row(len(rows), prompt, output, accepted=None if kept else False, parent_index=found.index))
        known.add(rows[-1], found.index)


def _step(step: str, on: Invocation, new: Ids, rows: list[Invocation]) -> tuple[Ids, Parent]:
    """The prompt of a step that goes on from a call, and what is to be found."""
    state, prompt, at = on.sequence_ids.tolist(), on.prompt_ids.tolist(), on.invocation_index
    if step == "root":
        return new, Parent("root")
    if step == "extend":
        return [*state, *new], Parent("extend", at)
    tries = [i for i in rows if i.prompt_ids.tolist() == prompt]
    if step in ("fork", "retry") and tries[-1].accepted is False:
        return prompt, Parent("retry", tries[-1].invocation_index)
    usable = [i for i in rows if i.accepted is not False]
    inside = state[: len(prompt) + 1]  # the first id of its answer, which those that extend it have as well
    made = {"cut": inside, "change": [*inside, *new]}.get(step, prompt)
    whole = [i for i in usable if made[: len(i)] == i.sequence_ids.tolist()]
    if whole:  # back to an earlier answer, and on from that
        return made, Parent("extend", max(whole, key=len).invocation_index)
    if step in ("fork", "retry"):
        return made, Parent("fork", [i for i in tries if i.accepted is not False][-1].invocation_index)
    through = [i for i in usable if i.sequence_ids.tolist()[: len(inside)] == inside]
    asked = [i for i in through if len(i.prompt_ids) > len(prompt) and step == "cut"]
    return made, Parent("fork" if asked else "rewrite", (asked or through)[-1].invocation_index)


few = st.lists(st.integers(1, 3), min_size=1, max_size=5)
calls = st.lists(st.tuples(few, few, st.sampled_from([None, True, False])), min_size=1, max_size=8)


@given(calls)
def test_of_ids_that_repeat_the_definition_is_kept_and_every_doubt_reported(made: list[tuple[Ids, Ids, Any]]) -> None:
    rows: list[Invocation] = []
    known = Parents()
    for prompt, output, accepted in made:
        new = row(len(rows), prompt, output, accepted=accepted)
        found = known.find(new)
        _by_definition(new, rows, found)
        rows.append(new.replace(relation=found.relation, parent_index=found.index))
        known.add(rows[-1], found.index)


def _by_definition(new: Invocation, rows: list[Invocation], found: Parent) -> None:
    """Compares with every earlier call, one by one."""
    prompt = new.prompt_ids.tolist()
    tries = [i for i in rows if i.prompt_ids.tolist() == prompt]
    usable = [i for i in rows if i.accepted is not False]
    whole = [i for i in usable if prompt[: len(i)] == i.sequence_ids.tolist()]
    begun = [i for i in usable if i.prompt_ids.tolist()[: len(prompt)] == prompt]
    if tries and tries[-1].accepted is False:
        assert found == Parent("retry", tries[-1].invocation_index)
    elif whole:
        longest = max(whole, key=lambda i: (len(i), i.invocation_index))
        assert (found.relation, found.index) == ("extend", longest.invocation_index)
        above = _ancestors(longest, rows)
        for i in whole:
            told = i.invocation_index in (found.index, *found.others)
            assert told or any(i.invocation_index in _ancestors(rows[o], rows) for o in (*found.others, found.index))
            assert not (told and i.invocation_index in above - {found.index} and len(i) < len(longest))
    elif begun:
        equal = [i.invocation_index for i in tries if i.accepted is not False]
        assert found == Parent("fork", equal[-1] if equal else begun[-1].invocation_index)
    else:
        nearest = max(usable, key=lambda i: (inherited(i, new), i.invocation_index), default=None)
        shared = 0 if nearest is None else inherited(nearest, new)
        near = nearest is not None and shared >= max(1, (len(prompt) + 1) // 2)
        assert found == (Parent("rewrite", nearest.invocation_index) if near and nearest else Parent("root"))


def _ancestors(of: Invocation, rows: list[Invocation]) -> set[int]:
    index, found = of.parent_index, {of.invocation_index}
    while index is not None:
        found.add(index)
        index = rows[index].parent_index
    return found


@settings(deadline=None, max_examples=60)
@given(calls)
def test_a_recording_and_a_converted_log_of_the_same_calls_have_one_lineage(made: list[tuple[Ids, Ids, Any]]) -> None:
    rows = [row(i, prompt, output, accepted=accepted) for i, (prompt, output, accepted) in enumerate(made)]
    converted = resolve(rows, [Declared()] * len(rows), Losses())
    earlier = Earlier()
    for r in rows:
        output = Sampled(0, r.prompt_ids, r.output_ids, None, "stop", {})
        record = CallRecord(
            episode="e", model_id="m", response_id=None, labels=Labels(), outputs=(output,), sampling=None,
            logprob_kind="unknown", policy_version=None, started=0, ended=0, accepted=r.accepted,
        )  # fmt: skip
        earlier.add(make_row(record, output, earlier, None, METADATA, None).row, None, 0)
    names = ("parent_index", "relation", "rewrite_kind", "rewrite_evidence", "attempt")
    assert [tuple(getattr(r, n) for n in names) for r in earlier.rows] == [
        tuple(columns.get(n) for n in names) for columns in converted
    ]


def _chain(n: int) -> list[tuple[Ids, Ids]]:
    made, state = [], LONG
    for turn in range(n):
        made.append((state, [1000 + turn, 2]))
        state = [*state, 1000 + turn, 2, 3]
    return made


EPISODES = {
    "a growing history": _chain(300),
    "the same prompt again and again": [(LONG * 10, [turn, 2]) for turn in range(300)],
    "a memory written anew behind one task": [([*LONG * 5, *[turn] * 150], [turn, 2]) for turn in range(300)],
    "a tree": [([*LONG * 5, *(turn >> k & 1 for k in range(9)), turn], [turn, 2]) for turn in range(300)],
    "agents in turn": [([turn % 20 + 500, *p], o) for turn, (p, o) in enumerate(_chain(300))],
}


@pytest.mark.parametrize("name", EPISODES)
def test_a_call_costs_its_own_ids_however_long_the_episode(name: str) -> None:
    """Every id of a prompt is read a few times: for a digest, and twice in each of the two trees. To compare each
    prompt with every earlier one would read some 150 times as many."""
    known, read = Parents(), 0
    for index, (prompt, output) in enumerate(EPISODES[name]):
        one = row(index, prompt, output)
        before = known.compared
        known.add(one, known.find(one).index)
        read += len(one)
        assert known.compared - before <= 6 * len(one), index
    assert known.compared > read  # the count counts


REPEATED = {
    "the same calls again and again": [_chain(2)[turn % 2] for turn in range(4000)],
    "each followed by all": [_chain(2)[turn >= 2000] for turn in range(4000)],
    "one id after the other": [([1] * (turn % 40 + 1), [1]) for turn in range(4000)],
    "without an output": [(LONG, []) for _ in range(4000)],
}


@pytest.mark.parametrize("name", REPEATED)
def test_calls_that_are_repeated_do_not_make_each_other_dearer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known, seen = Parents(), Counter[int]()
    ends = Match.ends

    def counted(self: Match, most: int) -> Iterator[tuple[int, int]]:
        for end in ends(self, most):
            seen[len(rows)] += 1
            yield end

    monkeypatch.setattr(Match, "ends", counted)
    rows: list[Parent] = []
    for index, (prompt, output) in enumerate(REPEATED[name]):
        one = row(index, prompt, output)
        found = known.find(one)
        known.add(one, found.index)
        rows.append(found)
        assert len(found.others) <= OTHERS and seen[index] <= OTHERS * (len(prompt) + 1)
    if output:
        assert rows[-1].relation == "extend" and rows[-1].others, "that it is a guess is told all the same"


sequences = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=12)


@given(sequences, st.lists(st.integers(0, 2), max_size=7), st.sets(st.integers(0, 11)))
@example([[0, 1, 2], [0, 1, 2, 0, 1], [0, 1]], [0, 1, 2, 0], {1})
def test_the_tree_holds_what_was_added_and_not_taken_out(made: list[Ids], asked: Ids, gone: set[int]) -> None:
    tree, held = PrefixTree(), {}
    for number, ids in enumerate(made):
        held[number] = np.array(ids, np.int32)
        tree.add(held[number], number)
    for number in gone & held.keys():
        tree.remove(held.pop(number), number)
    ids = np.array(asked, np.int32)
    found = tree.match(ids)
    shared = {number: common_prefix(other, ids) for number, other in held.items()}
    length = max(shared.values(), default=0)
    assert found.length == length
    assert found.latest == max((n for n, same in shared.items() if same == length), default=None)
    whole = [(len(other), n) for n, other in held.items() if shared[n] == len(other)]
    assert list(found.ends()) == sorted(whole, reverse=True)
    with pytest.raises(KeyError):
        tree.remove(ids, 99)
