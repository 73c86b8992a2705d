"""Second readers: programs written from the specification's text, in other languages, agree with the vectors.

They share no code with the project: `spec/vectors/readers/duckdb` is SQL, `spec/vectors/readers/node` JavaScript with
Parquet and Arrow readers of its own.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import duckdb
import polars
import pytest
from helpers_trace import VECTORS

import memopd_trace
from memopd_trace import validate

READERS = VECTORS / "readers"
NODE = READERS / "node"
ENTRIES: list[dict[str, Any]] = json.loads((VECTORS / "manifest.json").read_text(encoding="utf-8"))["vectors"]
READABLE = [e for e in ENTRIES if e["expected"]]
EVERYTHING = VECTORS / "built/valid/everything.parquet"

node = pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")


def expected(entry: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((VECTORS / entry["expected"]).read_text(encoding="utf-8"))
    return content


def cells(path: Path) -> list[dict[str, Any]]:
    """Every cell of every row, as Python values."""
    return [row for batch in memopd_trace.read(path).iter_batches() for row in batch.to_pylist()]


# -- DuckDB ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def database() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute((READERS / "duckdb/digest.sql").read_text(encoding="utf-8"))
    return connection


def test_sql_written_from_the_text_gives_every_digest(database: duckdb.DuckDBPyConnection) -> None:
    files = rows = 0
    for entry in READABLE:
        path = VECTORS / entry["file"]
        if path.suffix == ".arrow":  # DuckDB reads Parquet, and folders of it
            continue
        content = expected(entry)
        keys = [(row["episode_id"], row["invocation_index"]) for row in content["rows"]]
        want = sorted(zip(keys, content["state_digests"], strict=True))
        source = [str(p) for p in sorted(path.glob("part-*.parquet"))] if path.is_dir() else str(path)
        if entry["source"] == "invalid/W-MANIFEST-STRAY.json":
            source = [str(path / part["name"]) for part in json.loads((path / "manifest.json").read_text())["files"]]
        found = database.execute("SELECT * FROM state_digests($file)", {"file": source}).fetchall()
        assert [((episode, index), digest) for episode, index, digest in found] == want, entry["file"]
        files, rows = files + 1, rows + len(found)
    assert files > 25 and rows > 60


def test_duckdb_reads_the_values_and_nulls(database: duckdb.DuckDBPyConnection) -> None:
    rows = expected(next(e for e in ENTRIES if e["source"] == "valid/everything.json"))["rows"]
    found = database.sql(f"SELECT * FROM read_parquet('{EVERYTHING}')").to_arrow_table().to_pylist()
    for row, want in zip(found, rows, strict=True):
        assert {k for k, v in row.items() if v is not None} == set(want)
        for name in (
            "episode_id",
            "prompt_ids",
            "output_logprobs",
            "visible_until",
            "output_slots",
            "prompt_text",
            "reward",
        ):
            assert row[name] == want.get(name), name
    assert str(found[0]["sampling"]["seed"]) == rows[0]["sampling"]["seed"] == str(2**53 + 1)


def test_what_duckdb_writes_from_the_expected_rows_is_a_valid_trace(
    database: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    """The whole way in SQL: canonical JSON -> the declared columns -> Parquet with its metadata."""
    database.execute((READERS / "duckdb/write.sql").read_text(encoding="utf-8"))
    valid = [e for e in ENTRIES if e["source"].startswith("valid/") and e["file"].endswith(".parquet")]
    assert len(valid) > 12
    for number, entry in enumerate(valid):
        source, out = VECTORS / entry["file"], tmp_path / f"{number}.parquet"
        metadata = memopd_trace.read(source).metadata.model_dump_json()
        database.execute(
            f"COPY (SELECT * FROM trace_rows('{VECTORS / entry['expected']}')) TO '{out}' "
            f"(FORMAT parquet, COMPRESSION zstd, KV_METADATA {{memopd_trace: '{metadata}'}})"
        )
        report = validate(out, entry["profile"])
        assert report.clean, report.to_text()
        assert cells(out) == cells(source), entry["file"]


# -- Polars ----------------------------------------------------------------------------------------------------------


def test_what_polars_writes_is_a_valid_trace(tmp_path: Path) -> None:
    """Polars keeps the metadata in the footer alone, and writes an `ARROW:schema` that does not repeat it."""
    metadata = memopd_trace.read(EVERYTHING).metadata.model_dump_json()
    frame = polars.read_parquet(EVERYTHING)
    frame.write_parquet(tmp_path / "polars.parquet", metadata={"memopd_trace": metadata})
    report = validate(tmp_path / "polars.parquet")
    assert report.clean, report.to_text()
    assert cells(tmp_path / "polars.parquet") == cells(EVERYTHING)


# -- Node ------------------------------------------------------------------------------------------------------------


def run_node(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if not (NODE / "node_modules").is_dir():
        pytest.skip("the reader's packages are not installed: run `make reader`")
    command = ["node", *(str(a) for a in arguments)]
    return subprocess.run(command, cwd=NODE, capture_output=True, text=True, check=False, timeout=120)


@node
def test_the_node_reader_agrees_on_every_value_null_and_digest() -> None:
    done = run_node("check.mjs")
    results = {r["file"]: r for r in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, [r for r in results.values() if r["verdict"] == "differs"] or done.stderr
    for entry in READABLE:
        views = expected(entry).get("views")
        seen = {"views": len(views)} if views is not None else {}
        assert results[entry["file"]] == {"file": entry["file"], "verdict": "agrees", "rows": entry["rows"], **seen}
    assert sum(r.get("views", 0) for r in results.values()) >= 5
    agree, left = len(READABLE), len(ENTRIES) - len(results)
    total = f"{agree} agree, {len(results) - agree} refused as expected, 0 differ; {left} are for validators\n"
    assert done.stderr == total
    refused = {r["code"] for r in results.values() if r["verdict"] == "refused"}
    assert refused >= {"E-VERSION-MAJOR", "E-FEATURE-UNKNOWN", "E-META-INVALID", "E-UNREADABLE", "E-INCOMPLETE"}


@node
@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("rows", lambda c: c["rows"][0]["output_logprobs"].__setitem__(1, 0.0)),  # a null taken for zero
        ("rows", lambda c: c["rows"][1]["media"].append(None)),  # empty is not null, nor anything else
        ("rows", lambda c: c["rows"][0]["sampling"].__setitem__("seed", str(2**53))),  # 64 bits are not 53
        ("state_digests", lambda c: c["state_digests"].__setitem__(1, "0" * 64)),
    ],
)
def test_the_node_check_notices_a_wrong_expectation(place: str, change: Any, tmp_path: Path) -> None:
    entry = next(e for e in ENTRIES if e["source"] == "valid/everything.json")
    content = expected(entry)
    change(content)
    for name in (entry["file"], entry["expected"]):
        (tmp_path / name).parent.mkdir(parents=True)
    shutil.copyfile(VECTORS / entry["file"], tmp_path / entry["file"])
    (tmp_path / entry["expected"]).write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "manifest.json").write_text(json.dumps({"vectors": [entry]}), encoding="utf-8")
    done = run_node("check.mjs", tmp_path)
    assert done.returncode == 1
    assert re.match(rf"{place} \d: ", json.loads(done.stdout)["detail"])


@node
def test_the_node_programs_say_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "damaged").write_bytes(b"PAR1 and no more PAR1")
    for arguments, code, message in (
        (["read.mjs"], 2, "usage: node read.mjs TRACE"),
        (["read.mjs", tmp_path / "gone"], 3, f"error: E-NO-INPUT: {tmp_path}/gone"),
        (["read.mjs", tmp_path / "damaged"], 3, "error: "),
        (["check.mjs", "a", "b"], 2, "usage: node check.mjs"),
        (["check.mjs", tmp_path], 2, f"error: {tmp_path}: no manifest of vectors: "),
    ):
        done = run_node(*arguments)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1), done.stderr
        assert done.stderr.startswith(message)


def test_the_readers_share_no_code_with_the_project() -> None:
    sources = [p for p in READERS.rglob("*") if p.suffix in (".mjs", ".sql", ".json") and "node_modules" not in p.parts]
    assert len(sources) >= 6
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert ".py" not in text, path
    lock = json.loads((NODE / "package-lock.json").read_text())
    assert not any("resolved" in package for package in lock["packages"].values()), "a lock file names no registry"
