"""Cassettes of VCR.py: the bodies of real calls, packed or not, and nothing that could be a key."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from memopd_trace import Invocation, read
from memopd_trace.convert import Conversion, cassettes, convert
from memopd_trace.convert.chat import Renderer
from memopd_trace.convert.records import Record

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "yo"}, "finish_reason": "stop"}
CHAT = {"id": "a", "object": "chat.completion", "model": "m", "choices": [CHOICE]}
CHUNKS = [
    {"id": "b", "object": "chat.completion.chunk", "model": "m", "choices": [{"index": 0, **rest}]}
    for rest in ({"delta": {"content": "y"}}, {"delta": {"content": "o"}}, {"delta": {}, "finish_reason": "stop"})
]
MESSAGE = {"id": "c", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
           "content": [{"type": "text", "text": "yo"}]}  # fmt: skip


def interaction(answer: Any, code: int = 200, asked: Any = ASKED) -> dict[str, Any]:
    if not isinstance(answer, str | bytes):
        answer = json.dumps(answer)
    return {
        "request": {"body": json.dumps(asked), "headers": {"authorization": ["Bearer sk-secret"]}, "method": "POST",
                    "uri": "https://api.example.com/v1/chat/completions?key=sk-secret"},
        "response": {"body": {"string": answer}, "headers": {"set-cookie": ["sk-secret"]},
                     "status": {"code": code, "message": "OK"}},
    }  # fmt: skip


def played(folder: Path, name: str, found: list[Any], tokenizer: Path) -> tuple[Conversion, list[Invocation]]:
    cassette = folder / "calls.yaml"
    cassette.write_text(yaml.safe_dump({"interactions": found, "version": 1}))
    result = convert(name, cassette, folder / "out.parquet", tokenizer=tokenizer)
    assert result.losses.balanced()
    return result, [] if result.trace is None else list(read(result.trace).iter_invocations())


def test_answers_are_the_same_plain_packed_and_streamed(tmp_path: Path, tokenizer: Path) -> None:
    wire = "".join(f"data: {json.dumps(c)}\n\n" for c in CHUNKS) + "data: [DONE]\n\n"
    plain = json.dumps({**CHAT, "id": "p"}).encode()
    log = [interaction(a) for a in (CHAT, gzip.compress(plain), zlib.compress(plain.replace(b'"p"', b'"q"')), wire)]
    result, rows = played(tmp_path, "openai", log, tokenizer)
    assert result.exit_code() == 0 and [r.episode_id for r in rows] == ["a", "p", "q", "b"]
    assert {Renderer(tokenizer).tokenizer.decode(r.output_ids) for r in rows} == {"yo<|end|>"}
    assert {r.token_source for r in rows} == {"retokenized"}


def test_a_streamed_answer_of_the_responses_api_is_its_last_event(tmp_path: Path, tokenizer: Path) -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yo"}]}
    whole = {"id": "r", "object": "response", "model": "m", "status": "completed", "output": [said]}
    events = [{"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}},
              {"type": "response.output_text.delta", "delta": "yo"},
              {"type": "response.completed", "response": whole}]  # fmt: skip
    wire = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
    result, (row,) = played(tmp_path, "openai", [interaction(wire, asked={"model": "m", "input": "hi"})], tokenizer)
    assert result.exit_code() == 0 and row.episode_id == "r" and row.finish_reason == "stop"
    assert Renderer(tokenizer).tokenizer.decode(row.output_ids) == "yo<|end|>"


def test_no_header_and_no_query_reaches_the_trace(tmp_path: Path, tokenizer: Path) -> None:
    _, rows = played(tmp_path, "openai", [interaction(CHAT)], tokenizer)
    assert (rows[0].extra or {})["uri"] == "https://api.example.com/v1/chat/completions"
    assert b"sk-secret" not in (tmp_path / "out.parquet").read_bytes() and "sk-secret" not in repr(rows)


def test_calls_of_the_messages_api_are_read_too(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = played(tmp_path, "anthropic", [interaction(MESSAGE), interaction({}, 529)], tokenizer)
    assert len(rows) == 1 and result.exit_code() == 0
    assert result.losses.dropped_records["no call: an answer with status 5xx"].number == 1


def test_what_cannot_be_read_is_told_with_its_place_and_the_rest_is_converted(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cassettes, "MAX_RECORD", 10_000)
    bomb = gzip.compress(b" " * 10_001)
    log = ["odd", {"request": {}}, interaction(b"\xff\xfe\xfa"), interaction(bomb), interaction(b"\x1f\x8bx"),
           interaction("no JSON"), interaction({"data": []}), interaction(CHAT)]  # fmt: skip
    result, rows = played(tmp_path, "openai", log, tokenizer)
    assert len(rows) == 1 and result.exit_code() == 1
    assert [i.place.rpartition("[")[2] for i in result.losses.issues] == ["0]", "1]", "2]", "3]", "4]", "5]"]
    assert result.losses.dropped_records["no call: an answer without choices"].number == 1


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "- " * 20_000 + "x",
        "x: !!python/object/apply:os.system ['true']",
        "d: 2020-99-99",
        "list: of things",
        "",
        "interactions: 3",
    ],
)
def test_a_file_that_is_no_cassette_is_one_clear_issue(tmp_path: Path, tokenizer: Path, text: str) -> None:
    (tmp_path / "other.yaml").write_text(text)
    result = convert("openai", tmp_path / "other.yaml", tmp_path / "out.parquet", tokenizer=tokenizer)
    (issue,) = result.losses.issues
    assert result.exit_code() == 3 and issue.reason.startswith(("is no YAML", "no cassette of VCR.py"))


def test_a_cassette_may_be_packed_and_lie_among_other_logs(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    text = yaml.safe_dump({"interactions": [interaction(CHAT)]}).encode()
    (folder / "a.yaml.gz").write_bytes(gzip.compress(text))
    (folder / "b.jsonl").write_text(json.dumps({"request": ASKED, "response": {**CHAT, "id": "z"}}) + "\n")
    result = convert("openai", folder, tmp_path / "out.parquet", tokenizer=tokenizer)
    assert result.losses.rows == 2 and result.exit_code() == 0


def test_a_cassette_that_is_too_large_is_refused(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cassettes, "MAX_CASSETTE", 100)
    result, _ = played(tmp_path, "openai", [interaction(CHAT)], tokenizer)
    assert result.losses.issues[0].reason == "a cassette of more than 100 bytes"


def chained(first: str, step: str) -> str:
    """Ten levels, each of nine times the one below it."""
    levels = [f"a0: &a0 {first}"]
    levels += [f"a{n}: &a{n} " + step.format(", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 11)]
    return "\n".join(levels)


@pytest.mark.parametrize(
    "text",
    [
        chained("[xxxxxxxx]", "[{}]") + "\ninteractions: [{{request: {uri: *a10}, response: {status: {code: *a10}}}}]",
        chained("{x: 1}", "{{'!!': 1, <<: [{}]}}") + "\ninteractions: []",
        chained("{x: 1}", "{{!!merge <<: [{}]}}") + "\ninteractions: []",
        "a: 1" + ":59" * 200_000 + "\ninteractions: []",
        "a: !!int 1" + ":59" * 200_000 + "\ninteractions: []",
    ],
    ids=["aliases", "merged keys", "merged keys by a tag", "base 60", "base 60 by a tag"],
)
def test_a_small_cassette_costs_no_more_than_it_is_long(tmp_path: Path, text: str) -> None:
    (tmp_path / "bomb.yaml").write_text(text.replace("{{", "{").replace("}}", "}"))
    start = time.process_time()
    found = list(cassettes.records([tmp_path / "bomb.yaml"]))
    assert time.process_time() - start < 10, "some would take hours"
    assert len(repr(found)) < 1000


def test_numbers_and_nulls_of_a_cassette_stay_what_they_were(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "interactions:\n"
        "- {request: {body: null, uri: 'u?k'}, response: {status: {code: 200}, body: {string: '{}'}}}\n"
        "- {request: {body: '1', uri: null}, response: {status: {code: 1_0}, body: {string: ~}}}\n"
    )
    one, two = (r.value for r in cassettes.records([tmp_path / "a.yaml"]) if isinstance(r, Record))
    assert one == {"request": None, "response": "{}", "status_code": 200, "uri": "u"}
    assert two == {"request": "1", "response": None, "status_code": None, "uri": None}
