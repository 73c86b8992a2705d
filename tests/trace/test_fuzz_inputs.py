"""Inputs and outputs that are not what they seem: pipes, devices, circles, files that change or vanish meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_trace import build, valid

from memopd_trace import read, validate
from memopd_trace.cli import run
from memopd_trace.errors import InputError

Capture = pytest.CaptureFixture[str]
WRITER = """
import sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
from helpers_trace import build, valid
from memopd_trace import TraceWriter, read
source = read(build(valid("train"), Path(sys.argv[1]), "source"))
writer = TraceWriter(sys.argv[2], source.metadata, rows_per_part=2)
for invocation in source.iter_invocations():
    writer.write(invocation)
print("written", flush=True)
time.sleep(60)
"""


def refused(path: Path, capsys: Capture, code: str) -> None:
    """The command refuses the input with this code, and says so on stdout alone."""
    assert run(["validate", str(path), "--no-config"]) == 3
    out, err = capsys.readouterr()
    assert f"error[{code}]" in out and err == ""
    assert "Traceback" not in out


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A trace of 60 row groups of 400 kB: more than is read ahead."""
    path = build(valid("plain"), tmp_path)
    table = pq.read_table(path)
    noise = pa.array([os.urandom(200_000), os.urandom(200_000)])
    with pq.ParquetWriter(path, table.append_column("x_noise", noise).schema, compression="none") as writer:
        for number in range(60):
            ids = pa.array([f"e{number}"] * 2)
            writer.write_table(table.set_column(0, "episode_id", ids).append_column("x_noise", noise))
    assert validate(path).clean
    return path


