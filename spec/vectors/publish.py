"""Publish the test vectors: the files themselves, what they hold, and the manifest that lists them.

    python publish.py [FOLDER]

Writes `built/`, `expected/` and `manifest.json` beside this script (or into FOLDER), so that a reader in another
language needs no Python. A file whose content has not changed is left as it is: Parquet's bytes move with the
writer's version, its content does not. `README.md` describes what is written; like `build.py` this imports nothing of
the reference implementation, and it computes the state digest from the text of `../trace.md`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import build as builder
import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
SPEC = HERE.parent
CLAUSE = re.compile(r'^- <a id="([a-z0-9-]+)"></a>(.*?)(?=^- |^\S|\Z)', re.MULTILINE | re.DOTALL)


def publish(folder: Path) -> None:
    """Build everything anew and bring `folder` to it."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        write_all(fresh)
        for part in ("built", "expected"):
            for kind in builder.KINDS:
                _renew(fresh / part / kind, folder / part / kind)
        shutil.copyfile(fresh / "manifest.json", folder / "manifest.json")


def write_all(folder: Path) -> None:
    """`built/`, `expected/` and `manifest.json` under an empty folder."""
    clauses, entries = read_clauses(), []
    for kind in builder.KINDS:
        for part in ("built", "expected"):
            (folder / part / kind).mkdir(parents=True)
        for source in sorted((HERE / kind).glob("*.json")):
            vector = builder.load(source)
            path = builder.build(vector, folder / "built" / kind, source.stem)
            inputs = builder.build_inputs(vector, folder / "built" / kind, source.stem)
            entries.append(_entry(vector, source, path, folder, clauses, inputs))
    lines = ",\n".join(" " + json.dumps(entry, ensure_ascii=False) for entry in entries)
    text = f'{{"spec_version": "{spec_version()}", "vectors": [\n{lines}\n]}}\n'
    (folder / "manifest.json").write_text(text, encoding="utf-8")


def spec_version() -> str:
    """The version of the specification that the vectors test, from its title."""
    match = re.match(r"# Traces, version (\d+\.\d+)\n", (SPEC / "trace.md").read_text(encoding="utf-8"))
    if match is None:
        raise ValueError(f"{SPEC / 'trace.md'}: no version in the title")
    return match[1]


def read_clauses() -> dict[str, str]:
    """Code -> `FILE.md#anchor` of the clause that it stands for."""
    clauses = {}
    for path in sorted(SPEC.glob("*.md")):
        for anchor, text in CLAUSE.findall(path.read_text(encoding="utf-8")):
            code = re.search(r"`([EW]-[A-Z0-9-]+)`\.?\s*$", text)
            if code is not None:
                clauses[code[1]] = f"{path.name}#{anchor}"
    return clauses


def _entry(
    vector: dict[str, Any], source: Path, path: Path, folder: Path, clauses: dict[str, str], inputs: dict[str, Any]
) -> dict[str, Any]:
    """A vector's line in the manifest; what it holds goes to `expected/` if any reader can read it."""
    kind, name = source.parent.name, source.stem
    expected = None
    if kind == "valid" or all(code.startswith("W-") for code in vector["codes"]):
        expected = f"expected/{kind}/{name}.json"
        (folder / expected).write_text(to_text(expect(vector)), encoding="utf-8")
    metadata = vector["metadata"] if "raw_metadata" not in vector else None
    return {
        "file": str(path.relative_to(folder)),
        "source": f"{kind}/{name}.json",
        "spec_version": (metadata or {}).get("spec_version"),
        "profile": vector["profile"],
        "codes": sorted(vector["codes"]),
        "clause": None if kind == "valid" else _clause(name, vector["codes"], clauses),
        "why": vector["why"],
        "rows": len(vector["rows"]),
        "expected": expected,
        "read": vector.get("read"),
        "inputs": {
            **({"tokenizer": vector["tokenizer"]} if "tokenizer" in vector else {}),
            **{key: _relative(given, folder) for key, given in inputs.items()},
        },
    }


def _relative(paths: Path | list[Path], folder: Path) -> str | list[str]:
    if isinstance(paths, list):
        return [str(path.relative_to(folder)) for path in paths]
    return str(paths.relative_to(folder))


def _clause(name: str, codes: list[str], clauses: dict[str, str]) -> str | None:
    """The clause of the code that the vector is named after, or else of its first code."""
    for code in (name, re.sub(r"-\d+$", "", name), *sorted(codes)):
        if code in clauses:
            return clauses[code]
    return None


def expect(vector: dict[str, Any]) -> dict[str, list[Any]]:
    """What a reader of this version finds: the rows and their state digests; the same of views, where there are any."""
    rows = _canonical_rows(vector, builder.TYPES)
    expected: dict[str, list[Any]] = {"rows": rows, "state_digests": [digest(row) for row in rows]}
    if "views" in vector and not vector["codes"]:
        views = _canonical_rows(vector["views"], builder.VIEW_TYPES)
        outputs = {(row["episode_id"], row["invocation_index"]): row["output_ids"] for row in rows}
        viewed = [{**v, "output_ids": outputs[v["episode_id"], v["invocation_index"]]} for v in views]
        expected |= {"views": views, "view_digests": [digest(row) for row in viewed]}
    return expected


