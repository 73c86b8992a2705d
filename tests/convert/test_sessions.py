"""`vllm` and `openai`: requests and answers, with token ids and without, whole and streamed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_convert import converted

from memopd_trace import Sampling, validate
from memopd_trace.convert import chains
from memopd_trace.convert.chat import Renderer
from memopd_trace.convert.draft import Chat

PROMPT = list(range(100, 120))
ASK = {"messages": [{"role": "user", "content": "hi"}], "temperature": 1.0}


def choice(ids: list[int], **fields: Any) -> dict[str, Any]:
    content = [{"token": "x", "logprob": -0.5 * i, "bytes": [120]} for i in range(len(ids))]
    message = {"role": "assistant", "content": "yo"}
    return {"index": 0, "message": message, "token_ids": ids, "logprobs": {"content": content}, **fields}


def exchange(name: str, prompt: list[int], ids: list[int], session: str | None = "s", **fields: Any) -> dict[str, Any]:
    answer = {"id": name, "model": "m", "prompt_token_ids": prompt, "choices": [choice(ids, finish_reason="stop")]}
    return {"request": ASK, "response": answer, **({"session_id": session} if session else {}), **fields}


def test_calls_of_a_session_are_exact_and_linked(tmp_path: Path) -> None:
    records = [
        exchange("a", PROMPT, [30, 31, 2], policy_version=4, timestamp="2025-08-29T20:22:19Z"),
        exchange("b", PROMPT[::-1], [8, 2], session="t"),
        exchange("c", [*PROMPT, 30, 31, 2, 50], [9, 2], reward=0.0),
    ]
    result, rows = converted(tmp_path, "vllm", records, logprob_kind="raw")
    assert [(r.episode_id, r.relation, r.prompt_ids.tolist(), r.output_ids.tolist()) for r in rows] == [
        ("s", "root", PROMPT, [30, 31, 2]),
        ("s", "extend", [*PROMPT, 30, 31, 2, 50], [9, 2]),
        ("t", "root", PROMPT[::-1], [8, 2]),
    ]
    first, second, third = rows
    np.testing.assert_array_equal(first.output_logprobs, np.float32([0, -0.5, -1]))
    assert first.logprob_kind == "raw" and first.sampling == Sampling(temperature=1.0)
    assert (first.policy_version, second.policy_version) == (4, None)
    assert first.ended_at is not None and first.ended_at.year == 2025 and third.ended_at is None
    assert (second.reward, third.reward) == (0.0, None)  # a reward of 0 is one
    assert result.exit_code() == 0 and "no_tokenizer" in result.losses.gaps


def test_logprobs_that_may_be_before_or_after_sampling_are_left_out_and_kept_aside(tmp_path: Path) -> None:
    warm = {**exchange("a", PROMPT, [30, 2]), "request": {**ASK, "temperature": 0.7}}
    result, (row,) = converted(tmp_path, "vllm", [warm])
    assert row.output_logprobs is None and json.loads((row.extra or {})["log_probabilities"]) == [0.0, -0.5]
    assert any("--logprob-kind" in reason for reason in result.losses.degraded)
    _, (row,) = converted(tmp_path, "vllm", [warm], logprob_kind="raw")
    assert row.output_logprobs is not None


def test_the_floor_of_a_logprob_is_null_and_its_token_is_not_trained(tmp_path: Path) -> None:
    record = exchange("a", PROMPT, [30, 31, 2])
    record["response"]["choices"][0]["logprobs"]["content"][1]["logprob"] = -9999.0
    _, (row,) = converted(tmp_path, "vllm", [record])
    assert row.output_logprobs is not None and row.output_logprobs.tolist() == [0.0, None, -1.0]
    assert row.loss_mask().tolist() == [True, False, True]


def test_what_ids_tell_is_not_kept_twice_and_other_tokens_logprobs_are(tmp_path: Path) -> None:
    record = exchange("a", PROMPT, [30, 2])
    _, (row,) = converted(tmp_path, "vllm", [record])
    assert json.loads(row.messages or "") == [*ASK["messages"], {"role": "assistant", "content": "yo"}]
    assert "bytes" not in str(row.extra) and "yo" not in str(row.extra)
    record["response"]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = [{"token": "z", "logprob": -3.0}]
    _, (row,) = converted(tmp_path, "vllm", [record])
    assert '"token":"z","logprob":-3.0' in (row.extra or {})["response"]
    del record["response"]["choices"][0]["token_ids"]
    _, rows = converted(tmp_path, "vllm", [record])
    assert rows == []  # token texts are no ids


def test_several_choices_are_forks_of_the_first(tmp_path: Path) -> None:
    record = exchange("a", PROMPT, [30, 2])
    record["response"]["choices"].append(choice([31, 2], index=1))
    after = exchange("b", [*PROMPT, 31, 2, 60], [9, 2])
    result, rows = converted(tmp_path, "vllm", [record, after])
    assert [(r.relation, r.parent_index) for r in rows] == [("root", None), ("fork", 0), ("extend", 1)]
    assert not result.losses.degraded


def test_a_streamed_answer_is_its_chunks(tmp_path: Path) -> None:
    record = exchange("a", PROMPT, [30, 31, 2])
    whole = record["response"]["choices"][0]
    chunks: list[dict[str, Any]] = [
        {"id": "a", "model": "m", "prompt_token_ids": PROMPT, "choices": [{"index": 0, "delta": {"role": "assistant"}}]}
    ]
    for i, token in enumerate(whole["token_ids"]):
        part = {"index": 0, "delta": {"content": "yo"[i : i + 1]}, "token_ids": [token],
                "logprobs": {"content": [whole["logprobs"]["content"][i]]}}  # fmt: skip
        chunks.append({"id": "a", "choices": [part]})
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    chunks.append({"id": "a", "choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 3}})
    _, (a,) = converted(tmp_path, "vllm", [record])
    _, (b,) = converted(tmp_path, "vllm", [{**record, "response": chunks}])
    assert a.compute_digest() == b.compute_digest() and a.finish_reason == b.finish_reason == "stop"
    np.testing.assert_array_equal(a.output_logprobs, b.output_logprobs)


def test_other_places_of_ids(tmp_path: Path) -> None:
    inside = {"prompt_token_ids": PROMPT, **choice([30, 2])}
    named = {**choice([]), "logprobs": {"content": [{"token": "token_id:30", "logprob": -1.0}]}}
    del named["token_ids"]
    plain = {"text": "x", "token_ids": [30], "logprobs": {"tokens": ["x"], "token_logprobs": [-1.0]}}
    records = [
        {"request": ASK, "response": {"choices": [inside]}},
        {"request": json.dumps(ASK), "response": json.dumps({"prompt_token_ids": PROMPT, "choices": [named]})},
        {"request": {"prompt": [PROMPT]}, "response": {"body": {"choices": [plain]}}},
        {**ASK, "response": {"prompt_token_ids": PROMPT, "choices": [choice([30])]}},
        {"prompt_token_ids": PROMPT, "choices": [choice([30])]},
    ]
    result, rows = converted(tmp_path, "vllm", records)
    assert [r.prompt_ids.tolist() for r in rows] == [PROMPT] * 5 and {r.output_ids[0] for r in rows} == {30}
    assert all(r.output_logprobs is not None for r in rows)
    assert result.losses.gaps["no_episode"].number == 5 and len({r.episode_id for r in rows}) == 5


def test_errors_and_answers_without_output_are_dropped_with_a_reason(tmp_path: Path) -> None:
    silent = exchange("a", PROMPT, [])
    silent["response"]["choices"][0]["message"]["content"] = ""
    aborted = exchange("b", PROMPT, [], session="t")
    aborted["response"]["choices"][0] |= {"message": {"content": ""}, "finish_reason": "abort"}
    failed = {"request": ASK, "response": {"error": {"message": "too long"}}}
    records = [silent, aborted, failed, {"status_code": 503, "response": {}}, exchange("c", PROMPT, [2], session="u")]
    result, rows = converted(tmp_path, "vllm", records)
    assert [(r.episode_id, len(r.output_ids), r.finish_reason) for r in rows] == [("t", 0, "abort"), ("u", 1, "stop")]
    assert dict(result.losses.dropped_calls).keys() == {"no output"}
    assert sorted(result.losses.dropped_records) == [
        "no call: an answer with status 5xx",
        "no call: an error instead of an answer",
    ]
    assert result.exit_code() == 0


def test_text_becomes_ids_by_the_template(tmp_path: Path, tokenizer: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "1 + 2"}, {"type": "text", "text": "?"}]}]
    made = {"role": "assistant", "content": None, "tool_calls": [call]}
    later = [*asked, made, {"role": "tool", "tool_call_id": "c", "content": "3"}]
    records = [
        {"session_id": "s", "request": {"messages": asked, "tools": tools},
         "response": {"model": "m", "choices": [{"message": made, "finish_reason": "tool_calls"}]}},
        {"session_id": "s", "request": {"messages": later, "tools": tools},
         "response": {"choices": [{"message": {"role": "assistant", "content": "3"}, "finish_reason": "length"}],
                      "usage": {"prompt_tokens": 7, "completion_tokens": 1}}},
    ]  # fmt: skip
    result, (first, second) = converted(tmp_path, "openai", records, tokenizer=tokenizer, model_id="m")
    text = Renderer(tokenizer).tokenizer.decode
    assert text(first.prompt_ids).startswith("<|start|>tools [") and "1 + 2\n?" in text(first.prompt_ids)
    assert text(first.output_ids) == '<call>add {"a": 1}</call><|end|>'  # arguments as an object, and the turn's end
    assert text(second.output_ids) == "3"  # cut by its length: no end
    assert (second.relation, second.parent_index) == ("extend", 0)
    assert len(result.losses.degraded) == 1  # a count that disagrees
    (example,) = [c.example for reason, c in result.losses.degraded.items() if "rendered prompt" in reason]
    assert f"{len(second.prompt_ids)} ids, the log counted 7" in example
    assert validate(result.trace or "", "lineage", tokenizer=tokenizer).errors == 0


def test_a_template_that_leaves_tool_calls_out_is_reported(tmp_path: Path, tokenizer: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(tokenizer, plain)
    template = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    (plain / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    made = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    request = {"messages": [*ASK["messages"], made, {"role": "tool", "content": "3"}]}
    record = {"request": request, "response": {"choices": [{"message": {"role": "assistant", "content": "3"}}]}}
    result, (row,) = converted(tmp_path, "openai", [record], tokenizer=plain)
    assert "the chat template leaves tool calls out" in result.losses.degraded
    result, (row,) = converted(tmp_path, "openai", [record], tokenizer=tokenizer)
    assert not result.losses.degraded and row.token_source == "retokenized"
    asked = {"request": ASK, "response": {"choices": [{"message": made, "finish_reason": "tool_calls"}]}}
    result, rows = converted(tmp_path, "openai", [asked, record], tokenizer=plain)
    ((reason, _),) = result.losses.dropped_calls.items()
    assert len(rows) == 1 and reason.endswith("leaves tool calls out, and the answer is nothing else")


def test_recorded_ids_hold_over_a_rendering_that_differs(tmp_path: Path, tokenizer: Path) -> None:
    renderer = Renderer(tokenizer)
    chat = Chat(messages=ASK["messages"])
    same = renderer.encode(renderer.prompt_text(chat)).tolist()
    answer = renderer.encode("yo<|end|>").tolist()
    result, (row,) = converted(tmp_path, "vllm", [exchange("a", same, answer)], tokenizer=tokenizer)
    assert not result.losses.degraded and row.token_source == "engine"
    result, (row,) = converted(tmp_path, "vllm", [exchange("a", [5, *same], answer)], tokenizer=tokenizer)
    assert row.prompt_ids.tolist() == [5, *same]
    ((reason, count),) = result.losses.degraded.items()
    assert "which hold" in reason and f"{len(same)} ids, recorded {len(same) + 1}, equal up to 0" in count.example


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "a part of type 'image_url'"),
        ({"role": "user", "content": 5}, "neither text nor a list of parts"),
        ({"content": "x"}, "chat template"),
    ],
)
def test_what_cannot_be_rendered_is_dropped_with_the_reason(
    message: dict[str, Any], reason: str, tmp_path: Path, tokenizer: Path
) -> None:
    record = {
        "request": {"messages": [message]},
        "response": {"choices": [{"message": {"role": "assistant", "content": "x"}}]},
    }
    result, rows = converted(tmp_path, "openai", [record], tokenizer=tokenizer)
    assert rows == [] and result.exit_code() == 3
    assert reason in next(iter(result.losses.dropped_calls))


def test_a_template_inside_a_log_is_not_run(tmp_path: Path, tokenizer: Path) -> None:
    request = {**ASK, "chat_template": "{{ cycler.__init__.__globals__.os.system('touch pwned') }}"}
    record = {"request": request, "response": {"choices": [{"message": {"role": "assistant", "content": "x"}}]}}
    result, rows = converted(tmp_path, "openai", [record], tokenizer=tokenizer)
    assert rows == [] and "the request has a chat template of its own, which is not run" in result.losses.degraded


def answered(*output: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """An answer of the Responses form."""
    return {"id": "r1", "object": "response", "model": "m", "status": "completed", "output": list(output), **fields}


SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3"}]}
CALLED = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'}


def test_the_responses_form_is_rendered_too(tmp_path: Path, tokenizer: Path) -> None:
    tools = [{"type": "function", "name": "add", "parameters": {}}]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    result_of = {"type": "function_call_output", "call_id": "c", "output": "3"}
    records = [
        {"session_id": "s", "request": {"instructions": "be brief", "input": "1 + 2?", "tools": tools},
         "response": answered(CALLED)},
        {"session_id": "s",
         "request": {"instructions": "be brief", "tools": tools, "temperature": 0.5,
                     "input": [{"role": "user", "content": "1 + 2?"}, CALLED, result_of]},
         "response": answered(thought, SAID, id="r2", usage={"input_tokens": 5, "output_tokens": 2})},
    ]  # fmt: skip
    result, (first, second) = converted(tmp_path, "openai", records, tokenizer=tokenizer)
    text = Renderer(tokenizer).tokenizer.decode
    assert "system" in text(first.prompt_ids) and '{"name": "add"' in text(first.prompt_ids)
    assert text(first.output_ids) == '<call>add {"a": 1}</call><|end|>' and first.finish_reason == "tool_calls"
    assert text(second.output_ids) == "<think>hm</think>3<|end|>" and second.finish_reason == "stop"
    assert second.sampling == Sampling(temperature=0.5) and second.relation == "extend"
    assert sum("the log counted" in c.example for c in result.losses.degraded.values()) == 2


@pytest.mark.parametrize(
    ("request_of", "answer", "reason"),
    [
        ({"input": "x", "previous_response_id": "r0"}, answered(SAID), "no prompt"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, answered(SAID), "a part of type 'compaction'"),
        ({"input": "x"}, answered(SAID, {"type": "web_search_call"}, SAID), "several calls are one answer"),
        ({"input": "x"}, answered({"type": "reasoning", "encrypted_content": "x", "summary": []}), "encrypted"),
    ],
)
def test_what_a_server_keeps_to_itself_is_said(
    request_of: dict[str, Any], answer: dict[str, Any], reason: str, tmp_path: Path, tokenizer: Path
) -> None:
    result, rows = converted(tmp_path, "openai", [{"request": request_of, "response": answer}], tokenizer=tokenizer)
    assert rows == [] and reason in next(iter(result.losses.dropped_calls))


def asked(text: str, name: str, before: str | None = None, *output: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A call of the Responses form that goes on from another."""
    request = {"input": text, **({"previous_response_id": before} if before else {}), **more}
    return {"request": request, "response": answered(*(output or (SAID,)), id=name)}


