"""`memopd-trace plan`: the same names and numbers for the same trace, and no torch for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memopd_trace.cli import run
from memopd_trace.invocation import Invocation
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata, ViewInfo, ViewsMetadata
from memopd_trace.storage import read, write
from memopd_trace.viewfile import View, ViewsWriter

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
        "topk_bytes": (8 * 50 + 4) * 12,
        "full_bytes": 4 * 50 * 12,
        "estimated_flops": 2.0 * weights * 18 + 4 * 2 * 4 * 2 * 66 + 2 * 8 * 50 * 8,
        "kept_bytes": 0,
        "head_bytes": 4 * 50 * 8,
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
    assert not [name for name in printed if "flops" in name or "hidden" in name or "head" in name]
    assert run(["plan", str(toy[0])]) == 0
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:4] == ["logical tokens", "executed tokens", "sharing", "sampled bytes"], "the headline comes first"


def test_a_plan_speaks_of_the_view_that_is_asked_for(
    toy: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(read(toy[0]).iter_invocations())[:3]
    told = ViewsMetadata(producer=Producer(name="t"), tokenizer_fingerprint="f", views={"told": ViewInfo()})
    with ViewsWriter(tmp_path / "v.parquet", told) as writer:
        for row in rows:
            writer.write(View.of(row, row.replace(prompt_ids=[7, 8, *row.prompt_ids]), "told"))
    command, found = ["plan", str(toy[0]), "--format", "json", "--topk", "4"], {}
    for view, options in {
        "recorded": [],
        "persistent-history": ["--view", "persistent-history"],
        "told": ["--view", "told", "--views", str(tmp_path / "v.parquet")],
    }.items():
        assert run([*command, *options]) == 0
        found[view] = json.loads(capsys.readouterr().out)
    assert [p["invocations"] for p in found.values()] == [6, 6, 3]
    assert found["told"]["logical_tokens"] == 3 * (2 + 5) and found["told"]["topk_bytes"] == (8 * 4 + 4) * 6
    assert found["recorded"]["logical_tokens"] == found["persistent-history"]["logical_tokens"] == 30
    assert len({p["plan_digest"] for p in found.values()}) == 3
    assert run([*command, "--view", "told"]) == 2
    assert "of which file?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["owner/model", "nowhere", "{folder}/model/config.json"])
def test_a_teacher_that_is_no_local_folder_is_refused_in_one_line(
    name: str, toy: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(toy[0]), "--teacher", name.format(folder=toy[0].parent)]) == 3
    printed = capsys.readouterr().err
    assert "no local folder with a config.json" in printed and "not a hub name" in printed
    assert "Errno" not in printed and "Traceback" not in printed


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
