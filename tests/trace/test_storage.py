"""What is written is what is read, whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_testing import differences
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memopd_trace import batching, validate
from memopd_trace import invocation as invocation_module
from memopd_trace.disk import atomic_file
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Invocation, Media, Sampling, Segment, batch_from_invocations
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata
from memopd_trace.storage import TraceWriter, read, write

TOKENIZER = Tokenizer(fingerprint="f" * 64, size=100, vocab_size=128, eos_ids=[2])
METADATA = TraceMetadata(producer=Producer(name="tests"), models={"m": Model(name="m", tokenizer=TOKENIZER)})
FORMATS = ["t.parquet", "t.arrow", "folder"]


def row(index: int = 0, episode: str = "e", **fields: object) -> Invocation:
    base: dict[str, object] = {"model_id": "m", "prompt_ids": [1, 2], "output_ids": [3]}
    return Invocation(episode_id=episode, invocation_index=index, **{**base, **fields})  # type: ignore[arg-type]


def kept(a: Invocation, b: Invocation) -> bool:
    """Every field equal, nulls included; a digest that was not given has been computed."""
    return differences(a.replace(state_digest=a.state_digest or a.compute_digest()), b) == []


def optional(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(st.none(), values)


int32 = st.integers(-(2**31), 2**31 - 1)
ids = st.lists(int32, max_size=5)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
floats = st.floats(width=32, allow_nan=True)
segments = st.builds(Segment, int32, int32, text, optional(int32), optional(int32))
media = st.builds(Media, int32, int32, st.binary(min_size=32, max_size=32))
samplings = st.builds(Sampling, optional(st.floats(allow_nan=False)), seed=optional(int32))


@st.composite
def rows(draw: st.DrawFn) -> list[Invocation]:
    found = []
    for episode in range(draw(st.integers(1, 3))):
        for index in range(draw(st.integers(1, 3))):
            fields = {
                "prompt_ids": draw(ids),
                "output_ids": draw(ids),
                "parent_index": draw(optional(int32)),
                "relation": draw(optional(text)),
                "group_id": draw(optional(text)),
                "accepted": draw(optional(st.booleans())),
                "position_ids": draw(optional(ids)),
                "output_logprobs": draw(optional(st.lists(optional(floats), max_size=4))),
                "output_sampled": draw(optional(st.lists(st.booleans(), max_size=4))),
                "output_policy_versions": draw(optional(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3))),
                "segments": draw(
                    optional(
                        st.lists(st.builds(Segment, int32, int32, text, optional(int32), optional(int32)), max_size=2)
                    )
                ),
                "media": draw(
                    optional(st.lists(st.builds(Media, int32, int32, st.binary(min_size=32, max_size=32)), max_size=2))
                ),
                "sampling": draw(
                    optional(st.builds(Sampling, optional(st.floats(allow_nan=False)), seed=optional(int32)))
                ),
                "reward": draw(optional(st.floats(allow_nan=False))),
                "rewards": draw(optional(st.dictionaries(text, st.floats(allow_nan=False), max_size=2))),
                "extra": draw(optional(st.dictionaries(text, text, max_size=2))),
                "output_text": draw(optional(text)),
                "started_at": draw(optional(st.datetimes(timezones=st.just(UTC)))),
            }
            found.append(row(index, f"e{episode}", **fields))
    return found


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=rows())
def test_every_value_and_null_survives(name: str, data: list[Invocation], tmp_path: Path) -> None:
    path = tmp_path / name
    if path.is_dir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    write(path, METADATA, data, overwrite=True)
    reader = read(path)
    assert reader.metadata == METADATA
    found = list(reader.iter_invocations())
    assert len(found) == len(data)
    assert all(kept(a, b) for a, b in zip(data, found, strict=True))
    assert [len(e) for e in reader.iter_episodes()] == [
        sum(r.episode_id == e for r in data) for e in dict.fromkeys(r.episode_id for r in data)
    ]


def test_the_writers_defaults_are_the_measured_ones(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet", METADATA, [row(prompt_ids=list(range(1000)))])
    chunk = pq.read_metadata(tmp_path / "t.parquet").row_group(0)
    columns = {chunk.column(i).path_in_schema: chunk.column(i) for i in range(chunk.num_columns)}
    assert columns["prompt_ids.list.element"].compression == "ZSTD"
    assert "RLE_DICTIONARY" not in columns["prompt_ids.list.element"].encodings
    assert "RLE_DICTIONARY" in columns["model_id"].encodings


@pytest.mark.parametrize("name", FORMATS)
def test_an_exception_leaves_nothing_under_the_final_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), TraceWriter(tmp_path / name, METADATA) as writer:
        writer.write(row())
        writer._flush()
        raise RuntimeError
    assert [f.name for f in tmp_path.rglob("*") if f.is_file()] == []


def test_a_folder_is_complete_only_with_its_manifest(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", METADATA, rows_per_part=3) as writer:
        for episode in range(4):
            for index in range(2):
                writer.write(row(index, f"e{episode}"))
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert [p["rows"] for p in manifest["files"]] == [4, 4]  # an episode is never split over parts
    assert (manifest["rows"], manifest["episodes"], manifest["complete"]) == (8, 4, True)
    assert [i.episode_id for i in read(tmp_path / "t").iter_invocations()] == [f"e{i // 2}" for i in range(8)]
    (tmp_path / "t" / "part-00001.parquet").unlink()
    with pytest.raises(InputError, match="E-INCOMPLETE.*part-00001"):
        read(tmp_path / "t")
    (tmp_path / "t" / "manifest.json").unlink()
    with pytest.raises(InputError, match="E-INCOMPLETE"):
        read(tmp_path / "t")


def parts(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir() if not f.name.startswith("."))


def test_a_folder_being_overwritten_is_incomplete_until_it_is_whole_again(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    with TraceWriter(folder, METADATA, rows_per_part=1) as writer:
        for episode in ("a", "b", "c"):
            writer.write(row(episode=episode))
    with pytest.raises(RuntimeError), TraceWriter(folder, METADATA, overwrite=True, rows_per_part=1) as writer:
        assert len(list(read(folder).iter_invocations())) == 3, "nothing is touched before there is a new part"
        for episode in ("d", "e"):
            writer.write(row(episode=episode))
        raise RuntimeError
    assert parts(folder) == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    with pytest.raises(InputError, match="E-INCOMPLETE"):
        read(folder)
    with TraceWriter(folder, METADATA, overwrite=True, rows_per_part=1) as writer:
        writer.write(row(episode="d"))
        writer.write(row(episode="e"))
    assert parts(folder) == ["manifest.json", "part-00000.parquet", "part-00001.parquet"]
    assert [i.episode_id for i in read(folder).iter_invocations()] == ["d", "e"]
    assert validate(folder).codes == set(), "no part is left over"


def test_two_writers_of_one_file_do_not_share_a_temporary_name(tmp_path: Path) -> None:
    target = tmp_path / "t.bin"
    with atomic_file(target) as first, atomic_file(target) as second:
        first.write(b"one")
        second.write(b"two")
        names = sorted(f.name for f in tmp_path.iterdir())
        assert len(names) == 2 and all(n.startswith(".t.bin.") and n.endswith(".tmp") for n in names)
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("t.bin", b"one")], "the first to begin ends last"


WIDE = {
    "routed_experts": {"routed_experts": [0] * 40},
    "segments": {"segments": [Segment(0, 1, "user")] * 40},
    "extra": {"extra": {str(n): "" for n in range(40)}},
    "messages": {"messages": "\u00e9" * 20},  # 40 bytes
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("column", WIDE)
def test_batches_end_before_any_column_is_too_long_for_its_offsets(
    column: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invocation_module, "MAX_ITEMS", 100)
    monkeypatch.setattr(batching, "ITEMS_PER_BATCH", 90)
    data = [row(n, **WIDE[column]) for n in range(5)]
    write(tmp_path / name, METADATA, data)
    found = list(read(tmp_path / name).iter_invocations())
    assert all(kept(a, b) for a, b in zip(data, found, strict=True))
    if name == "t.arrow":
        assert pa.ipc.open_file(tmp_path / name).num_record_batches == 3
    with pytest.raises(UsageError, match=f"column '{column}': 120 items in 3 rows, limit 100"):
        batch_from_invocations(data[:3])


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "t", METADATA, [row()])
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    manifest["files"][0]["name"] = "../t/part-00000.parquet"
    (tmp_path / "t" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="E-INCOMPLETE"):
        read(tmp_path / "t")


@pytest.mark.parametrize("second", [row(1, "e"), row(0, "f"), row(0, "e")], ids=["gap", "ok", "again"])
def test_rows_come_episode_by_episode_and_in_order(second: Invocation, tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.parquet", METADATA) as writer:
        writer.write(row(0, "d"))
        if second.episode_id == "f":
            writer.write(second)
            with pytest.raises(UsageError, match="not written before"):
                writer.write(row(0, "d"))
        elif second.invocation_index == 1:
            with pytest.raises(UsageError, match="expected 0"):
                writer.write(second)
        else:
            writer.write(second)
            with pytest.raises(UsageError, match="expected 1"):
                writer.write(row(2, "e"))


def test_an_existing_target_and_an_unknown_suffix_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        write(tmp_path / "t.parquet", METADATA, [row()])
    assert (tmp_path / "t.parquet").read_text() == "mine"
    with pytest.raises(UsageError, match=r"unknown suffix '\.json'"):
        write(tmp_path / "t.json", METADATA, [row()])


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "E-UNREADABLE"),
        (b"{}", "E-UNREADABLE"),
        (b"PAR1", "E-UNREADABLE"),
        (b"PAR1" + b"\0" * 100 + b"PAR1", "E-UNREADABLE"),
        (b"ARROW1\0\0", "E-UNREADABLE"),
    ],
)
def test_what_is_no_trace_is_refused_by_code(content: bytes, code: str, tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(InputError, match=code):
        read(tmp_path / "t.parquet")


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
def test_a_file_cut_anywhere_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, METADATA, [row(prompt_ids=list(range(300)))])
    whole = (tmp_path / name).read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(InputError):
            list(read(tmp_path / name).iter_invocations())


def with_metadata(path: Path, **changes: object) -> Path:
    write(path, METADATA, [row()])
    table = pq.read_table(path)
    metadata = {**METADATA.model_dump(), **changes}
    pq.write_table(table.replace_schema_metadata({"memopd_trace": json.dumps(metadata)}), path)
    return path


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"spec_version": "2.0"}, "E-VERSION-MAJOR.*2.0.*1.0"),
        ({"spec_version": "one"}, "E-META-INVALID"),
        ({"required_features": ["telepathy"]}, "E-FEATURE-UNKNOWN.*telepathy"),
        ({"models": {"m": {}}}, "E-META-INVALID"),
        ({"producer": None}, "E-META-INVALID"),
        ({"models": {"m": {"name": "m", "tokenizer": {**TOKENIZER.model_dump(), "vocab_size": 2**31}}}}, "vocab_size"),
        ({"models": {"m": {"name": "m", "tokenizer": {**TOKENIZER.model_dump(), "bos_id": 10**30}}}}, "bos_id"),
        ({"models": {"m": {"name": "m", "tokenizer": {**TOKENIZER.model_dump(), "eos_ids": [-(2**40)]}}}}, "eos_ids"),
        ({"models": {"m": {"name": "m", "tokenizer": TOKENIZER.model_dump(), "num_experts": 2**62}}}, "num_experts"),
    ],
)
def test_metadata_that_cannot_be_trusted_is_refused(changes: dict[str, object], code: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=code):
        read(with_metadata(tmp_path / "t.parquet", **changes))


def test_a_newer_minor_version_and_unknown_keys_are_read(tmp_path: Path) -> None:
    reader = read(with_metadata(tmp_path / "t.parquet", spec_version="1.7", added_in_1_7={"x": 1}))
    assert reader.metadata.spec_version == "1.7"
    assert len(list(reader.iter_invocations())) == 1


def test_ids_beyond_int32_are_refused_by_the_python_view() -> None:
    with pytest.raises(ValueError, match="prompt_ids: values do not fit int32"):
        row(prompt_ids=[2**31])
    with pytest.raises(ValueError, match="one dimension"):
        row(prompt_ids=[[1, 2]])


def test_importing_the_package_is_light() -> None:
    program = "import sys, memopd_trace; assert not {'torch', 'transformers', 'pandas'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("name", FORMATS)
def test_a_batch_is_written_as_its_rows_are(name: str, tmp_path: Path) -> None:
    data = [row(index, episode) for episode in "efgh" for index in range(3)]
    for folder, batches in (("rows", [data]), ("batches", [data[:4], data[4:]])):
        (tmp_path / folder).mkdir()
        with TraceWriter(tmp_path / folder / name, METADATA, rows_per_part=5) as writer:
            for each in batches:
                if folder == "rows":
                    for one in each:
                        writer.write(one)
                else:
                    writer.write_batch(batch_from_invocations(each))
    by_row, by_batch = (read(tmp_path / folder / name) for folder in ("rows", "batches"))
    assert [f.name for f in by_row.files] == [f.name for f in by_batch.files]
    pairs = zip(by_row.iter_invocations(), by_batch.iter_invocations(), strict=True)
    assert all(kept(a, b) for a, b in pairs) and not validate(by_batch.path).errors
    if len(by_row.files) > 1:
        assert [
            json.loads((tmp_path / f / name / "manifest.json").read_text())["files"][0]["rows"]
            for f in ("rows", "batches")
        ] == [6, 6]


def test_a_batch_out_of_order_is_refused_whole_and_rows_may_go_on(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.parquet", METADATA) as writer:
        writer.write(row(0))
        for wrong in ([row(1), row(3)], [row(0, "f"), row(0)], [row(0, "f"), row(0, "g"), row(0, "f")]):
            with pytest.raises(UsageError, match="expected"):
                writer.write_batch(batch_from_invocations(wrong))
        writer.write_batch(batch_from_invocations([row(1), row(0, "f")]))
        writer.write(row(1, "f"))
    found = [i.key for i in read(tmp_path / "t.parquet").iter_invocations()]
    assert found == [("e", 0), ("e", 1), ("f", 0), ("f", 1)]
