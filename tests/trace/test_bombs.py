"""Small files that ask for gigabytes or for days: each is refused or found, in little memory and at once.

A bomb that a header gives away is refused before anything is decoded. That the bombs are real is shown by taking the
check away: then the memory limit of the command is what stops them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers_thrift as thrift
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_trace import build, valid

from memopd_trace import Report, limits, validate
from memopd_trace.cli import run
from memopd_trace.conform import MisfitError, conform
from memopd_trace.schema import COLUMN

MIB, GIB = 2**20, 2**30
CODECS = {"snappy": 1, "gzip": 2, "brotli": 4, "zstd": 6, "lz4": 7}
PLAIN, RLE, RLE_DICTIONARY = 0, 3, 8
HUGE = 2**31 - 1


def judged(path: Path) -> Report:
    """The report; fails where it took more than 256 MiB or 5 seconds of the processor."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, began = memory("VmHWM"), time.process_time()
    report = validate(path, "train")
    grown, seconds = memory("VmHWM") - before, time.process_time() - began
    assert grown < 256 * MIB, f"{grown / MIB:.0f} MiB"
    assert seconds < 5, f"{seconds:.1f} s"
    assert "does not fit into memory" not in report.to_text()
    return report


def memory(name: str) -> int:
    """A figure of this process, bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(name))


def with_chunk(data: bytes, column: str, pages: bytes, values: int, codec: int) -> bytes:
    """A Parquet file (one row group, no page index) in which a column chunk holds other pages; the footer knows it."""
    size = int.from_bytes(data[-8:-4], "little")
    body = data[: -8 - size]
    footer, _ = thrift.decode(data, len(body))
    chunks = [thrift.get(c, 3) for c in thrift.get(thrift.get(footer, 4)[1][0], 1)[1]]
    chunk = next(c for c in chunks if thrift.get(c, 3)[1][0] == column.encode())
    start, stored = thrift.get(chunk, 11) or thrift.get(chunk, 9), thrift.get(chunk, 7)
    dictionary = thrift.decode(pages)[1] if thrift.get(thrift.decode(pages)[0], 7) else 0
    thrift.put(chunk, 7, len(pages))
    thrift.put(chunk, 5, values)
    thrift.put(chunk, 4, codec)
    grown = len(pages) - stored
    for other in chunks:
        for field in other:
            if field[0] in (9, 11) and field[2] > start + stored - 1:
                field[2] += grown
    if dictionary:
        header = thrift.decode(pages)[0]
        thrift.put(chunk, 9, start + dictionary + thrift.get(header, 3))
    new = thrift.encode(footer)
    return body[:start] + pages + body[start + stored :] + new + len(new).to_bytes(4, "little") + b"PAR1"


def data_page(body: bytes, size: int, values: int, encoding: int) -> bytes:
    """A data page that says it holds so many values, and comes to so many bytes."""
    head = [[1, thrift.I32, values], [2, thrift.I32, encoding], [3, thrift.I32, RLE], [4, thrift.I32, RLE]]
    fields = [[1, thrift.I32, 0], [2, thrift.I32, size], [3, thrift.I32, len(body)], [5, thrift.STRUCT, head]]
    return thrift.encode(fields) + body


def dictionary_page(body: bytes, values: int) -> bytes:
    """A dictionary page, not compressed."""
    head = [[1, thrift.I32, values], [2, thrift.I32, PLAIN]]
    fields = [[1, thrift.I32, 2], [2, thrift.I32, len(body)], [3, thrift.I32, len(body)], [7, thrift.STRUCT, head]]
    return thrift.encode(fields) + body


def run_of(count: int, value: int) -> bytes:
    """A run of equal values below 256, in the run-length encoding."""
    return thrift.varint(count << 1) + bytes([value])


def levels(*runs: tuple[int, int]) -> bytes:
    """Repetition or definition levels of a page of version 1."""
    body = b"".join(run_of(*r) for r in runs)
    return len(body).to_bytes(4, "little") + body


def sound(folder: Path, **more: pa.Array) -> Path:
    """A valid trace of two rows with private columns."""
    path = build(valid("plain"), folder)
    table = pq.read_table(path)
    for name, column in more.items():
        table = table.append_column(name, column)
    pq.write_table(table, path)
    assert validate(path).clean
    return path


def ipc(folder: Path, rows: int, columns: dict[str, pa.Array], **options: Any) -> Path:
    """A trace of one episode in one record batch of an IPC file, with some columns replaced or added."""
    table = pq.read_table(build(valid("plain"), folder)).take(np.zeros(rows, np.int64)).combine_chunks()
    (batch,) = table.to_batches()
    arrays = {**dict(zip(batch.schema.names, batch.columns, strict=True)), **columns}
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))
    path = folder / "bomb.arrow"
    schema = batch.schema.with_metadata(table.schema.metadata)
    with pa.ipc.new_file(str(path), schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return path


def zeros(codec: str, total: int) -> bytes:
    """Compressed zeros, in frames of 64 MiB where the codec may be repeated."""
    frame = pa.compress(bytes(64 * MIB), codec, asbytes=True)
    return frame * (total // (64 * MIB)) if codec == "zstd" else frame


@pytest.mark.parametrize("codec", CODECS)
def test_a_page_that_comes_to_gigabytes(codec: str, tmp_path: Path) -> None:
    """Five private columns of 2 GiB each."""
    names = [f"x_{i}" for i in range(5)]
    path = sound(tmp_path, **{name: pa.array([b"a", b"b"]) for name in names})
    page = data_page(zeros(codec, 2 * GIB - 64 * MIB), 2 * GIB - 64 * MIB, 2, PLAIN)
    for name in names:
        path.write_bytes(with_chunk(path.read_bytes(), name, page, 2, CODECS[codec]))
    assert path.stat().st_size < 40 * MIB
    report = judged(path)
    assert report.codes == {"E-LIMIT"} and report.exit_code() == 3
    assert "bytes of decoded pages" in report.findings[0].message


def test_a_small_batch_that_comes_to_a_gigabyte(tmp_path: Path) -> None:
    """Below the limit of all batches, and still more than its bytes can come to."""
    path = ipc(tmp_path, 1, {"x_pad": pa.array([b"y" * 100_000])}, compression="zstd")
    size = (100_000).to_bytes(8, "little")
    front, found, back = path.read_bytes().rpartition(size)  # in front of the values; before it, the last offset
    assert found
    path.write_bytes(front + GIB.to_bytes(8, "little") + back)
    assert judged(path).codes == {"E-LIMIT"}


def test_without_the_check_the_memory_limit_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sound(tmp_path, x_0=pa.array([b"a", b"b"]))
    page = data_page(zeros("zstd", 2 * GIB - 64 * MIB), 2 * GIB - 64 * MIB, 2, PLAIN)
    path.write_bytes(with_chunk(path.read_bytes(), "x_0", page, 2, CODECS["zstd"]))
    monkeypatch.setattr(limits, "MAX_DECODED", 2**40)
    monkeypatch.setattr(limits, "FREE_DECODED", 2**40)
    assert run(["validate", str(path), "--max-memory", "0.25"]) == 3
    assert "does not fit into memory" in capsys.readouterr().out


def test_one_run_that_is_a_list_of_billions(tmp_path: Path) -> None:
    """The first prompt has 2^31 - 2 ids, in fewer than a hundred bytes."""
    path = sound(tmp_path)
    body = levels((1, 0), (HUGE - 2, 1), (1, 0)) + levels((HUGE, 3)) + bytes([1]) + run_of(HUGE, 0)
    pages = dictionary_page((7).to_bytes(4, "little"), 1) + data_page(body, len(body), HUGE, RLE_DICTIONARY)
    path.write_bytes(with_chunk(path.read_bytes(), "prompt_ids", pages, HUGE, 0))
    report = judged(path)
    assert report.codes == {"E-LIMIT"}
    assert "items of lists" in report.findings[0].message


def test_a_hand_made_page_of_few_values_is_read(tmp_path: Path) -> None:
    """What the test above takes too far is otherwise right."""
    path = sound(tmp_path)
    body = levels((1, 0), (9, 1), (1, 0)) + levels((11, 3)) + bytes([1]) + run_of(11, 0)
    pages = dictionary_page((7).to_bytes(4, "little"), 1) + data_page(body, len(body), 11, RLE_DICTIONARY)
    path.write_bytes(with_chunk(path.read_bytes(), "prompt_ids", pages, 11, 0))
    assert pq.read_table(path)["prompt_ids"].to_pylist() == [[7] * 10, [7]]
    assert "E-LIMIT" not in judged(path).codes


def test_a_dictionary_that_states_more_values_than_bytes(tmp_path: Path) -> None:
    path = sound(tmp_path)
    body = levels((2, 0)) + levels((2, 3)) + bytes([1]) + run_of(2, 0)
    pages = dictionary_page((7).to_bytes(4, "little"), HUGE) + data_page(body, len(body), 2, RLE_DICTIONARY)
    path.write_bytes(with_chunk(path.read_bytes(), "prompt_ids", pages, 2, 0))
    assert judged(path).codes == {"E-UNREADABLE"}


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_batch_that_comes_to_gigabytes(codec: str, tmp_path: Path) -> None:
    count = 2 * GIB // 8 + 1
    items = pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(np.zeros(count, np.int64))])
    offsets = pa.array([0, len(items), len(items)], pa.int64())
    path = ipc(tmp_path, 2, {"x": pa.LargeListArray.from_arrays(offsets, items)}, compression=codec)
    assert path.stat().st_size < 16 * MIB
    report = judged(path)
    assert report.codes == {"E-LIMIT"}
    assert "once decompressed" in report.findings[0].message


def shared_word() -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(512, np.int32)), pa.array(["w" * 4 * MIB]))


def shared_view(kind: pa.DataType, each: int, rows: int) -> pa.Array:
    """Every row is the same bytes."""
    view = np.array([[each, 0x77777777, 0, 0]], "<i4").repeat(rows, 0)
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(view), pa.py_buffer(b"w" * each)])


def shared_items() -> pa.Array:
    """Every row is the same million ids."""
    starts, sizes = pa.array(np.zeros(512, np.int32)), pa.array(np.full(512, MIB, np.int32))
    return pa.ListViewArray.from_arrays(starts, sizes, pa.array(np.ones(MIB, np.int32)))


def nothing_but_length(item: pa.DataType) -> pa.Array:
    """One list of 2^31 - 1 items that take no byte, then empty ones."""
    offsets = pa.py_buffer(np.array([0] + [HUGE] * 512, np.int32))
    items = pa.Array.from_buffers(item, HUGE, [None])
    return pa.Array.from_buffers(pa.list_(item), 512, [None, offsets], children=[items])


SHARED: dict[str, tuple[str, Callable[[], pa.Array]]] = {
    "a word of a dictionary": ("finish_reason", shared_word),
    "a text view": ("prompt_text", lambda: shared_view(pa.string_view(), MIB, 512)),
    "a list view": ("prompt_ids", shared_items),
    "a list of nulls": ("prompt_ids", lambda: nothing_but_length(pa.null())),
    "a list of structs without fields": ("segments", lambda: nothing_but_length(pa.struct([]))),
}


@pytest.mark.parametrize("what", SHARED)
def test_one_value_that_many_rows_share(what: str, tmp_path: Path) -> None:
    column, make = SHARED[what]
    report = judged(ipc(tmp_path, 512, {column: make()}))
    assert "E-COLUMN-TYPE" in report.codes
    found = [f for f in report.findings if f.code == "E-COLUMN-TYPE"]
    assert [f.column for f in found] == [column]
    assert "in one batch, limit" in str(found[0].actual) or "no field" in str(found[0].actual)


def test_what_rows_share_is_counted_by_the_rows_and_not_by_the_store() -> None:
    """Slices, nulls and both widths of text; just below the limit it is read."""
    text = COLUMN["prompt_text"].type
    for words in (pa.array(["w" * MIB, "v"]), pa.array(["w" * MIB, "v"], pa.large_string())):
        array = pa.DictionaryArray.from_arrays(pa.array([0] * 257 + [1, None], pa.int32()), words)
        with pytest.raises(MisfitError, match=f"come to {257 * MIB + 1} items or bytes"):
            conform(array, text)
        assert conform(array.slice(250), text).to_pylist() == ["w" * MIB] * 7 + ["v", None]
        assert len(conform(array.slice(1, 256), text)) == 256
    views = shared_view(pa.string_view(), MIB, 258)
    with pytest.raises(MisfitError, match=f"come to {257 * MIB} items or bytes"):
        conform(views.slice(1), text)
    assert conform(views.slice(256), text).to_pylist() == ["w" * MIB] * 2


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
def test_views_that_take_days_to_look_at(kind: pa.DataType, tmp_path: Path) -> None:
    """In a private column, which no rule reads: 60,000 views of one mebibyte."""
    nested = pa.StructArray.from_arrays([shared_view(kind, MIB, 60_000)], ["inner"])
    report = judged(ipc(tmp_path, 60_000, {"x_private": nested}))
    assert report.codes == {"E-LIMIT"}
    assert "'x_private': bytes of its views" in report.findings[0].message


def test_a_batch_of_more_rows_than_bytes(tmp_path: Path) -> None:
    """Columns of the null type take none: 2^40 rows."""
    path = tmp_path / "bomb.arrow"
    table = pq.read_table(build(valid("plain"), tmp_path))
    nothing = pa.Array.from_buffers(pa.null(), 2**40, [None])
    schema = pa.schema([(name, pa.null()) for name in table.schema.names], metadata=table.schema.metadata)
    with pa.ipc.new_file(str(path), schema, options=pa.ipc.IpcWriteOptions(allow_64bit=True)) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([nothing] * len(schema), schema=schema))
    report = judged(path)
    assert report.codes == {"E-LIMIT"} and "rows in" in report.findings[0].message


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_file_of_many_columns(suffix: str, nested: bool, tmp_path: Path) -> None:
    count = limits.MAX_COLUMNS + 1
    table = pa.table([pa.array([1], pa.int8())] * count, names=[f"x_{i}" for i in range(count)])
    if nested:
        table = pa.table({"x": table.to_struct_array()})
    path = tmp_path / f"bomb.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    assert judged(path).codes == {"E-LIMIT"}


def test_parts_that_are_named_over_and_over(tmp_path: Path) -> None:
    folder = build({**valid("plain"), "storage": "folder", "parts": [2]}, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] *= 10_000
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert judged(folder).codes == {"E-INCOMPLETE"}


def test_a_manifest_of_a_million_parts(tmp_path: Path) -> None:
    folder = build({**valid("plain"), "storage": "folder", "parts": [2]}, tmp_path)
    files = ",".join(f'{{"name":"{i}","rows":0}}' for i in range(10**6))
    (folder / "manifest.json").write_text(f'{{"files":[{files}],"complete":true}}')
    assert judged(folder).codes == {"E-LIMIT"}
    (folder / "manifest.json").write_text('{"complete":' + "[" * 10**6)
    assert judged(folder).codes == {"E-INCOMPLETE"}


@pytest.mark.parametrize("text", ["[" * 10**6, '{"models":' * 10**5, "9" * 10**6, '{"a":"' + "x" * 16 * MIB + '"}'])
def test_metadata_that_is_deep_or_long(text: str, tmp_path: Path) -> None:
    path = build({**valid("plain"), "raw_metadata": text}, tmp_path)
    assert judged(path).codes == {"E-META-INVALID"}


def test_a_value_of_fixed_width_that_comes_to_gigabytes(tmp_path: Path) -> None:
    path = sound(tmp_path, x_key=pa.array([b"aaaa", b"bbbb"], pa.binary(4)))
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    footer, _ = thrift.decode(data, len(data) - 8 - size)
    (column,) = (c for c in thrift.get(footer, 2)[1] if thrift.get(c, 4) == b"x_key")
    thrift.put(column, 2, 2**31 - 1)
    new = thrift.encode(footer)
    path.write_bytes(data[: -8 - size] + new + len(new).to_bytes(4, "little") + b"PAR1")
    report = judged(path)
    assert report.codes == {"E-LIMIT"} and report.exit_code() == 3
    assert "bytes of decoded pages: 21474" in report.findings[0].message


def test_row_groups_that_share_one_place(tmp_path: Path) -> None:
    """A footer that lists the same bytes two hundred times."""
    data = sound(tmp_path).read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    footer, _ = thrift.decode(data, len(data) - 8 - size)
    thrift.put(footer, 4, [thrift.STRUCT, thrift.get(footer, 4)[1] * 200])
    new = thrift.encode(footer)
    path = tmp_path / "bomb.parquet"
    path.write_bytes(data[: -8 - size] + new + len(new).to_bytes(4, "little") + b"PAR1")
    assert pq.ParquetFile(path).metadata.num_row_groups == 200
    assert judged(path).codes == {"E-UNREADABLE"}
