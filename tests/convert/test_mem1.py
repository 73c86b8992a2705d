"""MEM1: each call has its own prompt, of the question and the last turn alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers_convert import converted
from helpers_trainers import changed, mem1_rollout


def contents(row: Any) -> list[str]:
    return [m["content"] for m in json.loads(row.messages)]


def test_a_call_sees_the_question_and_the_last_turn_and_nothing_older(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "mem1", [mem1_rollout()], tokenizer=tokenizer)
    first = "<think>a</think><search>x</search>"
    second = "<think>b</think><search>y</search>"
    assert [contents(r) for r in rows] == [
        ["who?", first],
        ["who?", first + "<information>1</information>", second],
        ["who?", second + "<information>2</information>", "<think>c</think><answer>z</answer>"],
    ]
    assert {r.token_source for r in rows} == {"retokenized"} and result.exit_code() == 0


def test_what_the_state_stands_for_is_a_declared_rewrite_from_the_third_call_on(
    tmp_path: Path, tokenizer: Path
) -> None:
    _, rows = converted(tmp_path, "mem1", [mem1_rollout()], tokenizer=tokenizer)
    assert (rows[2].relation, rows[2].parent_index) == ("rewrite", 1)
    assert (rows[2].rewrite_kind, rows[2].rewrite_evidence) == ("memory", "explicit")
    assert rows[1].parent_index == 0 and rows[1].rewrite_evidence != "explicit"  # nothing was left out yet


def test_judgements_are_named_rewards_and_none_of_them_is_the_reward(tmp_path: Path, tokenizer: Path) -> None:
    _, rows = converted(tmp_path, "mem1", [mem1_rollout()], tokenizer=tokenizer)
    assert rows[2].rewards == {"Exact_match": 1.0, "Model_estimated_match": 1.0} and rows[2].reward is None
    assert (rows[2].terminated, rows[0].episode_id, rows[0].task_id) == (True, "4", "h")
    assert (rows[0].extra or {})["Golden_answer"] == '["z"]'


def test_a_response_without_its_state_is_completed_by_it(tmp_path: Path, tokenizer: Path) -> None:
    rollout = changed(mem1_rollout(), r0="<search>x</search>")
    _, rows = converted(tmp_path, "mem1", [rollout], tokenizer=tokenizer)
    assert contents(rows[0])[-1] == "<think>a</think><search>x</search>"


def test_a_last_answer_that_was_not_kept_is_a_lost_call(tmp_path: Path, tokenizer: Path) -> None:
    rollout = mem1_rollout()
    del rollout["r2"]
    result, rows = converted(tmp_path, "mem1", [rollout], tokenizer=tokenizer)
    assert len(rows) == 2 and "lost_calls" in result.losses.gaps and rows[1].terminated is None


def test_errors_and_other_memories_are_no_rollouts(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"index": 1, "error": "x"}, changed(mem1_rollout(), memories=["m"]), {"a": 1}, mem1_rollout()]
    result, rows = converted(tmp_path, "mem1", records, tokenizer=tokenizer)
    assert len(rows) == 3 and result.losses.broken == 1 and result.losses.dropped_records.total == 3
