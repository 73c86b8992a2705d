"""How calls follow from one another: declared, or found by their ids, with every guess counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_trace import Invocation
from memopd_trace.convert.assemble import in_order
from memopd_trace.convert.draft import Call
from memopd_trace.convert.lineage import Declared, resolve
from memopd_trace.convert.losses import Losses
from memopd_trace.pieces import load_pieces

TASK = list(range(100, 140))


def row(index: int, prompt: Sequence[int], output: Sequence[int], **columns: object) -> Invocation:
    fields = {"prompt_ids": np.array(prompt, np.int32), "output_ids": np.array(output, np.int32), **columns}
    return Invocation(episode_id="e", invocation_index=index, model_id="m", **fields)  # type: ignore[arg-type]


def lineage(
    calls: Sequence[tuple[Sequence[int], Sequence[int]]], words: dict[int, Declared] | None = None
) -> tuple[list[tuple[object, ...]], Losses]:
    """(parent, relation, kind, evidence) of each call, and what was counted."""
    losses = Losses()
    rows = [row(i, *ids) for i, ids in enumerate(calls)]
    found = resolve(rows, [(words or {}).get(i, Declared(key=str(i))) for i in range(len(rows))], losses)
    names = ("parent_index", "relation", "rewrite_kind", "rewrite_evidence")
    return [tuple(columns.get(name) for name in names) for columns in found], losses


ROOT = (None, "root", None, None)


def extend(parent: int) -> tuple[object, ...]:
    return (parent, "extend", None, None)


def test_a_growing_history_is_a_chain() -> None:
    calls, prompt = [], TASK
    for turn in range(5):
        calls.append((prompt, [7, turn, 2]))
        prompt = [*prompt, 7, turn, 2, 50 + turn]
    found, losses = lineage(calls)
    assert found == [ROOT, *map(extend, range(4))] and not losses.degraded
    assert losses.gaps["no_parent"].number == 4


def test_interleaved_agents_find_their_own_parents() -> None:
    other = TASK[::-1]
    calls = [(TASK, [1, 2]), (other, [3, 2]), ([*TASK, 1, 2, 9], [4, 2]), ([*other, 3, 2, 9], [5, 2])]
    found, losses = lineage(calls)
    assert found == [ROOT, ROOT, extend(0), extend(1)]
    (reason,) = losses.degraded
    assert reason.startswith("a context of its own")


def test_of_two_branches_the_longest_is_taken_and_counted() -> None:
    calls = [(TASK, [1, 2]), ([*TASK, 1], [2, 3, 4]), ([*TASK, 1, 2, 3, 4, 9], [5, 2])]
    found, losses = lineage(calls, {1: Declared(relation="root")})  # a branch of its own, whatever its ids
    assert found[2] == extend(1)
    assert losses.degraded["several calls could be the parent: the longest is taken"].number == 1
    assert "1 or 0" in losses.degraded["several calls could be the parent: the longest is taken"].example


def test_the_same_prompt_again_is_a_fork_and_says_that_it_may_be_a_second_try() -> None:
    found, losses = lineage([(TASK, [1, 2]), (TASK, [3, 2]), (TASK[:30], [4, 2])])
    assert found[1] == (0, "fork", None, None) and found[2][1] == "fork"
    assert losses.degraded["a prompt that was answered before: not told whether it is a second try"].number == 2


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ([*TASK[:20], *TASK[30:], 1, 2, 9], "elide"),
        ([*TASK[10:], 1, 2, 9], None),  # shares nothing in front: a context of its own, as far as ids tell
        ([*TASK, 1], "rewind"),
        ([*TASK[:20], 8, 8, 8, 8, 8, 8], "opaque"),
    ],
)
def test_what_ids_show_of_a_rewrite(prompt: list[int], kind: str | None) -> None:
    found, losses = lineage([(TASK, [1, 2]), (prompt, [3, 2])])
    assert found[1] == (ROOT if kind is None else (0, "rewrite", kind, "inferred"))
    assert ("a rewrite of an unknown kind" in losses.degraded) == (kind == "opaque")


THINK = [90, 91, 5, 5, 6, 6, 7, 92, 93, 40, 41, 42, 43, 2]  # marks 90 and 92, then what was said


@pytest.mark.parametrize(
    ("kept", "kind"),
    [
        ([90, 94, 92, 93, 40, 41, 42, 43, 2], "strip_thinking"),  # an empty block
        ([40, 41, 42, 43, 2], "strip_thinking"),  # the whole block is gone
        ([90, 91, 5, 5, 40, 41, 42, 43, 2], "elide"),  # something else than the head of the output is gone
        ([8, 8, 8, 8, 8, 8, 8], "opaque"),  # another answer
    ],
)
def test_reasoning_that_is_gone_is_known_where_the_log_says_that_there_was_some(kept: list[int], kind: str) -> None:
    calls = [(TASK, THINK), ([*TASK, *kept, 50, 51], [60, 2])]
    found, _ = lineage(calls, {0: Declared(reasoned=True)})
    assert found[1] == (0, "rewrite", kind, "inferred")
    assert lineage(calls)[0][1][2] != "strip_thinking"  # the log did not say so


def test_with_a_tokenizer_text_tells_the_kind(tokenizer: Path) -> None:
    pieces = load_pieces(tokenizer)
    ids = pieces.vocabulary
    text = lambda s: [ids[c] for c in s]  # noqa: E731
    prompt = [ids["<|start|>"], *text("user\nwhat is it?"), ids["<|end|>"]]
    output = [ids["<think>"], *text("let me see"), ids["</think>"], *text("it is red"), ids["<|end|>"]]
    after = [*prompt, *text("it is red"), ids["<|end|>"], *text("\nand now?")]
    losses = Losses()
    found = resolve([row(0, prompt, output), row(1, after, [ids["a"]])], [Declared(), Declared()], losses, pieces)
    assert found[1]["rewrite_kind"] == "strip_thinking" and found[1]["rewrite_evidence"] == "inferred"


def test_a_declared_parent_holds_over_a_longer_match() -> None:
    calls = [(TASK, [1, 2]), ([*TASK, 1, 2], [3, 2]), ([*TASK, 1, 2, 3, 2], [4, 2])]
    found, losses = lineage(calls, {2: Declared(parent="0")})
    assert found[2] == extend(0) and "no_parent" in losses.gaps


def test_a_declared_rewrite_is_explicit_and_one_that_changed_nothing_is_none() -> None:
    changed, grown = ([*TASK[:20], 8, 9], [3, 2]), ([*TASK, 1, 2, 9], [3, 2])
    words = {1: Declared(parent="0", rewrite_kind="summary")}
    assert lineage([(TASK, [1, 2]), changed], words)[0][1] == (0, "rewrite", "summary", "explicit")
    found, losses = lineage([(TASK, [1, 2]), grown], words)
    assert found[1] == extend(0) and "declared a rewrite, and no id changed" in losses.degraded


def test_declared_forks_retries_and_spawns() -> None:
    calls = [(TASK, [1, 2]), (TASK, [3, 2]), ([*TASK[:20], 5], [6, 2]), ([7, 8, 9], [6, 2])]
    words = {i: Declared(parent="0", relation=r) for i, r in ((1, "retry"), (2, "fork"), (3, "spawn"))}
    found, losses = lineage(calls, words)
    assert [f[:2] for f in found] == [(None, "root"), (0, "retry"), (0, "fork"), (0, "spawn")] and not losses.gaps


def test_tries_of_one_call_are_numbered() -> None:
    retry = Declared(parent="0", relation="retry")
    rows = [row(0, TASK, [1, 2]), row(1, TASK, [3, 2]), row(2, TASK, [4, 2]), row(3, TASK, [5, 2], attempt=7)]
    found = resolve(rows, [Declared(key="0"), retry, retry, retry], Losses())
    assert [columns["attempt"] for columns in found] == [None, 1, 2, 7]


def test_one_number_of_two_tries_is_left_out() -> None:
    rows = [row(0, TASK, [1, 2]), *(row(i, [*TASK, 1, 2, 9], [i, 2], attempt=0) for i in (1, 2))]
    losses = Losses()
    found = resolve(rows, [Declared()] * 3, losses)
    assert [columns["relation"] for columns in found] == ["root", "extend", "extend"]
    assert [columns["attempt"] for columns in found] == [None, 0, None]
    assert "the number of an attempt occurs twice, and is left out" in losses.degraded
    assert "a prompt that was answered before: not told whether it is a second try" in losses.degraded


def test_what_is_declared_against_the_ids_is_not_taken() -> None:
    calls = [(TASK, [1, 2]), ([*TASK, 1, 2, 9], [3, 2])]
    found, losses = lineage(calls, {1: Declared(parent="0", relation="retry")})
    assert found[1] == extend(0) and "declared a retry, and the ids say otherwise" in losses.degraded
    found, losses = lineage(calls, {1: Declared(parent="lost")})
    assert found[1] == extend(0) and "a declared parent is not in the log" in losses.degraded


def test_a_rejected_call_is_nobodys_parent() -> None:
    rows = [row(0, TASK, [1, 2], accepted=False), row(1, TASK, [3, 2]), row(2, [*TASK, 1, 2, 9], [4, 2])]
    losses = Losses()
    found = resolve(rows, [Declared(key="a"), Declared(), Declared(parent="a")], losses)
    assert found[2]["parent_index"] == 1 and "declared to follow a rejected call" in losses.degraded


@settings(deadline=None)
@given(order=st.permutations(range(6)), parents=st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_no_call_stands_in_front_of_its_declared_parent(order: list[int], parents: list[int]) -> None:
    calls = [Call(place=str(i), key=str(i), parent=None if parents[i] == i else str(parents[i])) for i in order]
    losses = Losses()
    placed = in_order(calls, losses)
    assert sorted(c.place for c in placed) == sorted(c.place for c in calls)
    seen: set[str | None] = set()
    for call in placed:
        assert call.parent is None or call.parent in seen
        seen.add(call.key)
    cyclic = any(c.parent is None for c in placed if parents[int(c.place)] != int(c.place))
    assert cyclic == ("declared parents go in a circle, and one is left out" in losses.degraded)
