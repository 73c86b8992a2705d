"""What a report says of a broken prefix or a null item is right to the number: the cause, the first id, how many."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from memopd_trace.conform import MisfitError, conform
from memopd_trace.lineage import explain_difference
from memopd_trace.schema import COLUMN

PARENT = list(range(20))

CASES = {
    "left out": (PARENT, PARENT[:5] + PARENT[10:], "elided", 5, "the parent's ids 5 to 9 are gone"),
    "left out, one": (PARENT, PARENT[:5] + PARENT[6:], "elided", 5, "the parent's id 5 is gone"),
    "cut on the left": (PARENT, PARENT[3:], "truncated_left", 0, "the parent's first 3 ids are gone"),
    "put in": (PARENT, [*PARENT[:5], 90, 91, *PARENT[5:]], "inserted", 5, "2 ids stand in front of the parent's id 5"),
    "put in, the second match": (
        [1, 2, 3, 4],
        [1, 2, 9, 3, 3, 4],
        "inserted",
        2,
        "2 ids stand in front of the parent's id 2",
    ),
    "replaced": (PARENT, [*PARENT[:5], 90, 91, *PARENT[8:]], "replaced", 5, "3 ids of the parent became 2 others"),
    "replaced, short": ([1, 2, 3, 4], [1, 9, 8, 4], "replaced", 1, "2 ids of the parent became 2 others"),
    "replaced, one": (PARENT, [*PARENT[:5], 90, *PARENT[6:]], "replaced", 5, "1 id of the parent became 1 other, "),
    "put in, one": (PARENT, [*PARENT[:5], 90, *PARENT[5:]], "inserted", 5, "1 id stands in front of the parent's id 5"),
    "a rewind": (PARENT, PARENT[:5], "cut_short", 5, "the prompt ends 15 ids before the parent does"),
    "one id far away": (
        [1, 2, 3],
        [1, 2, 9, 9, 9, 9, 3],
        "diverged",
        2,
        "the parent's ids from index 2 on do not follow",
    ),
    "three ids of many": (
        PARENT,
        [*PARENT[:5], *PARENT[17:]],
        "diverged",
        5,
        "the parent's ids from index 5 on do not follow",
    ),
    "four ids of many": (PARENT, [*PARENT[:5], *PARENT[16:]], "elided", 5, "the parent's ids 5 to 15 are gone"),
    "one id of eight": (PARENT[:8], [7], "truncated_left", 0, "the parent's first 7 ids are gone"),
    "one id of nine": (PARENT[:9], [8], "unrelated", 0, "the prompt shares nothing with the parent"),
}


@pytest.mark.parametrize("what", CASES)
def test_a_broken_prefix_is_told_to_the_number(what: str) -> None:
    parent, prompt, cause, at, detail = CASES[what]
    found = explain_difference(np.array(parent, np.int32), np.array(prompt, np.int32))
    assert (found.cause, found.index) == (cause, at), found
    assert found.detail.startswith(detail), found.detail


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_null_item_is_told_with_its_row(row: int) -> None:
    lists = [[1], [2, 3], [4]]
    lists[row] = [*lists[row], None]
    with pytest.raises(MisfitError, match=f"a null item in row {row}"):
        conform(pa.array(lists, pa.list_(pa.int32())), COLUMN["prompt_ids"].type)
