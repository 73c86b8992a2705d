"""verl: the one sequence of an agent loop becomes the calls that made it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers_convert import converted
from helpers_trainers import PROMPT, verl_output


def test_each_run_of_sampled_ids_is_a_call_with_all_before_it_as_prompt(tmp_path: Path) -> None:
    result, (first, second) = converted(tmp_path, "verl", [verl_output(uid="u", session_id=0)])
    assert first.prompt_ids.tolist() == PROMPT and first.output_ids.tolist() == [7, 2]
    assert second.prompt_ids.tolist() == [*PROMPT, 7, 2, 60, 61] and second.output_ids.tolist() == [8, 2]
    assert (second.relation, second.parent_index, second.episode_id, second.group_id) == ("extend", 0, "u_0", "u")
    assert (first.reward, second.reward, first.policy_version) == (None, 1.0, 5)
    assert (second.extra or {})["ids_after_the_last_call"] == "[62]" and result.exit_code() == 0


def test_a_zero_inside_the_mask_is_a_log_probability_and_one_outside_is_none(tmp_path: Path) -> None:
    _, (first, second) = converted(tmp_path, "verl", [verl_output()])
    np.testing.assert_array_equal(first.output_logprobs, np.float32([-0.5, 0.0]))
    np.testing.assert_array_equal(second.output_logprobs, np.float32([-0.25, -0.125]))
    assert not np.ma.getmaskarray(first.output_logprobs).any()


def test_outputs_of_one_session_are_one_episode_with_one_reward(tmp_path: Path) -> None:
    lines = [verl_output(uid="u", session_id=0, index=i) for i in range(2)]
    lines[1]["prompt_ids"] = [*PROMPT[:25], 71]
    together = {"uid": "v", "session_id": 0, "outputs": [verl_output(), verl_output(prompt_ids=[*PROMPT[:25], 71])]}
    for records in (lines, [together]):
        _, rows = converted(tmp_path, "verl", records)
        assert [r.relation for r in rows] == ["root", "extend", "rewrite", "extend"]
        assert rows[2].rewrite_evidence == "inferred" and [r.reward for r in rows] == [None, None, None, 1.0]


def test_a_mask_without_a_one_leaves_one_call_that_is_not_trained(tmp_path: Path) -> None:
    result, (row,) = converted(tmp_path, "verl", [verl_output(response_mask=[0] * 7)])
    assert len(row.output_ids) == 7 and row.output_loss_mask is not None and not row.output_loss_mask.any()
    assert any("without any 1" in reason for reason in result.losses.degraded)


def test_sampled_ids_outside_the_mask_are_counted(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "verl", [verl_output(response_mask=[0, 0, 0, 0, 1, 1, 0])])
    assert len(rows) == 1 and "lost_calls" in result.losses.gaps


def test_policy_versions_that_differ_are_not_made_one(tmp_path: Path) -> None:
    told = {"min_global_steps": 4, "max_global_steps": 5}
    _, rows = converted(tmp_path, "verl", [verl_output(extra_fields=told)])
    assert rows[0].policy_version is None and "max_global_steps" in (rows[1].extra or {})["extra_fields"]


def test_the_trainer_s_dump_is_text_and_says_so(tmp_path: Path, tokenizer: Path) -> None:
    line = {"input": "user\nhi", "output": "yo", "gts": "yo", "score": 1.0, "step": 3, "acc": 1}
    result, (row,) = converted(tmp_path, "verl", [line], tokenizer=tokenizer)
    assert (row.token_source, row.output_text, row.reward) == ("retokenized", "yo", 1.0)
    assert "lossy_text" in result.losses.gaps and (row.extra or {})["step"] == "3"


def test_a_small_mask_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    mask = [1, 0] * 20_000
    record = verl_output(response_ids=[5] * 40_000, response_mask=mask, response_logprobs=None)
    result, _ = converted(tmp_path, "verl", [record])
    assert result.losses.broken == 1 and "tokens in all" in result.losses.issues[0].reason
