"""What is said of two calls that do not go on from each other, when their texts are known."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from helpers_cases import tokenizer
from helpers_trace import VECTORS
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_trace import Invocation
from memopd_trace.causes import explain
from memopd_trace.lineage import common_prefix, final_ids
from memopd_trace.pieces import Pieces, load_pieces

TOY = load_pieces(VECTORS / "toy-tokenizer")


def ids(*pieces: str) -> list[int]:
    return [TOY.vocabulary[p] for p in pieces]


USER = ids("<|start|>", "user", "\n", "?", "<|end|>", "\n")
MODEL = ids("<|start|>", "assistant", "\n")
PROMPT = [*USER, *MODEL]
ANSWER = ids("yes", "<|end|>")
NEXT = [*ids("\n"), *USER, *MODEL]
CALL = ids("<tool_call>", "{", '"', "a", '"', ": ", "2", "}", "</tool_call>", "<|end|>")
THOUGHT = ids("<think>", "hmm", "</think>", "\n\n")
EMPTY = ids("<think>", "\n\n", "</think>", "\n\n")


def told(output: list[int], prompt: list[int], before: list[int] = PROMPT, pieces: Pieces | None = TOY) -> str:
    def call(p: list[int], o: list[int]) -> Invocation:
        return Invocation(episode_id="e", invocation_index=0, model_id="m", prompt_ids=p, output_ids=o)

    parent, child = call(before, output), call(prompt, ANSWER)
    difference = explain(parent, child, 1, pieces)
    assert difference.index == common_prefix(final_ids(parent), child.prompt_ids)
    return difference.cause


@pytest.mark.parametrize(
    ("cause", "output", "prompt"),
    [
        ("none", ANSWER, [*PROMPT, *ANSWER, *NEXT]),
        ("retokenised", ids("1", "1", "<|end|>"), [*PROMPT, *ids("11", "<|end|>"), *NEXT]),
        ("retokenised", ids("\n", "\n", "<|end|>"), [*PROMPT, *ids("\n\n", "<|end|>"), *NEXT]),
        ("reserialised", CALL, [*PROMPT, *ids("<tool_call>", "{", '"', "a", '"', ":", "2", "}"), *CALL[8:], *NEXT]),
        ("double_encoded", CALL[1:], [*PROMPT, *ids('"', "{", '\\"', "a", '\\"', ":", "2", "}", '"'), *NEXT]),
        ("stripped_thinking", [*THOUGHT, *ANSWER], [*PROMPT, *ANSWER, *NEXT]),
        ("stripped_thinking", [*THOUGHT, *ANSWER], [*PROMPT, *EMPTY, *ANSWER, *NEXT]),
        ("response_prefix", ANSWER, [*PROMPT, *EMPTY, *ANSWER, *NEXT]),
        ("whitespace", ids("\n", "yes", "<|end|>"), [*PROMPT, *ANSWER, *NEXT]),
        ("separator", ANSWER, [*PROMPT[:5], *PROMPT[6:], *ANSWER, *NEXT]),
        ("controls", ANSWER, [i for i in PROMPT + ANSWER + NEXT if i not in (2, 3)]),
        ("double_bos", ANSWER, [1, 1, *PROMPT, *ANSWER, *NEXT]),
        ("system_inserted", ANSWER, [*ids("<|start|>", "system", "\n", "be good", "<|end|>", "\n"), *PROMPT, *ANSWER]),
        ("truncated_left", ids("1", "1", "<|end|>"), [*PROMPT[3:], *ids("11", "<|end|>"), *NEXT]),
        ("other_output", ANSWER, [*PROMPT, *ids("no", " so", "<|end|>"), *NEXT]),
        ("cut_short", ANSWER, PROMPT[:4]),
        ("unrelated", ANSWER, ids("Memory", "part")),
        ("diverged", ANSWER, [*PROMPT[:3], *ids("Memory", "part", "more", "find", "found", "sum", "hmm", "a", "b")]),
    ],
)
def test_the_cause_that_text_tells(cause: str, output: list[int], prompt: list[int]) -> None:
    before = [1, *PROMPT] if cause == "double_bos" else PROMPT
    assert told(output, prompt, before) == cause


def test_a_change_of_value_is_no_new_writing() -> None:
    other = [*PROMPT, *ids("<tool_call>", "{", '"', "a", '"', ":", "11", "}"), *CALL[8:], *NEXT]
    assert told(CALL, other) not in ("reserialised", "double_encoded")


def test_without_a_tokenizer_only_ids_speak() -> None:
    assert told([*THOUGHT, *ANSWER], [*PROMPT, *ANSWER, *NEXT], pieces=None) == "elided"
    assert told(ids("1", "1"), [*PROMPT, *ids("11"), *NEXT], pieces=None) == "diverged"


def test_a_character_that_is_cut_in_the_middle_is_no_difference(tmp_path: Path) -> None:
    """The parent's last piece is the first byte of two; the child has the whole character in one piece."""
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    pieces = load_pieces(tokenizer(tmp_path, {1: "q", 2: "<0xC3>", 3: "<0xA9>", 4: "é"}, decoder=decoder))
    assert pieces.text([1, 2]) == "q\ufffd" and pieces.text([1, 2, 3]) == pieces.text([1, 4]) == "qé"
    assert told([2], [1, 4], [1], pieces) == "retokenised"


@pytest.mark.parametrize("piece", ["{", "[", '{"a":', " ", "<think>", '"'])
def test_hostile_repetition_takes_no_time(piece: str, tmp_path: Path) -> None:
    pieces = load_pieces(tokenizer(tmp_path, {1: piece, 2: "x", 3: "y"}))
    many = [1] * 200_000
    start = time.perf_counter()
    told([2], [*many, 3], many, pieces)
    told([2], [3, *many], many, pieces)
    assert time.perf_counter() - start < 10


@settings(max_examples=200, deadline=None)
@given(*[st.lists(st.integers(0, 63), min_size=1, max_size=12)] * 2, st.lists(st.integers(0, 63), max_size=12))
def test_only_equal_texts_are_called_retokenised_and_only_extensions_none(
    before: list[int], prompt: list[int], output: list[int]
) -> None:
    cause = told(output, prompt, before)
    whole = [*before, *output]
    assert (cause == "none") == (prompt[: len(whole)] == whole)
    if cause == "retokenised":
        assert TOY.text(prompt).startswith(TOY.text(whole))
    elif cause not in ("none", "double_bos", "placeholder"):
        assert not TOY.text(prompt).startswith(TOY.text(whole))


def test_ids_without_a_piece_are_passed_over() -> None:
    assert TOY.text(np.array([-5, 41, 2**31 - 1, 64])) == "yes"
    assert told([41, 999], [*PROMPT, 41, 998]) in ("retokenised", "other_output", "diverged")
