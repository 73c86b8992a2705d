"""Claude Code: a graph of lines gives each call its own prompt, and what is told twice counts once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from helpers_convert import LOGS, converted, write_lines

from memopd_trace import Invocation, read
from memopd_trace.convert import convert
from memopd_trace.convert.chat import Renderer

LOG = LOGS["claude-code"]


def line(kind: str, uuid: str, parent: str | None, content: Any = None, **more: Any) -> dict[str, Any]:
    message = {"role": kind, "content": content, "model": "m", "id": more.pop("id", None)}
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message, **more}


def shown(rows: list[Invocation], tokenizer: Path) -> list[str]:
    decode = Renderer(tokenizer).tokenizer.decode
    return [decode(r.prompt_ids) + decode(r.output_ids) for r in rows]


def test_a_session_with_parallel_tools_a_side_chain_and_a_compaction(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "claude-code", LOG, tokenizer=tokenizer)
    assert [(r.relation, r.parent_index, r.rewrite_kind, r.rewrite_evidence, r.agent_id) for r in rows] == [
        ("root", None, None, None, None),
        ("spawn", 0, None, None, "g"),
        ("extend", 0, None, None, None),
        ("rewrite", 2, "summary", "explicit", None),
    ]
    texts = shown(rows, tokenizer)
    assert texts[0].endswith('<call>Task {"prompt": "look"}</call><call>Task {}</call><|end|>')  # one call of two lines
    assert "<|start|>tool\ndid x<|end|>\n<|start|>tool\ndid y<|end|>" in texts[2]  # both, one beside the path
    assert "so far: done" in texts[3] and "did x" not in texts[3]
    assert "lost_calls" in result.losses.gaps and result.losses.versions == {"2"}


def test_a_repeated_line_counts_once_and_a_rewind_is_a_second_branch(tmp_path: Path, tokenizer: Path) -> None:
    log = [
        line("user", "u1", None, "go"),
        line("assistant", "a1", "u1", [{"type": "text", "text": "one"}], id="m1"),
        line("user", "u2", "a1", "left"),
        line("assistant", "a2", "u2", [{"type": "text", "text": "two"}], id="m2"),
        line("user", "u3", "a1", "right"),
        line("assistant", "a3", "u3", [{"type": "text", "text": "three"}], id="m3"),
    ]
    result, rows = converted(tmp_path, "claude-code", [*log, *log[:4]], tokenizer=tokenizer)
    assert [(r.relation, r.parent_index) for r in rows] == [("root", None), ("extend", 0), ("extend", 0)]
    assert "left" not in shown(rows, tokenizer)[2]
    assert result.losses.dropped_records["no call: a line told again"].number == 4


def test_of_two_results_of_a_tool_that_on_the_path_counts(tmp_path: Path, tokenizer: Path) -> None:
    result = {"type": "tool_result", "tool_use_id": "t"}
    log = [
        line("user", "u1", None, "go"),
        line("assistant", "a1", "u1", [{"type": "tool_use", "id": "t", "name": "ls", "input": {}}], id="m1"),
        line("user", "u2", "a1", [{**result, "content": "first"}]),
        line("user", "u3", "a1", [{**result, "content": "second"}]),
        line("assistant", "a2", "u2", [{"type": "text", "text": "one"}], id="m2"),
        line("assistant", "a3", "u3", [{"type": "text", "text": "two"}], id="m3"),
    ]
    _, rows = converted(tmp_path, "claude-code", log, tokenizer=tokenizer)
    texts = shown(rows, tokenizer)
    assert ["first" in text for text in texts] == [False, True, False] and "second" in texts[2]


def test_files_of_a_session_are_read_together(tmp_path: Path, tokenizer: Path) -> None:
    side = [record for record in LOG if record.get("isSidechain")]
    (tmp_path / "s" / "subagents").mkdir(parents=True)
    write_lines(tmp_path / "s.jsonl", [record for record in LOG if not record.get("isSidechain")])
    write_lines(tmp_path / "s" / "subagents" / "agent-g.jsonl", side)
    write_lines(tmp_path / "t.jsonl", [{**record, "sessionId": "t"} for record in LOG[:3]])  # resumed
    result = convert("claude-code", tmp_path, tmp_path / "t.parquet", tokenizer=tokenizer)
    rows = list(read(result.trace or "").iter_invocations())
    assert len(rows) == 4 and {r.episode_id for r in rows} == {"s"} and result.losses.balanced()
    assert [r.parent_index for r in rows if r.relation == "spawn"] == [0]
    assert result.losses.dropped_records["no call: a line told again"].number == 3


def test_an_older_side_chain_is_found_by_its_task(tmp_path: Path, tokenizer: Path) -> None:
    log = [{k: v for k, v in record.items() if k not in ("agentId", "toolUseResult")} for record in LOG]
    _, rows = converted(tmp_path, "claude-code", log, tokenizer=tokenizer)
    assert (rows[1].relation, rows[1].parent_index, rows[1].agent_id) == ("spawn", 0, "s1")


def test_a_parent_that_was_never_written_is_the_line_before(tmp_path: Path, tokenizer: Path) -> None:
    log = [
        line("user", "u1", None, "go"),
        line("assistant", "a1", "u1", [{"type": "text", "text": "one"}], id="m1"),
        line("user", "u2", "lost", "more"),
        line("assistant", "a2", "u2", [{"type": "text", "text": "two"}], id="m2"),
    ]
    result, rows = converted(tmp_path, "claude-code", log, tokenizer=tokenizer)
    assert [r.relation for r in rows] == ["root", "extend"]
    assert result.losses.degraded["a parent is not in the log: the line before is taken"].number == 1


def test_lines_that_a_compaction_kept_stand_behind_their_anchor(tmp_path: Path, tokenizer: Path) -> None:
    kept = {"preservedMessages": {"anchorUuid": "k", "uuids": ["u2", "a2"]}}
    log = [
        line("user", "u1", None, "go"),
        line("assistant", "a1", "u1", [{"type": "text", "text": "one"}], id="m1"),
        line("user", "u2", "a1", "more"),
        line("assistant", "a2", "u2", [{"type": "text", "text": "two"}], id="m2"),
        {"type": "system", "subtype": "compact_boundary", "uuid": "c", "parentUuid": None, "logicalParentUuid": "a2",
         "compactMetadata": kept},
        line("user", "k", "c", "summed up", isCompactSummary=True),
        line("user", "u3", "k", "and"),
        line("assistant", "a3", "u3", [{"type": "text", "text": "three"}], id="m3"),
    ]  # fmt: skip
    _, rows = converted(tmp_path, "claude-code", log, tokenizer=tokenizer)
    assert (rows[2].relation, rows[2].parent_index, rows[2].rewrite_kind) == ("rewrite", 1, "summary")
    words = ("summed up", "more", "two", "and", "three")
    places = [shown(rows, tokenizer)[2].find(word) for word in words]
    assert places == sorted(places) and places[0] > 0


def test_results_that_were_cleared_are_an_explicit_rewrite(tmp_path: Path, tokenizer: Path) -> None:
    use = [{"type": "tool_use", "id": "t", "name": "ls", "input": {}}]
    log = [
        line("user", "u1", None, "go"),
        line("assistant", "a1", "u1", use, id="m1"),
        line("user", "u2", "a1", [{"type": "tool_result", "tool_use_id": "t", "content": "a.txt"}]),
        line("assistant", "a2", "u2", [{"type": "text", "text": "one"}], id="m2"),
        {"type": "system", "subtype": "microcompact_boundary", "uuid": "c", "parentUuid": "a2",
         "microcompactMetadata": {"compactedToolIds": ["t"]}},
        line("user", "u3", "c", "more"),
        line("assistant", "a3", "u3", [{"type": "text", "text": "two"}], id="m3"),
    ]  # fmt: skip
    _, rows = converted(tmp_path, "claude-code", log, tokenizer=tokenizer)
    assert (rows[2].rewrite_kind, rows[2].rewrite_evidence) == ("elide", "explicit")
    assert "a.txt" in shown(rows, tokenizer)[1] and "a.txt" not in shown(rows, tokenizer)[2]


def test_errors_in_the_place_of_answers_are_no_calls(tmp_path: Path, tokenizer: Path) -> None:
    error = line("assistant", "e", "a3", [{"type": "text", "text": "API Error"}], isApiErrorMessage=True)
    hook = {"type": "hook", "uuid": "h", "parentUuid": "e"}
    again = line("user", "u9", "h", "again"), line("assistant", "a9", "u9", [{"type": "text", "text": "ok"}], id="m9")
    log = [*LOG[:8], error, hook, *again, *LOG[8:]]
    result, rows = converted(tmp_path, "claude-code", log, tokenizer=tokenizer)
    assert len(rows) == 5 and not any("API Error" in text for text in shown(rows, tokenizer))
    assert result.losses.dropped_records["no call: an error in the place of an answer"].number == 1
    assert (rows[3].relation, rows[3].parent_index) == ("extend", 2) and "a parent is" not in result.to_text()


SAMPLES = os.environ.get("MEMOPD_TRACE_SAMPLES")


@pytest.mark.skipif(SAMPLES is None, reason="MEMOPD_TRACE_SAMPLES names no folder of sample logs")
def test_sessions_of_others_convert(tmp_path: Path, tokenizer: Path) -> None:
    result = convert("claude-code", Path(SAMPLES or "") / "claude_code", tmp_path / "t.parquet", tokenizer=tokenizer)
    assert result.exit_code() == 0 and result.losses.balanced() and result.losses.rows == 10
