"""Logs that trainers' own classes and file writers made (`fixtures/make_*.py`) convert to what was put into them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_convert import FIXTURES, from_fixtures, ids

PROMPT = list(range(100, 130))


def test_slime_s_file_holds_appended_calls_and_a_forked_session(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    _, rows = from_fixtures("slime", tmp_path, "slime_rollout.pt")
    asked = [*PROMPT, 50]
    assert ids(rows) == [
        (PROMPT, [7, 8, 2]), ([*PROMPT, 7, 8, 2, 60, 61], [9, 2]),
        (asked, [7, 8, 2]), ([*asked, 7, 8, 2, 60, 50], [9, 2]),
        ([*asked, 7, 8, 2, 60, 50, 10, 2, 62, 50], [11, 2]),
    ]  # fmt: skip
    assert [r.relation for r in rows] == ["root", "extend", "root", "extend", "extend"] and rows[4].parent_index == 0
    assert [r.policy_version for r in rows[:2]] == [4, 5] and [r.reward for r in rows] == [None, 1.0, None, None, 0.5]
    assert rows[0].output_logprobs is not None and rows[0].output_logprobs.tolist() == [-0.5, 0.0, -0.25]


def test_skyrl_s_steps_end_where_the_environment_speaks_and_merged_ones_are_the_same_calls(tmp_path: Path) -> None:
    expected = [
        (PROMPT, [7, 8, 2]), ([*PROMPT, 7, 8, 2, 60, 61], [9, 2]),
        ([*PROMPT, 8, 2, 60, 61, 9, 2, 62], [10, 2]), (PROMPT[::-1], [11, 12]),
    ]  # fmt: skip
    for log in ("skyrl_steps.jsonl", "skyrl_merged.jsonl"):
        _, rows = from_fixtures("skyrl", tmp_path, log)
        assert ids(rows) == expected and [r.relation for r in rows] == ["root", "extend", "rewrite", "root"]
        assert [r.reward for r in rows] == [0.0, 0.5, 1.0, 0.0] and all(r.output_loss_mask is None for r in rows)
        assert [r.episode_id for r in rows] == ["adder_0"] * 3 + ["adder_1"] and rows[3].truncated


def test_skyrl_s_evaluation_is_text_beside_its_metrics(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = from_fixtures("skyrl", tmp_path, "skyrl_eval", tokenizer=tokenizer)
    assert len(rows) == 4 and rows[1].output_text == "9 2 62" and rows[1].reward == 0.5
    assert result.losses.dropped_records["no call: metrics of an evaluation"].number == 1


def test_verl_s_outputs_are_calls_with_the_session_s_reward(tmp_path: Path) -> None:
    _, rows = from_fixtures("verl", tmp_path, "verl_outputs.jsonl")
    turns = [(PROMPT, [7, 8, 2]), ([*PROMPT, 7, 8, 2, 60, 61], [9, 2])]
    assert ids(rows) == [*turns, *turns, ([*PROMPT[:25], 71, 72], [70, 2])]
    assert [r.relation for r in rows] == ["root", "extend", "root", "extend", "rewrite"]
    assert [r.policy_version for r in rows] == [5, 5, None, None, 6]
    assert [r.reward for r in rows] == [None, 1.0, None, None, 1.0] and {r.group_id for r in rows} == {"task"}
    assert (rows[1].extra or {})["ids_after_the_last_call"] == "[62]"


def test_verl_s_dump_is_text(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = from_fixtures("verl", tmp_path, "verl_dump.jsonl", tokenizer=tokenizer)
    assert [(r.output_text, r.reward) for r in rows] == [("3", 1.0), ("5", 0.0)] and "lossy_text" in result.losses.gaps


def test_rllm_s_episode_is_exact(tmp_path: Path) -> None:
    _, rows = from_fixtures("rllm", tmp_path, "rllm_episode.json")
    assert ids(rows) == [(PROMPT, [70, 71, 8, 2]), ([*PROMPT, 8, 2, 60], [9, 2]), (PROMPT[::-1], [9, 2])]
    assert [(r.relation, r.rewrite_kind, r.reward) for r in rows] == [
        ("root", None, None), ("rewrite", "strip_thinking", 1.0), ("root", None, 0.25),
    ]  # fmt: skip
    assert {r.policy_version for r in rows} == {3} and all(r.terminated for r in rows[1:])


def test_rllm_s_logged_episode_is_the_same_as_text(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = from_fixtures("rllm", tmp_path, "rllm_logged", tokenizer=tokenizer)
    assert [r.episode_id for r in rows] == ["task7:0/u1", "task7:0/u1", "task7:0/u2"]
    assert [json.loads(r.messages or "")[-1]["content"] for r in rows] == ["is it 3", "yes", "yes"]
    assert {r.token_source for r in rows} == {"retokenized"} and rows[1].reward == 1.0 and rows[0].task_id == "task7"
    assert result.losses.dropped_records["no call: a summary of a batch of episodes"].number == 1


def answers() -> list[dict[str, Any]]:
    """The real server's answers that were not streamed."""
    lines = (FIXTURES / "vllm_real.jsonl").read_text().splitlines()
    return [c["response"] for c in map(json.loads, lines) if isinstance(c["response"], dict)]


