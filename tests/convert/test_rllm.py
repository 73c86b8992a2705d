"""rLLM: trajectories are episodes, steps are calls with their exact ids, and default rewards are none."""

from __future__ import annotations

from pathlib import Path

from helpers_convert import converted
from helpers_trainers import PROMPT, changed, rllm_episode, rllm_record


def test_steps_are_calls_and_trajectories_episodes(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "rllm", [rllm_episode()])
    assert [(r.episode_id, r.agent_id, r.relation) for r in rows] == [
        ("task7:0/u1", "solver", "root"), ("task7:0/u1", "solver", "extend"), ("task7:0/u2", "judge", "root"),
    ]  # fmt: skip
    assert [r.group_id for r in rows] == ["task7:solver", "task7:solver", "task7:judge"]
    assert rows[1].prompt_ids.tolist() == [*PROMPT, 7, 2, 60] and rows[1].token_source == "engine"
    assert [r.policy_version for r in rows] == [2, 2, 2] and rows[0].finish_reason == "stop"
    assert result.exit_code() == 0 and rows[1].terminated and "no_parent" not in result.losses.gaps


def test_an_episode_of_a_later_epoch_is_another_one_and_one_told_twice_is_not(tmp_path: Path) -> None:
    first, later = rllm_episode(), rllm_episode()
    first["trajectories"].pop(), later["trajectories"].pop()
    later["trajectories"][0]["uid"] = "u9"
    result, rows = converted(tmp_path, "rllm", [first, later, first])
    assert [r.episode_id for r in rows] == ["task7:0/u1"] * 2 + ["task7:0/u9"] * 2
    assert result.losses.dropped_calls["told again"].number == 2


def test_a_reward_of_zero_that_nothing_set_is_null_and_a_step_s_own_is_kept(tmp_path: Path) -> None:
    _, rows = converted(tmp_path, "rllm", [rllm_episode()])
    assert [r.reward for r in rows] == [None, 1.0, 0.25]  # the trajectory's at its end, and the judge's step


def test_empty_lists_of_ids_are_null_and_the_text_is_rendered(tmp_path: Path, tokenizer: Path) -> None:
    episode = rllm_episode()
    for step in episode["trajectories"][0]["steps"]:
        step |= {"prompt_ids": [], "response_ids": [], "logprobs": []}
    _, rows = converted(tmp_path, "rllm", [episode], tokenizer=tokenizer)
    assert [r.token_source for r in rows] == ["retokenized", "retokenized", "engine"]
    assert rows[0].output_logprobs is None and "hm" in (rows[0].messages or "")


def test_a_prompt_with_blocks_of_an_image_is_no_list_of_ids(tmp_path: Path) -> None:
    episode = rllm_episode()
    episode["trajectories"][0]["steps"][0]["prompt_ids"] = [1, {"type": "image"}, 2]
    result, rows = converted(tmp_path, "rllm", [episode])
    assert len(rows) == 2 and "opaque_content" in result.losses.gaps and result.losses.broken == 0


def test_records_of_the_gateway_are_put_together_by_session(tmp_path: Path) -> None:
    later = changed(rllm_record(), trace_id="c2", prompt_token_ids=[*PROMPT, 7, 2, 60])
    other = changed(rllm_record(), trace_id="d", session_id="s2", weight_version="main@4")
    _, rows = converted(tmp_path, "rllm", [rllm_record(), other, later, rllm_record()])
    assert [(r.episode_id, r.relation) for r in rows] == [("s1", "root"), ("s1", "extend"), ("s2", "root")]
    assert rows[0].sampling is not None and rows[0].sampling.temperature == 1.0
    assert rows[2].policy_version is None and (rows[2].extra or {})["weight_version"] == "main@4"
