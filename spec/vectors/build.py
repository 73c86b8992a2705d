"""Build the test vectors into trace files, with nothing but pyarrow and the standard library.

    python build.py OUT_FOLDER [NAME...]

`README.md` describes a vector. Another implementation of the format can use this script as it is, or read the
JSON directly: nothing here imports the reference implementation.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
KINDS = ("valid", "invalid", "future")

# The columns' types as the specification states them (written again here, on purpose).
TYPES = {
    "episode_id": "string",
    "invocation_index": "int32",
    "model_id": "dictionary<string>",
    "prompt_ids": "list<int32>",
    "output_ids": "list<int32>",
    "parent_index": "int32",
    "relation": "dictionary<string>",
    "rewrite_kind": "dictionary<string>",
    "rewrite_evidence": "dictionary<string>",
    "segments": "list<struct<start:int32,stop:int32,kind:string,source_index:int32,source_start:int32>>",
    "group_id": "string",
    "task_id": "string",
    "agent_id": "string",
    "attempt": "int32",
    "accepted": "bool",
    "position_ids": "list<int32>",
    "visible_from": "list<int32>",
    "visible_until": "list<int32>",
    "output_slots": "list<int32>",
    "media": "list<struct<start:int32,stop:int32,sha256:binary32,mime:string,uri:string>>",
    "state_digest": "binary32",
    "output_logprobs": "list<float32>",
    "logprob_kind": "dictionary<string>",
    "output_kept_logmass": "list<float32>",
    "output_sampled": "list<bool>",
    "output_loss_mask": "list<bool>",
    "sampling": "struct<temperature:float64,top_p:float64,top_k:int32,min_p:float64,"
    "repetition_penalty:float64,seed:int64>",
    "policy_version": "int64",
    "output_policy_versions": "list<int64>",
    "kv_policy_version": "int64",
    "routed_experts": "list<int16>",
    "finish_reason": "dictionary<string>",
    "token_source": "dictionary<string>",
    "reward": "float64",
    "rewards": "map<string,float64>",
    "terminated": "bool",
    "truncated": "bool",
    "prompt_text": "string",
    "output_text": "string",
    "messages": "string",
    "started_at": "timestamp",
    "ended_at": "timestamp",
    "extra": "map<string,string>",
}
VIEW_TYPES = {
    "episode_id": "string",
    "invocation_index": "int32",
    "view": "dictionary<string>",
    "state_digest": "binary32",
    "prompt_ids": "list<int32>",
    "position_ids": "list<int32>",
    "visible_from": "list<int32>",
    "visible_until": "list<int32>",
    "output_slots": "list<int32>",
    "media": "list<struct<start:int32,stop:int32,sha256:binary32,mime:string,uri:string>>",
    "view_digest": "binary32",
}
SCORE_TYPES = {
    "episode_id": "string",
    "invocation_index": "int32",
    "state_digest": "binary32",
    "teacher_id": "dictionary<string>",
    "view": "dictionary<string>",
    "view_digest": "binary32",
    "output_index": "list<int32>",
    "logprob": "list<float32>",
    "logsumexp": "list<float32>",
    "entropy": "list<float32>",
    "topk_ids": "list<list<int32>>",
    "topk_logprobs": "list<list<float32>>",
    "tail_logprob": "list<float32>",
    "hidden": "list<states<float32,2>>",
    "hidden_scale": "list<list<float32>>",
    "hidden_logsumexp": "list<float32>",
    "hidden_kl": "list<float32>",
    "logits": "list<list<float32>>",
}
PLAIN = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "uint16": pa.uint16(),
    "binary32": pa.binary(32),
    "timestamp": pa.timestamp("us", tz="UTC"),
}


def load(path: Path) -> dict[str, Any]:
    """A vector with its base filled in: `metadata`, `rows` and every other key."""
    vector: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "base" not in vector:
        return vector
    base = load(HERE / "valid" / f"{vector['base']}.json")
    whole = {**base, **vector}
    whole["metadata"] = merge(base["metadata"], vector.get("metadata", {}))
    whole["rows"] = change(base["rows"], vector)
    for key in ("views", "scores"):
        if key in base and key in vector:
            described = "metadata" if key == "views" else "run"
            whole[key] = {**base[key], **vector[key], "rows": change(base[key]["rows"], vector[key])}
            whole[key][described] = merge(base[key][described], vector[key].get(described, {}))
    return whole


def change(rows: list[dict[str, Any]], how: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with the cells of `set` replaced, those of `append` added, and those of `order` kept."""
    rows = copy.deepcopy(rows)
    for row, changes in how.get("set", {}).items():
        rows[int(row)].update(changes)
    rows += how.get("append", [])
    return [rows[i] for i in how.get("order", range(len(rows)))]


