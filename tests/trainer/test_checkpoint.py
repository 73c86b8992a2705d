"""Checkpoints: whole or not there, models as they are, and gone on from only by the same run on the same data."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_scorer import metadata_for
from helpers_trainer import Setup, make_setup
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from memopd_trace.disk import atomic_folder
from memopd_trace.errors import CheckFailed, InputError, UsageError
from memopd_trace.record.fingerprint import tokenizer_fingerprint
from memopd_trace.storage import write
from memopd_trainer import checkpoint as checkpoint_module
from memopd_trainer import train
from memopd_trainer.checkpoint import write_manifest


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Two groups of two rollouts."""
    return make_setup(tmp_path_factory.mktemp("checkpoint"))


def test_an_output_folder_of_another_run_is_refused_by_the_key_that_differs(setup: Setup, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    train(setup.config(output=out, steps=1))
    with pytest.raises(UsageError, match=r"holds a run with lr = 0.001, not 0.01"):
        train(setup.config(output=out, steps=2, lr=1e-2))
    fewer = [i for e in setup.episodes[:2] for i in e]
    write(tmp_path / "fewer.parquet", metadata_for(setup.student), fewer)
    with pytest.raises(UsageError, match=r"other data than .*fewer\.parquet"):
        train(setup.config(output=out, steps=2, trace=str(tmp_path / "fewer.parquet")))
    # other places for the same data, and another rhythm of saving, are no other run
    shutil.copy(setup.trace, tmp_path / "moved.parquet")
    train(setup.config(output=out, steps=2, trace=str(tmp_path / "moved.parquet"), save_every=1))


def test_a_run_does_not_go_on_with_a_reward_that_was_changed(setup: Setup, tmp_path: Path) -> None:
    """The ids, and so every state and every score, stay what they are."""
    config = setup.config(output=str(tmp_path / "run"), steps=1)
    first = train(config)
    rows = [i for e in setup.episodes for i in e]
    rows[-1] = rows[-1].replace(reward=0.5)
    write(tmp_path / "changed.parquet", metadata_for(setup.student), rows)
    changed = str(tmp_path / "changed.parquet")
    with pytest.raises(UsageError, match=r"holds a run on other data than .*changed\.parquet"):
        train(setup.config(output=str(tmp_path / "run"), steps=2, trace=changed))
    assert train(setup.config(output=str(tmp_path / "run"), steps=2)).resumed_from == 1
    assert first.checkpoint.exists()


def test_two_processes_do_not_train_into_one_folder(setup: Setup, tmp_path: Path) -> None:
    config = setup.config(output=str(tmp_path / "run"), steps=1)
    (tmp_path / "run.json").write_text(config.model_dump_json())
    command = [sys.executable, "-c", "from memopd_trace.cli import main; main()", "train", str(tmp_path / "run.json")]
    other: list[subprocess.CompletedProcess[str]] = []

    def meanwhile(_: Any) -> None:
        other.append(subprocess.run(command, capture_output=True, text=True, check=False))

    train(config, on_step=meanwhile)
    assert other[0].returncode == 2 and "another process is training into it" in other[0].stderr
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half a file", b"evil"], ids=["empty", "cut", "pickle"])
def test_a_damaged_or_hostile_trainer_state_is_refused(setup: Setup, tmp_path: Path, content: bytes) -> None:
    result = train(setup.config(output=str(tmp_path / "run"), steps=1))
    touched = tmp_path / "touched"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (touched,)

    state = result.checkpoint / "trainer_state.pt"
    state.write_bytes(pickle.dumps(Evil(), protocol=2) if content == b"evil" else content)
    with pytest.raises(InputError, match=r"trainer_state\.pt: is not what was written"):
        train(setup.config(output=str(tmp_path / "run"), steps=2))
    write_manifest(result.checkpoint, 1)  # who forges the one can forge the other
    with pytest.raises(InputError, match=r"trainer_state\.pt: cannot be read"):
        train(setup.config(output=str(tmp_path / "run"), steps=2))
    assert not touched.exists()


@pytest.fixture(scope="module")
def one_step(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run of one step."""
    output = tmp_path_factory.mktemp("one") / "run"
    train(setup.config(output=str(output), steps=1))
    return output


@pytest.mark.parametrize("name", ["trainer_state.pt", "model.safetensors", "config.json", "tokenizer.json"])
def test_one_changed_byte_of_a_checkpoint_is_refused(setup: Setup, one_step: Path, tmp_path: Path, name: str) -> None:
    file = shutil.copytree(one_step, tmp_path / "run") / "step-000001" / name
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=rf"{name}: is not what was written.*another folder.*or start again"):
        train(setup.config(output=str(tmp_path / "run"), steps=2))
    content[-20] ^= 1
    file.write_bytes(content)
    assert train(setup.config(output=str(tmp_path / "run"), steps=2)).resumed_from == 1


def test_a_checkpoint_with_a_file_too_few_or_too_many_or_another_name_is_refused(
    setup: Setup, one_step: Path, tmp_path: Path
) -> None:
    def resumed(name: str) -> Any:
        return train(setup.config(output=str(tmp_path / name), steps=2))

    for name in ("few", "many", "renamed", "list"):
        shutil.copytree(one_step, tmp_path / name)
    (tmp_path / "few/step-000001/trainer_state.pt").unlink()
    (tmp_path / "many/step-000001/adapter_config.json").write_text("{}")
    (tmp_path / "renamed/step-000001").rename(tmp_path / "renamed/step-000002")
    (tmp_path / "list/step-000001/checkpoint.json").write_text("[" * 100_000)
    for name, message in {
        "few": r"its file 'trainer_state\.pt' is missing",
        "many": r"adapter_config\.json: was not written with the checkpoint",
        "renamed": r"step-000002: was written at step 1",
        "list": r"checkpoint\.json: cannot be read",
    }.items():
        with pytest.raises(InputError, match=message):
            resumed(name)


@pytest.mark.parametrize("kind", ["empty", "foreign", "file"])
def test_what_only_has_a_checkpoints_name_is_not_taken_for_one(
    setup: Setup, one_step: Path, tmp_path: Path, kind: str
) -> None:
    other = shutil.copytree(one_step, tmp_path / "run") / "step-000009"
    if kind == "file":
        other.touch()
    else:
        other.mkdir()
    if kind == "foreign":
        (other / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"step-000009: is no checkpoint"):
        train(setup.config(output=str(tmp_path / "run"), steps=10))


def forged(state: dict[str, Any], fault: str) -> dict[str, Any]:
    moments = state["optimizer"]["state"]
    first = next(iter(moments))
    if fault == "identity":
        return state | {"identity": [1]}
    if fault == "tensors":
        return state | {"identity": state["identity"] | {"lr": torch.zeros(2)}}
    if fault == "no optimizer":
        return state | {"optimizer": {}}
    if fault == "entry":
        moments[first] = torch.zeros(1)
    elif fault == "index":
        moments[10_000] = moments.pop(first)
    elif fault == "shape":
        moments[first]["exp_avg"] = torch.zeros(3)
    elif fault == "sign":
        moments[first]["exp_avg_sq"] -= 1
    elif fault == "other model":
        state["shapes"] = state["shapes"][1:]
    return state


@pytest.mark.parametrize(
    "fault", ["identity", "tensors", "no optimizer", "entry", "index", "shape", "sign", "other model"]
)
def test_a_forged_trainer_state_is_refused(setup: Setup, one_step: Path, tmp_path: Path, fault: str) -> None:
    folder = shutil.copytree(one_step, tmp_path / "run") / "step-000001"
    state = torch.load(folder / "trainer_state.pt", weights_only=True)
    torch.save(forged(state, fault), folder / "trainer_state.pt")
    write_manifest(folder, 1)
    with pytest.raises(InputError, match=r"trainer_state\.pt: (cannot be read|is not of the model)"):
        train(setup.config(output=str(tmp_path / "run"), steps=2))


def test_weights_that_are_not_finite_are_not_saved(setup: Setup, tmp_path: Path) -> None:
    config = setup.config(output=str(tmp_path / "run"), steps=1, lr=1e200, weight_decay=1e200)
    with pytest.raises(CheckFailed, match=r"step 1: the weights are not finite \('"):
        train(config)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock", "metrics.jsonl"]


def test_the_weights_can_be_read_by_whoever_can_read_the_configuration(one_step: Path) -> None:
    modes = {f.name: f.stat().st_mode for f in (one_step / "step-000001").iterdir()}
    assert "model.safetensors" in modes and len(set(modes.values())) == 1


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe", b'{"step": 1e999}', b'{"step": 1.5}', b"[" * 100_000, b"[]", b'{"step": 0, "held_out_data": "x"}'],
    ids=["binary", "infinite", "fraction", "deep", "list", "held out"],
)
def test_metrics_that_a_run_did_not_write_are_refused(
    setup: Setup, one_step: Path, tmp_path: Path, line: bytes
) -> None:
    output = shutil.copytree(one_step, tmp_path / "run")
    with (output / "metrics.jsonl").open("ab") as out:
        out.write(line + b"\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl: not a line of metrics") as caught:
        train(setup.config(output=str(output), steps=2))
    assert len(str(caught.value)) < 400


def test_a_checkpoint_is_a_model_folder_and_only_the_newest_can_be_gone_on_from(setup: Setup, tmp_path: Path) -> None:
    result = train(setup.config(output=str(tmp_path / "run"), steps=3, save_every=1))
    folders = sorted(p.name for p in (tmp_path / "run").iterdir() if p.is_dir())
    assert folders == ["step-000001", "step-000002", "step-000003"] and result.checkpoint.name == folders[-1]
    assert [(tmp_path / "run" / f / "trainer_state.pt").exists() for f in folders] == [False, False, True]
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / folder)
        assert model.dtype == torch.float64
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "run" / folder)
        original = PreTrainedTokenizerFast.from_pretrained(setup.student)
        assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(original)


def test_a_checkpoint_has_every_file_of_the_student_but_its_weights(setup: Setup, tmp_path: Path) -> None:
    """A tokenizer's files have whatever names its kind gives them, so no list of names decides."""
    student = shutil.copytree(setup.student, tmp_path / "student")
    kept = {"spiece.model": b"\x00pieces", "vocabulary.tiktoken": b"AA== 0"}
    kept["additional_chat_templates/tools.jinja"] = b"{{ tools }}"
    for name, content in kept.items():
        (student / name).parent.mkdir(exist_ok=True)
        (student / name).write_bytes(content)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "model-00001-of-00002.safetensors"):
        (student / name).write_bytes(b"weights")
    result = train(setup.config(student=str(student), output=str(tmp_path / "run"), steps=1))
    assert {n: (result.checkpoint / n).read_bytes() for n in kept} == kept
    there = {str(f.relative_to(result.checkpoint)) for f in result.checkpoint.rglob("*") if f.is_file()}
    assert there - {*kept, "trainer_state.pt", "checkpoint.json"} == {f.name for f in setup.student.iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (result.checkpoint / name).read_bytes() == (setup.student / name).read_bytes()


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_behind(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.save

    def full(state: Any, path: Path) -> None:
        if state["step"] == 2:
            raise RuntimeError("PytorchStreamWriter failed writing file: No space left on device")
        real(state, path)

    monkeypatch.setattr(checkpoint_module.torch, "save", full)
    config = setup.config(output=str(tmp_path / "run"), steps=2, save_every=1)
    with pytest.raises(InputError, match=r"step-000002: cannot be written.*No space left"):
        train(config)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock", "metrics.jsonl", "step-000001"]
    monkeypatch.undo()
    assert train(config).resumed_from == 1


def test_what_a_killed_process_left_of_a_checkpoint_is_removed(setup: Setup, tmp_path: Path) -> None:
    unfinished = tmp_path / "run/.step-000001.0badcafe.tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"half")
    train(setup.config(output=str(tmp_path / "run"), steps=1))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock", "metrics.jsonl", "step-000001"]


def test_a_folder_gets_its_name_when_all_its_files_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, synced, real = tmp_path / "out" / "model", [], os.fsync

    def watched(handle: int) -> None:
        synced.append((Path(f"/proc/self/fd/{handle}").resolve(), target.exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", watched)
    with atomic_folder(target) as folder:
        (folder / "weights").write_bytes(b"w")
        (folder / "templates").mkdir()
        (folder / "templates" / "chat").write_bytes(b"t")
    before = {p for p, named in synced if not named}
    assert before == {folder / "weights", folder / "templates", folder / "templates" / "chat", folder}
    assert (target.parent, True) in synced
    assert [p.name for p in target.parent.iterdir()] == ["model"]
    assert target.stat().st_mode == target.parent.stat().st_mode, "others may read it as they may its parent"


def test_two_writers_of_one_folder_do_not_touch_each_others_files(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError), atomic_folder(target) as late:
        with atomic_folder(target) as early:
            (early / "weights").write_bytes(b"first")
        (late / "weights").write_bytes(b"second")
    assert (target / "weights").read_bytes() == b"first" and [p.name for p in tmp_path.iterdir()] == ["model"]
    with pytest.raises(UsageError, match="exists already"), atomic_folder(target):
        pass
