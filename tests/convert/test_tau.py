"""tau-bench and tau2-bench: the agent's calls out of a conversation of two models."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from helpers_convert import LOGS, converted

RUN, RESULTS = LOGS["tau"]


def test_the_agents_messages_are_calls_and_the_users_are_counted_as_lost(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "tau", [RUN], tokenizer=tokenizer)
    assert [(r.relation, r.reward, r.group_id, r.episode_id) for r in rows] == [
        ("root", None, "3", "3/0"), ("extend", 0.0, "3", "3/0"),
    ]  # fmt: skip
    assert result.losses.gaps["lost_calls"].number == 2 and len(rows) == 2


def test_tau2_shows_the_agent_neither_the_users_tools_nor_takes_a_greeting_for_a_call(
    tmp_path: Path, tokenizer: Path
) -> None:
    _, rows = converted(tmp_path, "tau", [RESULTS], tokenizer=tokenizer)
    said = json.loads(rows[1].messages or "")
    assert [m["content"] for m in said] == ["Hi!", "where is it?", "", "lost", "lost"] and len(rows) == 2
    assert said[2]["tool_calls"][0]["function"] == {"name": "find", "arguments": {"id": 1}}
    assert said[3]["tool_call_id"] == "c" and rows[1].finish_reason == "stop"
    assert (rows[1].reward, rows[1].rewards, rows[1].terminated, rows[1].model_id) == (1.0, {"DB": 1.0}, True, "m")


def test_messages_of_several_tools_are_taken_apart(tmp_path: Path, tokenizer: Path) -> None:
    results = copy.deepcopy(RESULTS)
    messages = results["simulations"][0]["messages"]
    messages[3] = {"role": "tool", "tool_messages": [messages[3], {**messages[3], "id": "d", "content": "found"}]}
    _, rows = converted(tmp_path, "tau", [results], tokenizer=tokenizer)
    assert [m["content"] for m in json.loads(rows[1].messages or "")][3:5] == ["lost", "found"]


def test_a_simulation_that_is_broken_costs_no_other(tmp_path: Path, tokenizer: Path) -> None:
    good = RESULTS["simulations"][0]
    results = {**RESULTS, "simulations": [good, {**good, "id": "s2", "messages": [1]}]}
    result, rows = converted(tmp_path, "tau", [results], tokenizer=tokenizer)
    assert len(rows) == 2 and result.losses.issues[0].reason.startswith("simulations[1].messages[0]")
    assert (rows[0].extra or {})["timestamp"] == "2026-01-01"  # of the results


def test_results_that_hold_no_text_are_refused_with_a_reason(tmp_path: Path, tokenizer: Path) -> None:
    voice = {"id": "v", "task_id": "1", "ticks": [{}], "messages": [], "reward_info": {"reward": 1.0}}
    records = [{"info": {}, "tasks": []}, voice]
    result, rows = converted(tmp_path, "tau", records, tokenizer=tokenizer)
    assert rows == [] and result.exit_code() == 3
    assert any(r.startswith("no call: results without simulations") for r in result.losses.dropped_records)
    assert result.losses.dropped_calls.total == 1
