"""OpenHands: event streams of both generations, condensation, ids, and logs of completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_convert import LOGS, converted

from memopd_trace import Invocation, read
from memopd_trace.convert import convert
from memopd_trace.convert.chat import Renderer

SDK = LOGS["openhands"]


def texts(tokenizer: Path, rows: list[Invocation]) -> list[str]:
    decode = Renderer(tokenizer).tokenizer.decode
    return [decode(row.prompt_ids) for row in rows]


def without_ids(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e["kind"] != "TokenEvent"]


def v0(number: int, source: str, **fields: Any) -> dict[str, Any]:
    return {"id": number, "timestamp": f"2025-02-01T00:00:{number:02}", "source": source, "message": "", **fields}


def v0_call(number: int, response: str, action: str = "run", **message: Any) -> dict[str, Any]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": action, "arguments": "{}"}}
    made = {"role": "assistant", "content": None, "tool_calls": [call], **message}
    answer = {"id": response, "model": "m", "choices": [{"message": made, "finish_reason": "tool_calls"}]}
    about = {"function_name": action, "tool_call_id": f"c{number}", "model_response": answer}
    return v0(number, "agent", action=action, args={"command": "ls"}, tool_call_metadata=about)


def v0_result(number: int, call: int, content: str) -> dict[str, Any]:
    about = {"tool_call_id": f"c{call}", "model_response": {"id": "x"}}
    return v0(number, "agent", observation="run", content=content, cause=call, tool_call_metadata=about)


V0 = [
    v0(0, "user", action="message", args={"content": "go"}),
    v0_call(1, "r1"),
    v0_result(2, 1, "one"),
    v0_call(3, "r2"),
    v0_result(4, 3, "two"),
    v0(5, "environment", observation="agent_state_changed", content=""),
    v0(6, "agent", action="condensation",
       args={"forgotten_events_start_id": 1, "forgotten_events_end_id": 2, "summary": "did one", "summary_offset": 1}),
    v0_call(7, "r3", "finish"),
]  # fmt: skip


def test_token_events_give_the_ids_of_the_answer_in_front_of_them(tmp_path: Path) -> None:
    _, (first, second) = converted(tmp_path, "openhands", SDK)
    assert first.prompt_ids.tolist() == list(range(100, 140)) and first.output_ids.tolist() == [7, 2]
    assert second.prompt_ids.tolist() == [*range(100, 120), 60] and second.token_source == "engine"
    assert first.output_logprobs is None and json.loads(first.messages or "")[-1]["tool_calls"][0]["id"] == "c1"


def test_a_condensation_is_an_explicit_rewrite_and_its_summary_stands_at_its_offset(
    tmp_path: Path, tokenizer: Path
) -> None:
    result, rows = converted(tmp_path, "openhands", without_ids(SDK), tokenizer=tokenizer)
    assert [(r.relation, r.rewrite_kind, r.rewrite_evidence) for r in rows] == [
        ("root", None, None), ("rewrite", "summary", "explicit"),
    ]  # fmt: skip
    assert [m["content"] for m in json.loads(rows[1].messages or "")] == ["be brief", "go", "looked", "done"]
    assert "a.txt" not in texts(tokenizer, rows)[1] and "the call that wrote a summary" in str(result.losses.gaps)


@pytest.mark.parametrize(
    ("forgotten", "left"),
    [(["e5-summary"], ["again"]), ([], ["looked", "again"]), (["an id of no event"], ["again"])],
    ids=["named", "kept", "of a version that names none"],
)
def test_a_second_summary_takes_the_place_of_the_first_or_stands_beside_it(
    forgotten: list[str], left: list[str], tmp_path: Path, tokenizer: Path
) -> None:
    more = {"id": "e8", "kind": "Condensation", "source": "environment", "forgotten_event_ids": ["e6", *forgotten],
            "summary": "again", "summary_offset": 3, "llm_response_id": "r4"}  # fmt: skip
    last = {**SDK[6], "id": "e9", "llm_response_id": "r5"}
    _, rows = converted(tmp_path, "openhands", [*without_ids(SDK), more, last], tokenizer=tokenizer)
    assert [m["content"] for m in json.loads(rows[2].messages or "")] == ["be brief", "go", *left, "done"]


def test_events_that_go_without_a_summary_are_an_elision(tmp_path: Path, tokenizer: Path) -> None:
    events = [{**e, "summary": None} if e["kind"] == "Condensation" else e for e in without_ids(SDK)]
    _, rows = converted(tmp_path, "openhands", events, tokenizer=tokenizer)
    assert (rows[1].rewrite_kind, rows[1].rewrite_evidence) == ("elide", "explicit")
    assert [m["content"] for m in json.loads(rows[1].messages or "")] == ["be brief", "go", "done"]


def test_parallel_actions_of_one_answer_are_one_call(tmp_path: Path) -> None:
    other = {**SDK[2], "id": "e2b", "thought": [], "tool_call": {"id": "c2", "name": "cat", "arguments": "{}"}}
    result, rows = converted(tmp_path, "openhands", [*SDK[:3], other, *SDK[3:]])
    answer = json.loads(rows[0].messages or "")[-1]
    assert [c["function"]["name"] for c in answer["tool_calls"]] == ["ls", "cat"] and len(rows) == 2
    assert result.losses.calls == 2


def test_a_folder_with_an_event_a_file_is_one_conversation_with_its_state(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "events"
    folder.mkdir(parents=True)
    for number, event in enumerate(SDK):
        (folder / f"event-{number:05}-0a-1b.json").write_text(json.dumps(event))
    state = {"agent": {"llm": {"model": "m", "temperature": 0.5}}, "stats": {}, "execution_status": "idle"}
    (tmp_path / "run" / "base_state.json").write_text(json.dumps(state))
    result = convert("openhands", tmp_path / "run", tmp_path / "t.parquet")
    rows = list(read(tmp_path / "t.parquet").iter_invocations())
    assert len(rows) == 2 and rows[0].model_id == "m" and result.losses.records == result.losses.converted == 9
    assert rows[0].sampling is not None and rows[0].sampling.temperature == 0.5


def test_an_event_that_is_broken_is_reported_and_the_others_are_converted(tmp_path: Path) -> None:
    broken = {**SDK[1], "id": "e1b", "llm_message": "text"}
    result, rows = converted(tmp_path, "openhands", [*SDK[:2], broken, SDK[1], *SDK[2:]])
    assert len(rows) == 2 and result.exit_code() == 1
    assert [i.place.rpartition(":")[2] for i in result.losses.issues] == ["3"]
    assert result.losses.dropped_records["no call: an event that was told before"].number == 1


def test_the_older_stream_forgets_a_range_and_keeps_the_answers_of_the_provider(
    tmp_path: Path, tokenizer: Path
) -> None:
    _, rows = converted(tmp_path, "openhands", V0, tokenizer=tokenizer)
    assert [(r.relation, r.rewrite_kind, r.finish_reason) for r in rows] == [
        ("root", None, "tool_calls"), ("extend", None, "tool_calls"), ("rewrite", "summary", "tool_calls"),
    ]  # fmt: skip
    assert [(m["role"], m["content"]) for m in json.loads(rows[2].messages or "")][:4] == [
        ("user", "go"), ("user", "did one"), ("assistant", None), ("tool", "two"),
    ]  # fmt: skip
    assert rows[2].terminated is True and rows[2].model_id == "m"


def test_the_history_of_an_evaluation_is_an_episode_of_its_task(tmp_path: Path, tokenizer: Path) -> None:
    pairs = [[V0[0]], V0[1:3], V0[3:5]]  # as older evaluations wrote it
    record = {"instance_id": "django-1", "history": pairs, "test_result": {"git_patch": "x"}}
    _, rows = converted(tmp_path, "openhands", [record], tokenizer=tokenizer)
    assert [r.task_id for r in rows] == ["django-1"] * 2 and "x" in (rows[0].extra or {})["test_result"]


def test_a_log_of_completions_has_the_exact_call(tmp_path: Path, tokenizer: Path) -> None:
    record = {"messages": [{"role": "user", "content": "go"}], "tools": None, "kwargs": {"temperature": 0.25},
              "response": {"id": "r", "model": "m", "choices": [{"message": {"role": "assistant", "content": "x"}}]},
              "cost": 0.1, "timestamp": 1756498939.0}  # fmt: skip
    _, (row,) = converted(tmp_path, "openhands", [record], tokenizer=tokenizer)
    assert row.sampling is not None and row.sampling.temperature == 0.25 and row.ended_at is not None
