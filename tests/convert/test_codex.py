"""Codex: items between events become calls; rollbacks and compactions change the history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers_convert import LOGS, converted

from memopd_trace.convert.chat import Renderer

LOG = LOGS["codex"]


def said(role: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text" if role == "assistant" else "input_text", "text": text}]
    return {"type": "response_item", "payload": {"type": "message", "role": role, "content": content}}


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "event_msg", "payload": {"type": kind, **fields}}


def test_a_session_with_a_tool_a_rollback_and_a_compaction(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "codex", LOG, tokenizer=tokenizer)
    assert [(r.relation, r.parent_index, r.rewrite_kind, r.rewrite_evidence) for r in rows] == [
        ("root", None, None, None),
        ("extend", 0, None, None),
        ("rewrite", 1, "strip_thinking", "inferred"),  # the template does that
        ("rewrite", 1, "strip_thinking", "inferred"),  # the turn of call 2 was taken back
        ("rewrite", 3, "summary", "explicit"),
    ]
    texts = [Renderer(tokenizer).tokenizer.decode(r.prompt_ids) for r in rows]
    assert all("be brief" in text for text in texts) and "oops" in texts[2] and "oops" not in texts[3]
    assert "so far: done" in texts[4] and "a.txt" not in texts[4]
    assert {r.model_id for r in rows} == {"m"} and rows[0].episode_id == "s"
    assert result.losses.versions == {"0.99"} and "lost_calls" in result.losses.gaps


def test_a_count_that_is_told_again_is_not_that_of_the_next_call(tmp_path: Path, tokenizer: Path) -> None:
    count = event("token_count", info={"total_token_usage": {"input_tokens": 7},
                                       "last_token_usage": {"input_tokens": 7, "output_tokens": 1}})  # fmt: skip
    log = [
        said("user", "go"),
        said("assistant", "one"),
        count,
        count,
        said("user", "more"),
        said("assistant", "two"),
        count,
    ]
    result, rows = converted(tmp_path, "codex", log, tokenizer=tokenizer)
    counts = [c for reason, c in result.losses.degraded.items() if "another length" in reason and "prompt" in reason]
    assert len(rows) == 2 and [c.number for c in counts] == [1] and "the log counted 7" in counts[0].example


def test_encrypted_reasoning_is_a_gap_and_stands_in_no_prompt(tmp_path: Path, tokenizer: Path) -> None:
    hidden = {"type": "response_item", "payload": {"type": "reasoning", "summary": [], "encrypted_content": "e"}}
    log = [said("user", "go"), hidden, said("assistant", "one"), event("task_complete"), hidden, event("task_complete"),
           said("user", "more"), said("assistant", "two")]  # fmt: skip
    result, rows = converted(tmp_path, "codex", log, tokenizer=tokenizer)
    assert [r.relation for r in rows] == ["root", "extend"]
    assert result.losses.gaps["opaque_content"].number == 2
    assert result.losses.dropped_calls["all of the answer is encrypted"].number == 1


def test_behind_a_compaction_that_tells_no_history_nothing_is_made_up(tmp_path: Path, tokenizer: Path) -> None:
    after = [said("user", "more"), said("assistant", "two"), event("task_complete")]
    encrypted = [{"type": "compaction", "encrypted_content": "e"}]
    for number, payload in enumerate(({"message": "sum"}, {"message": "", "replacement_history": encrypted})):
        log = [said("user", "go"), said("assistant", "one"), {"type": "compacted", "payload": payload}, *after]
        (tmp_path / str(number)).mkdir()
        result, rows = converted(tmp_path / str(number), "codex", log, tokenizer=tokenizer)
        assert len(rows) == 1 and result.losses.dropped_calls.total == 1
        assert ("opaque_content" in result.losses.gaps) and "lost_calls" in result.losses.gaps


def test_a_turn_that_was_broken_off_and_one_call_after_another(tmp_path: Path, tokenizer: Path) -> None:
    log = [said("user", "go"), said("assistant", "one"), event("token_count", info={"last_token_usage": {}}),
           said("assistant", "two"), event("turn_aborted")]  # fmt: skip
    _, rows = converted(tmp_path, "codex", log, tokenizer=tokenizer)
    assert [r.finish_reason for r in rows] == [None, "abort"]


def test_the_oldest_files_have_no_payload(tmp_path: Path, tokenizer: Path) -> None:
    log = [{"id": "old", "timestamp": "2025-05-01T00:00:00Z", "instructions": "be brief"}, {"record_type": "state"},
           said("user", "go")["payload"], said("assistant", "one")["payload"]]  # fmt: skip
    result, rows = converted(tmp_path, "codex", log, tokenizer=tokenizer)
    assert rows[0].episode_id == "old" and result.losses.broken == 0
    assert "be brief" in Renderer(tokenizer).tokenizer.decode(rows[0].prompt_ids)


def test_a_rollback_of_more_turns_than_are_known_leaves_no_prompt(tmp_path: Path, tokenizer: Path) -> None:
    log = [said("user", "go"), said("assistant", "one"), event("thread_rolled_back", num_turns=2), said("user", "and"),
           said("assistant", "two")]  # fmt: skip
    result, rows = converted(tmp_path, "codex", log, tokenizer=tokenizer)
    assert len(rows) == 1 and result.losses.dropped_calls["no prompt: neither ids nor text"].number == 1


def test_a_call_of_a_kind_that_no_template_takes_is_dropped_with_its_name(tmp_path: Path, tokenizer: Path) -> None:
    shell = {"type": "response_item", "payload": {"type": "local_shell_call", "action": {}}}
    log = [said("user", "go"), said("assistant", "one"), shell, event("task_complete")]
    result, rows = converted(tmp_path, "codex", log, tokenizer=tokenizer)
    assert rows == [] and "'local_shell_call'" in str(list(result.losses.dropped_calls))
