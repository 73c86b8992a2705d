"""LangSmith: runs of wrapped clients and of LangChain, as its own schema writes them, and feedback on them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from helpers_convert import FIXTURES, converted

from memopd_trace import read
from memopd_trace.convert import convert

RUNS = [json.loads(line) for line in (FIXTURES / "langsmith_runs.jsonl").read_text().splitlines()]
ROOT, FIRST, TOOL, SECOND, CHAIN, FEEDBACK = RUNS
PROMPT = list(range(100, 120))


def changed(run: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the run with the value at a dotted path."""
    run = copy.deepcopy(run)
    place: Any = run
    *names, last = path.split(".")
    for name in names:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[last] = value
    return run


def test_a_wrapped_clients_calls_keep_the_servers_ids_and_follow_one_another(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "langsmith", RUNS)
    assert [r.prompt_ids.tolist() for r in rows] == [PROMPT, [*PROMPT, 30, 31, 2, 60, 61]]
    assert [r.output_ids.tolist() for r in rows] == [[30, 31, 2], [33, 2]]
    assert [(r.relation, r.parent_index, r.token_source) for r in rows] == [
        ("root", None, "engine"), ("extend", 0, "engine"),
    ]  # fmt: skip
    assert [r.finish_reason for r in rows] == ["tool_calls", "stop"] and {r.model_id for r in rows} == {"m"}
    assert rows[0].episode_id == ROOT["trace_id"] and rows[1].rewards == {"right": 1.0}
    assert rows[0].started_at is not None and rows[0].sampling is not None and rows[0].sampling.temperature == 1.0
    assert result.losses.dropped_calls.total == 1  # LangChain's text, without a tokenizer
    assert {"no_parent", "no_logprob_kind", "no_end", "no_reward", "no_policy_version"} <= result.losses.gaps.keys()


def test_log_probabilities_are_of_an_unknown_kind_until_it_is_told(tmp_path: Path) -> None:
    for options, kind in (({}, "unknown"), ({"logprob_kind": "raw"}, "raw")):
        _, rows = converted(tmp_path, "langsmith", RUNS, **options)
        assert [r.logprob_kind for r in rows] == [kind] * 2
        assert rows[0].output_logprobs is not None and rows[0].output_logprobs.tolist() == [-0.25] * 3


def test_messages_of_langchain_become_a_chat(tmp_path: Path, tokenizer: Path) -> None:
    _, (row,) = converted(tmp_path, "langsmith", [CHAIN], tokenizer=tokenizer)
    assert json.loads(row.messages or "") == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    ]  # fmt: skip
    assert (row.token_source, row.finish_reason, row.model_id) == ("retokenized", "stop", "m")


def test_several_prompts_and_several_generations_are_calls_of_their_own(tmp_path: Path, tokenizer: Path) -> None:
    generation = CHAIN["outputs"]["generations"][0][0]
    other = changed(generation, "message.kwargs.content", "hey")
    messages = CHAIN["inputs"]["messages"][0]
    run = changed(CHAIN, "outputs.generations", [[generation], [generation, other]])
    run["inputs"]["messages"] = [messages, messages[1:]]
    _, rows = converted(tmp_path, "langsmith", [run], tokenizer=tokenizer)
    assert [(r.relation, r.parent_index) for r in rows] == [("root", None), ("root", None), ("fork", 1)]


def test_a_tool_call_and_the_tools_of_langchain_are_rendered(tmp_path: Path, tokenizer: Path) -> None:
    run = changed(CHAIN, "outputs.generations.0.0.message.kwargs.tool_calls", [{"id": "c", "name": "ls", "args": {}}])
    run["extra"]["invocation_params"] |= {
        "tools": [{"type": "function", "function": {"name": "ls"}}],
        "temperature": 0.5,
    }
    _, (row,) = converted(tmp_path, "langsmith", [run], tokenizer=tokenizer)
    answer = json.loads(row.messages or "")[-1]
    assert answer["tool_calls"][0]["function"] == {"name": "ls", "arguments": {}}
    assert "ls" in (row.extra or {})["tools"] and row.sampling is not None and row.sampling.temperature == 0.5


