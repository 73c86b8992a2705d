"""What a real vLLM server answered (`fixtures/make_vllm.py`), converted: exact, and true by the model's own weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memopd_trace import read, validate
from memopd_trace.cli import run
from memopd_trace.convert import convert

LOG = Path(__file__).parent / "fixtures" / "vllm_real.jsonl"
RECORDS = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]


def test_a_real_log_is_converted_id_for_id(tmp_path: Path) -> None:
    result = convert("vllm", LOG, tmp_path / "t.parquet", logprob_kind="raw")
    assert result.exit_code() == 0 and not result.losses.degraded and result.losses.rows == 6
    rows = {r.key: r for r in read(tmp_path / "t.parquet").iter_invocations()}
    whole = RECORDS[0]["response"]
    first = rows["s", 0]
    assert first.prompt_ids.tolist() == whole["prompt_token_ids"]
    assert first.output_ids.tolist() == whole["choices"][0]["token_ids"]
    numbers = [item["logprob"] for item in whole["choices"][0]["logprobs"]["content"]]
    np.testing.assert_array_equal(first.output_logprobs, np.float32(numbers))
    assert [rows[key].relation for key in (("s", 0), ("s", 1), ("t", 1))] == ["root", "extend", "fork"]
    assert rows["u", 0].finish_reason == "length" and first.sampling is not None and first.sampling.seed == 1
    assert validate(tmp_path / "t.parquet", "lineage").clean


def test_a_real_stream_has_all_ids_of_its_chunks(tmp_path: Path) -> None:
    convert("vllm", LOG, tmp_path / "t.parquet")
    (row,) = [r for r in read(tmp_path / "t.parquet").iter_invocations() if r.key == ("s", 1)]
    chunks: list[Any] = RECORDS[1]["response"]
    assert len(chunks) > 5 and row.prompt_ids.tolist() == chunks[0]["prompt_token_ids"]
    assert row.output_ids.tolist() == [i for c in chunks for x in c["choices"] for i in x.get("token_ids") or ()]
    assert len(row.output_ids) == chunks[-1]["usage"]["completion_tokens"] == row.output_logprobs.count()  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_tokenizer_renders_the_same_ids_and_the_weights_give_the_same_numbers(
    tmp_path: Path, smollm2: Path
) -> None:
    trace = tmp_path / "t.parquet"
    result = convert("vllm", LOG, trace, tokenizer=smollm2, logprob_kind="raw")
    assert not result.losses.degraded  # every prompt and output is rendered as the server did
    text = convert("openai", LOG, tmp_path / "text.parquet", tokenizer=smollm2)
    assert text.losses.rows == 6
    assert run(["audit", str(trace), "--model", str(smollm2), "--max-abs", "0.001"]) == 0
