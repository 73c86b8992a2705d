"""Rules that look for a parent among all earlier calls, and those about turns: where each begins and keeps silent."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_cases import call, extend, judge, rewrite, root, tokenizer
from helpers_trace import valid
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_trace import Invocation, TraceMetadata
from memopd_trace.rules.ancestry import parent_ambiguous, parent_other
from memopd_trace.rules.episode import Run
from memopd_trace.rules.registry import Hit, Rule

METADATA = TraceMetadata.model_validate(valid("plain")["metadata"])
short = st.lists(st.integers(5, 6), min_size=1, max_size=5)
outputs = st.lists(st.integers(5, 6), max_size=2)


def episode(calls: list[tuple[list[int], list[int]]], **more: Any) -> Run:
    run = Run("e", METADATA)
    for i, (prompt, output) in enumerate(calls):
        row = Invocation(
            episode_id="e",
            invocation_index=i,
            model_id="m",
            prompt_ids=prompt,
            output_ids=output,
            **(more if i else {}),
        )
        run.add(i, row)
    return run


def hits(rule: Rule, run: Run) -> list[Hit]:
    assert rule.check is not None
    return list(rule.check(run))


def branches(calls: list[tuple[list[int], list[int]]], at: int, guessed: dict[int, int]) -> list[int]:
    """By hand: the calls whose whole state begins prompt `at`, longest and latest first, without the ancestors of one
    that was taken."""
    prompt = calls[at][0]
    fits = [i for i in range(at) if calls[i][1] and prompt[: sum(map(len, calls[i]))] == [*calls[i][0], *calls[i][1]]]
    found: list[int] = []
    above: set[int] = set()
    for i in sorted(fits, key=lambda i: (sum(map(len, calls[i])), i), reverse=True):
        if i not in above:
            found.append(i)
            step: int | None = i
            while step is not None:
                above.add(step)
                step = guessed.get(step)
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(short, outputs), min_size=2, max_size=7))
def test_parents_are_guessed_as_by_hand(calls: list[tuple[list[int], list[int]]]) -> None:
    guessed: dict[int, int] = {}
    expected = {}
    for at in range(len(calls)):
        found = branches(calls, at, guessed)
        if found:
            guessed[at] = found[0]
        if len(found) > 1:
            expected[at] = str(found[0])
    assert {h.row: h.expected for h in hits(parent_ambiguous, episode(calls))} == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(short, outputs), min_size=2, max_size=7))
def test_a_root_that_goes_on_from_another_call_is_named(calls: list[tuple[list[int], list[int]]]) -> None:
    expected = {at: str(found[0]) for at in range(len(calls)) if (found := branches(calls, at, {}))}
    assert {h.row: h.expected for h in hits(parent_other, episode(calls, relation="root"))} == expected


def test_a_rejected_call_and_one_without_output_are_nobody_s_parent(tmp_path: Path) -> None:
    first = root([5], [6])
    assert judge(tmp_path, first, root([5, 6, 7], [8])).codes == {"W-PARENT-OTHER"}
    assert judge(tmp_path, {**first, "accepted": False}, root([5, 6, 7], [8])).clean
    aborted = root([5], [], finish_reason="abort")
    assert judge(tmp_path, aborted, root([5, 6, 7], [8])).clean


def test_a_rewrite_may_keep_the_state_of_its_own_ancestor(tmp_path: Path) -> None:
    """Call 2 drops what call 1 added, and keeps all of call 0; a rewind says so, an elision may look so."""
    first, second = root([5], [6]), extend([5, 6, 7], [8])
    for kind in ("elide", "rewind"):
        assert judge(tmp_path, first, second, rewrite(kind, [5, 6, 9], [3], 1)).clean
    other = root([40], [41])
    stray = judge(tmp_path, first, other, rewrite("elide", [5, 6, 9], [3], 1))
    assert stray.codes == {"W-PARENT-OTHER"} and stray.findings[0].expected == "0"
    for kind in ("rewind", "opaque", "x_own"):
        assert judge(tmp_path, first, other, rewrite(kind, [5, 6, 9], [3], 1)).clean


def test_a_row_without_lineage_hands_its_guessed_ancestors_on(tmp_path: Path) -> None:
    """The chain from 2 to 0 runs through row 1, which says nothing."""
    chain = [root([5], [6]), call([5, 6, 7], [8]), extend([5, 6, 7, 8, 9], [10], 1)]
    assert judge(tmp_path, *chain, rewrite("elide", [5, 6, 11], [12], 2)).clean
    report = judge(tmp_path, *chain[:2], extend([5, 6, 7, 8, 9], [10], 1), rewrite("elide", [5, 6, 11], [12], 0))
    assert report.codes == {"W-REWRITE-KIND"}  # nothing changed; what it says of the parent is heard


def test_an_equal_state_of_another_call_is_no_other_parent(tmp_path: Path) -> None:
    """Two samples of one prompt came out alike: whichever is the parent, nothing else was gone on from."""
    rows = [root([5], [6]), call([5], [6], 0, "fork"), extend([5, 6, 7], [8], 0)]
    assert judge(tmp_path, *rows, rewrite("elide", [5, 6, 9], [10], 2)).clean
    rows[1]["output_ids"], rows[2]["relation"] = [6, 11], "extend"
    report = judge(tmp_path, *rows, rewrite("elide", [5, 6, 11, 9], [10], 2))
    assert report.codes == {"W-PARENT-OTHER"} and report.findings[0].expected == "1"


def test_equal_ids_in_another_state_are_a_rewrite(tmp_path: Path) -> None:
    first = root([5], [6])
    moved = rewrite("memory", [5, 6, 7], [8], position_ids=[3, 4, 5, 6])
    assert judge(tmp_path, first, moved).clean
    assert judge(tmp_path, first, {**moved, "position_ids": None}).codes == {"W-REWRITE-KIND"}


def test_a_long_episode_without_lineage_takes_no_time() -> None:
    prompt = np.arange(5, 2005, dtype=np.int32)
    calls = []
    for i in range(400):
        calls.append((prompt[: 5 * i + 1], prompt[5 * i + 1 : 5 * i + 4]))
    start = time.perf_counter()
    assert not (hits(parent_ambiguous, episode(calls)))
    assert time.perf_counter() - start < 10


PIECES = {2: "<|end|>", 3: "<|start|>", 13: "\n", 20: "a", 21: "b"}


@pytest.mark.parametrize(
    ("ids", "offset"),
    [
        ([20, 21], None),
        ([3, 20, 2, 13], None),  # a turn in its frame
        ([3, 20, 2], None),
        ([3, 3, 20, 21], None),
        ([13, 3, 20, 2, 13], None),  # with what separates it from the turn in front
        ([2, 13, 3, 20, 2, 13], None),  # and with the end of that turn
        ([13, 20, 3, 21], 2),
        ([13, 13, 3, 20, 2], 2),
        ([2], None),  # a mark alone
        ([3, 20, 2, 13, 13], 2),  # something stands behind the turn
        ([3, 20, 3, 20, 2], 2),
        ([20, 2], 1),
        ([20, 3, 21], 1),
    ],
)
def test_a_frame_is_no_stray_control_id(ids: list[int], offset: int | None, tmp_path: Path) -> None:
    read = tokenizer(tmp_path, PIECES, (2, 3))
    row = root([21, *ids], [20], segments=[{"start": 1, "stop": len(ids) + 1, "kind": "observation"}])
    report = judge(tmp_path, row, given=read)
    assert report.codes == ({"W-CONTROL-IN-CONTENT"} if offset is not None else set())
    assert offset is None or f"at offset {offset}" in report.findings[0].message


def test_a_copy_of_what_the_model_wrote_may_hold_its_stop_id(tmp_path: Path) -> None:
    segment = {"start": 0, "stop": 4, "kind": "observation", "source_index": 0, "source_start": 0}
    rows = (
        root([5, 6], [2, 7]),
        rewrite("memory", [5, 6, 2, 7, 9], [8], segments=[segment], position_ids=[1, 2, 3, 4, 5, 6]),
    )
    assert judge(tmp_path, *rows, bos_id=2).clean


def test_retries_of_a_retry_are_one_family(tmp_path: Path) -> None:
    rows = [
        root([5], [6], attempt=0, accepted=False),
        call([5], [7], 0, "retry", attempt=1, accepted=False),
        call([5], [8], 1, "retry", attempt=2, accepted=True),
    ]
    assert judge(tmp_path, *rows).clean
    rows[2]["attempt"] = 0
    report = judge(tmp_path, *rows)
    assert report.codes == {"E-ATTEMPT-DUPLICATE"} and "of the call of invocation 0" in report.findings[0].message


def test_spawned_contexts_may_ask_the_same(tmp_path: Path) -> None:
    spawned = [call([9], [7], 0, "spawn", attempt=0, agent_id=f"s{i}") for i in range(2)]
    assert judge(tmp_path, root([5], [6]), *spawned).clean
