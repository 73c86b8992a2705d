"""`memopd-trace plan`: the same names and numbers for the same trace, and no torch for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memopd_trace.cli import run
from memopd_trace.invocation import Invocation
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata
from memopd_trace.storage import read, write

CONFIG = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}


@pytest.fixture
def toy(tmp_path: Path) -> tuple[Path, Path]:
    """(a trace of two groups, a folder with a model's config and nothing else)."""
    tokenizer = Tokenizer(fingerprint="f", size=50, vocab_size=50)
    metadata = TraceMetadata(producer=Producer(name="t"), models={"m": Model(name="m", tokenizer=tokenizer)})
    rows = [
        Invocation(
            episode_id=f"e{group}{n}", invocation_index=0, model_id="m", group_id=f"g{group}", token_source="engine",
            prompt_ids=[3, 4, 5 + group], output_ids=[n, 9],
        )
        for group in range(2)
        for n in range(3)
    ]  # fmt: skip
    write(tmp_path / "trace.parquet", metadata, rows)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "trace.parquet", tmp_path / "model"


def test_a_plan_in_json_has_these_names_and_numbers(toy: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(toy[0]), "--max-tokens", "9", "--teacher", str(toy[1]), "--format", "json"]
    assert run(command) == 0
    first = capsys.readouterr().out
    printed = json.loads(first)
    digest = printed.pop("plan_digest")
    weights = 2 * (8 * 4 * (2 * 2 + 2 * 2) + 3 * 8 * 16)
    assert printed == {
        "report_version": "1",
        "layout": "tree",
        "max_tokens": 9,
        "packs": 2,
        "invocations": 6,
        "logical_tokens": 30,
        "executed_tokens": 18,
        "repeated_tokens": 0,
        "deep_packs": 0,
        "spared_tokens": 0,
        "kept_tokens": 0,
        "sharing": 1.6667,
        "targets": 12,
        "left_out": 0,
        "prediction_rows": 8,
        "visible_pairs": 2 * (6 + 3 * (4 + 5)),
        "longest_pack": 9,
        "balance_tokens": 1.0,
        "balance_pairs": 1.0,
        "balance_flops": 1.0,
        "sampled_bytes": 16 * 12,
        "estimated_flops": 2.0 * weights * 18 + 4 * 2 * 4 * 2 * 66 + 2 * 8 * 50 * 8,
        "kept_bytes": 0,
        "hidden_bytes_bfloat16": 2 * 8 * 12,
        "hidden_bytes_float32": 4 * 8 * 12,
        "hidden_bytes_states_float16": (2 * 8 + 4 + 8) * 12,
        "hidden_bytes_states_int8": (8 + 4 + 8) * 12,
    }
    assert len(digest) == 64
    assert run(command) == 0
    assert capsys.readouterr().out == first


def test_without_a_teacher_there_are_no_flops_and_no_bytes_of_states(
    toy: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(toy[0]), "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert not [name for name in printed if "flops" in name or "hidden" in name]
    assert run(["plan", str(toy[0])]) == 0
    assert "executed tokens" in capsys.readouterr().out


def test_a_plan_needs_no_torch(toy: tuple[Path, Path]) -> None:
    program = (
        "import sys; sys.modules.update(torch=None, transformers=None, safetensors=None);"
        f"from memopd_trace.cli import run; sys.exit(run(['plan', {str(toy[0])!r}, '--teacher', {str(toy[1])!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "estimated flops" in done.stdout


def test_episodes_with_some_columns_hold_these_as_views(toy: tuple[Path, Path]) -> None:
    (first, *_) = read(toy[0]).iter_episodes(("episode_id", "prompt_ids"))
    (row,) = first
    assert row.prompt_ids.tolist() == [3, 4, 5]
    assert not row.prompt_ids.flags.writeable
    with pytest.raises(AttributeError):
        _ = row.output_ids
