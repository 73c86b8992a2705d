"""Anthropic's messages API: blocks become messages, streams become answers, and what is hidden is said."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from helpers_convert import LOGS, converted

from memopd_trace.convert.chat import Renderer


def record(content: list[Any], **response: Any) -> dict[str, Any]:
    answer = {"id": "a", "type": "message", "role": "assistant", "model": "m", "content": content, **response}
    return {"request": {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, "response": answer}


def test_a_tool_between_two_calls_is_rendered_and_the_second_extends_the_first(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "anthropic", LOGS["anthropic"], tokenizer=tokenizer)
    text = Renderer(tokenizer).tokenizer.decode
    assert text(rows[0].output_ids) == '<think>hm</think>ok<call>add {"a": 1}</call><|end|>'
    assert "<|start|>tool\n3<|end|>" in text(rows[1].prompt_ids) and text(rows[1].output_ids) == "it is 3<|end|>"
    assert [(r.relation, r.finish_reason, r.token_source) for r in rows] == [
        ("root", "tool_calls", "retokenized"), ("extend", "stop", "retokenized"),
    ]  # fmt: skip
    assert json.loads((rows[0].extra or {})["blocks"]) == [{"block": 0, "signature": "s"}]
    assert rows[0].sampling is not None and rows[0].sampling.temperature == 1.0
    assert "the log counted 13" in result.to_text()  # with what the cache gave


def test_a_stream_may_be_the_text_of_the_wire_and_ends_in_the_same_answer(tmp_path: Path, tokenizer: Path) -> None:
    events = copy.deepcopy(LOGS["anthropic"][1]["response"])
    events += [
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "t", "name": "add"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a"'}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": ": 2}"}},
    ]
    wire = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
    base = LOGS["anthropic"][1]
    forms = [{**base, "session_id": s, "response": r} for s, r in (("x", events), ("y", wire), ("z", {"body": wire}))]
    result, rows = converted(tmp_path, "anthropic", forms, tokenizer=tokenizer)
    assert result.losses.broken == 0
    answers = {Renderer(tokenizer).tokenizer.decode(r.output_ids) for r in rows}
    assert len(rows) == 3 and answers == {'it is 3<call>add {"a": 2}</call><|end|>'}


def test_errors_are_no_calls_wherever_they_stand(tmp_path: Path, tokenizer: Path) -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}
    records = [{**record([]), "response": error}, {**record([]), "response": [error]},
               {**record([]), "status_code": 529}, record([{"type": "text", "text": "yo"}])]  # fmt: skip
    result, rows = converted(tmp_path, "anthropic", records, tokenizer=tokenizer)
    assert len(rows) == 1 and result.losses.broken == 0 and result.losses.dropped_records.total == 3


def test_hidden_reasoning_is_a_gap_and_an_answer_of_nothing_else_is_lost(tmp_path: Path, tokenizer: Path) -> None:
    hidden = {"type": "redacted_thinking", "data": "e"}
    both = [
        record([hidden, {"type": "text", "text": "yo"}]),
        record([{"type": "thinking", "thinking": "", "signature": "s"}]),
    ]
    result, rows = converted(tmp_path, "anthropic", both, tokenizer=tokenizer)
    assert len(rows) == 1 and result.losses.gaps["opaque_content"].number == 2
    assert result.losses.dropped_calls["all of the answer is encrypted"].number == 1
    assert json.loads((rows[0].extra or {})["blocks"]) == [{"block": 0, "data": "e"}]


def test_a_prompt_that_the_server_cleared_is_not_made_up(tmp_path: Path, tokenizer: Path) -> None:
    edits = {"applied_edits": [{"type": "clear_tool_uses_20250919", "cleared_tool_uses": 2}]}
    records = [record([{"type": "text", "text": "yo"}], context_management=e) for e in (edits, {"applied_edits": []})]
    result, rows = converted(tmp_path, "anthropic", records, tokenizer=tokenizer)
    assert len(rows) == 1 and "server_state" in result.losses.gaps
    assert result.losses.dropped_calls["no prompt: neither ids nor text"].number == 1


@pytest.mark.parametrize("kind", ["image", "server_tool_use"])
def test_what_is_no_text_drops_the_call_with_its_type(kind: str, tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "anthropic", [record([{"type": kind}])], tokenizer=tokenizer)
    assert rows == [] and f"'{kind}'" in str(list(result.losses.dropped_calls))


def test_an_answer_without_its_request_has_no_prompt(tmp_path: Path, tokenizer: Path) -> None:
    answer = record([{"type": "text", "text": "yo"}])["response"]
    result, rows = converted(tmp_path, "anthropic", [answer, {"request": {}}], tokenizer=tokenizer)
    assert rows == [] and result.losses.dropped_calls.total == 1 and result.losses.broken == 1
