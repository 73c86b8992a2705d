"""SkyRL: batches and rows of its generators, step by step or flattened."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_convert import converted
from helpers_trainers import PROMPT, changed, skyrl_batch, skyrl_steps


def test_a_flattened_rollout_becomes_its_calls(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "skyrl", [skyrl_batch()])
    assert [(r.episode_id, r.relation, r.reward) for r in rows] == [
        ("q1_0", "root", None), ("q1_0", "extend", 1.0), ("q1_1", "root", 0.0),
    ]  # fmt: skip
    assert rows[1].prompt_ids.tolist() == [*PROMPT, 7, 2, 60] and {r.group_id for r in rows} == {"q1"}
    assert [r.finish_reason for r in rows] == [None, "stop", "length"] and rows[2].truncated
    assert result.exit_code() == 0 and "rollout_metrics" in (rows[0].extra or {})


def test_steps_are_calls_and_a_changed_prompt_is_an_inferred_rewrite(tmp_path: Path) -> None:
    _, rows = converted(tmp_path, "skyrl", [skyrl_steps()])
    assert [(r.episode_id, r.relation, r.rewrite_evidence) for r in rows] == [
        ("q2_0", "root", None), ("q2_0", "rewrite", "inferred"),
    ]  # fmt: skip
    assert [r.reward for r in rows] == [0.5, 1.0]  # of the tokens, added up for each call
    assert (rows[0].extra or {})["token_rewards"] == "[0.0,0.5]" and rows[0].output_logprobs is None


def test_rewards_of_tokens_go_to_the_call_up_to_the_next_one(tmp_path: Path) -> None:
    rewards = [[0.0, 0.25, 0.5, 0.0, 1.0], [0.0, 0.0]]
    _, rows = converted(tmp_path, "skyrl", [changed(skyrl_batch(), rewards=rewards)])
    assert [r.reward for r in rows] == [0.75, 1.0, 0.0]


def test_rows_by_themselves_are_put_together_by_their_trajectory(tmp_path: Path) -> None:
    batch = skyrl_steps()
    names = [n for n in batch if batch[n] is not None]
    rows_of = [{n: batch[n][i] for n in names} for i in range(2)]
    _, rows = converted(tmp_path, "skyrl", [{**r, "global_step": s} for s in (1, 2) for r in rows_of])
    assert [r.episode_id for r in rows] == ["1/q2_0", "1/q2_0", "2/q2_0", "2/q2_0"]
    _, rows = converted(tmp_path, "skyrl", rows_of)
    assert [(r.episode_id, r.invocation_index, r.relation) for r in rows] == [
        ("q2_0", 0, "root"),
        ("q2_0", 1, "rewrite"),
    ]


@pytest.mark.parametrize("steps", [True, False])
def test_without_names_rows_belong_together_up_to_the_last_step(tmp_path: Path, steps: bool) -> None:
    batch = changed(skyrl_steps() if steps else skyrl_batch(), trajectory_ids=None)
    _, rows = converted(tmp_path, "skyrl", [batch])
    assert len({r.episode_id for r in rows}) == (1 if steps else 2)


def test_columns_of_other_lengths_are_broken(tmp_path: Path) -> None:
    result, _ = converted(tmp_path, "skyrl", [changed(skyrl_batch(), rewards=[1.0]), skyrl_steps()])
    assert result.losses.broken == 1 and "expected 2 rows" in result.losses.issues[0].reason


def test_a_dumped_evaluation_is_text(tmp_path: Path, tokenizer: Path) -> None:
    line = {"input_prompt": "hi", "output_response": "yo", "score": [0.0, 1.0], "stop_reason": "stop", "env_class": "e"}
    result, (row,) = converted(tmp_path, "skyrl", [line], tokenizer=tokenizer)
    assert (row.token_source, row.reward, row.finish_reason) == ("retokenized", 1.0, "stop")
    assert "lossy_text" in result.losses.gaps
