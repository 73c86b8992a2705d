"""MemAgent: rows of padded batches, whose memory is spliced as ids, and conversations of its asynchronous agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_convert import converted
from helpers_trainers import changed, memagent_batch, memagent_output

from memopd_trace.convert import convert

BATCH = memagent_batch()
ROWS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "sample_index", "final_mask", "uid")


def test_rows_lose_their_padding_and_are_calls_of_their_sample(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "memagent", [BATCH])
    assert [r.episode_id.rsplit("/", 1)[1] for r in rows] == ["0", "0", "0", "1", "1"]
    assert rows[0].prompt_ids.tolist() == [1, 2, 10, 11, 12, 5, 3, 4, 40, 41]
    assert [r.output_ids.tolist() for r in rows] == [[20, 21, 9], [25, 9], [30, 9], [22, 23, 24, 9], [31, 32, 9]]
    assert {(r.token_source, r.group_id) for r in rows} == {("engine", "u")}
    assert [r.terminated for r in rows] == [None, None, True, None, True]
    assert {"no_logprobs", "no_model", "no_sampling"} <= result.losses.gaps.keys()
    assert "no_parent" not in result.losses.gaps and not result.losses.degraded


def test_a_prompt_that_holds_the_last_answer_is_a_declared_rewrite_of_the_memory(tmp_path: Path) -> None:
    _, rows = converted(tmp_path, "memagent", [BATCH])
    assert [(r.relation, r.parent_index, r.rewrite_kind, r.rewrite_evidence) for r in rows[:3]] == [
        ("root", None, None, None), ("rewrite", 0, "memory", "explicit"), ("rewrite", 1, "memory", "explicit"),
    ]  # fmt: skip
    other = memagent_batch()
    for name in ("prompts", "input_ids"):
        other[name][2] = [77 if i in (20, 21) else i for i in other[name][2]]  # another memory than was written
    result, rows = converted(tmp_path, "memagent", [other])
    assert (rows[1].relation, rows[1].parent_index, rows[1].rewrite_evidence) == ("rewrite", 0, "inferred")
    assert "no_rewrite_kind" in result.losses.gaps


def test_the_score_is_the_episodes_though_every_row_has_it(tmp_path: Path) -> None:
    _, rows = converted(tmp_path, "memagent", [BATCH])
    assert [r.reward for r in rows] == [None, None, 1.0, None, 1.25]


def test_log_probabilities_of_the_sampler_are_kept_and_those_of_the_trainer_are_not_taken_for_them(
    tmp_path: Path,
) -> None:
    numbers = [[-0.5, -0.5, -0.5, 0, 0]] * 5
    _, rows = converted(tmp_path, "memagent", [changed(BATCH, rollout_log_probs=numbers, old_log_probs=numbers)])
    assert rows[0].output_logprobs is not None and rows[0].output_logprobs.tolist() == [-0.5] * 3
    assert rows[1].output_logprobs is not None and len(rows[1].output_logprobs) == 2
    assert rows[0].logprob_kind == "unknown" and "old_log_probs" in (rows[0].extra or {})
    _, rows = converted(tmp_path, "memagent", [changed(BATCH, old_log_probs=numbers)])
    assert {r.output_logprobs is None for r in rows} == {True}


def test_rows_by_themselves_are_put_together_by_step_and_sample(tmp_path: Path) -> None:
    rows_of = [{n: BATCH[n][i] for n in ROWS} for i in range(5)]
    _, rows = converted(tmp_path, "memagent", [{"global_step": s, **r} for r in rows_of for s in (1, 2)])
    assert [r.episode_id for r in rows] == ["1/0"] * 3 + ["2/0"] * 3 + ["1/1"] * 2 + ["2/1"] * 2
    assert [r.relation for r in rows[:3]] == ["root", "rewrite", "rewrite"]


def test_a_batch_in_parts_and_one_saved_by_torch_say_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    _, plain = converted(tmp_path, "memagent", [BATCH])
    names = [n for n in BATCH if n != "uid"]
    parts = {"batch": {n: BATCH[n] for n in names}, "non_tensor_batch": {"uid": BATCH["uid"]}, "meta_info": {"x": 1}}
    _, rows = converted(tmp_path, "memagent", [parts])
    assert [(r.prompt_ids.tolist(), r.rewrite_kind, r.group_id) for r in rows] == [
        (r.prompt_ids.tolist(), r.rewrite_kind, r.group_id) for r in plain
    ]  # fmt: skip
    torch.save({n: torch.tensor(BATCH[n]) for n in names}, tmp_path / "step_3.pt")
    result = convert("memagent", tmp_path / "step_3.pt", tmp_path / "t.parquet")
    assert result.exit_code() == 0 and (result.losses.rows, result.losses.episodes) == (5, 2)


def test_a_sample_without_its_last_call_has_no_end(tmp_path: Path) -> None:
    cut = {n: v[:3] for n, v in BATCH.items()}
    result, rows = converted(tmp_path, "memagent", [cut])
    assert {r.terminated for r in rows} == {None} and {r.reward for r in rows} == {None}
    assert result.losses.gaps["no_end"].number == 2


def test_rows_of_padding_are_no_calls(tmp_path: Path) -> None:
    padded = changed(BATCH, attention_mask=[*BATCH["attention_mask"][:4], [0] * 17])
    result, rows = converted(tmp_path, "memagent", [padded])
    assert len(rows) == 4 == result.losses.calls
    blank = changed(BATCH, attention_mask=[[0] * 17] * 5)
    assert "no call: a batch of padding alone" in converted(tmp_path, "memagent", [blank])[0].losses.dropped_records


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("attention_mask", None, "which ids are padding is not told"),
        ("attention_mask", [[1] * 9] * 5, "9 for 12 + 5 ids"),
        ("attention_mask", [[1, 0] * 8 + [1]] * 5, "padding inside the prompt"),
        ("input_ids", BATCH["input_ids"][::-1], "not the prompt and the response"),
        ("responses", [[1]], "expected 5 rows"),
        ("sample_index", [0], "a value for each of 5 rows"),
    ],
)
def test_batches_that_do_not_fit_are_reported(tmp_path: Path, name: str, value: Any, why: str) -> None:
    result, rows = converted(tmp_path, "memagent", [changed(BATCH, **{name: value}), BATCH])
    assert len(rows) == 5 and result.losses.broken == 1 and why in result.losses.issues[0].reason


def test_other_positions_than_in_a_row_are_counted(tmp_path: Path) -> None:
    odd = changed(BATCH, position_ids=[[p + 1 for p in row] for row in BATCH["position_ids"]])
    result, _ = converted(tmp_path, "memagent", [odd])
    assert result.losses.degraded["positions that are not 0, 1, 2… are left out"].number == 5


def test_ids_that_were_encoded_again_are_refused_and_their_conversations_are_text(
    tmp_path: Path, tokenizer: Path
) -> None:
    masks = [[int(i < 2) for i in range(5)]] * 5  # the template's end of a turn is no part of an answer
    result, rows = converted(tmp_path, "memagent", [changed(BATCH, response_mask=masks)])
    assert not rows and "encoded again from text" in next(iter(result.losses.dropped_records))
    result, rows = converted(tmp_path, "memagent", [memagent_output()], tokenizer=tokenizer)
    assert [(r.relation, r.rewrite_kind, r.rewrite_evidence) for r in rows] == [
        ("root", None, None), ("rewrite", "memory", "explicit"), ("rewrite", "memory", "explicit"),
    ]  # fmt: skip
    assert {r.token_source for r in rows} == {"retokenized"} and rows[2].terminated
    assert json.loads(rows[1].messages or "")[-1]["content"] == "three so far" and "timing_raw" in (rows[0].extra or {})


def test_a_mask_of_all_that_was_sampled_is_no_encoding(tmp_path: Path) -> None:
    masks = [row[12:] for row in BATCH["attention_mask"]]  # as the trainer makes it
    assert len(converted(tmp_path, "memagent", [changed(BATCH, response_mask=masks)])[1]) == 5
