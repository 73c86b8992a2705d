"""Gemini CLI: a list of changes to a chat gives each call the prompt that stood in front of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers_convert import LOGS, converted

from memopd_trace import Invocation
from memopd_trace.convert.chat import Renderer

LOG = LOGS["gemini-cli"]


def shown(rows: list[Invocation], tokenizer: Path) -> list[str]:
    decode = Renderer(tokenizer).tokenizer.decode
    return [decode(r.prompt_ids) + decode(r.output_ids) for r in rows]


def used(name: str, *results: str) -> dict[str, Any]:
    parts = [
        {"functionResponse": {"id": n, "name": "ls", "response": {"output": f"{n}.txt"}}} for n in results or [name]
    ]
    return {"id": name, "name": "ls", "args": {"at": name}, "result": parts}


def message(name: str, kind: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"id": name, "type": kind, "content": content, **({"model": "m"} if kind == "gemini" else {}), **more}


def test_a_chat_with_a_rewind_and_a_compression(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "gemini-cli", LOG, tokenizer=tokenizer)
    assert [(r.relation, r.parent_index, r.rewrite_kind, r.rewrite_evidence) for r in rows] == [
        ("root", None, None, None),
        ("extend", 0, None, None),
        ("extend", 1, None, None),
        ("extend", 1, None, None),  # the turn of call 2 was taken back
        ("rewrite", 3, "summary", "explicit"),
    ]
    texts = shown(rows, tokenizer)
    assert texts[0].endswith("look<call>ls {}</call>")  # the last word on a message holds
    assert texts[1].count("look") == 1 and "<|start|>tool\na.txt<|end|>" in texts[1] and "oops" not in texts[3]
    assert "so far: done" in texts[4] and "a.txt" not in texts[4]
    assert {"lost_calls", "opaque_content"} <= result.losses.gaps.keys()
    assert rows[0].episode_id == "s" and (rows[0].extra or {})["kind"] == "main"


def test_a_whole_document_gives_the_same_calls(tmp_path: Path, tokenizer: Path) -> None:
    messages = [LOG[1], LOG[3], LOG[4], LOG[9], LOG[10], LOG[11]]
    document = {**LOG[0], "messages": messages}
    _, rows = converted(tmp_path, "gemini-cli", [document], tokenizer=tokenizer)
    (tmp_path / "lines").mkdir()
    _, others = converted(tmp_path / "lines", "gemini-cli", [LOG[0], *messages], tokenizer=tokenizer)
    assert shown(rows, tokenizer) == shown(others, tokenizer) and len(rows) == 3


def test_tools_that_are_added_when_others_have_answered_are_a_further_call(tmp_path: Path, tokenizer: Path) -> None:
    log = [
        LOG[0],
        message("u", "user", "go"),
        message("g", "gemini", "look", toolCalls=[used("t1")]),
        message("g", "gemini", "look", toolCalls=[used("t1"), used("t2")]),
        message("h", "gemini", "done"),
    ]
    _, rows = converted(tmp_path, "gemini-cli", log, tokenizer=tokenizer)
    texts = shown(rows, tokenizer)
    assert [r.relation for r in rows] == ["root", "extend", "extend"]
    assert "t1.txt" in texts[1] and texts[1].endswith('<call>ls {"at": "t2"}</call>') and "t2" not in texts[0]
    assert texts[2].count("t1.txt") == texts[2].count("t2.txt") == 1


def test_results_of_tools_that_ran_at_once_stand_once_each(tmp_path: Path, tokenizer: Path) -> None:
    tools = [used("t1", "t1", "t2"), used("t2", "t1", "t2")]
    log = [
        LOG[0],
        message("u", "user", "go"),
        message("g", "gemini", "", toolCalls=tools),
        message("h", "gemini", "done"),
    ]
    _, rows = converted(tmp_path, "gemini-cli", log, tokenizer=tokenizer)
    assert shown(rows, tokenizer)[1].count("t1.txt") == shown(rows, tokenizer)[1].count("t2.txt") == 1


def test_a_new_list_of_the_same_messages_is_no_rewrite_and_a_cleared_result_is_one(
    tmp_path: Path, tokenizer: Path
) -> None:
    first = [message("u", "user", "go"), message("g", "gemini", "look", toolCalls=[used("t1")])]
    second = message("h", "gemini", "one file")
    parts = [{"text": "look"}, {"functionCall": {"id": "t1", "name": "ls", "args": {"at": "t1"}}}]
    for number, (output, relation, kind) in enumerate((("t1.txt", "extend", None), ("[cut]", "rewrite", "elide"))):
        tool = used("t1")
        tool["result"][0]["functionResponse"]["response"]["output"] = output
        answered = {"id": "r", "type": "user", "content": tool["result"]}
        history = [message("u", "user", [{"text": "go"}]), message("g", "gemini", parts, toolCalls=[tool]), answered,
                   message("h", "gemini", [{"text": "one file"}])]  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        log = [LOG[0], *first, second, {"$set": {"messages": history}}, message("i", "gemini", "done")]
        _, rows = converted(folder, "gemini-cli", log, tokenizer=tokenizer)
        assert [(r.relation, r.rewrite_kind) for r in rows[1:]] == [("extend", None), (relation, kind)]
        texts = shown(rows, tokenizer)
        assert texts[1].count("t1.txt") == 1 and texts[2].count(output) == 1


def test_what_is_no_chat_is_reported(tmp_path: Path, tokenizer: Path) -> None:
    recorded = {"method": "generateContentStream", "response": []}
    result, rows = converted(tmp_path, "gemini-cli", [recorded, *LOG], tokenizer=tokenizer)
    assert len(rows) == 5 and [i.place.rpartition(":")[2] for i in result.losses.issues] == ["1"]