def build(vector: dict[str, Any], folder: Path, name: str) -> Path:
    """Write a loaded vector under `folder` and return the path to give to a validator."""
    storage = vector.get("storage", "parquet")
    if vector.get("absent"):
        return folder / f"{name}.parquet"
    if storage == "folder":
        return _build_folder(vector, folder / name)
    path = folder / (f"{name}.arrow" if storage == "ipc" else f"{name}.parquet")
    table = to_table(vector, vector["rows"], vector["metadata"])
    for _ in range(vector.get("doubled", 0)):
        table = pa.concat_tables([table, table]).combine_chunks()
    if storage == "ipc":
        options = pa.ipc.IpcWriteOptions(**vector.get("ipc", {}))
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table)
    else:
        _write_parquet(table, path, vector.get("parquet", {}))
    _damage(path, vector.get("damage", {}))
    return path


def build_inputs(vector: dict[str, Any], folder: Path, name: str) -> dict[str, Path | list[Path]]:
    """Write what a validator is to be given beside the trace: `views`, a file, and `scores`, a folder or several."""
    inputs: dict[str, Path | list[Path]] = {}
    if "views" in vector:
        views = vector["views"]
        path = folder / f"{name}.views.{'arrow' if views.get('storage') == 'ipc' else 'parquet'}"
        inputs["views"] = path
        if not views.get("absent"):
            table = to_table(views, views["rows"], views["metadata"], VIEW_TYPES, "memopd_trace_views")
            _write_views(table, path)
            _damage(path, views.get("damage", {}))
    if "scores" in vector:
        scores = vector["scores"]
        first = _build_scores(scores, folder / f"{name}.scores")
        inputs["scores"] = first
        if "again" in scores:
            other = {**scores, "rows": change(scores["rows"], scores["again"])}
            inputs["scores"] = [first, _build_scores(other, folder / f"{name}.scores-again")]
    return inputs


def to_table(
    vector: dict[str, Any],
    rows: list[dict[str, Any]],
    metadata: Any,
    declared: dict[str, str] = TYPES,
    key: str = "memopd_trace",
) -> pa.Table:
    """The rows as an Arrow table; a column that no row names is absent."""
    types = {**declared, **vector.get("types", {})}
    used = (
        {name for row in vector["rows"] for name in row} | set(vector.get("types", {})) | set(vector.get("empty", ()))
    )
    names = [n for n in types if n in used and n not in vector.get("drop", ())]
    names += vector.get("repeat", [])
    arrays = []
    for name in names:
        kind = parse_type(types[name])
        arrays.append(to_array([decode(row.get(name), kind) for row in rows], kind))
    raw = vector.get("raw_metadata", json.dumps(metadata))
    schema = pa.schema(
        [pa.field(n, a.type) for n, a in zip(names, arrays, strict=True)],
        metadata=None if raw is None else {key: raw},
    )
    return pa.Table.from_arrays(arrays, schema=schema)


def parse_type(text: str) -> pa.DataType:
    """`list<int32>`, `struct<a:int32,b:string>` and the like as an Arrow type."""
    if text in PLAIN:
        return PLAIN[text]
    match = re.fullmatch(r"(\w+)<(.*)>", text)
    if match is None:
        raise ValueError(f"unknown type {text}")
    outer, inner = match.groups()
    if outer == "dictionary":
        return pa.dictionary(pa.int32(), parse_type(inner))
    if outer in ("list", "large_list", "list_view"):
        item, _, label = inner.partition("|")  # list<int32|element> names the item field
        make = {"list": pa.list_, "large_list": pa.large_list, "list_view": pa.list_view}[outer]
        return make(pa.field(label or "item", parse_type(item)))
    parts = inner.split(",")
    if outer == "states":
        return pa.list_(parse_type(parts[0]), int(parts[1]))
    if outer == "map":
        return pa.map_(parse_type(parts[0]), parse_type(parts[1]))
    if outer == "struct":
        return pa.struct([pa.field(p.split(":")[0], parse_type(p.split(":")[1])) for p in parts])
    raise ValueError(f"unknown type {text}")


def decode(value: Any, kind: pa.DataType) -> Any:
    """A JSON value as Python value: hex for binary, "NaN" for floats, digits for integers, pairs for maps."""
    if value is None:
        return None
    if pa.types.is_fixed_size_binary(kind):
        return bytes.fromhex(value)
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_integer(kind) or pa.types.is_timestamp(kind):
        return int(value)  # beyond 2^53 a string
    if pa.types.is_map(kind):
        return [(k, decode(v, kind.item_type)) for k, v in value.items()]
    if pa.types.is_struct(kind):
        return {f.name: decode(value.get(f.name), f.type) for f in kind}
    if isinstance(value, list):
        return [decode(v, kind.value_type) for v in value]
    return value


def to_array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """An Arrow array; half floats and dictionaries by way of the type they are made from."""
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    if pa.types.is_list(kind) and pa.types.is_float16(kind.value_type):
        return pa.array(values, pa.list_(pa.float32())).cast(kind)
    return pa.array(values, kind)


def merge(target: Any, patch: Any) -> Any:
    """JSON merge patch: null deletes a key, objects merge, anything else replaces."""
    if not isinstance(patch, dict) or not isinstance(target, dict):
        return copy.deepcopy(patch)
    out = {k: v for k, v in target.items() if k not in patch}
    out.update({k: merge(target.get(k), v) for k, v in patch.items() if v is not None})
    return out


