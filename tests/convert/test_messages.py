"""Data sets of conversations: each message of the assistant is a call, whatever the form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_convert import LOGS, converted

from memopd_trace import read
from memopd_trace.convert import convert
from memopd_trace.convert.chat import Renderer


def test_each_answer_is_a_call_and_follows_the_one_before(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "messages", LOGS["messages"], tokenizer=tokenizer)
    assert [(r.relation, r.parent_index) for r in rows[:3]] == [("root", None), ("extend", 0), ("extend", 1)]
    assert {r.episode_id for r in rows[:3]} == {"7"} and len(rows) == 5
    text = Renderer(tokenizer).tokenizer.decode
    assert {text(r.output_ids) for r in rows[3:]} == {"yo"}  # the forms say the same
    assert text(rows[3].prompt_ids) == text(rows[4].prompt_ids)
    assert text(rows[1].output_ids) == '<call>add {"a": 1}</call>' and (rows[4].extra or {})["source"] == "x"
    assert "no_model" in result.losses.gaps and "no_parent" not in result.losses.gaps


def test_reasoning_that_a_template_takes_out_is_an_inferred_rewrite(tmp_path: Path, tokenizer: Path) -> None:
    thought = {"role": "assistant", "content": "yo", "reasoning_content": "hm"}
    asked = {"role": "user", "content": "hi"}
    log = [{"messages": [asked, thought, asked, {"role": "assistant", "content": "again"}]}]
    _, rows = converted(tmp_path, "messages", log, tokenizer=tokenizer)
    assert (rows[1].relation, rows[1].rewrite_kind, rows[1].rewrite_evidence) == (
        "rewrite", "strip_thinking", "inferred",
    )  # fmt: skip


def test_a_trial_that_harbor_exported_a_call_at_a_time_is_one_episode_and_no_call_is_counted_twice(
    tmp_path: Path, tokenizer: Path
) -> None:
    def said(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    first = [said("user", "make a file"), said("assistant", "ls")]
    second = [*first, said("user", "it is empty"), said("assistant", "touch a")]
    after = [said("user", "make a file; so far you have listed the folder"), said("assistant", "touch b")]
    log = [
        {"conversations": messages, "trial_name": "t", "episode": f"episode-{i}", "task": "files", "agent": i}
        for i, messages in enumerate((first, second, after))
    ]
    result, rows = converted(tmp_path, "messages", log, tokenizer=tokenizer)
    assert [(r.episode_id, r.task_id, r.relation) for r in rows] == [
        ("t", "files", "root"), ("t", "files", "extend"), ("t", "files", "rewrite"),
    ]  # fmt: skip
    assert result.losses.dropped_calls["told again"].number == 1 == result.losses.dropped_calls.total
    assert "lost_calls" not in result.losses.gaps  # a call that is told again is not lost
    assert rows[0].extra == {f"episode-{i}": f'{{"agent":{i}}}' for i in range(3)}


def test_calls_of_functions_in_sharegpt_are_calls_of_tools(tmp_path: Path, tokenizer: Path) -> None:
    turns = [("human", "1 + 2?"), ("function_call", '{"name": "add", "arguments": {"a": 1}}'), ("observation", "3"),
             ("gpt", "3")]  # fmt: skip
    tools = '[{"type": "function", "function": {"name": "add"}}]'
    log = [{"conversations": [{"from": who, "value": value} for who, value in turns], "tools": tools}]
    _, rows = converted(tmp_path, "messages", log, tokenizer=tokenizer)
    text = Renderer(tokenizer).tokenizer.decode
    assert text(rows[0].output_ids) == '<call>add {"a": 1}</call>' and "<|start|>tools" in text(rows[0].prompt_ids)
    assert "<|start|>tool\n3<|end|>" in text(rows[1].prompt_ids)


@pytest.mark.parametrize(
    ("record", "broken"),
    [({"text": "hi"}, 1), ({"messages": [{"role": "wizard", "content": "x"}]}, 1), ({"messages": []}, 0),
     ({"messages": [{"role": "user", "content": "x"}]}, 0), ({"messages": "hi"}, 1)],
)  # fmt: skip
def test_what_holds_no_answer_is_counted(record: Any, broken: int, tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "messages", [record], tokenizer=tokenizer)
    assert rows == [] and result.losses.broken == broken and result.losses.dropped_records.total == 1


def test_rows_of_a_parquet_file_are_conversations(tmp_path: Path, tokenizer: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    pq.write_table(
        pa.table({"messages": [messages] * 100, "prompt_id": [f"p{i}" for i in range(100)]}), tmp_path / "d.parquet"
    )
    (tmp_path / "e.parquet").write_bytes(b"PAR1 and no more")
    inputs = [tmp_path / "d.parquet", tmp_path / "e.parquet"]
    result = convert("messages", inputs, tmp_path / "out" / "t.parquet", tokenizer=tokenizer)
    assert result.losses.rows == 100 and result.losses.broken == 1 and result.losses.balanced()
    assert [r.episode_id for r in read(result.trace or "").iter_invocations()][:2] == ["p0", "p1"]


SAMPLES = os.environ.get("MEMOPD_TRACE_SAMPLES")


@pytest.mark.skipif(SAMPLES is None, reason="MEMOPD_TRACE_SAMPLES names no folder of sample logs")
def test_conversations_of_others_convert(tmp_path: Path, tokenizer: Path) -> None:
    result = convert("messages", Path(SAMPLES or "") / "hf_messages", tmp_path / "t.parquet", tokenizer=tokenizer)
    assert result.exit_code() == 0 and result.losses.balanced() and result.losses.rows == 128
