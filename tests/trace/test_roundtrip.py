"""A trace that went through another tool: every value, null and empty list is kept, or the loss is named here.

`spec/rationale.md` has these losses as a table. The file metadata is the one thing that most tools drop unless told to
keep it: the validator then says `E-META-MISSING`, and putting it back makes the trace whole again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import polars
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from helpers_testing import differences, trace_sample

from memopd_trace import read, validate, write
from memopd_trace.metadata import KEY
from memopd_trace.testing import TRAITS, traits

MAPS = ("rewards", "extra")
Way = Callable[[Path, Path], Path]  # (a valid trace, a folder) -> what the tool wrote of it


def arrow_parquet(path: Path, folder: Path) -> Path:
    pq.write_table(pq.read_table(path), folder / "out.parquet")
    return folder / "out.parquet"


def arrow_ipc(path: Path, folder: Path) -> Path:
    table = pq.read_table(path)
    with pa.ipc.new_file(folder / "out.arrow", table.schema) as writer:
        writer.write_table(table)
    return folder / "out.arrow"


def arrow_dataset(path: Path, folder: Path) -> Path:
    pads.write_dataset(pads.dataset(path), folder / "out", format="parquet")
    return folder / "out" / "part-0.parquet"


def metadata_of(path: Path) -> str:
    return pq.read_schema(path).metadata[KEY].decode()


def polars_parquet(path: Path, folder: Path) -> Path:
    polars.read_parquet(path).write_parquet(folder / "out.parquet")
    return folder / "out.parquet"


def polars_parquet_told(path: Path, folder: Path) -> Path:
    told = {KEY.decode(): metadata_of(path)}
    polars.read_parquet(path).write_parquet(folder / "out.parquet", metadata=told)
    return folder / "out.parquet"


def polars_ipc(path: Path, folder: Path) -> Path:
    polars.read_parquet(path).write_ipc(folder / "out.arrow")
    return folder / "out.arrow"


def polars_arrow(path: Path, folder: Path) -> Path:
    pq.write_table(polars.from_arrow(pq.read_table(path)).to_arrow(), folder / "out.parquet")  # type: ignore[union-attr]
    return folder / "out.parquet"


def duckdb_parquet(path: Path, folder: Path, options: str = "") -> Path:
    out = folder / "out.parquet"
    duckdb.sql(f"COPY (SELECT * FROM read_parquet('{path}')) TO '{out}' (FORMAT parquet{options})")
    return out


def duckdb_parquet_told(path: Path, folder: Path) -> Path:
    told = metadata_of(path).replace("'", "''")
    return duckdb_parquet(path, folder, f", KV_METADATA {{{KEY.decode()}: '{told}'}}")


def duckdb_arrow(path: Path, folder: Path) -> Path:
    pq.write_table(duckdb.sql(f"FROM read_parquet('{path}')").to_arrow_table(), folder / "out.parquet")
    return folder / "out.parquet"


def without_maps(path: Path, folder: Path) -> Path:
    """The maps as lists of key-value structs, which read alike; HF datasets knows no map."""
    table = pq.read_table(path)
    for name in MAPS:
        kind = table.schema.field(name).type
        pairs = pa.list_(pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)]))
        table = table.set_column(table.schema.get_field_index(name), name, table.column(name).cast(pairs))
    pq.write_table(table, folder / "lists.parquet")
    return folder / "lists.parquet"


def hf_parquet(path: Path, folder: Path) -> Path:
    lists = str(without_maps(path, folder))
    datasets.Dataset.from_parquet(lists, cache_dir=str(folder / "cache")).to_parquet(str(folder / "out.parquet"))
    return folder / "out.parquet"


def hf_disk(path: Path, folder: Path) -> Path:
    datasets.Dataset(pq.read_table(without_maps(path, folder))).save_to_disk(str(folder / "disk"))
    table = datasets.load_from_disk(str(folder / "disk")).data.table
    pq.write_table(table.replace_schema_metadata(None), folder / "out.parquet")
    return folder / "out.parquet"


KEEPING: tuple[Way, ...] = (arrow_parquet, arrow_ipc, arrow_dataset, polars_parquet_told, duckdb_parquet_told)
DROPPING: tuple[Way, ...] = (
    polars_parquet, polars_ipc, polars_arrow, duckdb_parquet, duckdb_arrow, hf_parquet, hf_disk,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def pool() -> list[Any]:
    """Traces that together show everything that there is, maps that hold something among it."""
    wanted, found = {*TRAITS, *MAPS}, []
    for trace in (t for profile in ("train", "core") for t in trace_sample(profile)):
        shown = traits(*trace) | {name for name in MAPS if any(getattr(row, name) for row in trace[1])}
        if wanted & shown:
            found.append(trace)
            wanted -= shown
    assert not wanted and len(found) > 3
    return found


def as_it_was(path: Path, trace: Any) -> None:
    metadata, rows = trace
    report = validate(path)
    assert report.clean, report.to_text()
    reader = read(path)
    assert reader.metadata == metadata
    assert [differences(a, b) for a, b in zip(rows, reader.iter_invocations(), strict=True)] == [[]] * len(rows)


@pytest.mark.parametrize("way", KEEPING, ids=lambda way: way.__name__)
def test_nothing_is_lost(way: Way, pool: list[Any], tmp_path: Path) -> None:
    for number, trace in enumerate(pool):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / "in.parquet", *trace)
        as_it_was(way(folder / "in.parquet", folder), trace)


@pytest.mark.parametrize("way", DROPPING, ids=lambda way: way.__name__)
def test_the_metadata_is_lost_and_nothing_else(way: Way, pool: list[Any], tmp_path: Path) -> None:
    for number, trace in enumerate(pool[::3] if way.__name__.startswith("hf") else pool):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / "in.parquet", *trace)
        out = way(folder / "in.parquet", folder)
        assert validate(out).codes == {"E-META-MISSING"}
        as_it_was(with_metadata(out, metadata_of(folder / "in.parquet")), trace)


def with_metadata(path: Path, metadata: str) -> Path:
    """The same columns, byte for byte the tool's, with the key put back."""
    if path.suffix == ".arrow":
        table = pa.ipc.open_file(path).read_all()
        table = table.replace_schema_metadata({KEY: metadata})
        with pa.ipc.new_file(path.with_name("back.arrow"), table.schema) as writer:
            writer.write_table(table)
        return path.with_name("back.arrow")
    pq.write_table(pq.read_table(path).replace_schema_metadata({KEY: metadata}), path.with_name("back.parquet"))
    return path.with_name("back.parquet")


def test_hf_datasets_knows_no_map(pool: list[Any], tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", *pool[0])
    with pytest.raises(ValueError, match="map<string, double"):
        datasets.Dataset.from_parquet(str(tmp_path / "in.parquet"), cache_dir=str(tmp_path / "cache"))
    others = [name for name in pq.read_schema(tmp_path / "in.parquet").names if name not in MAPS]
    whole = pq.read_table(tmp_path / "in.parquet", columns=others)
    assert datasets.Dataset(whole).column_names == others
