"""What can happen to a scores folder: damage is found, said in one line and mended; nothing that was whole is lost."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers_resume import files_of, make_toy, shards_of

from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import ScoreResult, score
from memopd_scorer.teacher import LoadedModel, load
from memopd_trace.cli import run as run_command
from memopd_trace.errors import InputError, UsageError
from memopd_trace.validate import validate

OPTIONS: dict[str, Any] = {"max_tokens": 60, "shard_tokens": 50}
Damage = Callable[[Path], None]


@dataclass
class Toy:
    """A teacher, its trace, and an undisturbed run of it, from which every test takes a copy."""

    teacher: LoadedModel
    path: Path
    trace: Path
    whole: Path

    def score(self, out: Path, **options: Any) -> ScoreResult:
        return score(self.trace, self.teacher, out, **{**OPTIONS, **options})

    def copy(self, out: Path) -> Path:
        shutil.copytree(self.whole, out)
        return out

    @property
    def files(self) -> dict[str, bytes]:
        return files_of(self.whole)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("toy")
    path, trace = make_toy(folder)
    toy = Toy(load(path), path, trace, folder / "whole")
    assert toy.score(toy.whole).shards > 4
    return toy


def flip(file: Path) -> None:
    """One bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 7)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def remove(file: Path) -> None:
    file.unlink()


DAMAGES = (flip, cut, empty, remove)


def refused(toy: Toy, folder: Path, code: str, **options: Any) -> InputError:
    """Scoring into the folder is refused, and changes nothing in it."""
    before = files_of(folder)
    with pytest.raises(InputError) as caught:
        toy.score(folder, **options)
    assert caught.value.code == code and "\n" not in str(caught.value)
    assert files_of(folder) == {".lock": b"", **before}
    return caught.value


@pytest.mark.parametrize("damage", [flip, cut, empty])
@pytest.mark.parametrize("number", [0, -1])
def test_a_damaged_shard_is_refused_and_repair_scores_it_alone_again(
    damage: Damage, number: int, toy: Toy, tmp_path: Path
) -> None:
    folder = toy.copy(tmp_path / "s")
    shard = shards_of(folder)[number]
    damage(shard)
    with pytest.raises(InputError, match="E-SCORES-DAMAGED"):
        ScoresReader(folder)
    assert "E-SCORES-DAMAGED" in validate(toy.trace, scores=folder).codes
    assert f"{shard}: missing, or its bytes do not match" in str(refused(toy, folder, "E-SCORES-DAMAGED"))
    assert toy.score(folder, repair=True).shards_scored == 1
    assert files_of(folder) == toy.files


@pytest.mark.parametrize(
    ("name", "damage"),
    [*((name, damage) for name in ("head.safetensors", "manifest.json") for damage in DAMAGES), ("shard", remove)],
)
def test_what_can_be_made_again_is_made_again_without_asking(
    name: str, damage: Damage, toy: Toy, tmp_path: Path
) -> None:
    folder = toy.copy(tmp_path / "s")
    damage(shards_of(folder)[1] if name == "shard" else folder / name)
    assert toy.score(folder).shards_scored == (name == "shard")
    assert files_of(folder) == toy.files


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_json_is_refused_and_repaired_from_what_the_shards_say(
    damage: Damage, toy: Toy, tmp_path: Path
) -> None:
    folder = toy.copy(tmp_path / "s")
    damage(folder / "run.json")
    with pytest.raises(InputError):
        ScoresReader(folder)
    before = files_of(folder)
    with pytest.raises(InputError) as caught:
        toy.score(folder)
    assert caught.value.code in ("E-META-INVALID", "E-SCORES-OTHER-RUN", "E-INCOMPLETE")
    assert files_of(folder) == before
    assert toy.score(folder, repair=True).shards_scored == 0
    assert files_of(folder) == toy.files


def test_a_run_json_of_another_run_beside_its_shards_is_kept(toy: Toy, tmp_path: Path) -> None:
    other = tmp_path / "other"
    toy.score(other, signals=["sampled"])
    assert "signals is" in str(refused(toy, other, "E-SCORES-OTHER-RUN", repair=True))
    (other / "run.json").unlink()
    assert "shards of another run" in str(refused(toy, other, "E-SCORES-OTHER-RUN", repair=True))


