"""The published vectors: what is committed is what the sources build, nothing is missing or left over, and each file of
the manifest gets exactly its codes, as it would in the hands of somebody who never saw this project's Python."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from helpers_trace import VECTORS, script

import memopd_trace
from memopd_trace import validate
from memopd_trace.errors import InputError
from memopd_trace.schema import SPEC_VERSION

KIB = 1024
MANIFEST: dict[str, Any] = json.loads((VECTORS / "manifest.json").read_text(encoding="utf-8"))
ENTRIES: list[dict[str, Any]] = MANIFEST["vectors"]
KINDS = ("valid", "invalid", "future")


def _publisher() -> ModuleType:
    sys.path.insert(0, str(VECTORS))  # it imports its neighbour `build`, as a script does
    before = sys.modules.pop("build", None)
    try:
        return script(VECTORS / "publish.py")
    finally:
        sys.path.remove(str(VECTORS))
        sys.modules.pop("build", None)
        if before is not None:
            sys.modules["build"] = before


publisher = _publisher()


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("rebuilt")
    publisher.write_all(folder)
    return folder


def files_of(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


# -- what is committed is current ------------------------------------------------------------------------------------


def test_the_manifest_is_what_the_sources_give(rebuilt: Path) -> None:
    committed = (VECTORS / "manifest.json").read_text(encoding="utf-8")
    assert committed == (rebuilt / "manifest.json").read_text(encoding="utf-8"), "run `make spec`"


def test_the_expected_content_is_what_the_sources_give(rebuilt: Path) -> None:
    names = files_of(rebuilt / "expected")
    assert names == files_of(VECTORS / "expected") and len(names) > 20
    for name in names:
        text = (VECTORS / "expected" / name).read_text(encoding="utf-8")
        assert text == (rebuilt / "expected" / name).read_text(encoding="utf-8"), f"{name}: run `make spec`"


def test_the_built_files_hold_what_the_sources_give(rebuilt: Path) -> None:
    assert files_of(rebuilt / "built") == files_of(VECTORS / "built"), "run `make spec`"
    for kind in KINDS:
        for path in (rebuilt / "built" / kind).iterdir():
            assert publisher.same_content(path, VECTORS / "built" / kind / path.name), f"{path.name}: run `make spec`"


def test_arrow_ipc_files_are_the_same_to_the_byte(rebuilt: Path) -> None:
    names = {n for n in files_of(rebuilt / "built") if n.endswith(".arrow")}
    assert len(names) >= 4
    for name in names:
        assert (rebuilt / "built" / name).read_bytes() == (VECTORS / "built" / name).read_bytes(), name


def test_the_comparison_sees_another_cell_key_type_part_and_byte(rebuilt: Path, tmp_path: Path) -> None:
    builder = publisher.builder
    plain = builder.load(VECTORS / "valid" / "plain.json")

    def built(name: str, **changes: Any) -> Path:
        (tmp_path / name).mkdir()
        path: Path = builder.build({**plain, **changes}, tmp_path / name, "v")
        return path

    same, cells = built("same"), json.loads(json.dumps(plain["rows"]))
    cells[0]["output_ids"][0] += 1
    assert publisher.same_content(same, built("other-codec", parquet={"compression": "zstd"}))
    for name, changes in (
        ("cell", {"rows": cells}),
        ("key", {"metadata": {**plain["metadata"], "x": 1}}),
        ("type", {"types": {"prompt_ids": "large_list<int32>"}}),
        ("cut", {"damage": {"keep": 0.5}}),
        ("folder", {"storage": "folder", "parts": [len(cells)]}),
    ):
        assert not publisher.same_content(same, built(name, **changes)), name
    folder = shutil.copytree(rebuilt / "built" / "valid" / "folder", tmp_path / "copy")
    assert publisher.same_content(folder, rebuilt / "built" / "valid" / "folder")
    with (folder / "part-00000.parquet").open("ab") as out:
        out.write(b"PAR1")
    assert not publisher.same_content(folder, rebuilt / "built" / "valid" / "folder")


# -- the manifest lists everything, and everything is small ----------------------------------------------------------


def test_no_file_is_without_an_entry_and_no_entry_without_a_file() -> None:
    sources = {f"{kind}/{p.name}" for kind in KINDS for p in (VECTORS / kind).iterdir()}
    assert sources == {e["source"] for e in ENTRIES} and len(sources) == len(ENTRIES) > 100
    built = {f"built/{kind}/{p.name}" for kind in KINDS for p in (VECTORS / "built" / kind).iterdir()}
    traces = {e["file"] for e in ENTRIES}
    inputs = {path for e in ENTRIES for given in e["inputs"].values() for path in _paths(given)}
    assert traces - built == {e["file"] for e in ENTRIES if e["codes"] == ["E-NO-INPUT"] and not e["inputs"]} != set()
    assert built <= traces | inputs
    missing = {path for path in inputs if not (VECTORS / path).exists()}
    assert missing <= {
        p for e in ENTRIES if e["codes"] == ["E-NO-INPUT"] for v in e["inputs"].values() for p in _paths(v)
    }
    expected = {f"expected/{kind}/{p.name}" for kind in KINDS for p in (VECTORS / "expected" / kind).iterdir()}
    assert expected == {e["expected"] for e in ENTRIES if e["expected"] is not None}


def _paths(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def test_the_readme_names_the_keys_of_an_entry() -> None:
    text = (VECTORS / "README.md").read_text(encoding="utf-8")
    table = text.split("| key of an entry | meaning |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert len(named) > 8 and all(sorted(entry) == sorted(named) for entry in ENTRIES)


def test_files_are_small() -> None:
    sizes = {p: p.stat().st_size for kind in ("built", "expected") for p in (VECTORS / kind).rglob("*") if p.is_file()}
    assert max(sizes.values()) < 100 * KIB
    assert sum(sizes.values()) < 5 * KIB * KIB


def test_every_entry_says_which_clause_it_is_about() -> None:
    for entry in ENTRIES:
        if entry["clause"] is None:
            assert entry["source"].startswith("valid/"), entry["source"]
            continue
        file, anchor = entry["clause"].split("#")
        assert f'<a id="{anchor}"></a>' in (VECTORS.parent / file).read_text(encoding="utf-8"), entry["source"]
    assert len({e["clause"] for e in ENTRIES}) > 60


def test_an_invalid_vector_has_one_clause_of_its_own_code() -> None:
    for entry in ENTRIES:
        if entry["source"].startswith("invalid/"):
            code = re.sub(r"-\d+$", "", Path(entry["source"]).stem)
            assert code in (*entry["codes"], entry["read"]), entry["source"]


# -- each file gets its codes, each readable one its content ---------------------------------------------------------


def given(entry: dict[str, Any]) -> dict[str, Any]:
    """The validator's options that the manifest names, as paths."""
    return {
        name: VECTORS / value if isinstance(value, str) else [VECTORS / path for path in value]
        for name, value in entry["inputs"].items()
    }


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e["source"].removesuffix(".json"))
def test_a_published_file_gets_exactly_its_codes(entry: dict[str, Any]) -> None:
    report = validate(VECTORS / entry["file"], entry["profile"], **given(entry))
    assert report.codes == set(entry["codes"]), report.to_text()


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e["expected"]], ids=lambda e: e["source"].removesuffix(".json")
)
def test_a_readable_file_holds_what_is_expected(entry: dict[str, Any]) -> None:
    expected = json.loads((VECTORS / entry["expected"]).read_text(encoding="utf-8"))
    reader = memopd_trace.read(VECTORS / entry["file"])
    rows = [_canonical_row(row) for batch in reader.iter_batches() for row in batch.to_pylist()]
    assert rows == expected["rows"] and len(rows) == entry["rows"]
    assert reader.metadata.spec_version == entry["spec_version"]
    digests = [i.compute_digest().hex() for i in reader.iter_invocations()]
    assert digests == expected["state_digests"]