def test_rllm_s_gateway_keeps_one_choice_and_the_other_is_found_in_the_answer(tmp_path: Path) -> None:
    _, rows = from_fixtures("rllm", tmp_path, "rllm_gateway.jsonl")
    choices = [choice["token_ids"] for answer in answers() for choice in answer["choices"]]
    assert sorted(r.output_ids.tolist() for r in rows) == sorted(choices) and len(choices) == len(rows) == 5
    assert [r.relation for r in rows if r.episode_id == "t"] == ["root", "fork"]
    assert {r.policy_version for r in rows} == {3}


def test_tinker_s_capture_is_read_from_its_file_and_from_its_store(tmp_path: Path) -> None:
    expected = [(PROMPT, [7, 2]), ([*PROMPT, 7, 2, 60], [7, 2]), (PROMPT[::-1], [7, 2]), (PROMPT[::-1], [8, 2])]
    for log in ("tinker_sample.jsonl", "tinker_rows.json"):
        result, rows = from_fixtures("tinker", tmp_path, log)
        assert ids(rows) == expected and [r.relation for r in rows] == ["root", "extend", "root", "fork"]
        assert [r.episode_id for r in rows[:2]] == ["run/train/4/0/1"] * 2 and rows[2].episode_id == rows[3].episode_id
        assert [r.group_id for r in rows] == ["run/train/4/0"] * 2 + [None] * 2 and rows[3].finish_reason == "stop"
        assert all(r.model_id == "tinker://run/sampler_weights/000004" for r in rows)
        assert all(r.sampling is not None and r.sampling.temperature == 1.0 for r in rows)
        lost = "a call without an answer" in result.losses.dropped_calls
        assert lost == (log == "tinker_sample.jsonl")  # the store takes in none of a request that failed


def test_agent_lightning_s_events_are_the_server_s_answers(tmp_path: Path) -> None:
    result, rows = from_fixtures("agent-lightning", tmp_path, "agent_lightning_events.json")
    chats = [a for a in answers() if a["object"] == "chat.completion"]
    assert sorted(r.output_ids.tolist() for r in rows) == sorted(c["token_ids"] for a in chats for c in a["choices"])
    assert {r.policy_version for r in rows} == {7} and [r.reward for r in rows] == [None, None, None, 0.5]
    assert result.losses.dropped_records["no call: an error instead of an answer"].number == 1


def test_agent_lightning_s_spans_hold_ids_as_numbers_and_in_the_text_of_choices(tmp_path: Path) -> None:
    result, rows = from_fixtures("agent-lightning", tmp_path, "agent_lightning_spans.jsonl")
    first, two = answers()[:2]
    assert ids(rows) == [(a["prompt_token_ids"], a["choices"][0]["token_ids"]) for a in (first, two)]
    for row, answer in zip(rows, (first, two), strict=True):
        told = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
        assert row.output_logprobs is not None and row.output_logprobs.tolist() == pytest.approx(told)
    assert rows[1].rewards == {"right": 1.0, "brief": 0.5} and rows[1].reward == 1.0 and rows[1].model_id == "smollm2"
    assert result.losses.degraded["choices behind the first one are kept as extra"].number == 1


def test_the_older_verifiers_results_are_exact_where_a_step_has_tokens(tmp_path: Path) -> None:
    result, rows = from_fixtures("verifiers", tmp_path, "verifiers_results")
    assert ids(rows) == [(PROMPT, [70, 71, 8, 2]), ([*PROMPT, 8, 2, 60], [9, 2])]
    assert [(r.relation, r.reward) for r in rows] == [("root", None), ("rewrite", 1.0)]
    assert {r.finish_reason for r in rows} == {"stop"} and {r.model_id for r in rows} == {"m"}
    assert all(r.sampling is not None and r.sampling.temperature == 1.0 for r in rows) and rows[0].task_id == "0"
    assert result.losses.dropped_calls["no token ids, and no tokenizer to make them (--tokenizer)"].number == 1