def test_a_run_that_has_only_begun_is_not_taken_over_by_repair(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    text = (toy.whole / "run.json").read_text().replace('"max_tokens": 60', '"max_tokens": 61')
    (tmp_path / "s" / "run.json").write_text(text)
    found = refused(toy, tmp_path / "s", "E-SCORES-OTHER-RUN", repair=True)
    assert "max_tokens is 61 there and 60 now" in str(found)


def strays(folder: Path, other: Path) -> dict[str, Path]:
    """Shards that do not belong where they lie, by what is wrong with them."""
    mine, theirs = shards_of(folder), shards_of(other)
    name = mine[0].name.replace("shard-000000", "shard-000777")
    second = mine[1].name.replace("shard-000001", "shard-000000")
    return {
        "the plan has only": shutil.copy(mine[0], folder / name),
        "not those of the plan": shutil.copy(mine[1], folder / second),
        "of another run": shutil.copy(theirs[0], folder / theirs[0].name),
    }


@pytest.mark.parametrize("wrong", ["the plan has only", "not those of the plan", "of another run"])
def test_a_shard_that_does_not_belong_there_is_refused_and_removed_by_repair(
    wrong: str, toy: Toy, tmp_path: Path
) -> None:
    folder, other = toy.copy(tmp_path / "s"), tmp_path / "other"
    toy.score(other, signals=["sampled"])
    for what, file in strays(folder, other).items():
        if what != wrong:
            file.unlink()
    with pytest.raises(InputError, match=f"E-SCORES-DAMAGED.*{wrong}"):
        toy.score(folder)
    assert set(files_of(folder)) >= set(toy.files), "nothing is removed unasked"
    assert toy.score(folder, repair=True).shards_scored == 0
    assert files_of(folder) == toy.files


def test_several_faults_at_once_cost_only_the_shards_that_are_bad(toy: Toy, tmp_path: Path) -> None:
    folder = toy.copy(tmp_path / "s")
    flip(shards_of(folder)[0])
    cut(shards_of(folder)[2])
    remove(shards_of(folder)[3])
    flip(folder / "manifest.json")
    empty(folder / "head.safetensors")
    empty(folder / "run.json")
    assert toy.score(folder, repair=True).shards_scored == 3
    assert files_of(folder) == toy.files


# a disk that is full


class _FullFile(io.FileIO):
    """A file on a disk that has room for `room` more bytes, which its whole class shares."""

    room = 0

    def write(self, data: Any) -> int:
        size = min(len(memoryview(data).cast("B")), _FullFile.room)
        if size == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _FullFile.room -= size
        return super().write(memoryview(data).cast("B")[:size]) or 0


@contextmanager
def _no_room(patch: pytest.MonkeyPatch, toy: Toy) -> Iterator[None]:
    """Writing fails after a while, in the middle of a file."""
    opened = Path.open
    _FullFile.room = sum(len(data) for data in toy.files.values()) * 2 // 3

    def open_full(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode == "xb":
            return io.BufferedWriter(_FullFile(path, "x"))
        return opened(path, mode, *args, **options)

    with patch.context() as inner:
        inner.setattr(Path, "open", open_full)
        yield


@contextmanager
def _failing(patch: pytest.MonkeyPatch, module: Any, name: str, good: int) -> Iterator[None]:
    """The function says that the disk is full, from its `good`-th call on."""
    calls, real = iter(range(10**6)), getattr(module, name)

    def full(*args: Any, **options: Any) -> Any:
        if next(calls) >= good:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **options)

    with patch.context() as inner:
        inner.setattr(module, name, full)
        yield


@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_a_full_disk_is_one_line_and_loses_nothing(
    where: str, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memopd_scorer.scoring.load", lambda path, **options: toy.teacher)
    command = ["score", str(toy.trace), "--teacher", str(toy.path), "-o", str(tmp_path / "s")]
    command += ["--max-tokens", "60", "--shard-tokens", "50"]
    faults = {
        "write": lambda: _no_room(monkeypatch, toy),
        "fsync": lambda: _failing(monkeypatch, os, "fsync", 9),
        "rename": lambda: _failing(monkeypatch, Path, "replace", 5),
    }
    with faults[where]():
        assert run_command(command) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: disk: No space left on device"
    finished = len(shards_of(tmp_path / "s"))
    assert 0 < finished < len(shards_of(toy.whole)) and not list((tmp_path / "s").glob(".*.tmp"))
    assert {name: toy.files[name] for name in files_of(tmp_path / "s")} == files_of(tmp_path / "s")
    result = toy.score(tmp_path / "s")
    assert result.shards_scored == result.shards - finished
    assert files_of(tmp_path / "s") == toy.files


def test_a_limit_on_file_size_meets_the_head_and_is_one_line(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memopd_scorer.scoring.load", lambda path, **options: toy.teacher)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, hard))
    try:
        code = run_command(["score", str(toy.trace), "--teacher", str(toy.path), "-o", str(tmp_path / "s")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 3
    assert capsys.readouterr().err == "error: disk: File too large\n"
    assert set(files_of(tmp_path / "s")) == {".lock", "run.json"}, "the head is larger than that"


# a folder that goes away, or may not be written


def test_a_folder_that_vanishes_is_not_made_anew_with_half_of_the_shards(toy: Toy, tmp_path: Path) -> None:
    def remove_folder(done: int, total: int) -> None:
        if done == total // 2:
            shutil.rmtree(tmp_path / "s", ignore_errors=True)

    with pytest.raises(InputError, match="E-INCOMPLETE.*run.json is gone"):
        toy.score(tmp_path / "s", on_pack=remove_folder)
    assert not (tmp_path / "s").exists()
    assert toy.score(tmp_path / "s").shards_scored == len(shards_of(toy.whole))
    assert files_of(tmp_path / "s") == toy.files


def test_a_shard_that_vanishes_during_the_run_is_missed_at_the_end(toy: Toy, tmp_path: Path) -> None:
    removed: list[Path] = []

    def remove_shard(done: int, total: int) -> None:
        if done == total and not removed:
            removed.append(shards_of(tmp_path / "s")[0])
            removed[0].unlink()

    with pytest.raises(InputError, match=r"E-INCOMPLETE.*1 of \d+ shards are missing.*run the same command again"):
        toy.score(tmp_path / "s", on_pack=remove_shard)
    assert not (tmp_path / "s" / "manifest.json").exists()
    assert toy.score(tmp_path / "s").shards_scored == 1
    assert files_of(tmp_path / "s") == toy.files


def test_another_run_that_took_the_folder_meanwhile_is_not_finished(toy: Toy, tmp_path: Path) -> None:
    text = (toy.whole / "run.json").read_text().replace('"max_tokens": 60', '"max_tokens": 61')

    def take(done: int, total: int) -> None:
        (tmp_path / "s" / "run.json").write_text(text)

    with pytest.raises(InputError, match="E-SCORES-OTHER-RUN.*max_tokens is 61 there and 60 now"):
        toy.score(tmp_path / "s", on_pack=take)
    assert not (tmp_path / "s" / "manifest.json").exists()


def test_a_failure_is_reported_once_and_the_manifest_is_never_early(toy: Toy, tmp_path: Path) -> None:
    folder = toy.copy(tmp_path / "s")
    remove(shards_of(folder)[1])

    def fail(done: int, total: int) -> None:
        assert not (folder / "manifest.json").exists(), "it lists a shard that is not there"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        toy.score(folder, on_pack=fail)
    assert toy.score(folder).shards_scored == 1
    assert json.loads((folder / "manifest.json").read_text())["complete"] is True


@pytest.mark.parametrize("name", ["run.json", "head.safetensors", "manifest.json"])
def test_what_is_no_file_is_refused_and_never_waited_for(name: str, toy: Toy, tmp_path: Path) -> None:
    folder = toy.copy(tmp_path / "s")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UsageError, match=f"{name}: is no file"):
        toy.score(folder)
    with pytest.raises(InputError):
        ScoresReader(folder)
