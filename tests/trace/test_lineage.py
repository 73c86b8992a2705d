"""Prefixes, extensions, and the likely cause where a prefix breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd_trace import Invocation
from memopd_trace.invocation import IDS, Media
from memopd_trace.lineage import common_prefix, explain_difference, final_ids, is_extension, state_difference

ids = st.lists(st.integers(0, 3), max_size=12).map(lambda v: np.array(v, np.int32))


def arr(*values: int) -> IDS:
    return np.array(values, np.int32)


def call(prompt: list[int], output: list[int], **more: Any) -> Invocation:
    return Invocation(episode_id="e", invocation_index=0, model_id="m", prompt_ids=prompt, output_ids=output, **more)


@given(ids, ids)
def test_common_prefix_is_the_longest_equal_start(a: IDS, b: IDS) -> None:
    n = common_prefix(a, b)
    assert a[:n].tolist() == b[:n].tolist()
    assert n in (len(a), len(b)) or a[n] != b[n]


@given(ids, ids)
def test_only_a_true_extension_has_no_difference(parent: IDS, prompt: IDS) -> None:
    difference = explain_difference(parent, prompt, bos_id=1)
    assert (difference.cause == "none") == (prompt[: len(parent)].tolist() == parent.tolist())
    assert difference.index == common_prefix(parent, prompt)


PARENT = arr(1, 10, 11, 12, 13, 14, 15, 16, 17, 2)


@pytest.mark.parametrize(
    ("cause", "parent", "prompt", "index"),
    [
        ("none", PARENT, arr(*PARENT, 40, 41), 10),
        ("none", PARENT, PARENT, 10),
        ("unrelated", PARENT, arr(50, 51, 52), 0),
        ("cut_short", PARENT, PARENT[:6], 6),
        ("double_bos", PARENT, arr(1, *PARENT, 40), 1),
        ("truncated_left", PARENT, arr(*PARENT[3:], 40), 0),
        ("elided", PARENT, arr(*PARENT[:2], *PARENT[5:], 40), 2),
        ("inserted", PARENT, arr(*PARENT[:4], 90, 91, *PARENT[4:], 40), 4),
        ("replaced", PARENT, arr(*PARENT[:3], 99, *PARENT[5:], 40), 3),
        ("diverged", PARENT, arr(*PARENT[:4], 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71), 4),
        # two ids that give one text became one id
        ("diverged", arr(6, 10, 10), arr(6, 11, 5), 1),
        # two newlines merged, the end of the turn stayed
        ("replaced", arr(5, 198, 198, 645), arr(5, 271, 645, 644), 1),
        # the reasoning of an earlier turn was dropped by the template
        ("elided", arr(1, 2, 90, 91, 92, 3), arr(1, 2, 3, 4, 5), 2),
        # a leading newline was stripped
        ("elided", arr(8, 198, 7), arr(8, 7, 9), 1),
        # re-serialised tool call between equal stretches
        ("replaced", arr(1, 30, 31, 32, 2), arr(1, 33, 34, 2, 5), 1),
    ],
)
def test_likely_cause(cause: str, parent: IDS, prompt: IDS, index: int) -> None:
    difference = explain_difference(parent, prompt, bos_id=1)
    assert (difference.cause, difference.index) == (cause, index), difference.detail


def test_double_bos_is_claimed_only_of_the_model_s_own_id() -> None:
    assert explain_difference(PARENT, arr(1, *PARENT), bos_id=None).cause == "inserted"


def test_a_long_repetition_does_not_take_for_ever() -> None:
    parent = np.zeros(200_000, np.int32)
    parent[0] = 1
    prompt = np.zeros(200_000, np.int32)
    assert explain_difference(parent, prompt).index == 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.lists(st.integers(0, 5), max_size=4))
def test_a_prompt_that_begins_with_prompt_and_output_is_an_extension(prompt: list[int], output: list[int]) -> None:
    parent = call(prompt, output)
    assert is_extension(parent, call([*prompt, *output, 9], [7]))
    assert is_extension(parent, call([*prompt, *output], []))
    assert not is_extension(parent, call([9, *prompt, *output], [7]))


def test_equal_ids_at_other_positions_are_no_extension() -> None:
    parent, child = call([5, 6], [7]), call([5, 6, 7, 8], [9])
    assert is_extension(parent, child)
    assert is_extension(parent, child.replace(position_ids=[0, 1, 2, 3, 4])), "the default written out"
    moved = child.replace(position_ids=[1, 2, 3, 4, 5])
    assert not is_extension(parent, moved) and state_difference(parent, moved) == "position_ids"


def test_a_key_may_be_evicted_later_but_not_come_back() -> None:
    parent = call([5, 6, 7], [8], visible_until=[4, 2, 4, 4])  # key 1 is gone from query 2 on
    later = call([5, 6, 7, 8, 9], [3], visible_until=[6, 2, 5, 6, 6, 6])  # key 2 goes at query 5
    assert is_extension(parent, later)
    back = later.replace(visible_until=[6, 6, 5, 6, 6, 6])
    assert state_difference(parent, back) == "visible_until"
    within = later.replace(visible_until=[6, 2, 3, 6, 6, 6])  # the parent's last query did see key 2
    assert state_difference(parent, within) == "visible_until"


def test_a_bidirectional_block_must_stay() -> None:
    parent = call([5, 6], [7], visible_from=[0, 0, 2])
    assert state_difference(parent, call([5, 6, 7], [8])) == "visible_from"
    assert is_extension(parent, call([5, 6, 7], [8], visible_from=[0, 0, 2, 3]))


def test_media_of_the_shared_part_must_stay_and_new_media_may_follow() -> None:
    one, two = Media(0, 1, b"a" * 32), Media(3, 4, b"b" * 32)
    parent = call([5, 6], [7], media=[one])
    assert is_extension(parent, call([5, 6, 7, 60], [8], media=[one, two]))
    assert state_difference(parent, call([5, 6, 7, 60], [8], media=[two])) == "media"


def test_in_place_generation_continues_from_the_filled_prompt() -> None:
    parent = call([5, 99, 6, 99], [8, 9], output_slots=[3, 1])
    assert final_ids(parent).tolist() == [5, 9, 6, 8]
    assert parent.prompt_ids.tolist() == [5, 99, 6, 99], "the record itself is untouched"
    assert is_extension(parent, call([5, 9, 6, 8, 99], [7], output_slots=[4]))
    assert not is_extension(parent, call([5, 99, 6, 99, 99], [7], output_slots=[4]))


def test_slots_that_do_not_fit_do_no_harm() -> None:
    assert final_ids(call([5, 99], [8], output_slots=[7])).tolist() == [5, 99]
    assert final_ids(call([5, 99], [8, 9], output_slots=[1])).tolist() == [5, 99]