def _canonical_rows(table: dict[str, Any], types: dict[str, str]) -> list[dict[str, Any]]:
    """The declared cells that are not null."""
    kinds = {name: builder.parse_type(text) for name, text in types.items() if name not in table.get("drop", ())}
    return [
        {name: canonical(row[name], kind) for name, kind in kinds.items() if row.get(name) is not None}
        for row in table["rows"]
    ]


def to_text(expected: dict[str, list[Any]]) -> str:
    """Canonical JSON, one row a line."""
    parts = []
    for key, items in expected.items():
        lines = ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in items)
        parts.append(f'"{key}": [\n{lines}\n ]')
    return "{" + ",\n ".join(parts) + "}\n"


def canonical(value: Any, kind: pa.DataType) -> Any:
    """A cell as `expected/` states it: 64-bit integers and times as strings, float32 as the double it is."""
    if value is None or pa.types.is_fixed_size_binary(kind):
        return value
    if pa.types.is_int64(kind) or pa.types.is_timestamp(kind):
        return str(int(value))
    if pa.types.is_float32(kind):
        return struct.unpack("<f", struct.pack("<f", value))[0]
    if pa.types.is_float64(kind):
        return float(value)
    if pa.types.is_map(kind):
        return {k: canonical(v, kind.item_type) for k, v in sorted(value.items())}
    if pa.types.is_struct(kind):
        return {f.name: canonical(value.get(f.name), f.type) for f in kind}
    return [canonical(v, kind.value_type) for v in value] if isinstance(value, list) else value


def digest(row: dict[str, Any]) -> str:
    """The state digest of a row in canonical form, in hex, as `../trace.md` states its bytes."""
    prompt, output, slots = row["prompt_ids"], row["output_ids"], row.get("output_slots")
    p, o = len(prompt), len(output)
    n = p if slots is not None else p + o
    defaults = {"position_ids": list(range(n)), "visible_from": list(range(n)), "visible_until": [n] * n}
    given = [[] if row.get(name) in (None, default) else row[name] for name, default in defaults.items()]
    data = b"memopd-trace/state/1"
    for array in (prompt, output, *given, slots or []):
        data += struct.pack("<Q", len(array)) + struct.pack(f"<{len(array)}i", *array)
    runs = row.get("media", [])
    data += struct.pack("<Q", len(runs))
    for run in runs:
        data += struct.pack("<ii", run["start"], run["stop"]) + bytes.fromhex(run["sha256"])
    return hashlib.sha256(data).hexdigest()


def same_content(a: Path, b: Path) -> bool:
    """Whether two built vectors hold the same: the same bytes, tables, or folders of such.

    A shard of scores is the same under another hash in its name, which moves with the Parquet writer's version."""
    if a.is_dir() or b.is_dir():
        return a.is_dir() and b.is_dir() and _same_folder(a, b)
    if not (a.exists() and b.exists()):
        return False
    if a.read_bytes() == b.read_bytes():
        return True
    if a.name == b.name == "manifest.json":
        return _manifest(a) == _manifest(b)
    left, right = _table(a), _table(b)
    if left is None or right is None:  # two cut files are alike: no reader gets anything out of either
        return left is right and a.read_bytes()[:4] == b.read_bytes()[:4] == b"PAR1"
    if not left.schema.equals(right.schema, check_metadata=True):
        return False
    return left.equals(right) or repr(left.to_pydict()) == repr(right.to_pydict())  # NaN does not equal NaN


def _same_folder(a: Path, b: Path) -> bool:
    left, right = ({_unhashed(p.name): p for p in folder.iterdir()} for folder in (a, b))
    return left.keys() == right.keys() and all(same_content(path, right[name]) for name, path in left.items())


def _unhashed(name: str) -> str:
    """A shard's name without the hash of its bytes."""
    return re.sub(r"-[0-9a-f]{16}(?=\.parquet$)", "", name)


def _manifest(path: Path) -> Any:
    """A folder's manifest, each hash replaced by whether it is that of the file."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for part in manifest.get("files", ()):
        file = path.parent / part["name"]
        actual = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
        if "sha256" in part:
            part["sha256"] = part["sha256"] == actual
        named = re.search(r"-([0-9a-f]{16})\.parquet$", part["name"])
        part["name"] = [_unhashed(part["name"]), named is not None and (actual or "").startswith(named[1])]
    return manifest


def _table(path: Path) -> pa.Table | None:
    """All of a Parquet or Arrow IPC file with its metadata; columns of one name keep their places."""
    try:
        file = pa.ipc.open_file(path) if path.suffix == ".arrow" else pq.ParquetFile(path)
        table = file.read_all() if path.suffix == ".arrow" else file.read()
    except (pa.ArrowException, OSError):
        return None
    metadata = dict(table.schema.metadata or {})
    if path.suffix != ".arrow":
        metadata |= {k: v for k, v in (file.metadata.metadata or {}).items() if k != b"ARROW:schema"}
    names = [f"{i} {name}" for i, name in enumerate(table.column_names)]
    return table.rename_columns(names).replace_schema_metadata(metadata)


def _renew(fresh: Path, kept: Path) -> None:
    """Bring `kept` to the content of `fresh`, touching only what differs."""
    kept.mkdir(parents=True, exist_ok=True)
    for path in kept.iterdir():
        if not (fresh / path.name).exists() or not same_content(fresh / path.name, path):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in fresh.iterdir():
        if not (kept / path.name).exists():
            shutil.copytree(path, kept / path.name) if path.is_dir() else shutil.copyfile(path, kept / path.name)


if __name__ == "__main__":
    publish(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