@pytest.mark.parametrize("content", [b"", b"P", b"PAR1", b"ARROW1", b"PAR1PAR1", b"ARROW1\0\0ARROW1", b"\0" * 4096])
def test_a_file_of_few_bytes(content: bytes, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(content)
    refused(path, capsys, "E-UNREADABLE")


NAMED = {  # and what is made of it: where the name is not asked for, it may be read
    pa.timestamp("us", "Europe/Rome"): {3},
    pa.list_(pa.timestamp("us", "Europe/Rome")): {3},
    pa.list_(pa.field("Europe/Rome", pa.int8())): {3},
    pa.struct([pa.field("Europe/Rome", pa.int8())]): {3},
    pa.dictionary(pa.int8(), pa.timestamp("us", "Europe/Rome")): {0, 1},
    pa.map_(pa.string(), pa.field("Europe/Rome", pa.int8())): {0, 1},
}


@pytest.mark.parametrize("kind", NAMED, ids=str)
@pytest.mark.parametrize("column", ["started_at", "extra", "x_private"])
def test_a_name_in_a_type_that_is_no_text(kind: pa.DataType, column: str, tmp_path: Path, capsys: Capture) -> None:
    table = pq.read_table(build(valid("plain"), tmp_path))
    table = table.append_column(column, pa.nulls(len(table), kind))
    path = tmp_path / "t.arrow"
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    assert path.read_bytes().count(b"Europe/Rome") == 2
    path.write_bytes(path.read_bytes().replace(b"Europe/Rome", b"Europe\xf0Rome"))
    assert run(["validate", str(path), "--no-config"]) in NAMED[kind]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("column", ["segments", "x_private"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_type_that_pyarrow_does_not_know(column: str, nested: bool, tmp_path: Path, capsys: Capture) -> None:
    """Intervals of days and milliseconds; pyarrow writes none, but one byte makes one of another interval."""
    kind = pa.list_(pa.month_day_nano_interval()) if nested else pa.month_day_nano_interval()
    table = pq.read_table(build(valid("plain"), tmp_path))
    table = table.append_column(column, pa.nulls(len(table), kind))
    path = tmp_path / "t.arrow"
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    data = path.read_bytes()
    for at in (i for i, byte in enumerate(data) if byte == 2):
        path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
        try:
            unknown = str(pa.ipc.open_file(str(path)).schema.field(column).type).count("day_time_interval")
        except (pa.ArrowException, UnicodeError):
            continue
        if unknown:
            refused(path, capsys, "E-UNREADABLE")
            return
    raise AssertionError("no byte was the unit of the interval")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, capsys: Capture) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", capsys, "E-UNREADABLE")
    folder = build({**valid("plain"), "storage": "folder", "parts": [2]}, tmp_path)
    (folder / "part-00000.parquet").unlink()
    os.mkfifo(folder / "part-00000.parquet")
    refused(folder, capsys, "E-INCOMPLETE")
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    refused(folder, capsys, "E-INCOMPLETE")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/random"])
def test_a_device_is_refused_and_not_read(device: str, tmp_path: Path, capsys: Capture) -> None:
    refused(Path(device), capsys, "E-UNREADABLE")
    (tmp_path / "link.parquet").symlink_to(device)
    refused(tmp_path / "link.parquet", capsys, "E-UNREADABLE")


def test_circles_of_links(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    refused(tmp_path / "a", capsys, "E-UNREADABLE")
    folder = build({**valid("plain"), "storage": "folder", "parts": [2]}, tmp_path)
    (folder / "inside").symlink_to(folder)
    assert validate(folder / "inside" / "inside").clean
    (folder / "part-00000.parquet").unlink()
    (folder / "part-00000.parquet").symlink_to("part-00000.parquet")
    refused(folder, capsys, "E-INCOMPLETE")
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to(folder)
    refused(folder, capsys, "E-INCOMPLETE")


def test_a_file_that_is_cut_while_it_is_read_is_read_whole_or_refused(long: Path) -> None:
    """Arrow reads ahead: what it has, it has. A part is never given for the whole."""
    batches = read(long).iter_batches(rows=1)
    rows = next(batches).num_rows
    os.truncate(long, long.stat().st_size // 2)
    code = None
    try:
        rows += sum(batch.num_rows for batch in batches)
    except InputError as error:
        code = error.code
    assert (rows == 120 and code is None) or code == "E-UNREADABLE"
    assert validate(long).codes == {"E-UNREADABLE"}


def test_a_file_that_is_replaced_while_it_is_read(long: Path, tmp_path: Path) -> None:
    """Who has opened the old one reads it to its end."""
    (tmp_path / "new").mkdir()
    batches = read(long).iter_batches(rows=1)
    first = next(batches)
    build(valid("train"), tmp_path / "new").replace(long)
    assert sum(b.num_rows for b in [first, *batches]) == 120
    assert validate(long, "train").clean


def test_files_that_change_under_the_validator_give_a_verdict_or_a_refusal(long: Path) -> None:
    """Another thread cuts, grows and replaces it without end."""
    whole, stop = long.read_bytes(), threading.Event()

    def disturb() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            os.truncate(long, number * 7919 * 101 % len(whole))
            with long.open("r+b") as out:
                out.write(whole[: len(whole) // (1 + number % 3)])

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        reports = [validate(long) for _ in range(20)]
    finally:
        stop.set()
        thread.join()
    assert {r.exit_code() for r in reports} <= {0, 1, 3}
    assert any(r.refused for r in reports), "some of it must have been noticed"
    assert all(r.codes <= {"E-UNREADABLE", "E-LIMIT"} for r in reports)


@pytest.mark.parametrize("name", ["trace.parquet", "folder"])
def test_what_a_killed_writer_leaves_is_no_trace(name: str, tmp_path: Path, capsys: Capture) -> None:
    script = WRITER.format(paths=[str(Path(__file__).parents[1])])
    target = tmp_path / name
    command = [sys.executable, "-c", script, str(tmp_path), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        refused(target, capsys, "E-INCOMPLETE" if name == "folder" else "E-NO-INPUT")
        process.send_signal(signal.SIGKILL)
    refused(target, capsys, "E-INCOMPLETE" if name == "folder" else "E-NO-INPUT")


def test_a_thousand_inputs(tmp_path: Path, capsys: Capture) -> None:
    path = build(valid("plain"), tmp_path)
    missing = [str(tmp_path / f"gone-{i}") for i in range(990)]
    assert run(["validate", *[str(path)] * 10, *missing, "--max-findings", "3", "--no-config"]) == 3
    out, err = capsys.readouterr()
    assert err == "" and "990 inputs refused" in out
    assert out.count("error[E-NO-INPUT]") == 3 and "990 findings, 3 shown" in out


def test_a_report_that_fills_the_disk(tmp_path: Path, capsys: Capture) -> None:
    path = build(valid("plain"), tmp_path)
    assert run(["validate", str(path), "-o", "/dev/full", "--no-config"]) == 3
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "No space left" in err


def test_stdout_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    path = build(valid("plain"), tmp_path)
    script = "from memopd_trace.cli import main; main()"
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", script, "validate", str(path), "--no-config"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1 and b"No space left" in done.stderr