def test_calls_that_go_on_from_a_response_of_the_log_have_its_whole_history(tmp_path: Path, tokenizer: Path) -> None:
    records = [
        asked("1 + 2?", "a", None, CALLED, instructions="be brief"),
        asked("hi", "z"),  # no chain
        {**asked("", "b", "a"), "request": json.dumps({"input": [{"type": "function_call_output", "call_id": "c",
                                                                  "output": "3"}], "previous_response_id": "a"})},
        asked("sure?", "c", "b", instructions="be long"),
        asked("really?", "d", "b"),
    ]  # fmt: skip
    result, rows = converted(tmp_path, "openai", records, tokenizer=tokenizer)
    chain = [[m["role"] for m in json.loads(r.messages or "")] for r in rows if r.episode_id == "a"]
    begin = ["user", "assistant", "tool", "assistant"]
    assert chain == [
        ["system", "user", "assistant"], begin, ["system", *begin, "user", "assistant"], [*begin, "user", "assistant"],
    ]  # fmt: skip
    assert len(rows) == 5
    parents = [r.parent_index for r in rows if r.episode_id == "a"]
    assert parents == [None, 0, 1, 1] and "server_state" not in result.losses.gaps
    assert result.losses.gaps["no_episode"].number == 1  # of the call that is no part of a chain


