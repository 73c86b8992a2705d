"""The validator on scores of real models: what the scorer writes has no finding, and what goes wrong is found."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from helpers_resume import make_toy
from helpers_scorer import metadata_for, save_model, tiny_model
from helpers_scores import item, rewritten, roll

from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_scorer.teacher import load
from memopd_trace import Report, read, validate, write
from memopd_trace.errors import InputError
from memopd_trace.metadata import SCORES_KEY
from memopd_trace.record.fingerprint import weights_digest
from memopd_trace.rules import RULES

ALL = ("sampled", "topk", "hidden", "full")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(teacher folder, trace): the teacher is the policy, and the trace names its weights."""
    folder = tmp_path_factory.mktemp("toy")
    teacher, plain = make_toy(folder)
    metadata = metadata_for(teacher)
    own = metadata.models["m"].model_copy(update={"weights_digest": weights_digest(load(teacher).model)})
    trace = folder / "named.parquet"
    write(trace, metadata.model_copy(update={"models": {"m": own}}), list(read(plain).iter_invocations()))
    return teacher, trace


@pytest.fixture(scope="module")
def scored(toy: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All four signals, several shards."""
    teacher, trace = toy
    out = tmp_path_factory.mktemp("scored") / "scores"
    score(trace, teacher, out, signals=ALL, topk=4, max_tokens=200, shard_bytes=20_000)
    assert len(list(out.glob("shard-*"))) > 1
    return out


def status(report: Report) -> dict[str, str]:
    return {r.code: r.status for r in report.rules if RULES[r.code].wants == "scores"}


def test_scores_of_all_signals_have_no_finding_and_every_rule_ran(toy: tuple[Path, Path], scored: Path) -> None:
    report = validate(toy[1], scores=scored)
    assert report.clean, report.to_text()
    assert report.traces[0].inputs[0].rows == 20
    not_run = {code for code, state in status(report).items() if state != "pass"}
    assert not_run == {"E-SCORES-DISAGREE", "W-SCORES-TEMPERATURE", "E-SCORES-TIER"}


@pytest.mark.parametrize("signal", ALL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scores_of_each_signal_and_dtype_have_no_finding(
    signal: str, dtype: str, toy: tuple[Path, Path], tmp_path: Path
) -> None:
    teacher, trace = toy
    score(trace, teacher, tmp_path / "s", signals=(signal,), topk=4, dtype=dtype)
    report = validate(trace, scores=tmp_path / "s")
    assert report.clean, report.to_text()
    assert status(report)["E-SCORES-CHECK"] == ("pass" if signal == "hidden" else "not run")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_layout_of_the_same_teacher_agrees(dtype: str, toy: tuple[Path, Path], tmp_path: Path) -> None:
    teacher, trace = toy
    for layout in ("tree", "single"):
        score(trace, teacher, tmp_path / layout, signals=("sampled",), dtype=dtype, layout=layout)  # type: ignore[arg-type]
    report = validate(trace, scores=[tmp_path / "tree", tmp_path / "single"])
    assert report.clean and status(report)["E-SCORES-DISAGREE"] == "pass", report.to_text()


def test_another_teacher_is_not_expected_to_agree(toy: tuple[Path, Path], tmp_path: Path) -> None:
    teacher, trace = toy
    other = save_model(tiny_model("llama", seed=4), tmp_path / "other")
    score(trace, teacher, tmp_path / "a", signals=("sampled",))
    score(trace, other, tmp_path / "b", signals=("sampled",))
    report = validate(trace, scores=[tmp_path / "a", tmp_path / "b"])
    assert report.clean and status(report)["E-SCORES-DISAGREE"] == "not run"


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (roll("logprob"), {"E-SCORES-TARGET", "E-SCORES-CHECK", "E-SCORES-SHIFT"}),
        (roll("hidden"), {"E-SCORES-CHECK"}),
        (roll("logits"), {"E-SCORES-LOGITS", "E-SCORES-TARGET"}),
        (roll("topk_ids", "topk_logprobs", "tail_logprob"), {"E-SCORES-TARGET"}),
        (roll("tail_logprob"), {"E-SCORES-TOPK-MASS"}),
        (lambda row: row["topk_ids"][0].reverse(), {"E-SCORES-TARGET"}),
        (lambda row: row["topk_logprobs"][0].reverse(), {"E-SCORES-TOPK-ORDER"}),
    ],
    ids=["logprob", "states", "logits", "topk", "tail", "ids", "order"],
)
def test_values_of_another_token_are_found(
    change: Callable[[dict[str, Any]], None], codes: set[str], toy: tuple[Path, Path], scored: Path, tmp_path: Path
) -> None:
    """Every row of every shard is changed; the other numbers of a row give it away."""
    report = validate(toy[1], scores=rewritten(scored, tmp_path / "s", change))
    assert codes <= report.codes <= codes | {"E-SCORES-TARGET"}, report.to_text()


def test_one_wrong_number_of_one_row_is_found_where_it_is(toy: tuple[Path, Path], scored: Path, tmp_path: Path) -> None:
    broken = rewritten(scored, tmp_path / "s", item("entropy", float("nan")), row=2)
    (finding,) = validate(toy[1], scores=broken).findings
    assert (finding.code, finding.row, finding.column) == ("E-SCORES-NONFINITE", 2, "entropy")
    assert finding.message.startswith("entropy[1] is not finite")


def test_a_shift_is_found_by_the_policys_own_numbers_alone(toy: tuple[Path, Path], tmp_path: Path) -> None:
    """No signal but `sampled`: nothing within a row contradicts it."""
    teacher, trace = toy
    score(trace, teacher, tmp_path / "s", signals=("sampled",))
    report = validate(trace, scores=rewritten(tmp_path / "s", tmp_path / "shifted", roll("logprob")))
    assert report.codes == {"E-SCORES-SHIFT"}
    assert "i+1" in report.findings[0].message


def test_the_head_of_another_model_is_found(toy: tuple[Path, Path], scored: Path, tmp_path: Path) -> None:
    other = save_model(tiny_model("llama", seed=4), tmp_path / "other")
    score(toy[1], other, tmp_path / "theirs", signals=("hidden",))
    swapped = shutil.copytree(scored, tmp_path / "s")
    shutil.copy(tmp_path / "theirs" / "head.safetensors", swapped / "head.safetensors")
    report = validate(toy[1], scores=swapped)
    assert report.codes == {"E-SCORES-DAMAGED"}
    assert status(report)["E-SCORES-CHECK"] == "not run"


def test_a_flipped_byte_of_a_shard_is_found(toy: tuple[Path, Path], scored: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(scored, tmp_path / "s")
    shard = sorted(broken.glob("shard-*"))[1]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    report = validate(toy[1], scores=broken)
    assert report.codes == {"E-SCORES-DAMAGED"}
    assert status(report)["E-SCORES-MISSING"] == "not run"


def test_scores_of_a_trace_that_changed_are_found(toy: tuple[Path, Path], scored: Path, tmp_path: Path) -> None:
    rows = list(read(toy[1]).iter_invocations())
    moved = [r.replace(position_ids=r.positions() + 1) if r.key == ("m0", 1) else r for r in rows]
    write(tmp_path / "t.parquet", read(toy[1]).metadata, moved)
    (finding,) = validate(tmp_path / "t.parquet", scores=scored).findings
    assert (finding.code, finding.episode_id, finding.invocation_index) == ("E-SCORES-STATE", "m0", 1)


def test_a_bfloat16_state_that_is_infinite_is_found(toy: tuple[Path, Path], tmp_path: Path) -> None:
    teacher, trace = toy
    score(trace, teacher, tmp_path / "s", signals=("hidden",), dtype="bfloat16")
    bits = int(torch.tensor(float("inf"), dtype=torch.bfloat16).view(torch.uint16))

    def change(row: dict[str, Any]) -> None:
        row["hidden"][-1] = [bits, *row["hidden"][-1][1:]]

    broken = rewritten(tmp_path / "s", tmp_path / "broken", change, row=3)
    assert "E-SCORES-NONFINITE" in validate(trace, scores=broken).codes
    assert SCORES_KEY in pq.read_schema(next(broken.glob("shard-*"))).metadata, "the copy is a shard of the same run"


def test_a_column_of_states_that_is_there_twice_is_found(toy: tuple[Path, Path], scored: Path, tmp_path: Path) -> None:
    shutil.copytree(scored, tmp_path / "s")
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    old = tmp_path / "s" / manifest["files"][0]["name"]
    table = pq.read_table(old)
    pq.write_table(table.append_column("hidden", table.column("hidden")), tmp_path / "twice.parquet")
    digest = hashlib.sha256((tmp_path / "twice.parquet").read_bytes()).hexdigest()[:16]
    manifest["files"][0]["name"] = f"shard-000000-{digest}.parquet"
    (tmp_path / "twice.parquet").rename(tmp_path / "s" / manifest["files"][0]["name"])
    old.unlink()
    (tmp_path / "s" / "manifest.json").write_text(json.dumps(manifest))
    assert "E-SCORES-COLUMN" in validate(toy[1], scores=tmp_path / "s").codes
    with pytest.raises(InputError, match="E-SCORES-DAMAGED.*the name twice"):
        ScoresReader(tmp_path / "s")
