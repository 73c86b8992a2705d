"""stdout and inputs as a hostile shell gives them: closed, narrow, cut short, out of reach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_trace import build, valid

from memopd_trace import validate
from memopd_trace.cli import INTERRUPTED, run

COMMAND = f"{sys.executable} -c 'from memopd_trace.cli import main; main()'"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, check=False, timeout=60, env={**os.environ, **environment}
    )


def test_a_closed_stdout_or_stderr_is_no_error() -> None:
    for line in (f"{COMMAND} codes >&-", f"{COMMAND} codes 2>&- >/dev/null", f"{COMMAND} --version >&- 2>&-"):
        done = shell(line)
        assert (done.returncode, done.stderr) == (0, b""), line


@pytest.mark.parametrize("command", ["codes", "codes --format json", "schema", "schema --format json"])
def test_a_pipe_that_nobody_reads_is_no_error(command: str) -> None:
    done = shell(f"set -o pipefail; {COMMAND} {command} | true")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_path_is_reported_in_any_encoding(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff\xc3\xa9\xe2\x86\x92\xf0\x9f\x98\x80.parquet")
    build(valid("train"), tmp_path, "t").rename(path)
    for more in ("", f"-o {tmp_path}/report"):
        line = f"{COMMAND} validate {tmp_path}/*.parquet --format json {more}"
        done = shell(line, PYTHONIOENCODING=encoding)
        assert done.returncode == 0 and done.stderr == b""
        text = (tmp_path / "report").read_bytes().decode() if more else done.stdout.decode(encoding)
        assert json.loads(text)["traces"][0]["path"] == str(path)
    done = shell(f"{COMMAND} validate {tmp_path}/*.parquet", PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and done.stderr == b"", "the trace is good, whatever its name"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a file that this process's child cannot read")
def test_an_unreadable_file_or_folder_is_refused_and_the_rest_is_judged(tmp_path: Path) -> None:
    path = build(valid("train"), tmp_path, "t")
    path.chmod(0)
    tmp_path.chmod(0o755)
    (tmp_path / "shut").mkdir(mode=0o700)
    build(valid("train"), tmp_path / "shut", "t")
    build(valid("train"), tmp_path, "good")
    names = ["t.parquet", "shut/t.parquet", "good.parquet"]
    program = (
        "import os, sys; import memopd_trace.report.render, memopd_trace.validate; from memopd_trace.cli import main\n"
        f"os.chdir({str(tmp_path)!r}); os.setuid(65534); sys.argv = ['memopd-trace', 'validate', *{names!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stdout.count(b"ermission denied") == done.stdout.count(b"error[E-UNREADABLE]") == 2
    assert b"2 inputs refused; 4 rows" in done.stdout, "the one that can be read is judged"


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_name_that_cannot_be_does_not_stop_the_other_inputs(name: str, tmp_path: Path) -> None:
    good = build(valid("train"), tmp_path, "good")
    report = validate([tmp_path / name, good])
    assert report.codes == {"E-UNREADABLE"} and report.refused == 1
    assert report.traces[1].rows > 0


def test_a_device_and_a_fifo_are_no_traces(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "manifest.json")
    report = validate([tmp_path / "fifo", "/dev/null", tmp_path / "folder"])
    assert [f.code for f in report.findings] == ["E-UNREADABLE", "E-UNREADABLE", "E-INCOMPLETE"]
    assert all("not a regular file" in f.message for f in report.findings)


def test_a_full_disk_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(build(valid("train"), tmp_path, "good"))
    assert run(["validate", good, "-o", "/dev/full"]) == 3
    assert capsys.readouterr().err == "error: disk: No space left on device\n"


def test_ctrl_c_while_an_interrupt_is_told_does_not_cut_the_line() -> None:
    code = """
import os, signal
from memopd_trace import cli

def interrupted(*_, **__):
    raise KeyboardInterrupt

def pressed_again(*arguments, real=cli.printable):
    os.kill(os.getpid(), signal.SIGINT)
    return real(*arguments)

cli.app, cli.printable = interrupted, pressed_again
cli.main()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60, text=True)
    assert (found.returncode, found.stderr) == (130, f"error: {INTERRUPTED}\n")
