"""ART: trajectories of exchanges and of messages with choices, as its own serializers write them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from helpers_convert import FIXTURES, converted

from memopd_trace import Invocation, read
from memopd_trace.convert import Conversion, convert

EXCHANGES, COMPACT = [json.loads(line) for line in (FIXTURES / "art_exchanges.jsonl").read_text().splitlines()]
MIGRATED, GROUP = [json.loads(line) for line in (FIXTURES / "art_groups.jsonl").read_text().splitlines()]
PROMPT = list(range(100, 120))


def of_table(folder: Path, name: str, **options: Any) -> tuple[Conversion, list[Invocation]]:
    """What a Parquet file of the fixtures converts to."""
    result = convert("art", FIXTURES / name, folder / f"{name}.trace.parquet", **options)
    return result, list(read(result.trace).iter_invocations()) if result.trace is not None else []


def test_exchanges_of_every_protocol_keep_ids_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "art", [EXCHANGES])
    assert [r.prompt_ids.tolist() for r in rows] == [PROMPT, [*PROMPT, 30, 31, 2, 60], [*PROMPT, 30, 31, 2, 62]]
    assert [r.output_ids.tolist() for r in rows] == [[30, 31, 2], [33, 34], [35, 2]]
    assert [(r.relation, r.parent_index, r.token_source) for r in rows] == [
        ("root", None, "engine"), ("extend", 0, "engine"), ("extend", 0, "engine"),
    ]  # fmt: skip
    assert [r.finish_reason for r in rows] == ["stop", "length", "stop"]
    assert [r.reward for r in rows] == [None, None, 0.5] and {r.model_id for r in rows} == {"m"}
    assert rows[0].started_at is not None and rows[0].started_at.second == 0 and rows[0].sampling is not None
    assert result.losses.dropped_calls.total == 1  # Anthropic's, as text without a tokenizer
    assert {"no_parent", "lossy_text", "lost_calls", "no_policy_version"} <= result.losses.gaps.keys()
    assert (rows[0].extra or {})["initial_policy_version"] == "4"  # another one at the end: which call saw which?


def test_log_probabilities_are_of_the_kind_that_the_server_told(tmp_path: Path) -> None:
    _, rows = converted(tmp_path, "art", [EXCHANGES])
    assert [r.logprob_kind for r in rows] == ["processed", "raw", "unknown"]
    assert [r.output_logprobs.tolist() for r in rows if r.output_logprobs is not None] == [
        [-0.25] * 3, [-0.5, -0.75], [-1.0, -2.0],
    ]  # fmt: skip
    logits = copy.deepcopy(EXCHANGES)
    logits["exchanges"]["completions"][0]["response"]["choices"][0]["logprobs_mode"] = "raw_logits"
    result, rows = converted(tmp_path, "art", [logits])
    assert rows[1].output_logprobs is None and (rows[1].extra or {})["log_probabilities"] == "[-0.5,-0.75]"
    assert "log-probabilities left out: they are none" in result.losses.degraded


def test_compact_json_and_the_table_say_the_same(tmp_path: Path) -> None:
    _, plain = converted(tmp_path, "art", [EXCHANGES])
    _, compact = converted(tmp_path, "art", [COMPACT])
    _, table = of_table(tmp_path, "art_exchanges.parquet")
    assert len(plain) == 3 and [len(rows) for rows in (compact, table)] == [6, 6]
    for rows in (compact[:3], table[:3]):
        assert [r.output_ids.tolist() for r in rows] == [r.output_ids.tolist() for r in plain]
        assert [r.messages for r in rows] == [r.messages for r in plain]
        assert rows[-1].reward == 0.5 and len({r.group_id for r in rows}) == 1
    assert compact[3].group_id == compact[0].group_id and table[3].group_id == table[0].group_id
    assert compact[5].reward == 0.0 and table[5].reward == 0.0  # a default, which is left out of the JSON
    assert json.loads((compact[0].extra or {})["group"]) == {"metadata": {"kind": "sums"}}


def test_a_tokenized_trajectory_is_read_from_its_exchanges(tmp_path: Path) -> None:
    wrapped = {"format": "art.trajectories", "version": 1, "kind": "tokenized_trajectory", "strings": {},
               "data": {"trajectory": EXCHANGES, "history": {}, "tokens": [1, 2]}}  # fmt: skip
    _, rows = converted(tmp_path, "art", [wrapped])
    assert len(rows) == 3
    alone = {**wrapped, "kind": "tokenized_history", "data": {"value": {}, "exchanges": []}}
    result, _ = converted(tmp_path, "art", [alone])
    assert result.losses.dropped_records["no call: a history without its trajectory"].number == 1


def test_choices_among_messages_are_calls_and_other_histories_their_own(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "art", [GROUP], tokenizer=tokenizer)
    assert result.valid
    assert [len(json.loads(r.messages or "")) for r in rows] == [3, 5, 2, 3]
    assert [(r.relation, r.token_source) for r in rows] == [
        ("root", "retokenized"), ("extend", "retokenized"), ("root", "retokenized"), ("root", "engine"),
    ]  # fmt: skip
    assert [r.policy_version for r in rows] == [4, 4, 4, None] and len({r.group_id for r in rows}) == 1
    assert [r.reward for r in rows] == [None, None, 1.0, 0.0]
    extra = rows[0].extra or {}
    assert "add" in extra["tools"] and json.loads(extra["metadata"]) == {"scenario": "s1"}
    exact = rows[3]
    assert (exact.prompt_ids.tolist(), exact.output_ids.tolist(), exact.logprob_kind) == (
        list(range(80, 100)),
        [36, 2],
        "unknown",
    )
    assert result.losses.degraded["output ids without those of their prompt are kept as extra"].number == 3
    assert extra["output_token_ids"] == "[30,31,2]" and rows[0].output_logprobs is None


@pytest.mark.parametrize("form", ["lines", "table"])
def test_older_logs_of_text_alone_keep_their_messages(tmp_path: Path, tokenizer: Path, form: str) -> None:
    if form == "lines":
        result, rows = converted(tmp_path, "art", [MIGRATED], tokenizer=tokenizer)
    else:
        result, rows = of_table(tmp_path, "art_groups.parquet", tokenizer=tokenizer)
        rows.insert(2, rows[1])  # the table has no further histories
    made = [json.loads(r.messages or "")[-1] for r in rows]
    assert made[0]["tool_calls"][0]["function"]["name"] == "add" and (made[1]["content"], made[3]["content"]) == (
        "3",
        "4",
    )
    assert [r.output_logprobs for r in rows[:3]] == [None] * 3 and "no_logprobs" in result.losses.gaps
    assert rows[1].relation == "extend" and rows[0].group_id == rows[3].group_id


def test_rollouts_that_failed_are_a_gap(tmp_path: Path) -> None:
    failed = {**GROUP, "exceptions": [{"type": "E", "message": "m", "traceback": "t"}]}
    result, rows = converted(tmp_path, "art", [failed])
    assert len(rows) == 1 and result.losses.gaps["lost_calls"].number == 1 and "exceptions" in str(rows[0].extra)


def test_several_generations_of_one_answer_are_calls(tmp_path: Path) -> None:
    record = copy.deepcopy(EXCHANGES)
    response = record["exchanges"]["responses"][0]["response"]
    first = response["token_generations"][0]
    second = {"prompt_token_ids": [*first["prompt_token_ids"], 35, 2, 63], "token_ids": [36, 2], "output_indices": [],
              "compact_logprobs": [-0.5, -0.5], "logprobs_mode": "raw_logprobs"}  # fmt: skip
    response["token_generations"].append(second)
    record["exchanges"] = {"responses": record["exchanges"]["responses"]}
    _, rows = converted(tmp_path, "art", [record])
    assert [(r.output_ids.tolist(), r.relation, r.logprob_kind) for r in rows] == [
        ([35, 2], "root", "unknown"), ([36, 2], "extend", "raw"),
    ]  # fmt: skip


def test_an_answer_that_repeats_its_prompt_is_counted_as_lost(tmp_path: Path) -> None:
    record = copy.deepcopy(EXCHANGES)
    record["exchanges"]["completions"][0]["request"]["echo"] = True
    result, rows = converted(tmp_path, "art", [record])
    assert len(rows) == 2 and result.losses.dropped_calls["an answer that repeats its prompt (echo)"].number == 1
