"""Copy the specification, as it stands, to `versions/MAJOR.MINOR/`.

    python freeze.py                 # of a version that has no copy yet
    python freeze.py --unreleased    # or of one that has, and is not released

A version is *released* when its heading in `CHANGELOG.md` has a date and the hash of its frozen copy:

    ## 1.0 (unreleased)
    ## 1.0 (2027-01-31, SHA256SUMS 5f70bf18…)      all 64 digits; this script prints the line

A released version is never written again. `SHA256SUMS` in the copy lists its files, so that `sha256sum -c` checks it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import re
import shutil
import sys
from pathlib import Path

SPEC = Path(__file__).parent
SUMS = "SHA256SUMS"
NOT_NORMATIVE = ("README.md", "CHANGELOG.md", "rationale.md", "implementations.md", "cases.md")
HEADING = re.compile(r"^## (\d+\.\d+) \((?:(unreleased)|(\d{4}-\d\d-\d\d), SHA256SUMS ([0-9a-f]{64}))\)$", re.MULTILINE)


def versions(spec: Path) -> dict[str, str | None]:
    """The versions that the changelog knows; for a released one, the SHA-256 of its `SHA256SUMS`."""
    found = HEADING.findall((spec / "CHANGELOG.md").read_text(encoding="utf-8"))
    return {version: digest or None for version, _, _, digest in found}


def version_of(spec: Path) -> str:
    """The version in the title of `trace.md`."""
    match = re.match(r"# Traces, version (\d+\.\d+)\n", (spec / "trace.md").read_text(encoding="utf-8"))
    if match is None:
        raise ValueError("trace.md: no version in the title")
    return match[1]


def texts(spec: Path) -> list[Path]:
    """What a copy holds, relative to `spec`: the normative texts, the JSON schemas, the codes, the columns."""
    found = [p for p in (*spec.glob("*.md"), *spec.glob("*.json"), *spec.glob("schema/*")) if p.is_file()]
    return sorted(p.relative_to(spec) for p in found if p.name not in NOT_NORMATIVE)


def sums(folder: Path) -> str:
    """The lines of `SHA256SUMS` for every file in a copy."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != SUMS)
    return "".join(f"{_sha256(p)}  {p.relative_to(folder).as_posix()}\n" for p in files)


def freeze(spec: Path, *, unreleased: bool = False) -> Path:
    """Write the copy of the current version and return its folder.

    Raises:
        ValueError: the version is not in the changelog, is released, or has a copy and `unreleased` is not given.
    """
    version, known = version_of(spec), versions(spec)
    folder = spec / "versions" / version
    if version not in known:
        raise ValueError(f"CHANGELOG.md has no heading for version {version}")
    if known[version] is not None:
        raise ValueError(f"version {version} is released: its copy stays as it is; give the change a new version")
    if folder.exists() and not unreleased:
        raise ValueError(f"{folder} exists: --unreleased writes it again")
    fresh = folder.with_name(f"{version}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    for name in texts(spec):
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec / name, fresh / name)
    (fresh / SUMS).write_text(sums(fresh), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return folder


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    """Freeze the current version; exit code 1 with one line where that is refused."""
    parser = argparse.ArgumentParser(description="Copy the specification to versions/, by its version.")
    parser.add_argument("--unreleased", action="store_true", help="write the copy of an unreleased version again")
    try:
        folder = freeze(SPEC, unreleased=parser.parse_args().unreleased)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    today = datetime.datetime.now(tz=datetime.UTC).date()
    print(f"{folder}: to release it, its heading in CHANGELOG.md becomes")
    print(f"## {folder.name} ({today}, SHA256SUMS {_sha256(folder / SUMS)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
