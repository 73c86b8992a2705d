"""A log of each harness and tracing tool that the tests of converters read, as their programs write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _openhands() -> list[dict[str, Any]]:
    """A conversation of the SDK: two answers with ids, the second behind a condensation."""
    task, shorter = list(range(100, 140)), [*range(100, 120), 60]

    def event(name: str, kind: str, source: str = "environment", **fields: Any) -> dict[str, Any]:
        return {"id": name, "timestamp": "2026-06-16T05:39:18", "source": source, "kind": kind, **fields}

    def said(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    call = {"id": "c1", "name": "ls", "arguments": "{}", "origin": "completion"}
    return [
        event("e0", "SystemPromptEvent", system_prompt=said("be brief"), tools=[]),
        event("e1", "MessageEvent", "user", llm_message={"role": "user", "content": [said("go")]}),
        event("e2", "ActionEvent", "agent", thought=[said("look")], tool_name="ls", tool_call_id="c1", tool_call=call,
              llm_response_id="r1"),
        event("e3", "ObservationEvent", tool_name="ls", tool_call_id="c1", action_id="e2",
              observation={"content": [said("a.txt")], "is_error": False}),
        event("e4", "TokenEvent", prompt_token_ids=task, response_token_ids=[7, 2]),
        event("e5", "Condensation", forgotten_event_ids=["e2", "e3"], summary="looked", summary_offset=2,
              llm_response_id="r2"),
        event("e6", "MessageEvent", "agent", llm_message={"role": "assistant", "content": [said("done")]},
              llm_response_id="r3"),
        event("e7", "TokenEvent", prompt_token_ids=shorter, response_token_ids=[8, 2]),
    ]  # fmt: skip


def _swe_agent() -> list[dict[str, Any]]:
    """Two steps with what the model read at each, the second with an observation left out."""
    system, task = {"role": "system", "content": "fix it"}, {"role": "user", "content": "it is broken"}
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    look = {"role": "assistant", "content": "look", "tool_calls": [call], "thought": "look", "agent": "main"}
    seen = {"role": "tool", "content": "a.py", "tool_call_ids": ["c"], "agent": "main"}
    done = {"role": "assistant", "content": "done", "thought": "done", "agent": "main"}
    steps = [
        {"action": "ls", "observation": "a.py", "response": "look", "thought": "look", "query": [system, task]},
        {"action": "submit", "observation": "", "response": "done", "thought": "done",
         "query": [system, task, look, {**seen, "content": "Old environment output: (1 lines omitted)"}]},
    ]  # fmt: skip
    config = json.dumps({"agent": {"model": {"name": "m", "temperature": 0.0, "top_p": 1.0}}})
    return [{"environment": "main", "trajectory": steps, "history": [system, task, look, seen, done],
             "replay_config": config,
             "info": {"exit_status": "submitted", "model_stats": {"api_calls": 3}}}]  # fmt: skip


def _mini_swe_agent() -> list[dict[str, Any]]:
    """A trajectory whose provider gave ids."""
    task = list(range(100, 140))

    def answer(text: str, prompt: list[int], output: list[int]) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text},
                  "token_ids": output}  # fmt: skip
        response = {"id": text, "model": "m", "prompt_token_ids": prompt, "choices": [choice]}
        return {"role": "assistant", "content": text, "extra": {"actions": [], "cost": 0.1, "response": response}}

    messages = [
        {"role": "system", "content": "fix it"},
        {"role": "user", "content": "it is broken"},
        answer("look", task, [7, 2]),
        {"role": "user", "content": "a.py", "extra": {"returncode": 0}},
        answer("done", [*task, 7, 2, 50], [8, 2]),
        {"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}},
    ]
    info = {"exit_status": "Submitted", "model_stats": {"api_calls": 2, "instance_cost": 0.2},
            "config": {"model": {"model_name": "m", "model_kwargs": {"temperature": 1.0}}}}  # fmt: skip
    return [{"info": info, "messages": messages, "trajectory_format": "mini-swe-agent-1.1", "instance_id": "i"}]


def _inspect() -> list[dict[str, Any]]:
    """A log of one sample: two calls with pooled messages and ids of the server, the second behind a compaction."""
    task = list(range(100, 140))
    pool = [{"role": "system", "content": "attachment://x"}, {"role": "user", "content": "go"},
            {"role": "assistant", "content": "look"}, {"role": "user", "content": "sum: looked"}]  # fmt: skip

    def model(text: str, refs: list[list[int]], prompt: list[int], output: list[int]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": output}
        said = {"message": message, "stop_reason": "stop"}
        response = {"id": text, "model": "m", "prompt_token_ids": prompt, "choices": [choice]}
        call = {"request": {"model": "m", "temperature": 1.0}, "response": response, "call_refs": refs,
                "call_key": "messages"}  # fmt: skip
        return {"event": "model", "uuid": text, "timestamp": "2025-10-06T10:15:45+00:00", "model": "v/m", "input": [],
                "input_refs": refs, "tools": [], "config": {"temperature": 1.0},
                "output": {"model": "m", "choices": [said], "usage": {"input_tokens": len(prompt)}},
                "call": call}  # fmt: skip

    compaction = {"event": "compaction", "type": "summary", "tokens_before": 40, "tokens_after": 21}
    events = [model("look", [[0, 2]], task, [7, 2]), compaction,
              model("done", [[0, 1], [3, 4]], [*task[:20], 60], [8, 2])]  # fmt: skip
    sample = {"id": 1, "epoch": 1, "uuid": "u", "events": events, "attachments": {"x": "be brief"},
              "events_data": {"messages": pool, "calls": pool}, "scores": {"match": {"value": "C", "answer": "x"}},
              "metadata": {"hard": True}}  # fmt: skip
    return [{"version": 2, "status": "success", "eval": {"task": "t", "model": "v/m"}, "samples": [sample]}]


def _openinference() -> list[dict[str, Any]]:
    """A trace of two calls, with a tool between them."""
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}

    def span(name: str, kind: str, second: int, **attributes: Any) -> dict[str, Any]:
        flat = {k.replace("__", "."): v for k, v in attributes.items()}
        return {"name": kind, "context": {"trace_id": "t", "span_id": name}, "parent_id": "p",
                "start_time": f"2026-01-01T00:00:0{second}+00:00", "end_time": f"2026-01-01T00:00:0{second}.5+00:00",
                "attributes": {"openinference.span.kind": kind, **flat}}  # fmt: skip

    asked = {"llm__model_name": "m", "llm__invocation_parameters": '{"temperature": 0.5}',
             "llm__tools__0__tool__json_schema": json.dumps(tool),
             "llm__input_messages__0__message__role": "user",
             "llm__input_messages__0__message__content": "what is there?"}  # fmt: skip
    made = {"role": "assistant", "tool_calls__0__tool_call__id": "c",
            "tool_calls__0__tool_call__function__name": "ls",
            "tool_calls__0__tool_call__function__arguments": "{}"}  # fmt: skip
    answer = {f"llm__output_messages__0__message__{k}": v for k, v in made.items()}
    later = {f"llm__input_messages__1__message__{k}": v for k, v in made.items()}
    result = {"llm__input_messages__2__message__role": "tool", "llm__input_messages__2__message__tool_call_id": "c",
              "llm__input_messages__2__message__content": "a.txt"}  # fmt: skip
    done = {"llm__output_messages__0__message__role": "assistant",
            "llm__output_messages__0__message__contents__0__message_content__type": "text",
            "llm__output_messages__0__message__contents__0__message_content__text": "a.txt is"}  # fmt: skip
    return [
        span("b", "LLM", 3, **asked, **later, **result, **done, session__id="s"),
        span("a", "LLM", 1, **asked, **answer, session__id="s"),
        span("x", "TOOL", 2, tool__name="ls"),
    ]


def _otel() -> list[dict[str, Any]]:
    """A trace of two calls: messages as JSON, and in the older numbered form."""
    tools = [{"type": "function", "name": "ls", "description": "lists", "parameters": {"type": "object"}}]
    call = {"type": "tool_call", "id": "c", "name": "ls", "arguments": {"at": "."}}
    asked = [{"role": "user", "parts": [{"type": "text", "content": "what is there?"}]}]
    made = [
        {"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"}, call], "finish_reason": "tool_call"}
    ]
    common = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.request.temperature": 0.5}

    def span(name: str, second: int, **attributes: Any) -> dict[str, Any]:
        return {"name": "chat m", "context": {"trace_id": "t", "span_id": name}, "attributes": {**common, **attributes},
                "start_time": f"2026-01-01T00:00:0{second}Z"}  # fmt: skip

    first = {"gen_ai.input.messages": json.dumps(asked), "gen_ai.output.messages": json.dumps(made),
             "gen_ai.tool.definitions": json.dumps(tools), "gen_ai.response.finish_reasons": ["tool_call"],
             "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "be brief"}])}  # fmt: skip
    second = {"gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": "be brief",
              "gen_ai.prompt.1.role": "user", "gen_ai.prompt.1.content": "what is there?",
              "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "a.txt",
              "gen_ai.usage.prompt_tokens": 9}  # fmt: skip
    return [span("a", 1, **first), span("b", 2, **second), {**span("c", 3), "attributes": {"http.method": "GET"}}]


def _langfuse() -> list[dict[str, Any]]:
    """A trace with two generations and scores of both levels."""
    tool = {"role": "tool", "content": {"type": "function", "function": {"name": "ls", "parameters": {}}}}
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    asked = [{"role": "user", "content": "what is there?"}]
    made = {"role": "assistant", "content": "", "additional_kwargs": {"tool_calls": [call], "refusal": None}}
    result = {"role": "tool", "tool_call_id": "c", "content": "a.txt"}

    def generation(name: str, second: int, given: Any, said: Any) -> dict[str, Any]:
        return {"id": name, "traceId": "t", "type": "GENERATION", "model": "m", "modelParameters": {"temperature": 0},
                "startTime": f"2026-01-01T00:00:0{second}Z", "input": json.dumps(given), "output": json.dumps(said),
                "usageDetails": {"input": 9, "output": 3}}  # fmt: skip

    scores = [{"name": "toxicity", "value": 0.1, "observationId": None, "comment": "fine"},
              {"name": "brevity", "value": 1, "observationId": "g1"}]  # fmt: skip
    observations = [
        generation("g2", 3, [*asked, made, result, tool], {"role": "assistant", "content": "a.txt"}),
        generation("g1", 1, [*asked, tool], made),
        {"id": "s", "traceId": "t", "type": "SPAN", "name": "tools", "input": None},
    ]
    return [{"trace": {"id": "t", "name": "LangGraph", "scores": scores}, "observations": observations}]


def _tau() -> list[dict[str, Any]]:
    """A run of tau-bench, and tau2's results with a tool of the user's."""
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"id": 1}'}}
    traj = [{"role": "system", "content": "policy"}, {"role": "user", "content": "where is it?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "name": "find", "content": "lost"},
            {"role": "assistant", "content": "lost"}, {"role": "user", "content": "###STOP###"}]  # fmt: skip
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    own = {"id": "c", "name": "find", "arguments": {"id": 1}, "requestor": "assistant"}
    theirs = {"id": "u", "name": "reboot", "arguments": {}, "requestor": "user"}
    messages = [
        {"role": "assistant", "content": "Hi!", "turn_idx": 0, "cost": 0.0},
        {"role": "user", "content": "where is it?", "turn_idx": 1},
        {"role": "assistant", "content": None, "tool_calls": [own], "usage": usage, "turn_idx": 2},
        {"role": "tool", "id": "c", "content": "lost", "requestor": "assistant", "error": False},
        {"role": "user", "content": None, "tool_calls": [theirs]},
        {"role": "tool", "id": "u", "content": "rebooted", "requestor": "user"},
        {"role": "assistant", "content": "lost", "usage": usage,
         "raw_data": {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "lost"}}},
    ]  # fmt: skip
    simulation = {"id": "s1", "task_id": "7", "trial": 0, "termination_reason": "user_stop", "messages": messages,
                  "reward_info": {"reward": 1.0, "reward_breakdown": {"DB": 1.0}, "info": None}}  # fmt: skip
    info = {"agent_info": {"implementation": "llm_agent", "llm": "m", "llm_args": {"temperature": 0.0}}}
    return [
        {"task_id": 3, "trial": 0, "reward": 0.0, "info": {"user_cost": 0.1}, "traj": traj},
        {"timestamp": "2026-01-01", "info": info, "tasks": [], "simulations": [simulation]},
    ]


def _langsmith() -> list[dict[str, Any]]:
    """Two traces and a feedback, as LangSmith's own client wrote them, with the model's runs first."""
    file = Path(__file__).parent / "convert" / "fixtures" / "langsmith_runs.jsonl"
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(runs, key=lambda r: r.get("run_type") != "llm")


LOGS: dict[str, list[dict[str, Any]]] = {
    "openhands": _openhands(),
    "swe-agent": _swe_agent(),
    "mini-swe-agent": _mini_swe_agent(),
    "inspect": _inspect(),
    "openinference": _openinference(),
    "otel": _otel(),
    "langfuse": _langfuse(),
    "langsmith": _langsmith(),
    "tau": _tau(),
}
