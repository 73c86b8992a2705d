"""Damaged files: cut anywhere, flipped anywhere, the answer is a verdict or a refusal, never a traceback."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from helpers_trace import build, valid

from memopd_trace import validate
from memopd_trace.cli import run

STORAGES = ["parquet", "ipc", "folder"]


def sound(storage: str, folder: Path) -> Path:
    """A valid trace; the file to damage."""
    vector = valid("train")
    vector.update(storage=storage, parts=[3, 1])
    path = build(vector, folder)
    return path / "part-00000.parquet" if storage == "folder" else path


def judged(path: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """The exit code of the command; fails on a traceback, or on silence."""
    target = path.parent if path.name.startswith("part-") else path
    code = run(["validate", str(target), "--profile", "train"])
    out, err = capsys.readouterr()
    assert code in (0, 1, 3), f"exit {code}: {out}{err}"
    assert "Traceback" not in out + err and "internal error" not in err
    assert out.splitlines()[-1].endswith("not run")
    return code


@pytest.mark.parametrize("storage", STORAGES)
def test_a_file_cut_at_any_length_is_refused(storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sound(storage, tmp_path)
    data = path.read_bytes()
    assert judged(path, capsys) == 0
    lengths = {0, 1, 3, 4, 5, 6, 8, 12, len(data) - 1, len(data) - 4, len(data) - 8}
    lengths |= set(np.linspace(0, len(data) - 1, 40).astype(int).tolist())
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        assert judged(path, capsys) == 3, f"cut at {length} of {len(data)}"


@pytest.mark.parametrize("storage", ["parquet", "ipc"])
def test_a_flipped_byte_gives_a_verdict_or_a_refusal(
    storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sound(storage, tmp_path)
    data = path.read_bytes()
    random = np.random.default_rng(20)
    codes = set()
    for at in random.integers(0, len(data), 200):
        damaged = bytearray(data)
        damaged[at] ^= int(random.integers(1, 256))
        path.write_bytes(damaged)
        codes.add(judged(path, capsys))
    assert 3 in codes, "some flips must have hit what holds the file together"


def test_a_flipped_byte_in_a_folder_is_always_noticed(tmp_path: Path) -> None:
    path = sound("folder", tmp_path)
    data = path.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 40)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        report = validate(path.parent)
        assert report.refused or "E-MANIFEST-SHA256" in report.codes


def test_findings_before_the_damage_are_kept(tmp_path: Path) -> None:
    """An IPC file whose second batch has offsets that point outside."""
    vector = valid("plain")
    vector["rows"][0]["prompt_ids"] = [5, -1, 7]
    path = build({**vector, "storage": "ipc"}, tmp_path)
    table = pa.ipc.open_file(path).read_all()
    good = table.combine_chunks().to_batches()[0]
    prompts = good.column("prompt_ids")
    broken = pa.ListArray.from_buffers(
        prompts.type, 2, [None, pa.py_buffer(np.array([0, 999_999, 3], np.int32))], children=[prompts.values]
    )
    columns = [broken if name == "prompt_ids" else good.column(name) for name in good.schema.names]
    bad = pa.RecordBatch.from_arrays(columns, schema=good.schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, good.schema) as writer:
        writer.write_batch(good)
        writer.write_batch(bad)
    report = validate(path)
    assert report.codes == {"E-ID-RANGE", "E-UNREADABLE"}
    assert report.exit_code(exit_zero=True) == 3


def test_a_dictionary_index_that_points_nowhere_is_refused(tmp_path: Path) -> None:
    path = build({**valid("plain"), "storage": "ipc"}, tmp_path)
    table = pa.ipc.open_file(path).read_all()
    indices, words = pa.array([0, 7_000_000], pa.int32()), pa.array(["m"])
    wild = pa.DictionaryArray.from_arrays(indices, words, safe=False)
    table = table.set_column(table.schema.get_field_index("model_id"), "model_id", wild)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert validate(path).codes == {"E-UNREADABLE"}


@pytest.mark.parametrize(
    "kind",
    [
        pa.run_end_encoded(pa.int32(), pa.string()),
        pa.sparse_union([pa.field("a", pa.int32())]),
        pa.dictionary(pa.int8(), pa.int64()),
        pa.month_day_nano_interval(),
        pa.decimal128(10, 2),
        pa.list_(pa.list_(pa.int32())),
        pa.map_(pa.string(), pa.string()),
        pa.struct([pa.field("start", pa.int32())]),
        pa.timestamp("ns"),
        pa.binary_view(),
        pa.null(),
    ],
    ids=str,
)
@pytest.mark.parametrize("column", ["episode_id", "prompt_ids", "relation", "segments", "sampling", "rewards"])
def test_any_arrow_type_in_any_column_is_a_verdict(kind: pa.DataType, column: str, tmp_path: Path) -> None:
    path = build({**valid("train"), "storage": "ipc"}, tmp_path)
    table = pa.ipc.open_file(path).read_all()
    strange = pa.nulls(len(table), kind)
    if column in table.column_names:
        table = table.set_column(table.schema.get_field_index(column), column, strange)
    else:
        table = table.append_column(column, strange)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    report = validate(path, "train")
    assert report.exit_code() in (0, 1), report.to_text()
    if pa.types.is_null(kind):
        assert ("E-NULL" in report.codes) == (column in ("episode_id", "prompt_ids"))
    elif not (pa.types.is_struct(kind) and column == "sampling"):  # a struct without the known fields is empty
        assert "E-COLUMN-TYPE" in report.codes