def _canonical_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `to_pylist` as `expected/` states it."""
    kinds = {name: publisher.builder.parse_type(text) for name, text in publisher.builder.TYPES.items()}
    return {k: publisher.canonical(_plain(v, kinds[k]), kinds[k]) for k, v in row.items() if v is not None}


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A cell of `to_pylist` as a vector writes it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime.datetime):
        since = value - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        return (since.days * 86400 + since.seconds) * 10**6 + since.microseconds
    if pa.types.is_map(kind):
        return dict(value)
    if pa.types.is_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    return {f.name: _plain(value[f.name], f.type) for f in kind} if pa.types.is_struct(kind) else value


def test_some_vector_has_a_value_and_a_null_in_every_column() -> None:
    rows = json.loads((VECTORS / "expected/valid/everything.json").read_text(encoding="utf-8"))["rows"]
    columns = set(publisher.builder.TYPES)
    assert {name for row in rows for name in row} == columns
    required = {"episode_id", "invocation_index", "model_id", "prompt_ids", "output_ids"}
    assert {name for name in columns if not all(name in row for row in rows)} == columns - required


# -- the future ------------------------------------------------------------------------------------------------------


def future(name: str) -> dict[str, Any]:
    return next(e for e in ENTRIES if e["source"] == f"future/{name}.json")


def test_a_newer_minor_version_is_read_with_one_warning_whatever_it_added() -> None:
    minor = [e for e in ENTRIES if e["source"].startswith("future/minor") and e["expected"]]
    assert len(minor) >= 5
    for entry in minor:
        assert entry["codes"] == ["W-VERSION-MINOR"], entry["source"]
        assert entry["spec_version"] != SPEC_VERSION
        assert validate(VECTORS / entry["file"], entry["profile"]).exit_code() == 0


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("major", "E-VERSION-MAJOR", ("2.0", SPEC_VERSION)),
        ("major-old", "E-VERSION-MAJOR", ("0.9", SPEC_VERSION)),
        ("minor-feature", "E-FEATURE-UNKNOWN", ("speculative_tree",)),
    ],
)
def test_what_a_reader_cannot_understand_it_refuses_by_name(name: str, code: str, said: tuple[str, ...]) -> None:
    entry = future(name)
    assert entry["codes"] == [code]
    with pytest.raises(InputError) as error:
        memopd_trace.read(VECTORS / entry["file"])
    assert error.value.code == code
    assert all(f"{word}" in error.value.message for word in said)
    report = validate(VECTORS / entry["file"], entry["profile"])
    assert report.exit_code() == 3 and all(word in report.to_text() for word in said)
