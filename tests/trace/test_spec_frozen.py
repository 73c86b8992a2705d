"""Frozen versions: a copy of a released version never changes, and the schema never changes without its version."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers_trace import script

from memopd_trace.schema import SPEC_VERSION

SPEC = Path(__file__).parents[2] / "spec"
VERSIONS = SPEC / "versions"
COPY = VERSIONS / SPEC_VERSION


freezer = script(SPEC / "freeze.py")


@pytest.mark.parametrize("folder", sorted(p for p in VERSIONS.iterdir()), ids=lambda p: p.name)
def test_a_frozen_copy_is_what_its_sums_say(folder: Path) -> None:
    assert (folder / "SHA256SUMS").read_text() == freezer.sums(folder)
    assert (folder / "trace.md").read_text().startswith(f"# Traces, version {folder.name}\n")


def test_the_changelog_knows_every_frozen_version_and_a_released_one_by_its_hash() -> None:
    known = freezer.versions(SPEC)
    assert SPEC_VERSION in known and freezer.version_of(SPEC) == SPEC_VERSION
    headings = re.findall(r"^## (\d\S*)", (SPEC / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings == list(known), "a heading is neither unreleased nor dated and hashed"
    assert {p.name for p in VERSIONS.iterdir()} <= set(known)
    for version, digest in known.items():
        if digest is not None:
            assert hashlib.sha256((VERSIONS / version / "SHA256SUMS").read_bytes()).hexdigest() == digest, version


def schema_files() -> list[Path]:
    return sorted(p.relative_to(COPY) for p in (*COPY.glob("*.schema.json"), *COPY.glob("schema/*.json")))


@pytest.mark.parametrize("name", schema_files(), ids=str)
def test_the_schema_is_that_of_its_frozen_version(name: Path) -> None:
    assert json.loads((SPEC / name).read_text()) == json.loads((COPY / name).read_text()), (
        "a change needs a new version (trace.md, section 10); while this one is unreleased: make freeze"
    )


def test_the_frozen_copy_holds_every_schema_and_text() -> None:
    assert {p.relative_to(COPY) for p in COPY.rglob("*") if p.is_file()} == {*freezer.texts(SPEC), Path("SHA256SUMS")}
    assert len(schema_files()) >= 4
    assert {"trace.md", "files.md", "arrays.md", "registry.md", "codes.json"} <= {p.name for p in COPY.iterdir()}


def test_frozen_codes_keep_their_severity_and_frozen_clauses_their_anchor() -> None:
    frozen, live = (_codes(folder) for folder in (COPY, SPEC))
    assert len(frozen) > 80 and frozen.items() <= live.items()
    for path in COPY.glob("*.md"):
        anchors = _anchors(path)
        assert anchors <= _anchors(SPEC / path.name), path.name
    assert len(_anchors(COPY / "trace.md")) > 80


def _codes(folder: Path) -> dict[str, str]:
    codes: Any = json.loads((folder / "codes.json").read_text())
    return {entry["code"]: entry["severity"] for entry in (codes["codes"] if isinstance(codes, dict) else codes)}


def _anchors(path: Path) -> set[str]:
    return set(re.findall(r'<a id="([a-z0-9-]+)">', path.read_text()))


# -- the tool --------------------------------------------------------------------------------------------------------


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    folder = tmp_path / "spec"
    shutil.copytree(SPEC, folder, ignore=shutil.ignore_patterns("vectors", "versions", "__pycache__"))
    return folder


def release(spec: Path) -> None:
    digest = hashlib.sha256((spec / "versions" / SPEC_VERSION / "SHA256SUMS").read_bytes()).hexdigest()
    text = (spec / "CHANGELOG.md").read_text()
    heading = f"## {SPEC_VERSION} (2027-01-31, SHA256SUMS {digest})"
    (spec / "CHANGELOG.md").write_text(text.replace(f"## {SPEC_VERSION} (unreleased)", heading))
    assert freezer.versions(spec)[SPEC_VERSION] == digest


def test_an_unreleased_version_is_frozen_again_only_when_asked(spec: Path) -> None:
    text = (spec / "CHANGELOG.md").read_text()
    (spec / "CHANGELOG.md").write_text(
        re.sub(rf"^## {re.escape(SPEC_VERSION)} \(.*\)$", f"## {SPEC_VERSION} (unreleased)", text, flags=re.MULTILINE)
    )
    folder = freezer.freeze(spec)
    before = freezer.sums(folder)
    (spec / "trace.md").write_text((spec / "trace.md").read_text() + "\nMore.\n")
    with pytest.raises(ValueError, match="--unreleased"):
        freezer.freeze(spec)
    assert freezer.sums(folder) == before
    freezer.freeze(spec, unreleased=True)
    assert freezer.sums(folder) == (folder / "SHA256SUMS").read_text() != before
    release(spec)
    with pytest.raises(ValueError, match="is released"):
        freezer.freeze(spec, unreleased=True)


def test_a_version_without_a_heading_is_not_frozen(spec: Path) -> None:
    text = (spec / "trace.md").read_text()
    (spec / "trace.md").write_text(text.replace(f"# Traces, version {SPEC_VERSION}\n", "# Traces, version 9.9\n"))
    with pytest.raises(ValueError, match=r"no heading for version 9\.9"):
        freezer.freeze(spec)
