"""What the tests of converters share: logs written, converted and read back; a small tokenizer with a template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import helpers_harnesses
import helpers_trainers

from memopd_trace import Invocation, read, validate
from memopd_trace.convert import Conversion, convert

FIXTURES = Path(__file__).parent / "convert" / "fixtures"
TEMPLATE = (  # as reasoning models have it: reasoning is kept only behind the last user's message
    "{%- set last = namespace(user=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}<|start|>tools {{ tools | tojson }}<|end|>{{ '\n' }}{% endif %}"
    "{%- for m in messages %}<|start|>{{ m.role + '\n' }}"
    "{%- if m.reasoning_content and loop.index0 > last.user %}<think>{{ m.reasoning_content }}</think>{%- endif %}"
    "{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{%- endfor %}"
    "<|end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """JSON Lines; bytes are written as they are."""
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def converted(folder: Path, name: str, records: Iterable[Any], **options: Any) -> tuple[Conversion, list[Invocation]]:
    """Records through a converter: its outcome, and the rows if a valid trace was written. What holds for every
    conversion is asserted here: nothing vanishes uncounted, and the trace is what `validate` calls valid."""
    number = len(list(folder.glob("log*")))
    log = write_lines(folder / f"log{number}.jsonl", records)
    result = convert(name, log, folder / f"out{number}.parquet", **options)
    assert result.losses.balanced(), result.to_text()
    if result.trace is None:
        return result, []
    assert validate(result.trace, "lineage").errors == (0 if result.valid else result.report.errors)
    rows = list(read(result.trace).iter_invocations())
    assert len(rows) == result.losses.rows
    return result, rows


def from_fixtures(name: str, folder: Path, *logs: str, **options: Any) -> tuple[Conversion, list[Invocation]]:
    """Kept logs through a converter: a valid trace was written, and nothing is lost uncounted."""
    target = folder / f"t{len(list(folder.iterdir()))}.parquet"
    result = convert(name, [FIXTURES / log for log in logs], target, **options)
    assert result.losses.balanced() and result.exit_code() == 0 and result.trace is not None, result.to_text()
    return result, list(read(result.trace).iter_invocations())


def ids(rows: list[Invocation]) -> list[tuple[list[int], list[int]]]:
    """The prompts and the outputs."""
    return [(r.prompt_ids.tolist(), r.output_ids.tolist()) for r in rows]


def toy_tokenizer(folder: Path) -> Path:
    """A character tokenizer with marks and a chat template, as Transformers saves it: id 0 `<|end|>` ends a turn."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<|end|>", "<|start|>", "<think>", "</think>", "<call>", "</call>"]
    characters = ["\n", *map(chr, range(32, 127)), "é"]
    vocabulary = {piece: i for i, piece in enumerate([*marks, *characters, "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    fast.add_tokens(marks[2:])
    fast.chat_template = TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    return folder


def _vllm() -> list[dict[str, Any]]:
    """A session of two calls, and one of two choices."""
    prompt = list(range(100, 120))

    def record(name: str, session: str, prompt: list[int], *outputs: list[int]) -> dict[str, Any]:
        choices = [
            {"index": i, "message": {"role": "assistant", "content": "yo"}, "token_ids": ids, "finish_reason": "stop",
             "logprobs": {"content": [{"token": "x", "logprob": -0.25, "bytes": [120]} for _ in ids]}}
            for i, ids in enumerate(outputs)
        ]  # fmt: skip
        return {
            "session_id": session,
            "timestamp": 1756498939.0,
            "attempt": 0,
            "request": {"messages": [{"role": "user", "content": "hi"}], "temperature": 1.0, "top_p": 1.0},
            "response": {"id": name, "model": "m", "prompt_token_ids": prompt, "choices": choices,
                         "usage": {"prompt_tokens": len(prompt), "completion_tokens": 3}},
        }  # fmt: skip

    return [
        record("a", "s", prompt, [30, 31, 2]),
        record("b", "t", prompt[::-1], [30, 2], [31, 2]),
        record("c", "s", [*prompt, 30, 31, 2, 50], [32, 2]),
    ]


def _nemo_gym() -> list[dict[str, Any]]:
    two_calls = json.loads((FIXTURES / "nemo_gym_two_calls.json").read_text())["input"]
    rollout = {"responses_create_params": {"input": [{"role": "user", "content": "hot?"}], "temperature": 1.0},
               "response": two_calls, "reward": 1.0, "_ng_task_index": 1, "_ng_rollout_index": 0}  # fmt: skip
    return [rollout, json.loads((FIXTURES / "nemo_gym_without_ids.jsonl").read_text())]


def _atif() -> list[dict[str, Any]]:
    """A trajectory with an embedded sub-agent."""
    task = list(range(100, 140))

    def step(number: int, prompt: list[int], output: list[int], **fields: Any) -> dict[str, Any]:
        metrics = {"prompt_token_ids": prompt, "completion_token_ids": output, "logprobs": [-0.5] * len(output),
                   "prompt_tokens": len(prompt), "completion_tokens": len(output)}  # fmt: skip
        return {"step_id": number, "source": "agent", "message": "x", "metrics": metrics, **fields}

    agent = {"name": "t", "version": "1", "model_name": "m"}
    inner = {
        "schema_version": "ATIF-v1.7",
        "trajectory_id": "sub",
        "agent": agent,
        "steps": [step(1, task[::-1], [5, 2])],
    }
    call = {"tool_call_id": "c", "function_name": "ask", "arguments": {}}
    ref = {"source_call_id": "c", "subagent_trajectory_ref": [{"trajectory_id": "sub"}]}
    asks = {"tool_calls": [call], "observation": {"results": [ref]}}
    user = {"step_id": 1, "source": "user", "message": "go"}
    steps = [user, step(2, task, [7, 2], **asks), step(3, [*task, 7, 2, 9], [8, 2], reasoning_content="hm")]
    return [{"schema_version": "ATIF-v1.7", "session_id": "s", "agent": agent, "steps": steps,
             "subagent_trajectories": [inner], "notes": "n"}]  # fmt: skip


def _agent_lightning() -> list[dict[str, Any]]:
    """The events of an attempt, and a span of another."""
    data = [{"model": "m", "model_version": 4, **{k: r[k] for k in ("request", "response")}} for r in _vllm()[::2]]
    common = {"rollout_id": "r", "attempt_id": "a", "timestamp": 1756498939.0}
    events = [{"event_type": "model_request", "data": d, **common} for d in data]
    reward = {"event_type": "reward", "data": {"value": 1.0, "message": "m"}, **common}
    attributes = {
        "prompt_token_ids": "[1, 2, 3]",
        "response_token_ids": "[[4, 2]]",
        "agentlightning.reward.0.value": 0.5,
    }
    span = {"rollout_id": "q", "attempt_id": "a", "sequence_id": 1, "span_id": "s", "attributes": attributes,
            "start_time": 1756498939.0}  # fmt: skip
    return [*events, reward, span]


def _openai() -> list[dict[str, Any]]:
    """Two turns with a tool call of a session, in the chat form, and one of the Responses form."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 2?"}]
    made = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    later = [*asked, made, {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "3"}]}]
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3"}]}
    common = {"tools": tools, "temperature": 0.5, "chat_template_kwargs": {"enable_thinking": True}}

    def record(name: str, messages: Any, message: Any, why: str) -> dict[str, Any]:
        choice = {"index": 0, "message": message, "finish_reason": why}
        usage = {"prompt_tokens": 40, "completion_tokens": 9}
        return {"session_id": "s", "request": {"messages": messages, **common},
                "response": {"id": name, "model": "m", "choices": [choice], "usage": usage}}  # fmt: skip

    return [
        record("a", asked, made, "tool_calls"),
        record("b", later, {"role": "assistant", "content": "3"}, "stop"),
        {"request": {"instructions": "be brief", "input": [{"role": "user", "content": "1 + 2?"}], "tools": tools},
         "response": {"id": "r", "object": "response", "model": "m", "status": "completed", "output": [said],
                      "usage": {"input_tokens": 5, "output_tokens": 2}}},
    ]  # fmt: skip


def _sglang() -> list[dict[str, Any]]:
    """A call of `/generate`, and a chat that goes on from it."""
    prompt = list(range(100, 120))

    def meta(name: str, version: Any, *ids: int) -> dict[str, Any]:
        triples = [[-0.5 * (i != 2), i, None] for i in ids]
        return {"id": name, "finish_reason": {"type": "stop", "matched": 2}, "completion_tokens": 2,
                "weight_version": version, "output_token_logprobs": triples}  # fmt: skip

    asked = {"input_ids": prompt, "sampling_params": {"temperature": 1.0, "top_k": -1}, "return_logprob": True}
    said = {"text": "x", "output_ids": [30, 2], "meta_info": meta("a", "4", 30, 2)}
    choice = {"message": {"content": "y"}, "finish_reason": "stop", "meta_info": meta("b", 5, 31, 2),
              "prompt_token_ids": [*prompt, 30, 2, 50]}  # fmt: skip
    return [
        {"session_id": "s", "request": asked, "response": said},
        {"session_id": "s", "request": {"messages": [{"role": "user", "content": "x"}]},
         "response": {"id": "b", "model": "m", "choices": [choice]}},
    ]  # fmt: skip


def _anthropic() -> list[dict[str, Any]]:
    """Two calls of a session with a tool between them, the second streamed."""
    tools = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]
    made = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "ok"},
            {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]  # fmt: skip
    asked: list[dict[str, Any]] = [{"role": "user", "content": "1 + 2?"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "3"}]}
    later = [*asked, {"role": "assistant", "content": made}, {"role": "user", "content": [result]}]
    usage = {"input_tokens": 9, "cache_read_input_tokens": 4, "output_tokens": 3}
    events = [
        {"type": "message_start", "message": {"id": "b", "model": "m", "content": [], "usage": {"input_tokens": 20}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "it is "}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "3"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
    ]
    common = {"model": "m", "max_tokens": 9, "system": "be brief", "tools": tools, "temperature": 1.0}
    return [
        {"session_id": "s", "request": {**common, "messages": asked},
         "response": {"id": "a", "type": "message", "role": "assistant", "model": "m", "content": made,
                      "stop_reason": "tool_use", "usage": usage}},
        {"session_id": "s", "request": {**common, "messages": later}, "response": events},
    ]  # fmt: skip


def _claude_code() -> list[dict[str, Any]]:
    """A session with two tools at once, a compaction, and a side chain."""
    at = "2026-01-15T10:00:00Z"

    def line(kind: str, uuid: str, parent: str | None, content: Any = None, **more: Any) -> dict[str, Any]:
        answer = {"id": more.pop("id"), "model": "m", "stop_reason": "end_turn",
                  "usage": {"input_tokens": 9, "output_tokens": 3}} if kind == "assistant" else {}  # fmt: skip
        message = {} if kind == "system" else {"message": {"role": kind, "content": content, **answer}}
        return {"type": kind, "uuid": uuid, "parentUuid": parent, "timestamp": at, "sessionId": "s", "version": "2",
                "isSidechain": False, **message, **more}  # fmt: skip

    def use(name: str, **inputs: Any) -> list[dict[str, Any]]:
        return [{"type": "tool_use", "id": name, "name": "Task", "input": inputs}]

    def result(name: str) -> list[dict[str, Any]]:
        return [{"type": "tool_result", "tool_use_id": name, "content": f"did {name}"}]

    side = {"isSidechain": True, "agentId": "g"}
    return [
        line("user", "u1", None, "go"),
        line("assistant", "a1", "u1", use("x", prompt="look"), id="m1"),
        line("assistant", "a2", "a1", use("y"), id="m1"),
        line("user", "s1", None, "look", **side),
        line("assistant", "s2", "s1", [{"type": "text", "text": "seen"}], id="m2", **side),
        line("user", "r1", "a1", result("x"), toolUseResult={"agentId": "g"}),
        line("user", "r2", "a2", result("y")),
        line("assistant", "a3", "r2", [{"type": "text", "text": "done"}], id="m3"),
        line("system", "c", None, subtype="compact_boundary", logicalParentUuid="a3", compactMetadata={"trigger": "m"}),
        line("user", "u2", "c", "so far: done", isCompactSummary=True, isVisibleInTranscriptOnly=True),
        line("user", "u3", "u2", [{"type": "text", "text": "more"}]),
        line("assistant", "a4", "u3", [{"type": "text", "text": "yes"}], id="m4"),
        {"type": "summary", "summary": "a title", "leafUuid": "a4"},
    ]


def _codex() -> list[dict[str, Any]]:
    """A session with a tool, counts told twice, a rollback and a compaction."""

    def item(kind: str, **fields: Any) -> dict[str, Any]:
        return {"timestamp": "2026-01-15T10:00:00Z", "type": "response_item", "payload": {"type": kind, **fields}}

    def said(role: str, text: str) -> dict[str, Any]:
        word = "output_text" if role == "assistant" else "input_text"
        return item("message", role=role, content=[{"type": word, "text": text}])

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"timestamp": "2026-01-15T10:00:00Z", "type": "event_msg", "payload": {"type": kind, **fields}}

    def count(total: int) -> dict[str, Any]:
        used = {"input_tokens": 40, "output_tokens": 5}
        return event("token_count", info={"total_token_usage": {"input_tokens": total}, "last_token_usage": used})

    meta = {"id": "s", "cwd": "/x", "cli_version": "0.99", "base_instructions": {"text": "be brief"}}
    thought = item("reasoning", summary=[{"type": "summary_text", "text": "hm"}], encrypted_content="e")
    history = [said("user", "go")["payload"], said("user", "so far: done")["payload"]]
    return [
        {"type": "session_meta", "payload": meta},
        {"type": "turn_context", "payload": {"model": "m", "effort": "low"}},
        said("user", "go"), event("user_message", message="go"), thought,
        item("function_call", name="ls", call_id="c", arguments="{}"), count(1), count(1),
        item("function_call_output", call_id="c", output="a.txt"), said("assistant", "one file"), count(2),
        said("user", "oops"), event("user_message", message="oops"), said("assistant", "what"), count(3),
        event("thread_rolled_back", num_turns=1), said("user", "and"), event("user_message", message="and"),
        said("assistant", "done"), count(4),
        {"type": "compacted", "payload": {"message": "", "replacement_history": history}},
        said("user", "more"), said("assistant", "yes"), event("task_complete"),
    ]  # fmt: skip


def _gemini_cli() -> list[dict[str, Any]]:
    """A chat whose messages are told again, with a rewind and a compression."""
    at = "2026-01-15T10:00:00Z"

    def user(name: str, text: str) -> dict[str, Any]:
        return {"id": name, "timestamp": at, "type": "user", "content": [{"text": text}]}

    def gemini(name: str, text: str, **more: Any) -> dict[str, Any]:
        tokens = {"input": 30, "output": 4, "cached": 0, "thoughts": 2, "tool": 0, "total": 36}
        return {"id": name, "timestamp": at, "type": "gemini", "content": text, "model": "m", "tokens": tokens, **more}

    def used(name: str) -> dict[str, Any]:
        answer = {"functionResponse": {"id": name, "name": "ls", "response": {"output": "a.txt"}}}
        return {"id": name, "name": "ls", "args": {}, "result": [answer], "status": "success"}

    return [
        {"sessionId": "s", "projectHash": "h", "startTime": at, "kind": "main"},
        user("u1", "go"),
        gemini("g1", "look"),
        gemini("g1", "look", toolCalls=[used("t1")]),
        gemini("g2", "one file"),
        {"$set": {"lastUpdated": at}},
        user("u2", "oops"),
        gemini("g3", "what"),
        {"$rewindTo": "u2"},
        {"id": "i", "timestamp": at, "type": "info", "content": "rewound"},
        user("u3", "and"),
        gemini("g4", "done"),
        {"$set": {"messages": [user("n1", "so far: done"), {**user("n2", "fine"), "type": "gemini"}]}},
        user("u4", "more"),
        gemini("g5", "yes"),
    ]


def _messages() -> list[dict[str, Any]]:
    """Conversations in the chat form, in ShareGPT's, and of a prompt and its completion."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    return [
        {"id": 7, "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
                               {"role": "assistant", "content": "yo"}, {"role": "user", "content": "1 + 2?"},
                               {"role": "assistant", "content": None, "tool_calls": [call]},
                               {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "tools": "[]"},
        {"prompt": "hi", "completion": "yo", "source": "x"},
    ]  # fmt: skip


LOGS: dict[str, list[dict[str, Any]]] = {  # a log of each format, with ids where it can hold some
    "nemo-gym": _nemo_gym(),
    "atif": _atif(),
    "vllm": _vllm(),
    "sglang": _sglang(),
    "agent-lightning": _agent_lightning(),
    "openai": _openai(),
    "anthropic": _anthropic(),
    "claude-code": _claude_code(),
    "codex": _codex(),
    "gemini-cli": _gemini_cli(),
    "messages": _messages(),
}
LOGS |= helpers_trainers.LOGS
LOGS |= helpers_harnesses.LOGS
