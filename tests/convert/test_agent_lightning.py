"""Agent Lightning: events of its store, and the spans of its older one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_convert import converted

from memopd_trace import Sampling

PROMPT = list(range(100, 120))


def event(kind: str, data: Any, rollout: str = "r", attempt: str = "a1", time: float = 1756498939.0) -> dict[str, Any]:
    return {"event_type": kind, "rollout_id": rollout, "attempt_id": attempt, "timestamp": time, "data": data}


def request(name: str, prompt: list[int], ids: list[int], **fields: Any) -> dict[str, Any]:
    content = [{"token": "x", "logprob": -0.5} for _ in ids]
    choice = {"message": {"content": "yo"}, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": "stop"}
    return {"model": "m", "model_version": 4, "request": {"messages": [], "temperature": 1.0},
            "response": {"id": name, "prompt_token_ids": prompt, "choices": [choice]}, **fields}  # fmt: skip


def test_attempts_are_episodes_and_the_last_reward_holds(tmp_path: Path) -> None:
    records = [
        event("model_request", request("1", PROMPT, [7, 2], latency_ms=3)),
        event("model_request", request("2", PROMPT, [8, 2]), attempt="a2"),
        event("reward", {"value": 0.0, "message": "wrong", "source": "judge"}),
        event("model_request", request("3", [*PROMPT, 7, 2, 9], [5, 2])),
        event("note", {"text": "x"}),
        event("reward", {"value": 1.0}),
    ]
    result, rows = converted(tmp_path, "agent-lightning", records)
    assert [(r.episode_id, r.relation, r.reward) for r in rows] == [
        ("r/a1", "root", None), ("r/a1", "extend", 1.0), ("r/a2", "root", None),
    ]  # fmt: skip
    assert (
        rows[0].policy_version == 4 and rows[0].sampling == Sampling(temperature=1.0) and rows[0].ended_at is not None
    )
    assert rows[0].output_logprobs is not None and "latency_ms" in (rows[0].extra or {})["data"]
    assert (rows[0].extra or {})["reward_message"] == "wrong"
    assert result.losses.dropped_records["no call: an event of type 'note'"].number == 1
    assert result.losses.degraded["told twice and differently, the last word holds: reward"].number == 1


def test_the_same_prompt_sampled_twice_is_two_calls(tmp_path: Path) -> None:
    records = [event("model_request", request(name, PROMPT, ids)) for name, ids in (("1", [7, 2]), ("2", [8, 2]))]
    _, rows = converted(tmp_path, "agent-lightning", records)
    assert [r.relation for r in rows] == ["root", "fork"]


def test_a_version_that_is_no_number_stays_with_what_is_left_over(tmp_path: Path) -> None:
    records = [event("model_request", request("1", PROMPT, [7, 2], model_version="main@4"))]
    _, rows = converted(tmp_path, "agent-lightning", records)
    assert rows[0].policy_version is None and "main@4" in (rows[0].extra or {})["data"]


def span(number: int, attributes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"rollout_id": "r", "attempt_id": "a", "sequence_id": number, "span_id": f"s{number}", "name": "chat",
            "attributes": attributes, "start_time": 1756498939.0, "end_time": 1756498940.0, **fields}  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "output"),
    [
        ("prompt_token_ids", "response_token_ids"),
        ("llm.hosted_vllm.prompt_token_ids", "llm.hosted_vllm.response_token_ids"),
        ("agentlightning.operation.output.prompt_token_ids", "agentlightning.operation.output.choices.0.token_ids"),
    ],
)
def test_spans_in_any_order_with_ids_as_text(prompt: str, output: str, tmp_path: Path) -> None:
    records = [
        span(3, {"agentlightning.reward.0.name": "f1", "agentlightning.reward.0.value": 0.5}),
        span(2, {prompt: str([*PROMPT, 7, 2, 9]), output: "[[8, 2]]", "gen_ai.response.model": "m"}),
        span(1, {prompt: PROMPT, output: [[7, 2]], "logprobs.content": '[{"logprob": -1}, {"logprob": -2}]', "x": 1}),
        span(4, {"tool": "ls"}),
    ]
    result, rows = converted(tmp_path, "agent-lightning", records)
    assert [(r.prompt_ids.tolist(), r.output_ids.tolist()) for r in rows] == [
        (PROMPT, [7, 2]), ([*PROMPT, 7, 2, 9], [8, 2]),
    ]  # fmt: skip
    assert [r.relation for r in rows] == ["root", "extend"] and rows[1].rewards == {"f1": 0.5} and rows[1].reward == 0.5
    assert rows[0].output_logprobs is not None and rows[0].output_logprobs.tolist() == [-1, -2]
    assert rows[0].started_at is not None and rows[1].model_id == "m"
    assert result.losses.dropped_records["no call: a span without ids and reward"].number == 1


def test_other_records_are_said(tmp_path: Path) -> None:
    records = [
        {"rollout_id": "r", "input": {}, "status": {}},
        {"x": 1},
        event("model_request", {"response": {"error": 1}}),
    ]
    result, rows = converted(tmp_path, "agent-lightning", records)
    assert rows == [] and result.losses.broken == 1 and result.exit_code() == 3
    assert "no call: a rollout's description" in result.losses.dropped_records
