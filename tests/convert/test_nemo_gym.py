"""NeMo Gym: exact ids, a template that strips reasoning, and rollouts whose lists of ids are empty."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_convert import FIXTURES, converted

from memopd_trace import read, validate
from memopd_trace.convert import convert
from memopd_trace.lineage import common_prefix, inherited

TWO_CALLS = FIXTURES / "nemo_gym_two_calls.json"
WITHOUT_IDS = json.loads((FIXTURES / "nemo_gym_without_ids.jsonl").read_text())


def test_two_calls_come_out_exact_and_the_second_is_an_inferred_rewrite(tmp_path: Path) -> None:
    result = convert("nemo-gym", TWO_CALLS, tmp_path / "t.parquet")
    first, second = read(tmp_path / "t.parquet").iter_invocations()
    items = [i for i in json.loads(TWO_CALLS.read_text())["input"]["output"] if "prompt_token_ids" in i]
    for row, item in zip((first, second), items, strict=True):
        assert row.prompt_ids.tolist() == item["prompt_token_ids"]
        assert row.output_ids.tolist() == item["generation_token_ids"]
        np.testing.assert_array_equal(row.output_logprobs, np.float32(item["generation_log_probs"]))
        assert not np.ma.getmaskarray(row.output_logprobs).any()  # a 0.0 that was reported is one
        assert row.token_source == "engine" and row.logprob_kind == "unknown"
    assert (first.relation, second.relation, second.parent_index) == ("root", "rewrite", 0)
    assert (second.rewrite_kind, second.rewrite_evidence) == ("strip_thinking", "inferred")
    assert validate(tmp_path / "t.parquet", "lineage").clean and result.exit_code() == 0


def test_the_two_calls_agree_on_the_prompt_and_one_id_only(tmp_path: Path) -> None:
    convert("nemo-gym", TWO_CALLS, tmp_path / "t.parquet")
    first, second = read(tmp_path / "t.parquet").iter_invocations()
    agreed = common_prefix(first.sequence_ids, second.prompt_ids)
    assert agreed == inherited(first, second) == len(first.prompt_ids) + 1
    whole = first.output_ids.tobytes()
    assert whole not in second.prompt_ids.tobytes()  # the output stands nowhere in the next prompt


def test_what_the_log_does_not_say_is_a_gap_in_the_metadata(tmp_path: Path) -> None:
    convert("nemo-gym", TWO_CALLS, tmp_path / "t.parquet")
    metadata = read(tmp_path / "t.parquet").metadata
    assert metadata.source is not None and metadata.source.format == "nemo-gym"
    codes = {gap.code for gap in metadata.source.gaps}
    assert {"no_parent", "no_rewrite_kind", "no_logprob_kind", "no_sampling", "no_reward", "no_tokenizer"} <= codes
    assert "no_logprobs" not in codes and "no_token_ids" not in codes
    tokenizer = metadata.models["toy"].tokenizer
    assert tokenizer.fingerprint.startswith("unknown:") and tokenizer.size == tokenizer.vocab_size
    row = next(iter(read(tmp_path / "t.parquet").iter_invocations()))
    assert tokenizer.size > row.prompt_ids.max()


def test_empty_lists_of_ids_are_null_and_without_a_tokenizer_nothing_is_made_of_them(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "nemo-gym", [WITHOUT_IDS])
    assert rows == [] and result.exit_code() == 3 and not list(tmp_path.glob("out*"))
    assert result.losses.degraded["an empty list of ids is null"].number == 4
    (reason,) = result.losses.dropped_calls
    assert "no tokenizer" in reason and result.losses.dropped_calls.total == 2


def test_with_a_tokenizer_the_text_is_rendered_and_says_so(tmp_path: Path, tokenizer: Path) -> None:
    result, (first, second) = converted(tmp_path, "nemo-gym", [WITHOUT_IDS], tokenizer=tokenizer)
    assert result.exit_code() == 0
    assert first.token_source == second.token_source == "retokenized"
    assert first.output_logprobs is None and second.output_logprobs is None
    assert (first.group_id, first.episode_id) == ("adder/3", "adder/3/0")
    assert (first.reward, second.reward) == (None, 0.0)  # a reward of 0 is one, and the episode's own
    assert first.extra is not None and first.extra["expected_answer"] == "3"
    assert json.loads(second.messages or "")[-1]["content"] == "3"
    report = validate(result.trace or "", "lineage", tokenizer=tokenizer)
    assert report.errors == 0, report.to_text()


def test_another_models_tokenizer_is_found_out(tmp_path: Path, tokenizer: Path) -> None:
    result = convert("nemo-gym", TWO_CALLS, tmp_path / "t.parquet", tokenizer=tokenizer)
    assert result.exit_code() == 1 and result.trace == tmp_path / "t.parquet.invalid"
    (found,) = [c.example for reason, c in result.losses.degraded.items() if reason.endswith("is it this model's?")]
    assert re.fullmatch(r"toy: id \d{4}, and the tokenizer has \d{2,3}", found)


def test_token_entries_of_interleaved_rollouts_are_put_together(tmp_path: Path) -> None:
    def entry(rollout: str, number: int, prompt: list[int]) -> dict[str, object]:
        return {"schema_version": 1, "rollout_id": rollout, "model_call_id": f"{rollout}{number}", "model": "m",
                "prompt_token_ids": prompt, "generation_token_ids": [9, 2], "generation_log_probs": [-1.0, -2.0],
                "output_items": [], "created_at": 1756498939.0 + number}  # fmt: skip

    long = list(range(10, 40))
    records = [
        entry("a", 0, long),
        entry("b", 0, long[::-1]),
        entry("a", 1, [*long, 9, 2, 5]),
        entry("a", 1, [*long, 9, 2, 5]),
    ]
    result, rows = converted(tmp_path, "nemo-gym", records)
    assert [(r.episode_id, r.invocation_index, r.relation) for r in rows] == [
        ("a", 0, "root"), ("a", 1, "extend"), ("b", 0, "root"),
    ]  # fmt: skip
    assert result.losses.dropped_calls["told again"].number == 1


def test_a_record_of_something_else_is_reported_with_its_line(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "nemo-gym", [{"input": json.loads(TWO_CALLS.read_text())["input"]}, {"foo": 1}])
    assert len(rows) == 2 and result.exit_code() == 1
    assert [i.place.rsplit(":")[-1] for i in result.losses.issues] == ["2"]


def _as_long_as_the_real_one() -> dict[str, Any]:
    """The two calls of the fixture with as many ids as a real server gave: 3088 + 495 and 3637. Of the first output
    the second prompt keeps its first id and the last 75; the 418 ids of reasoning, and a line break, are gone."""
    rng = random.Random(9)
    record: dict[str, Any] = json.loads(TWO_CALLS.read_text())
    first, second = (item for item in record["input"]["output"] if "prompt_token_ids" in item)
    think, two_breaks = second["prompt_token_ids"][len(first["prompt_token_ids"]) :][:2]
    words = [rng.randrange(1000, 100_000) for _ in range(3088 + 418 + 75 + 472 + 207)]
    prompt, reasoning, kept, result, answer = np.split(np.array(words), np.cumsum([3088, 418, 75, 472]))
    output = [think, 198, *reasoning, *kept]
    first |= {"prompt_token_ids": prompt.tolist(), "generation_token_ids": [int(i) for i in output]}
    second |= {"prompt_token_ids": [int(i) for i in (*prompt, think, two_breaks, *kept, *result)],
               "generation_token_ids": answer.tolist()}  # fmt: skip
    for item in (first, second):
        ids = item["generation_token_ids"]
        item["generation_log_probs"] = [0.0 if i % 7 == 1 else -rng.expovariate(2) for i, _ in enumerate(ids)]
    return record


def _holds_two_calls_that_agree_on_3089_ids(source: Path, trace: Path) -> None:
    """What must come of two calls between which the template dropped the reasoning, whoever wrote the log."""
    result = convert("nemo-gym", source, trace)
    first, second = read(trace).iter_invocations()
    logged = json.loads(source.read_text())["input"]["output"]
    items = [item for item in logged if item.get("prompt_token_ids")]
    for row, item in zip((first, second), items, strict=True):
        assert row.prompt_ids.tolist() == item["prompt_token_ids"]
        assert row.output_ids.tolist() == item["generation_token_ids"]
        np.testing.assert_array_equal(row.output_logprobs, np.float32(item["generation_log_probs"]))
        assert row.token_source == "engine"
    assert [len(first.prompt_ids), len(first.output_ids), len(second.prompt_ids)] == [3088, 495, 3637]
    assert (first.relation, second.relation, second.parent_index) == ("root", "rewrite", 0)
    assert (second.rewrite_kind, second.rewrite_evidence) == ("strip_thinking", "inferred")
    assert common_prefix(first.sequence_ids, second.prompt_ids) == inherited(first, second) == 3089
    assert first.sequence_ids[3089] != second.prompt_ids[3089]
    assert validate(trace, "lineage").clean and result.exit_code() == 0


def test_two_calls_of_the_real_size_agree_on_3089_ids(tmp_path: Path) -> None:
    source = tmp_path / "rollout.json"
    source.write_text(json.dumps(_as_long_as_the_real_one()))
    _holds_two_calls_that_agree_on_3089_ids(source, tmp_path / "t.parquet")


SAMPLES = os.environ.get("MEMOPD_TRACE_SAMPLES")


@pytest.mark.skipif(SAMPLES is None, reason="MEMOPD_TRACE_SAMPLES names no folder of sample logs")
def test_the_real_file_of_two_calls(tmp_path: Path) -> None:
    source = Path(SAMPLES or "") / "nemo_gym" / "vllm_two_call_token_ids_real.json"
    _holds_two_calls_that_agree_on_3089_ids(source, tmp_path / "t.parquet")
