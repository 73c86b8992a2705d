"""SGLang: `/generate` and chat, with ids and log-probabilities as triples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers_convert import LOGS, converted

from memopd_trace import Sampling

PROMPT = list(range(100, 120))


def test_generate_and_chat_give_exact_calls(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "sglang", LOGS["sglang"])
    assert [(r.relation, r.prompt_ids.tolist(), r.output_ids.tolist()) for r in rows] == [
        ("root", PROMPT, [30, 2]), ("extend", [*PROMPT, 30, 2, 50], [31, 2]),
    ]  # fmt: skip
    assert all(r.output_logprobs is not None and r.output_logprobs.tolist() == [-0.5, 0.0] for r in rows)
    assert [r.finish_reason for r in rows] == ["stop", "stop"] and [r.policy_version for r in rows] == [4, 5]
    assert rows[0].sampling == Sampling(temperature=1.0, top_k=0) and not result.losses.degraded


def test_the_triples_alone_tell_the_ids(tmp_path: Path) -> None:
    record: dict[str, Any] = {**LOGS["sglang"][0]}
    record["response"] = {k: v for k, v in record["response"].items() if k != "output_ids"}
    _, (row,) = converted(tmp_path, "sglang", [record])
    assert row.output_ids.tolist() == [30, 2]


def test_of_a_stream_the_last_chunk_has_all(tmp_path: Path) -> None:
    record = LOGS["sglang"][0]
    early = {"text": "", "output_ids": [30], "meta_info": {**record["response"]["meta_info"], "finish_reason": None}}
    _, (row,) = converted(tmp_path, "sglang", [{**record, "response": [early, record["response"]]}])
    assert row.output_ids.tolist() == [30, 2] and row.finish_reason == "stop"


def test_an_aborted_call_keeps_what_it_has(tmp_path: Path) -> None:
    meta = {"id": "a", "finish_reason": {"type": "abort", "message": "m"}, "output_token_logprobs": [[-0.5, 30, None]]}
    record = {"request": {"input_ids": PROMPT}, "response": {"text": "x", "meta_info": meta}, "session_id": "s"}
    _, (row,) = converted(tmp_path, "sglang", [record])
    assert row.finish_reason == "abort" and row.output_ids.tolist() == [30]


def test_other_records_are_said(tmp_path: Path) -> None:
    records = [{"response": {"error": "x"}}, {"response": {"text": "x"}}, *LOGS["sglang"]]
    result, rows = converted(tmp_path, "sglang", records)
    assert len(rows) == 2 and result.losses.broken == 1
    assert result.losses.dropped_records["no call: an error instead of an answer"].number == 1
