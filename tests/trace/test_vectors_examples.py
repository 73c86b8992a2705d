"""The numbers in the specification's texts: every example block is read from the text and recomputed here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from memopd_trace.invocation import Invocation, Media
from memopd_trace.metadata import TraceMetadata
from memopd_trace.schema import TRACE_COLUMNS, type_name

SPEC = Path(__file__).parents[2] / "spec"
BLOCK = re.compile(r"^```json\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXTS = ("trace.md", "files.md", "arrays.md")
Example = dict[str, Any]
EXAMPLES: dict[str, Example] = {}
for _text in TEXTS:
    for _block in BLOCK.findall((SPEC / _text).read_text(encoding="utf-8")):
        _example = json.loads(_block)
        if "example" in _example:
            assert _example["example"] not in EXAMPLES, "an example's name is its own"
            EXAMPLES[_example["example"]] = _example


def near(actual: float, written: float) -> bool:
    """Equal to the five places that the text gives."""
    return round(actual, 5) == written


def log_softmax(logits: Any) -> NDArray[np.float64]:
    z = np.asarray(logits, dtype=float)
    return np.asarray(z - np.log(np.exp(z).sum()))


def row(e: Example, **more: Any) -> Invocation:
    names = ("output_slots", "position_ids", "visible_from", "visible_until", "output_sampled", "output_loss_mask")
    fields = {name: e[name] for name in (*names, "accepted") if name in e}
    key = {"episode_id": "e", "invocation_index": 0, "model_id": "m"}
    return Invocation(
        **{**key, "prompt_ids": e.get("prompt_ids", [1]), "output_ids": e["output_ids"], **fields, **more}
    )


def sees(visible_from: Any, visible_until: Any, n: int) -> NDArray[np.bool_]:
    q = np.arange(n)[:, None]
    low = np.arange(n) if visible_from is None else np.asarray(visible_from)
    high = np.full(n, n) if visible_until is None else np.asarray(visible_until)
    return np.asarray((low <= q) & (q < high))


def sequence(e: Example) -> None:
    p, o = len(e["prompt_ids"]), len(e["output_ids"])
    assert e["sequence"] == e["prompt_ids"] + e["output_ids"] == row(e).sequence_ids.tolist()
    assert e["n"] == p + o and e["output_at"] == [p + i for i in range(o)]
    assert e["predicted_by_query"] == [p + i - 1 for i in range(o)]


def positions(e: Example) -> None:
    cache, by_length = [], []
    for index in range(len(e["prompt_ids"]) + len(e["output_ids"])):
        if index == len(e["prompt_ids"]):
            cache = [k for k in cache if k not in e["evicted_after_prompt"]]
        by_length.append(len(cache))
        cache.append(index)
    assert e["by_cache_length"] == by_length != list(range(len(by_length)))
    assert e["counting_on"] is None  # the default is 0…n-1, which is what an engine that counts on gives
    assert row(e).positions().tolist() == list(range(len(by_length)))


def visibility(e: Example) -> None:
    n = len(e["visible_from"])
    assert sees(e["visible_from"], e["visible_until"], n).astype(int).tolist() == e["sees"]
    assert sees(None, None, n).astype(int).tolist() == e["causal"] != e["sees"]


def eviction(e: Example) -> None:
    p, n = len(e["prompt_ids"]), len(e["prompt_ids"]) + len(e["output_ids"])
    until = [p if k in e["evicted_after_prompt"] else n for k in range(n)]
    assert e["visible_until"] == until
    matrix = sees(e["visible_from"], until, n)
    assert {q: np.flatnonzero(matrix[int(q)]).tolist() for q in e["keys_of_query"]} == e["keys_of_query"]


def slots(e: Example) -> None:
    filled = list(e["prompt_ids"])
    for slot, token in zip(e["output_slots"], e["output_ids"], strict=True):
        filled[slot] = token
    assert e["filled"] == filled and e["n"] == len(e["prompt_ids"]) == len(row(e))
    assert e["predicted_by_query"] == e["output_slots"]


def logprob_kinds(e: Example) -> None:
    z, i, t = np.asarray(e["logits"], float), e["id"], e["temperature"]
    raw, tempered = log_softmax(z)[i], log_softmax(z / t)[i]
    assert near(raw, e["raw"]) and near(tempered, e["tempered"]) and near(raw / t, e["raw_divided_by_temperature"])
    assert len({e["raw"], e["tempered"], e["raw_divided_by_temperature"]}) == 3


def logprob_items(e: Example) -> None:
    trained = row(e).loss_mask().tolist()
    assert e["trained"] == trained
    values = [x for x, t in zip(e["output_logprobs"], trained, strict=True) if t]
    assert None in e["output_logprobs"] and near(sum(values), e["sum_over_trained"])


def kept_mass(e: Example) -> None:
    tempered = (
        np.log(e["probabilities"]) if "probabilities" in e else log_softmax(np.array(e["logits"]) / e["temperature"])
    )
    p = np.exp(tempered)
    best = np.argsort(-p, kind="stable")
    kept = best[: e["top_k"]] if "top_k" in e else best[: int(np.argmax(np.cumsum(p[best]) >= e["top_p"] - 1e-12)) + 1]
    assert kept.tolist() == e["kept"] and len(kept) < len(p)
    mass = np.log(p[kept].sum())
    assert near(mass, e["kept_logmass"]) and near(tempered[e["id"]], e["tempered"])
    assert near(tempered[e["id"]] - mass, e["processed"])
    assert "tail_mass" not in e or near(1 - np.exp(mass), e["tail_mass"])


def masks(e: Example) -> None:
    assert row(e).loss_mask().tolist() == e["trained"] and e["output_loss_mask"] is None


def versions(e: Example) -> None:
    assert e["policy_version"] == e["output_policy_versions"][-1] and e["oldest"] == min(e["output_policy_versions"])
    assert len(e["output_policy_versions"]) == len(e["output_ids"])


def routes(e: Example) -> None:
    n = len(e["prompt_ids"]) + len(e["output_ids"])
    layers, k, flat = e["num_moe_layers"], e["experts_per_token"], e["routed_experts"]
    assert len(flat) == (n - 1) * layers * k
    for layer in range(layers):
        start = (1 * layers + layer) * k
        assert e[f"of_token_1_in_layer_{layer}"] == flat[start : start + k]
    assert np.reshape(flat, (n - 1, layers, k))[1, 0].tolist() == e["of_token_1_in_layer_0"]


def segments(e: Example) -> None:
    for segment, copied in zip(e["segments"], e["copied"], strict=True):
        start, stop, source = segment["start"], segment["stop"], segment["source_start"]
        assert e["sequence"][start:stop] == copied == e["source_sequence"][source : source + stop - start]


def media(e: Example) -> None:
    (run,) = e["media"]
    assert run["sha256"] == hashlib.sha256(bytes.fromhex(e["content_hex"])).hexdigest()
    assert e["prompt_ids"][run["start"] : run["stop"]] == e["placeholders"]


def digest(e: Example) -> None:
    runs = [Media(m["start"], m["stop"], bytes.fromhex(m["sha256"])) for m in e.get("media", [])]
    data = b"".join(bytes.fromhex(text) for text in e["bytes"].values())
    names = list(e["bytes"])
    assert names[0] == "tag" and bytes.fromhex(e["bytes"]["tag"]) == b"memopd-trace/state/1"
    assert hashlib.sha256(data).hexdigest() == e["state_digest"] == row(e, media=runs or None).compute_digest().hex()
    for name in names[1:-1]:
        raw = bytes.fromhex(e["bytes"][name])
        items = np.frombuffer(raw[8:], "<i4").tolist()
        assert int.from_bytes(raw[:8], "little") == len(items), name
        n = len(e["prompt_ids"]) + (len(e["output_ids"]) if "output_slots" not in e else 0)
        default = {"position_ids": list(range(n)), "visible_from": list(range(n)), "visible_until": [n] * n}.get(
            name, []
        )
        assert items == ([] if (given := e.get(name, default)) == default else given), name


def metadata(e: Example) -> None:
    minimal = e["value"]
    TraceMetadata.model_validate(minimal)
    required = TraceMetadata.model_json_schema()["required"]
    assert set(minimal) == {"spec_version", *required}


RECOMPUTED: dict[str, Callable[[Example], None]] = {
    "kept-mass-tempered": kept_mass,
    "digest-slots": digest,
    "digest-eviction": digest,
    "digest-written-out": digest,
    **{
        f.__name__.replace("_", "-"): f
        for f in (sequence, positions, visibility, eviction, slots, logprob_kinds, logprob_items, kept_mass, masks)
    },
    **{f.__name__: f for f in (versions, routes, segments, media, digest, metadata)},
}


@pytest.mark.parametrize("name", sorted(RECOMPUTED))
def test_an_examples_numbers_follow_from_one_another(name: str) -> None:
    RECOMPUTED[name](EXAMPLES[name])


def test_every_example_is_recomputed() -> None:
    assert set(EXAMPLES) == set(RECOMPUTED)


def test_a_wrong_number_is_noticed() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("logprob-kinds", {"tempered": -0.14294}),
        ("kept-mass", {"kept_logmass": -0.22315}),
        ("visibility", {"sees": EXAMPLES["visibility"]["causal"]}),
        ("positions", {"by_cache_length": [0, 1, 2, 3, 4, 5]}),
        ("routes", {"of_token_1_in_layer_0": [2, 5]}),
        ("slots", {"filled": [5, 8, 6, 9]}),
        ("digest", {"state_digest": "0" * 64}),
        ("digest-slots", {"output_slots": [2]}),
        ("digest-eviction", {"visible_until": [5, 4, 5, 5, 5]}),
        ("digest-written-out", {"position_ids": [0, 1, 2, 3, 5]}),
    ]
    for name, change in wrong:
        with pytest.raises(AssertionError):
            RECOMPUTED[name]({**EXAMPLES[name], **change})


def test_every_array_has_a_row_in_the_table_and_an_example() -> None:
    text = (SPEC / "arrays.md").read_text(encoding="utf-8")
    arrays = [c.name for c in TRACE_COLUMNS if c.length is not None or c.name == "routed_experts"]
    assert re.findall(r"^\| `([a-z_]+)` \|", text, re.MULTILINE) == arrays
    assert len(arrays) >= 12
    used = {name for e in EXAMPLES.values() for name in e} | {"position_ids"}  # as by_cache_length
    assert {"kept_logmass", "by_cache_length"} < used
    assert not set(arrays) - used - {"output_kept_logmass"}


def test_the_text_on_positions_agrees_with_the_text_on_eviction() -> None:
    a, b = EXAMPLES["positions"], EXAMPLES["eviction"]
    assert all(a[key] == b[key] for key in ("prompt_ids", "output_ids", "evicted_after_prompt"))


def test_the_table_of_parquet_types_is_what_a_file_without_arrow_has() -> None:
    lines = (SPEC / "files.md").read_text(encoding="utf-8").split("\n## ")[2].splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    rows = {name: (physical, logical) for names, physical, logical in table for name in re.findall(r"`([^`]+)`", names)}
    file = pq.ParquetFile(SPEC / "vectors/built/valid/everything-zstd.parquet")
    assert b"ARROW:schema" not in file.metadata.metadata
    leaves = [leaf for c in TRACE_COLUMNS for leaf in _leaves(c.type)]
    assert len(leaves) == len(file.schema) > len(TRACE_COLUMNS)
    for number, leaf in enumerate(leaves):
        stored = file.schema.column(number)
        logical = re.match(r"\w+", str(stored.logical_type))
        assert logical is not None
        words = {"Int": "INTEGER", "None": "none"}.get(logical[0], logical[0].upper())
        physical, logicals = rows[leaf]
        assert f"`{stored.physical_type}" in physical and words in logicals, (stored.path, leaf)


def _leaves(kind: pa.DataType) -> list[str]:
    """The leaf types of a column, as the specification writes them."""
    if pa.types.is_list(kind):
        return _leaves(kind.value_type)
    if pa.types.is_map(kind):
        return [*_leaves(kind.key_type), *_leaves(kind.item_type)]
    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in _leaves(field.type)]
    return [type_name(kind)]


def test_the_text_names_every_key_of_the_metadata() -> None:
    text = (SPEC / "files.md").read_text(encoding="utf-8")
    named = {
        key for line in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE) for key in re.findall(r"`([^`]+)`", line)
    }
    schema = TraceMetadata.model_json_schema()
    keys = set(_keys(schema, schema["$defs"], ""))
    assert len(keys) > 25
    assert keys - named == {"producer", "models.*.tokenizer", "source"}, "objects are named by their keys"


def _keys(schema: dict[str, Any], models: dict[str, Any], prefix: str) -> list[str]:
    """Every key of a JSON schema as a path: `.` of an object, `.*.` of a map, `[].` of a list."""
    found = []
    for name, value in schema["properties"].items():
        path = f"{prefix}{name}"
        found.append(path)
        for inner in (value, *value.get("anyOf", ())):
            for part, mark in (
                (inner, "."),
                (inner.get("items", {}), "[]."),
                (inner.get("additionalProperties"), ".*."),
            ):
                if isinstance(part, dict) and "$ref" in part:
                    found += _keys(models[part["$ref"].rsplit("/", 1)[1]], models, path + mark)
    return found
