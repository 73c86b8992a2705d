"""Logs that agents and instrumentations wrote themselves (`fixtures/make_*.py`) convert to what was put into them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers_convert import FIXTURES, from_fixtures, ids

PROMPT = list(range(100, 130))
HELPERS = ["summary", "questions", "answers"]


@pytest.mark.parametrize("logs", ["atif_trial", "atif_linear"])
def test_harbor_s_agent_is_one_episode_with_an_explicit_summary(tmp_path: Path, logs: str) -> None:
    result, rows = from_fixtures("atif", tmp_path, logs)
    assert [(r.relation, r.parent_index, r.rewrite_kind, r.rewrite_evidence) for r in rows] == [
        ("root", None, None, None), ("extend", 0, None, None), *[("spawn", 1, None, None)] * 3,
        ("rewrite", 1, "summary", "explicit"), ("extend", 5, None, None), ("extend", 6, None, None),
    ]  # fmt: skip
    assert [r.agent_id for r in rows[2:5]] == [f"session-summarization-1-{name}" for name in HELPERS]
    assert result.losses.records == result.losses.converted == 5 and {r.model_id for r in rows} == {"toy"}
    kept = json.loads((FIXTURES / "atif_trial" / "result.json").read_text())["agent_result"]["rollout_details"]
    told = [turn for one in kept for turn in zip(one["prompt_token_ids"], one["completion_token_ids"], strict=True)]
    assert sorted(ids(rows)) == sorted(told) and all(r.output_logprobs is not None for r in rows)


def test_harbor_s_result_beside_a_trajectory_gives_names_and_rewards_and_no_calls(tmp_path: Path) -> None:
    _, rows = from_fixtures("atif", tmp_path, "atif_trial")
    assert {(r.episode_id, r.task_id) for r in rows} == {("hello__abc", "hello")}
    assert rows[-1].reward == 1.0 and rows[-1].rewards == {"reward": 1.0, "style": 0.5}
    left = json.loads((rows[0].extra or {})["agent_result"])
    assert left["rollout_details"][0]["extra"] == {"stop_reason": ["stop"] * 5} and "completion" not in str(left)
    _, alone = from_fixtures("atif", tmp_path, "atif_trial/result.json")
    assert sorted(ids(alone)) == sorted(ids(rows)) and alone[-1].reward == 1.0
    assert [r.agent_id for r in alone] == ["main"] * 5 + ["helper-1", "helper-2", "helper-3"]


def test_mini_swe_agent_keeps_the_ids_that_came_through_litellm(tmp_path: Path) -> None:
    _, rows = from_fixtures("mini-swe-agent", tmp_path, "mini_swe_agent.traj.json")
    assert ids(rows) == [(PROMPT, [7, 8, 2]), ([*PROMPT, 7, 8, 2, 60, 61], [9, 2])]
    assert rows[1].relation == "extend" and rows[1].terminated and rows[0].finish_reason == "tool_calls"
    assert rows[0].output_logprobs is not None and rows[0].sampling is not None and rows[0].model_id == "toy"
    assert "api_key" in (FIXTURES / "mini_swe_agent.traj.json").read_text()
    assert not any("api_key" in text for r in rows for text in (r.extra or {}).values())


def test_openhands_sdk_s_events_are_exact_up_to_and_behind_a_condensation(tmp_path: Path) -> None:
    result, rows = from_fixtures("openhands", tmp_path, "openhands_sdk")
    events = [json.loads(path.read_text()) for path in sorted((FIXTURES / "openhands_sdk" / "events").iterdir())]
    told = [(e["prompt_token_ids"], e["response_token_ids"]) for e in events if e["kind"] == "TokenEvent"]
    assert ids(rows) == told and len(told) == 6 and {e["kind"] for e in events} >= {"Condensation", "ActionEvent"}
    assert [r.relation for r in rows] == ["root", *["extend"] * 4, "rewrite"]
    assert (rows[5].rewrite_kind, rows[5].rewrite_evidence, rows[5].parent_index) == ("summary", "explicit", 4)
    assert result.losses.gaps["lost_calls"].number == 1  # the one that wrote the summary


@pytest.mark.parametrize("name", ["openinference", "otel"])
def test_spans_of_the_instrumentations_hold_the_calls_and_a_streamed_one(
    name: str, tmp_path: Path, tokenizer: Path
) -> None:
    result, rows = from_fixtures(name, tmp_path, f"{name}_spans.jsonl", tokenizer=tokenizer)
    messages = [json.loads(r.messages or "") for r in rows]
    assert [m[-1].get("content") or m[-1]["tool_calls"][0]["function"]["name"] for m in messages] == [
        "add",
        "3",
        "it is 3",
    ]
    assert [[m["role"] for m in each] for each in messages[:2]] == [
        ["system", "user", "assistant"], ["system", "user", "assistant", "tool", "assistant"],
    ]  # fmt: skip
    assert [r.finish_reason for r in rows] == ["tool_calls", "stop", "stop"] and len({r.episode_id for r in rows}) == 1
    assert (
        {r.model_id for r in rows} == {"toy"} and rows[0].sampling is not None and rows[0].sampling.temperature == 0.5
    )
    assert result.losses.dropped_records.total == 1  # the agent's own span
