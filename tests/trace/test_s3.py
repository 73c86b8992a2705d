"""Traces in an object store, against a local server that speaks S3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyarrow import fs

from memopd_trace import TraceWriter, read, validate
from memopd_trace.cli import run
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Invocation
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata
from memopd_trace.places import RemotePath, place

TOKENIZER = Tokenizer(fingerprint="f" * 64, size=100, vocab_size=128)
METADATA = TraceMetadata(producer=Producer(name="tests"), models={"m": Model(name="m", tokenizer=TOKENIZER)})
FORMS = ["s3://traces/t.parquet", "s3://traces/t.arrow", "s3://traces/runs/today"]


def names(store: fs.FileSystem) -> list[str]:
    found = store.get_file_info(fs.FileSelector("traces", recursive=True))
    return sorted(info.path for info in found if info.type == fs.FileType.File)


def rows(episodes: int = 3, prompt: int = 5) -> list[Invocation]:
    return [
        Invocation(episode_id=f"e{e}", invocation_index=i, model_id="m", prompt_ids=[prompt] * 4, output_ids=[7])
        for e in range(episodes)
        for i in range(2)
    ]


def write(path: str, invocations: list[Invocation], **options: bool) -> None:
    with TraceWriter(path, METADATA, rows_per_part=4, **options) as writer:  # type: ignore[arg-type]
        for invocation in invocations:
            writer.write(invocation)


@pytest.mark.parametrize("path", FORMS)
def test_what_is_written_there_reads_back_and_validates(path: str, store: fs.FileSystem) -> None:
    write(path, rows())
    assert [i.key for i in read(path).iter_invocations()] == [i.key for i in rows()]
    report = validate(path)
    assert report.clean and report.traces[0].path == path and report.traces[0].rows == 6


def test_findings_name_the_place(store: fs.FileSystem, capsys: pytest.CaptureFixture[str]) -> None:
    write("s3://traces/bad.parquet", rows(1, prompt=999))
    assert run(["validate", "s3://traces/bad.parquet"]) == 1
    assert "s3://traces/bad.parquet:0: error[E-ID-RANGE]" in capsys.readouterr().out


def test_a_folder_is_complete_with_its_manifest_alone(store: fs.FileSystem) -> None:
    path = "s3://traces/runs/today"
    with TraceWriter(path, METADATA, rows_per_part=4) as writer:
        for invocation in rows():
            writer.write(invocation)
        assert names(store) == ["traces/runs/today/part-00000.parquet"]
        assert [f.code for f in validate(path).findings] == ["E-INCOMPLETE"]
    assert names(store)[0].endswith("manifest.json") and validate(path).clean
    store.delete_file("traces/runs/today/part-00001.parquet")
    assert validate(path).codes == {"E-INCOMPLETE"}


def test_another_part_under_a_name_of_the_manifest_is_found(store: fs.FileSystem) -> None:
    write("s3://traces/folder", rows())
    write("s3://traces/other.parquet", rows(2, prompt=6))
    store.copy_file("traces/other.parquet", "traces/folder/part-00000.parquet")
    assert validate("s3://traces/folder").codes == {"E-MANIFEST-SHA256"}


@pytest.mark.parametrize("path", FORMS)
def test_nothing_is_left_by_a_writer_that_failed(path: str, store: fs.FileSystem) -> None:
    with pytest.raises(RuntimeError), TraceWriter(path, METADATA) as writer:
        writer.write(rows()[0])
        raise RuntimeError
    assert names(store) == []


def test_nothing_is_replaced_unless_asked_for(store: fs.FileSystem) -> None:
    for path in FORMS:
        write(path, rows())
        with pytest.raises(UsageError, match="exists already"):
            write(path, rows())
        write(path, rows(1), overwrite=True)
        assert validate(path).clean and validate(path).traces[0].rows == 2
    manifest = json.loads(place("s3://traces/runs/today/manifest.json").read_text())
    assert names(store)[:2] == ["traces/runs/today/manifest.json", "traces/runs/today/part-00000.parquet"]
    assert len(manifest["files"]) == 1, "the parts of the longer trace are gone"


def test_a_sample_and_several_processes_work_there_too(store: fs.FileSystem) -> None:
    write(FORMS[0], rows())
    write(FORMS[2], rows())
    report = validate(FORMS[::2], sample=2, jobs=2)
    assert report.clean and [t.of_episodes for t in report.traces] == [3, 3]


@pytest.mark.parametrize("path", ["s3://traces/none.parquet", "s3://traces/none", "s3://no-such-bucket/t.parquet"])
def test_what_is_not_there_is_one_line(
    path: str, store: fs.FileSystem, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert run(["validate", path]) == 3
    assert f"{path}: no such file or folder" in capsys.readouterr().out
    with pytest.raises(InputError, match="E-NO-INPUT"):
        read(path)


def test_a_store_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    path = "s3://traces/t.parquet?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"
    assert run(["validate", path]) == 3
    out, err = capsys.readouterr()
    assert out.startswith("s3://traces/t.parquet: error[E-UNREADABLE]") and "Could not connect" in out.splitlines()[0]
    assert "Traceback" not in out + err


def test_credentials_in_a_uri_are_refused_and_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "s3://user:hunter2@traces/t.parquet"]) == 2
    out, err = capsys.readouterr()
    assert "environment" in err and "hunter2" not in out + err


def test_a_uri_survives_being_a_path() -> None:
    remote = place(Path("s3://bucket/run/part.parquet"))
    assert isinstance(remote, RemotePath) and str(remote) == "s3://bucket/run/part.parquet"
    assert (remote.name, remote.suffix, str(remote.parent)) == ("part.parquet", ".parquet", "s3://bucket/run")
    assert remote == place("s3://bucket/run") / "part.parquet" and isinstance(place("s3"), Path)