def test_runs_inside_runs_say_the_same_as_runs_line_by_line(tmp_path: Path) -> None:
    whole = {**ROOT, "child_runs": [FIRST, TOOL, SECOND]}
    _, nested = converted(tmp_path, "langsmith", [whole])
    _, plain = converted(tmp_path, "langsmith", [SECOND, TOOL, FIRST, ROOT])  # in any order: the dotted order holds
    assert [r.prompt_ids.tolist() for r in nested] == [r.prompt_ids.tolist() for r in plain]
    assert [r.relation for r in nested] == [r.relation for r in plain] == ["root", "extend"]
    assert json.loads((nested[0].extra or {})["runs"])[0]["name"] == "add"


def test_feedback_stays_with_its_key_and_its_run(tmp_path: Path) -> None:
    stats = {"kind": {"n": 2, "avg": 0.5, "values": {}}}
    other = {**FEEDBACK, "id": "2", "key": "brief", "score": True}
    inner = {**FEEDBACK, "id": "3", "run_id": FIRST["id"], "score": 0.25}
    note = {**FEEDBACK, "id": "4", "key": "note", "score": None, "comment": "fine"}
    runs = [ROOT, {**FIRST, "feedback_stats": stats}, SECOND, FEEDBACK, other, inner, note]
    _, rows = converted(tmp_path, "langsmith", runs)
    assert rows[0].rewards == {"kind": 0.5} and rows[1].rewards == {"right": 1.0, "brief": 1.0}
    kept = rows[0].extra or {}
    assert json.loads(kept["feedback 3"])["score"] == 0.25 and json.loads(kept["feedback 4"])["comment"] == "fine"


def test_what_is_no_answer_is_counted(tmp_path: Path) -> None:
    failed = {**FIRST, "id": "f", "outputs": None, "error": "boom"}
    result, rows = converted(tmp_path, "langsmith", [*RUNS, failed, {"x": 1}])
    assert len(rows) == 2 and result.losses.broken == 1
    assert result.losses.dropped_records["no call: a run without an answer"].number == 1


def test_a_table_of_runs_says_the_same_as_json(tmp_path: Path) -> None:
    names = ("id", "trace_id", "parent_run_id", "run_type", "dotted_order", "inputs", "outputs", "extra")
    rows = [{n: json.dumps(r[n]) if isinstance(r.get(n), dict) else r.get(n) for n in names} for r in RUNS[:4]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "runs.parquet")
    result = convert("langsmith", tmp_path / "runs.parquet", tmp_path / "t.parquet")
    found = list(read(tmp_path / "t.parquet").iter_invocations())
    assert result.exit_code() == 0 and [r.output_ids.tolist() for r in found] == [[30, 31, 2], [33, 2]]
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "runs.parquet").read_bytes()[:-9])
    assert convert("langsmith", tmp_path / "torn.parquet", tmp_path / "u.parquet").exit_code() == 3


def test_an_answer_of_anthropics_client_is_a_message(tmp_path: Path, tokenizer: Path) -> None:
    said = {"id": "m1", "role": "assistant", "model": "c", "stop_reason": "end_turn",
            "content": [{"type": "text", "text": "yo"}],
            "usage_metadata": {"input_tokens": 3, "output_tokens": 2}}  # fmt: skip
    asked = {"messages": [{"role": "user", "content": "hi"}], "system": "be brief", "temperature": 1.0}
    result, (row,) = converted(
        tmp_path, "langsmith", [{**CHAIN, "inputs": asked, "outputs": said}], tokenizer=tokenizer
    )
    assert [m["content"] for m in json.loads(row.messages or "")] == ["be brief", "hi", "yo"]
    assert (row.finish_reason, row.model_id) == ("stop", "c")
    assert any("another length" in reason for reason in result.losses.degraded)  # its own counts, kept honest
