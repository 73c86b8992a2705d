"""A teacher's scores on their way to other trainers: joined by key, checked, at the token that predicts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers_resume import make_toy
from helpers_scorer import SIZE
from helpers_scores import item, rewritten

from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_trace import Invocation, read, write
from memopd_trace.cli import run
from memopd_trace.errors import InputError, UsageError
from memopd_trace.export import export
from memopd_trace.export.formats.distillkit import CONFIG, DATA, FLOOR, index_bits, pack

TOPK = 4


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(teacher folder, trace)."""
    return make_toy(tmp_path_factory.mktemp("toy"), count=2)


@pytest.fixture(scope="module")
def scored(toy: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Top-k and states."""
    out = tmp_path_factory.mktemp("scored") / "scores"
    score(toy[1], toy[0], out, signals=("sampled", "topk", "hidden"), topk=TOPK)
    return out


@pytest.fixture(scope="module")
def sampled(toy: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sampled tokens alone."""
    out = tmp_path_factory.mktemp("sampled") / "scores"
    score(toy[1], toy[0], out, signals=("sampled",))
    return out


def rows_of(trace: Path) -> list[Invocation]:
    return list(read(trace).iter_invocations())


def written(name: str, trace: Path, scores: Path, folder: Path, **options: Any) -> list[dict[str, Any]]:
    export(name, trace, folder / "out.parquet", scores=scores, overwrite=True, **options)
    return pq.read_table(folder / "out.parquet").to_pylist()


def test_verl_and_nemo_rl_find_the_teacher_at_the_token_that_predicts(
    toy: tuple[Path, Path], scored: Path, tmp_path: Path
) -> None:
    reader = ScoresReader(scored)
    for name, ids, logprobs in (
        ("verl", "teacher_ids", "teacher_logprobs"),
        ("nemo-rl", "teacher_topk_indices", "teacher_topk_logits"),
    ):
        for row, found in zip(rows_of(toy[1]), written(name, toy[1], scored, tmp_path), strict=True):
            teacher = reader.get(*row.key)
            assert teacher is not None and len(found[ids]) == len(found[logprobs]) == len(row)
            at = len(row.prompt_ids) - 1 + teacher.output_index
            assert np.array_equal(np.array(found[ids])[at], teacher.topk_ids)
            assert np.array_equal(np.array(found[logprobs], np.float32)[at], teacher.topk_logprobs)
            rest = np.delete(np.arange(len(row)), at)
            assert len(rest) == len(row.prompt_ids) and not np.array(found[logprobs])[rest].any()


def test_trl_finds_the_teacher_at_the_token_itself(toy: tuple[Path, Path], scored: Path, tmp_path: Path) -> None:
    reader = ScoresReader(scored)
    for row, found in zip(rows_of(toy[1]), written("trl", toy[1], scored, tmp_path), strict=True):
        teacher = reader.get(*row.key)
        assert teacher is not None
        assert found["topk_token_ids"] == teacher.topk_ids.tolist()
        assert np.array_equal(np.array(found["topk_logprobs"], np.float32), teacher.topk_logprobs)
        assert np.array_equal(np.array(found["actual_logprobs"], np.float32), teacher.logprob)


def test_without_top_k_only_verl_takes_the_sampled_id_in_its_place(
    toy: tuple[Path, Path], sampled: Path, tmp_path: Path
) -> None:
    row = rows_of(toy[1])[0]
    teacher = ScoresReader(sampled).get(*row.key)
    assert teacher is not None
    found = written("verl", toy[1], sampled, tmp_path)[0]
    at = len(row.prompt_ids) - 1
    assert [k for (k,) in found["teacher_ids"][at:-1]] == row.output_ids.tolist()
    assert np.array_equal(np.array(found["teacher_logprobs"], np.float32)[at:-1, 0], teacher.logprob)
    assert written("trl", toy[1], sampled, tmp_path)[0]["topk_token_ids"] is None
    assert written("nemo-rl", toy[1], sampled, tmp_path)[0]["teacher_topk_logits"] is None
    made = export("nemo-rl", toy[1], tmp_path / "again.parquet", scores=sampled)
    assert made.losses.lost["scores.logprob"].rows == 12
    with pytest.raises(InputError, match="--signal topk"):
        export("distillkit", toy[1], tmp_path / "dk", scores=sampled)


def decoded(folder: Path, k: int, d: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(ids [L, K], log-probabilities [L, K], labels [L]) of each row, read bit by bit as the layout says."""
    found = []
    bits = (d - 1).bit_length()
    for row in pq.read_table(folder / DATA).to_pylist():
        logprobs = [np.frombuffer(bytes(b), "<f4") for b in row["compressed_logprobs"]]
        texts = ["".join(f"{byte:08b}" for byte in b) for b in row["bytepacked_indices"]]
        ids = [[int(t[n * bits : (n + 1) * bits], 2) for n in range(k)] for t in texts]
        found.append((np.array(ids), np.array(logprobs), np.array(row["labels"])))
    return found


def test_distillkit_gets_every_bit_of_the_top_k(toy: tuple[Path, Path], scored: Path, tmp_path: Path) -> None:
    export("distillkit", toy[1], tmp_path / "dk", scores=scored)
    rows, reader = rows_of(toy[1]), ScoresReader(scored)
    longest = max(map(len, rows))
    table = pq.read_table(tmp_path / "dk" / DATA)
    for row, plain, (ids, logprobs, labels) in zip(
        rows, table.to_pylist(), decoded(tmp_path / "dk", TOPK, SIZE), strict=True
    ):
        teacher = reader.get(*row.key)
        assert teacher is not None and ids.shape == logprobs.shape == (longest, TOPK)
        at = len(row.prompt_ids) - 1 + teacher.output_index
        assert np.array_equal(ids[at], teacher.topk_ids) and np.array_equal(logprobs[at], teacher.topk_logprobs)
        assert plain["input_ids"][: len(row)] == row.sequence_ids.tolist()
        assert plain["attention_mask"] == [1] * len(row) + [0] * (longest - len(row))
        assert np.flatnonzero(labels >= 0).tolist() == at.tolist(), "a label stands where a signal does"
    config = (tmp_path / "dk" / CONFIG).read_text()
    assert f'd: {SIZE}\nk: {TOPK}\nexact_k: {TOPK}\nexact_dtype: "float32"\n' in config


def test_ids_are_packed_highest_bit_first() -> None:
    assert pack(np.array([[1, 2, 3]]), 3).tolist() == [[0b00101001, 0b10000000]]
    assert [index_bits(d) for d in (2, 3, 64, 65, 32000, 49152, 65536, 65537, 151936)] == [
        1,
        2,
        6,
        7,
        15,
        16,
        16,
        17,
        18,
    ]


def test_probability_0_is_finite_for_distillkit(toy: tuple[Path, Path], scored: Path, tmp_path: Path) -> None:
    """0 times infinity would be NaN in a divergence."""

    def nothing_else(row: dict[str, Any]) -> None:
        row["topk_logprobs"][0] = [0.0, *[float("-inf")] * (TOPK - 1)]

    forged = rewritten(scored, tmp_path / "forged", nothing_else)
    export("distillkit", toy[1], tmp_path / "dk", scores=forged)
    row = rows_of(toy[1])[0]
    _, logprobs, _ = decoded(tmp_path / "dk", TOPK, SIZE)[0]
    assert logprobs[len(row.prompt_ids) - 1].tolist() == [0.0, *[FLOOR] * (TOPK - 1)]


def test_scores_of_another_state_or_of_other_tokens_are_refused(
    toy: tuple[Path, Path], scored: Path, tmp_path: Path
) -> None:
    rows = rows_of(toy[1])
    last = rows[-1]
    rows[-1] = last.replace(output_ids=last.output_ids[::-1], output_logprobs=None, logprob_kind=None)
    write(tmp_path / "other.parquet", read(toy[1]).metadata, rows)
    forged = rewritten(scored, tmp_path / "forged", item("logprob", -0.125), row=2)
    for trace, scores, code in (
        (tmp_path / "other.parquet", scored, "E-SCORES-STATE"),
        (toy[1], forged, "E-SCORES-CHECK"),
    ):
        with pytest.raises(InputError) as caught:
            export("verl", trace, tmp_path / "out.parquet", scores=scores)
        assert caught.value.code == code and not (tmp_path / "out.parquet").exists()


def test_scores_of_another_trace_are_refused(toy: tuple[Path, Path], scored: Path, tmp_path: Path) -> None:
    rows = [r.replace(episode_id="another", invocation_index=n) for n, r in enumerate(rows_of(toy[1])[:1])]
    write(tmp_path / "other.parquet", read(toy[1]).metadata, rows)
    with pytest.raises(InputError, match="E-SCORES-ROW"):
        export("verl", tmp_path / "other.parquet", tmp_path / "out.parquet", scores=scored)


def test_a_damaged_shard_is_exit_code_3(
    toy: tuple[Path, Path], scored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = rewritten(scored, tmp_path / "damaged", item("logprob", 0.0), row=0)
    shard = next(damaged.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-9])
    command = ["export", "verl", str(toy[1]), "-o", str(tmp_path / "out.parquet"), "--scores"]
    assert run([*command, str(damaged)]) == 3
    assert run([*command, str(tmp_path / "none")]) == 3
    assert "E-SCORES-DAMAGED" in capsys.readouterr().err


def test_rows_without_scores_are_null_or_left_out_and_counted(
    toy: tuple[Path, Path], scored: Path, tmp_path: Path
) -> None:
    more = rows_of(toy[1])[0].replace(episode_id="more")
    write(tmp_path / "more.parquet", read(toy[1]).metadata, [*rows_of(toy[1]), more])
    made = export("verl", tmp_path / "more.parquet", tmp_path / "out.parquet", scores=scored)
    assert pq.read_table(tmp_path / "out.parquet").column("teacher_ids").null_count == 1
    assert made.losses.lost["scores"].rows == 1 and made.losses.written == 13
    made = export("distillkit", tmp_path / "more.parquet", tmp_path / "dk", scores=scored)
    assert made.losses.left_out["not scored"].rows == 1 and made.losses.written == 12


def test_a_trained_token_without_a_score_leaves_the_teacher_null(
    toy: tuple[Path, Path], scored: Path, tmp_path: Path
) -> None:
    """A filler would be judged as what the teacher says."""

    def one_less(row: dict[str, Any]) -> None:
        for name in (
            "output_index",
            "logprob",
            "logsumexp",
            "entropy",
            "topk_ids",
            "topk_logprobs",
            "tail_logprob",
            "hidden",
        ):
            del row[name][1]

    holed = rewritten(scored, tmp_path / "holed", one_less, row=0)
    (less,) = [n for n, row in enumerate(written("verl", toy[1], holed, tmp_path)) if row["teacher_ids"] is None]
    export("distillkit", toy[1], tmp_path / "dk", scores=holed)
    labelled = [int((labels >= 0).sum()) for _, _, labels in decoded(tmp_path / "dk", TOPK, SIZE)]
    expected = [len(row.output_ids) - (n == less) for n, row in enumerate(rows_of(toy[1]))]
    assert labelled == expected, "only that label is gone"


def test_another_temperature_is_refused_unless_it_is_dropped(
    toy: tuple[Path, Path], scored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memopd_trace.export import scores as module

    warm = ScoresReader(scored).metadata.model_copy(update={"temperature": 0.5})
    monkeypatch.setattr(module.Scores, "metadata", property(lambda self: warm, lambda self, value: None), raising=False)
    with pytest.raises(InputError, match=r"temperature 0\.5, .*--drop temperature"):
        export("verl", toy[1], tmp_path / "out.parquet", scores=scored)
    made = export("verl", toy[1], tmp_path / "out.parquet", scores=scored, drop=["temperature"])
    assert made.losses.lost["scores.temperature"].rows == 12


def test_that_the_teacher_read_another_prompt_is_listed(toy: tuple[Path, Path], tmp_path: Path) -> None:
    score(toy[1], toy[0], tmp_path / "flat", signals=("sampled",), view="persistent-history")
    made = export("trl", toy[1], tmp_path / "out.parquet", scores=tmp_path / "flat")
    assert "view 'persistent-history'" in made.losses.lost["scores.view"].why
    assert made.losses.lost["scores.view"].rows == 12


def test_a_folder_is_replaced_whole_and_only_if_it_is_an_export(
    toy: tuple[Path, Path], scored: Path, tmp_path: Path
) -> None:
    out = tmp_path / "dk"
    export("distillkit", toy[1], out, scores=scored)
    with pytest.raises(UsageError, match="exists already"):
        export("distillkit", toy[1], out, scores=scored)
    (out / "stray").touch()
    export("distillkit", toy[1], out, scores=scored, overwrite=True)
    assert {f.name for f in out.iterdir()} == {DATA, CONFIG} and [f.name for f in tmp_path.iterdir()] == ["dk"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").touch()
    with pytest.raises(UsageError, match="no earlier export"):
        export("distillkit", toy[1], mine, scores=scored, overwrite=True)
    assert (mine / "file").exists()


def test_a_folder_is_not_replaced_through_a_link_nor_where_it_holds_what_is_read(
    toy: tuple[Path, Path], scored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "dk"
    export("distillkit", toy[1], out, scores=scored)
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(UsageError, match="no earlier export"):
        export("distillkit", toy[1], tmp_path / "link", scores=scored, overwrite=True)
    inside = Path(shutil.copy(toy[1], out / "trace.parquet"))
    with pytest.raises(UsageError, match="one in the other"):
        export("distillkit", inside, out, scores=scored, overwrite=True)
    with pytest.raises(UsageError, match="one in the other"):
        export("distillkit", toy[1], scored / "dk", scores=scored)
    assert inside.exists() and not (scored / "dk").exists()
    inside.unlink()
    monkeypatch.chdir(out)
    export("distillkit", toy[1], ".", scores=scored, overwrite=True)
    assert {f.name for f in out.iterdir()} == {DATA, CONFIG}


KILLED = """
import os, signal, sys
from memopd_trace.export.formats import distillkit
distillkit.DistillKitSink.close = lambda self, notes: os.kill(os.getpid(), signal.SIGKILL)
from memopd_trace.export import export
export("distillkit", sys.argv[1], sys.argv[2], scores=sys.argv[3], overwrite=True)
"""


@pytest.mark.slow
def test_killed_in_the_middle_no_half_folder_is_there(toy: tuple[Path, Path], scored: Path, tmp_path: Path) -> None:
    out = tmp_path / "dk"
    command = [sys.executable, "-c", KILLED, str(toy[1]), str(out), str(scored)]
    assert subprocess.run(command, check=False).returncode < 0
    assert not out.exists() and list(tmp_path.glob(".dk.*.tmp"))


def test_hugging_face_datasets_reads_every_file(toy: tuple[Path, Path], scored: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    cache = str(tmp_path / "cache")
    for name in ("verl", "trl", "nemo-rl"):
        export(name, toy[1], tmp_path / f"{name}.parquet", scores=scored)
        files = str(tmp_path / f"{name}.parquet")
        assert len(datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)) == 12
    export("distillkit", toy[1], tmp_path / "dk", scores=scored)
    assert len(datasets.load_dataset(str(tmp_path / "dk"), split="train", cache_dir=cache)) == 12