def test_a_session_that_is_told_holds_its_chains(tmp_path: Path, tokenizer: Path) -> None:
    records = [{**asked("x", name, before), "session_id": "s"} for name, before in (("a", None), ("b", "a"))]
    _, rows = converted(tmp_path, "openai", records, tokenizer=tokenizer)
    assert [(r.episode_id, r.parent_index) for r in rows] == [("s", None), ("s", 0)]


def test_what_is_missing_in_a_chain_is_a_gap_for_all_behind_it(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(
        tmp_path, "openai", [asked("x", "b", "a"), asked("y", "c", "b"), asked("z", "d")], tokenizer=tokenizer
    )
    assert len(rows) == 1 and result.losses.gaps["server_state"].number == 2
    conversation = {"request": {"input": "x", "conversation": {"id": "v"}}, "response": answered(SAID)}
    result, rows = converted(tmp_path, "openai", [conversation], tokenizer=tokenizer)
    assert rows == [] and "server_state" in result.losses.gaps


def test_a_chain_that_goes_round_is_cut(tmp_path: Path, tokenizer: Path) -> None:
    records = [asked("x", "a"), asked("y", "b", "a"), asked("z", "a", "b"), asked("w", "c", "a")]
    result, rows = converted(tmp_path, "openai", records, tokenizer=tokenizer)
    assert len(rows) == 3 and result.losses.dropped_calls.total == 1  # the id that occurs twice


def test_a_chain_whose_prompts_would_outgrow_the_log_by_far_is_cut(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log tells each item once, and its prompts hold all before them: 100,000 calls would have 10^10 items."""
    monkeypatch.setattr(chains, "MAX_RESTORED", 12)
    records = [asked(f"x{n}", f"r{n}", f"r{n - 1}" if n else None) for n in range(6)]
    result, rows = converted(tmp_path, "openai", [*records, asked("y", "s"), asked("z", "t", "s")], tokenizer=tokenizer)
    assert [r.episode_id for r in rows] == ["r0"] * 4 + ["s"] * 2  # 2 + 4 + 6 items; 8 more are too many
    assert result.losses.gaps["server_state"].number == result.losses.dropped_calls.total == 2


def test_behind_a_compaction_nothing_is_made_up(tmp_path: Path, tokenizer: Path) -> None:
    compaction = {"type": "compaction", "id": "x", "encrypted_content": "e"}
    kept = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "old"}]}
    records = [
        asked("x", "a"),
        asked("y", "b", "a", compaction, SAID),  # the server compacted what it then answered to
        asked("z", "c", "b"),
        {"request": {"input": "x"}, "response": answered(kept, compaction, id="k", object="response.compaction")},
        {"request": {"input": [kept, compaction, {"role": "user", "content": "and?"}]},
         "response": answered(SAID, id="l")},
        answered(kept, compaction, id="m", object="response.compaction"),
    ]  # fmt: skip
    result, rows = converted(tmp_path, "openai", records, tokenizer=tokenizer)
    assert [json.loads(r.messages or "")[0]["content"] for r in rows] == ["x"]
    assert result.losses.calls == 6 and result.losses.dropped_calls.total == 5
    assert result.losses.dropped_calls["a compaction, whose result the server encrypted"].number == 2
    assert {"server_state", "opaque_content", "lost_calls"} <= result.losses.gaps.keys()


def test_an_output_that_lacks_its_encrypted_reasoning_says_so(tmp_path: Path, tokenizer: Path) -> None:
    hidden = {"type": "reasoning", "encrypted_content": "x", "summary": []}
    record = {"request": {"input": "x"}, "response": answered(hidden, SAID)}
    result, (row,) = converted(tmp_path, "openai", [record], tokenizer=tokenizer)
    assert "opaque_content" in result.losses.gaps and row.token_source == "retokenized"
