"""What a writer may replace, and what it must leave alone."""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers_trace import build, valid

from memopd_trace import storage
from memopd_trace.cli import run
from memopd_trace.disk import atomic_file, exclusive
from memopd_trace.errors import UsageError
from memopd_trace.invocation import Invocation
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata
from memopd_trace.record.recorder import TraceRecorder
from memopd_trace.storage import TraceWriter, read

TOKENIZER = Tokenizer(fingerprint="f" * 64, size=100, vocab_size=128, eos_ids=[2])
METADATA = TraceMetadata(producer=Producer(name="tests"), models={"m": Model(name="m", tokenizer=TOKENIZER)})


def row(episode: str = "e") -> Invocation:
    return Invocation(episode_id=episode, invocation_index=0, model_id="m", prompt_ids=[1, 2], output_ids=[3])


def episodes(path: Path) -> list[str]:
    return [i.episode_id for i in read(path).iter_invocations()]


@pytest.mark.parametrize("way", ["same", "symlink", "hard link", "symlink to the folder", "in the folder"])
def test_a_report_never_replaces_its_input(way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "in" / "t.parquet"
    with TraceWriter(trace, METADATA) as writer:
        writer.write(row())
    source, output = trace, trace
    if way == "symlink":
        output = tmp_path / "link"
        output.symlink_to(trace)
    elif way == "hard link":
        output = tmp_path / "other"
        output.hardlink_to(trace)
    elif way != "same":
        trace = source = tmp_path / "folder"
        with TraceWriter(trace, METADATA) as writer:
            writer.write(row())
        output = trace / "report.txt"
        if way == "symlink to the folder":
            (tmp_path / "link").symlink_to(trace)
            source = tmp_path / "link"
    assert run(["validate", str(source), "-o", str(output)]) == 2
    assert "is the input" in capsys.readouterr().err
    assert episodes(trace) == ["e"]
    assert not (tmp_path / "folder" / "report.txt").exists()


@pytest.mark.parametrize("output", ["", "folder", "circle"])
def test_an_output_that_can_be_no_file_is_refused(output: str, tmp_path: Path) -> None:
    trace = str(build(valid("train"), tmp_path, "good"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    assert run(["validate", trace, "-o", output and str(tmp_path / output)]) == 2
    assert (tmp_path / "circle").is_symlink() and (tmp_path / "folder").is_dir()


def test_a_fifo_is_written_through(tmp_path: Path) -> None:
    fifo, got = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    with atomic_file(fifo) as out:
        out.write(b"report")
    reader.join(10)
    assert got == [b"report"] and fifo.is_fifo()


def test_a_device_is_written_through_a_symlink(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    with atomic_file(link) as out:
        out.write(b"report")
    assert link.is_symlink() and Path("/dev/null").is_char_device()
    assert [f.name for f in tmp_path.iterdir()] == ["null"]
    with pytest.raises(UsageError, match="is no folder"):
        TraceWriter(link, METADATA, overwrite=True)


@pytest.mark.parametrize("there", [True, False])
def test_a_symlink_stays_and_its_file_is_written(there: bool, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    if there:
        (tmp_path / "far" / "file").write_text("old")
    link = tmp_path / "link"
    link.symlink_to("far/file")
    with atomic_file(link) as out:
        out.write(b"new")
    assert link.is_symlink() and (tmp_path / "far" / "file").read_bytes() == b"new"


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "none"])
def test_two_writers_of_one_new_file_lose_nothing(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no hard links")))
    path = tmp_path / "t.parquet"
    first, second = TraceWriter(path, METADATA), TraceWriter(path, METADATA)
    first.write(row("first"))
    second.write(row("second"))
    first.close()
    with pytest.raises(UsageError, match=r"exists already.*this one is t\.\w{8}\.parquet"):
        second.close()
    kept = [f for f in tmp_path.iterdir() if f != path]
    assert episodes(path) == ["first"] and [episodes(f) for f in kept] == [["second"]]
    with pytest.raises(UsageError, match="writing failed before"):
        second.close()


def test_a_second_writer_of_one_new_folder_is_refused_at_once(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", METADATA) as first:
        with pytest.raises(UsageError, match="exists already"):
            TraceWriter(tmp_path / "t", METADATA)
        first.write(row("first"))
    assert episodes(tmp_path / "t") == ["first"]
    with pytest.raises(RuntimeError), TraceWriter(tmp_path / "u", METADATA) as writer:
        writer.write(row())
        raise RuntimeError
    assert not (tmp_path / "u").exists(), "a folder without a part does not stay"


@pytest.mark.parametrize("name", ["t.parquet", "t"])
def test_nothing_is_written_after_close(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with TraceWriter(path, METADATA) as writer:
        writer.write(row("a"))
    writer.close()
    with pytest.raises(UsageError, match="the writer is closed"):
        writer.write(row("b"))
    writer.close()
    assert episodes(path) == ["a"]
    recorder = TraceRecorder(tmp_path / f"r-{name}", METADATA, profile="core")
    recorder.close()
    with pytest.raises(UsageError, match="is closed"):
        recorder.episode("e")


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "t"])
def test_a_full_disk_is_told_and_a_second_close_says_what_is_lost(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = TraceWriter(tmp_path / name, METADATA)
    writer.write(row())
    real = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode="r", *a: Full() if "x" in mode else real(self, mode, *a))
        with pytest.raises(OSError, match="No space left"):
            writer.close()
    with pytest.raises(UsageError, match=r"writing failed before \(.*No space left.*this trace is not there"):
        writer.close()
    with pytest.raises(UsageError, match="writing failed before"):
        writer.write(row("f"))
    assert list(tmp_path.iterdir()) == []
    storage.write(tmp_path / name, METADATA, [row()])
    assert episodes(tmp_path / name) == ["e"]


def test_a_lock_that_is_no_file_neither_empties_another_one_nor_waits(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"), exclusive(tmp_path / "a", "writing into"):
        pass
    assert precious.read_text() == "kept"
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / ".lock")
    with exclusive(tmp_path / "b", "writing into"):
        pass
