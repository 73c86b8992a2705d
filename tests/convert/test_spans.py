"""Spans: OpenTelemetry's GenAI conventions and OpenInference's, in OTLP, as SDKs print them, and bare; and Langfuse."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from helpers_convert import LOGS, converted


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    """Printed spans as an OTLP document."""

    def value(item: Any) -> dict[str, Any]:
        if isinstance(item, bool):
            return {"boolValue": item}
        if isinstance(item, int):
            return {"intValue": str(item)}
        if isinstance(item, float):
            return {"doubleValue": item}
        if isinstance(item, list):
            return {"arrayValue": {"values": [value(v) for v in item]}}
        if isinstance(item, dict):
            return {"kvlistValue": {"values": [{"key": k, "value": value(v)} for k, v in item.items()]}}
        return {"stringValue": item}

    made = [
        {"traceId": s["context"]["trace_id"], "spanId": s["context"]["span_id"], "name": s["name"],
         "startTimeUnixNano": f"{1_756_498_939 + i}000000000",
         "attributes": [{"key": k, "value": value(v)} for k, v in s["attributes"].items()]}
        for i, s in enumerate(spans)
    ]  # fmt: skip
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "x"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "s"}, "spans": made}]}]}


def test_genai_messages_become_a_chat_with_instructions_tools_and_reasoning(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "otel", LOGS["otel"], tokenizer=tokenizer)
    assert [r.episode_id for r in rows] == ["t", "t"] and rows[0].finish_reason == "tool_calls"
    said = json.loads(rows[0].messages or "")
    assert [m["role"] for m in said] == ["system", "user", "assistant"] and said[2]["reasoning_content"] == "hm"
    assert said[2]["tool_calls"][0]["function"] == {"name": "ls", "arguments": {"at": "."}}
    assert json.loads((rows[0].extra or {})["tools"])[0]["function"]["name"] == "ls"
    assert [m["content"] for m in json.loads(rows[1].messages or "")] == ["be brief", "what is there?", "a.txt"]
    assert result.losses.dropped_records["no call: a span that is none of a model"].number == 1


def test_an_otlp_document_gives_the_same_rows_as_printed_spans(tmp_path: Path, tokenizer: Path) -> None:
    for name in ("otel", "openinference"):
        spans = sorted(LOGS[name], key=lambda s: s["start_time"])
        _, printed = converted(tmp_path, name, spans, tokenizer=tokenizer)
        result, packed = converted(tmp_path, name, [otlp(*spans)], tokenizer=tokenizer)
        assert [r.prompt_ids.tolist() for r in printed] == [r.prompt_ids.tolist() for r in packed]
        assert [r.relation for r in printed] == [r.relation for r in packed]
        assert result.losses.records == 3 and packed[0].started_at is not None and "resource" in (packed[0].extra or {})


def test_structured_messages_and_tool_answers_are_read_as_json_is(tmp_path: Path, tokenizer: Path) -> None:
    span = copy.deepcopy(LOGS["otel"][0])
    results = [{"type": "tool_call_response", "id": "c", "response": {"files": ["a"]}},
               {"type": "tool_call_response", "id": "d", "response": "b"}]  # fmt: skip
    call = {"role": "assistant", "parts": [{"type": "tool_call", "id": "c", "name": "ls", "arguments": {}}]}
    span["attributes"] |= {"gen_ai.input.messages": [call, {"role": "tool", "parts": results}],
                           "gen_ai.conversation.id": "talk"}  # fmt: skip
    _, printed = converted(tmp_path, "otel", [span], tokenizer=tokenizer)
    _, packed = converted(tmp_path, "otel", [otlp(span)], tokenizer=tokenizer)
    for (row,) in (printed, packed):
        said = json.loads(row.messages or "")
        assert [m["role"] for m in said] == ["system", "assistant", "tool", "tool", "assistant"]
        assert said[2]["content"] == '{"files":["a"]}' and row.episode_id == "talk"


def test_messages_in_events_and_evaluations_are_read(tmp_path: Path, tokenizer: Path) -> None:
    span = copy.deepcopy(LOGS["otel"][0])
    moved = {n: span["attributes"].pop(n) for n in ("gen_ai.input.messages", "gen_ai.output.messages")}
    score = {"gen_ai.evaluation.name": "fit", "gen_ai.evaluation.score.value": 0.5}
    span["events"] = [{"name": "gen_ai.client.inference.operation.details", "attributes": moved},
                      {"name": "gen_ai.evaluation.result", "attributes": score}]  # fmt: skip
    _, (row,) = converted(tmp_path, "otel", [span], tokenizer=tokenizer)
    assert row.rewards == {"fit": 0.5} and row.reward is None


def test_several_answers_are_forks_and_content_that_was_not_captured_is_counted(
    tmp_path: Path, tokenizer: Path
) -> None:
    several, bare = copy.deepcopy(LOGS["otel"][0]), copy.deepcopy(LOGS["otel"][0])
    answers = [{"role": "assistant", "parts": [{"type": "text", "content": c}]} for c in ("x", "y")]
    several["attributes"] |= {"gen_ai.output.messages": json.dumps(answers), "gen_ai.response.id": "r"}
    for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
        del bare["attributes"][name]
    result, rows = converted(tmp_path, "otel", [several, bare], tokenizer=tokenizer)
    assert [r.relation for r in rows] == ["root", "fork"]
    assert result.losses.dropped_calls["no prompt: neither ids nor text"].number == 1


@pytest.mark.parametrize("nested", [False, True])
def test_openinference_messages_are_gathered_by_their_numbers(nested: bool, tmp_path: Path, tokenizer: Path) -> None:
    spans = copy.deepcopy(LOGS["openinference"])
    if nested:  # as Phoenix exports them
        messages = [{"message.role": "user", "message.content": f"{i}"} for i in range(12)]
        said = [{"message": {"role": "assistant", "content": "x"}}]
        spans[1]["attributes"] = {
            "openinference": {"span": {"kind": "LLM"}},
            "session": {"id": "s"},
            "llm": {"model_name": "m", "input_messages": messages, "output_messages": said},
        }
    result, rows = converted(tmp_path, "openinference", spans, tokenizer=tokenizer)
    said = json.loads(rows[0].messages or "")
    if nested:
        assert [m["content"] for m in said] == [*map(str, range(12)), "x"]
        return
    assert [r.relation for r in rows] == ["root", "extend"]  # by time, not in the order of the file
    assert said[1]["tool_calls"][0]["function"] == {"name": "ls", "arguments": "{}"} and rows[0].episode_id == "s"
    assert rows[0].sampling is not None and rows[0].sampling.temperature == 0.5
    assert result.losses.dropped_records["no call: a span that is none of a model"].number == 1


def test_langfuse_generations_are_calls_in_the_order_of_time_and_scores_keep_their_level(
    tmp_path: Path, tokenizer: Path
) -> None:
    _, (first, second) = converted(tmp_path, "langfuse", LOGS["langfuse"], tokenizer=tokenizer)
    assert (first.rewards, second.rewards, second.reward) == ({"brevity": 1.0}, {"toxicity": 0.1}, None)
    assert json.loads(first.messages or "")[-1]["tool_calls"][0]["id"] == "c" and second.relation == "extend"
    assert json.loads((first.extra or {})["tools"])[0]["function"]["name"] == "ls"
    assert "fine" in (first.extra or {})["scores"] and "SPAN" in (first.extra or {})["observations"]


def test_single_observations_are_put_together_by_their_trace(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "langfuse", LOGS["langfuse"][0]["observations"], tokenizer=tokenizer)
    assert [(r.episode_id, r.relation) for r in rows] == [("t", "root"), ("t", "extend")]
    assert result.losses.dropped_records["no call: an observation that is no generation"].number == 1
