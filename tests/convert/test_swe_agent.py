"""SWE-agent and mini-swe-agent: what each call read, demonstrations, and the provider's own answers."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from helpers_convert import LOGS, converted

SWE, MINI = LOGS["swe-agent"][0], LOGS["mini-swe-agent"][0]


def test_a_query_is_what_the_call_read_and_a_processor_shows_as_an_inferred_rewrite(
    tmp_path: Path, tokenizer: Path
) -> None:
    long = copy.deepcopy(SWE)
    late = [*long["trajectory"][1]["query"], {"role": "assistant", "content": "done"}]
    late[3] = {"role": "tool", "content": "gone", "tool_call_ids": ["c"]}
    long["trajectory"].append({"response": "more", "thought": "more", "query": late})
    result, rows = converted(tmp_path, "swe-agent", [long], tokenizer=tokenizer)
    assert [(r.relation, r.parent_index, r.rewrite_evidence) for r in rows] == [
        ("root", None, None), ("extend", 0, None), ("rewrite", 1, "inferred"),
    ]  # fmt: skip
    assert json.loads(rows[1].messages or "")[3]["content"] == "Old environment output: (1 lines omitted)"
    assert json.loads(rows[0].messages or "")[-1]["tool_calls"][0]["id"] == "c"  # of the history
    assert json.loads(rows[1].messages or "")[3]["tool_call_id"] == "c"
    assert "an answer's tool calls are not in the history" in result.losses.degraded  # of the added step


def test_settings_end_and_what_was_asked_beside_the_log_are_told(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "swe-agent", [SWE], tokenizer=tokenizer)
    assert rows[0].model_id == "m" and rows[0].sampling is not None and rows[0].sampling.temperature == 0
    assert rows[1].terminated is True and (rows[0].extra or {})["action"] == "ls"
    assert result.losses.gaps["lost_calls"].example == "3 calls were made, 2 are in the log"


def test_a_history_without_queries_is_taken_for_the_prompts_and_demonstrations_are_no_calls(
    tmp_path: Path, tokenizer: Path
) -> None:
    shown = {"role": "assistant", "content": "as in this example", "is_demo": True, "agent": "main"}
    value = {"history": [SWE["history"][0], shown, *SWE["history"][1:]]}
    result, rows = converted(tmp_path, "swe-agent", [value], tokenizer=tokenizer)
    assert len(rows) == 2 and json.loads(rows[0].messages or "")[1]["content"] == "as in this example"
    assert "processors" in result.losses.gaps["lossy_text"].example


def test_mini_takes_the_ids_of_the_providers_answer(tmp_path: Path) -> None:
    _, rows = converted(tmp_path, "mini-swe-agent", [MINI])
    assert [(r.relation, r.output_ids.tolist(), r.finish_reason) for r in rows] == [
        ("root", [7, 2], "stop"), ("extend", [8, 2], "stop"),
    ]  # fmt: skip
    assert rows[0].prompt_ids.tolist() == list(range(100, 140)) and rows[1].terminated is True
    assert rows[0].task_id == "i" and rows[0].sampling is not None


def test_mini_reads_bare_lists_of_messages(tmp_path: Path, tokenizer: Path) -> None:
    bare = [{"role": m["role"], "content": m["content"]} for m in MINI["messages"][:-1]]
    result, rows = converted(tmp_path, "mini-swe-agent", bare, tokenizer=tokenizer)
    assert [r.relation for r in rows] == ["root", "extend"] and result.losses.records == 5


def test_mini_reads_answers_of_the_responses_form(tmp_path: Path, tokenizer: Path) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "bash", "arguments": '{"command": "ls"}'}
    answer = {"object": "response", "model": "m", "output": [{"type": "reasoning", "summary": []}, call]}
    output = {"type": "function_call_output", "call_id": "c", "output": "a.py"}
    messages = [*MINI["messages"][:2], answer, output, {**answer, "output": [call]}]
    _, rows = converted(tmp_path, "mini-swe-agent", [{**MINI, "messages": messages}], tokenizer=tokenizer)
    said = json.loads(rows[1].messages or "")
    assert [m["role"] for m in said] == ["system", "user", "assistant", "tool", "assistant"]
    assert said[2]["tool_calls"][0]["function"]["name"] == "bash" and said[3]["content"] == "a.py"


def test_mini_says_that_a_limit_cut_it(tmp_path: Path) -> None:
    info = {**MINI["info"], "exit_status": "LimitsExceeded", "model_stats": {"api_calls": 4}}
    result, rows = converted(tmp_path, "mini-swe-agent", [{**MINI, "info": info}])
    assert rows[1].truncated is True and rows[1].terminated is None and result.losses.gaps["lost_calls"].number == 2