def _write_parquet(table: pa.Table, path: Path, options: dict[str, Any]) -> None:
    """`footer_only`: as writers other than Arrow do, the metadata is in the footer and not in `ARROW:schema` too."""
    options = {**options}
    rows, footer_only = options.pop("row_group_size", None), options.pop("footer_only", False)
    metadata = table.schema.metadata
    if footer_only:
        table = table.replace_schema_metadata(None)
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        writer.write_table(table, rows)
        if footer_only:
            writer.add_key_value_metadata(metadata)


def _build_folder(vector: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True)
    rows, files = list(vector["rows"]), []
    for number, size in enumerate(vector["parts"]):
        path = folder / f"part-{number:05d}.parquet"
        part, rows = rows[:size], rows[size:]
        metadata = merge(vector["metadata"], vector.get("part_metadata", {}).get(str(number), {}))
        pq.write_table(to_table(vector, part, metadata), path)
        episodes = len({row["episode_id"] for row in part})
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append({"name": path.name, "rows": size, "episodes": episodes, "sha256": digest})
    manifest: Any = {
        "format": "memopd-trace",
        "spec_version": vector["metadata"]["spec_version"],
        "files": files,
        "rows": sum(f["rows"] for f in files),
        "episodes": len({row["episode_id"] for row in vector["rows"]}),
        "complete": True,
    }
    for number, changes in vector.get("part_manifest", {}).items():
        files[int(number)].update(changes)
    for name in vector.get("stray", ()):
        (folder / name).write_bytes((folder / files[0]["name"]).read_bytes())
    for name in vector.get("remove", ()):
        (folder / name).unlink()
    if vector.get("manifest", {}) is not None:
        (folder / "manifest.json").write_text(json.dumps(merge(manifest, vector.get("manifest", {}))))
    return folder


def _write_views(table: pa.Table, path: Path) -> None:
    if path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path)


def _build_scores(scores: dict[str, Any], folder: Path) -> Path:
    """`run.json`, shards, the head and the manifest; a shard's name carries the hash of its bytes."""
    if scores.get("absent"):
        return folder
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(scores.get("raw_run") or json.dumps(scores["run"]))
    rows, files = list(scores["rows"]), []
    for number, size in enumerate(scores.get("shards", [len(rows)])):
        part, rows = rows[:size], rows[size:]
        run = merge(scores["run"], scores.get("shard_run", {}).get(str(number), {}))
        table = to_table(scores, part, run, SCORE_TYPES, "memopd_trace_scores")
        path = folder / f"shard-{number:06d}"
        pq.write_table(table, path)
        path = path.rename(folder / f"{path.name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.parquet")
        files.append({"name": path.name, "rows": size})
        _damage(path, scores.get("shard_damage", {}).get(str(number), {}))
    for number in scores.get("unlisted", ()):
        files.pop(number)
    if "head" in scores:
        (folder / "head.safetensors").write_bytes(safetensors(scores["head"]))
    manifest: Any = {"spec_version": "1.0", "files": files, "rows": sum(f["rows"] for f in files), "complete": True}
    divergences = [float(kl) for row in scores["rows"] for kl in row.get("hidden_kl", ())]
    if divergences:
        manifest["hidden_kl"] = {"mean": sum(divergences) / len(divergences), "max": max(divergences)}
    if scores.get("manifest", {}) is not None:
        (folder / "manifest.json").write_text(json.dumps(merge(manifest, scores.get("manifest", {}))))
    for name in scores.get("remove", ()):
        (folder / name).unlink()
    return folder


def safetensors(tensors: dict[str, list[list[float]]]) -> bytes:
    """float32 matrices as a safetensors file: the header's length, the header, the bytes in order."""
    header, data = {}, b""
    for name, matrix in tensors.items():
        flat = [x for row in matrix for x in row]
        place = [len(data), len(data) + 4 * len(flat)]
        header[name] = {"dtype": "F32", "shape": [len(matrix), len(matrix[0])], "data_offsets": place}
        data += struct.pack(f"<{len(flat)}f", *flat)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _damage(path: Path, damage: dict[str, Any]) -> None:
    """`keep`: the first part of the bytes only; `content`: other bytes altogether (hex)."""
    data = path.read_bytes()
    if "keep" in damage:
        path.write_bytes(data[: int(len(data) * damage["keep"])])
    if "content" in damage:
        path.write_bytes(bytes.fromhex(damage["content"]))


def main(arguments: list[str]) -> None:
    """Build all vectors, or those named, into a folder."""
    out, names = Path(arguments[0]), set(arguments[1:])
    for kind in KINDS:
        (out / kind).mkdir(parents=True, exist_ok=True)
        for path in sorted((HERE / kind).glob("*.json")):
            if not names or path.stem in names:
                vector = load(path)
                print(build(vector, out / kind, path.stem), *build_inputs(vector, out / kind, path.stem).values())


if __name__ == "__main__":
    main(sys.argv[1:])
