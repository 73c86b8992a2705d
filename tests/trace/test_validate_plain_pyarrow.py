"""The sceptic's test: a trace written by plain pyarrow, from the text of the format alone, is valid for training;
the same trace with any one fault is not, and the fault is named.

Nothing of this project writes a byte here; it only judges.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memopd_trace import Report, read, validate
from memopd_trace.storage import TraceReader

Rows = list[dict[str, Any]]

METADATA = {
    "spec_version": "1.0",
    "producer": {"name": "a sceptic", "version": "1"},
    "required_features": [],
    "models": {
        "student": {
            "name": "some/model",
            "tokenizer": {
                "fingerprint": "abc",
                "size": 1000,
                "vocab_size": 1024,
                "bos_id": 1,
                "eos_ids": [2],
                "stop_ids": [2, 3],
            },
        }
    },
}
CATEGORY = pa.dictionary(pa.int32(), pa.string())
SEGMENT = pa.struct(
    [
        ("start", pa.int32()),
        ("stop", pa.int32()),
        ("kind", pa.string()),
        ("source_index", pa.int32()),
        ("source_start", pa.int32()),
    ]
)
SAMPLING = pa.struct([("temperature", pa.float64()), ("top_p", pa.float64()), ("top_k", pa.int32())])
TYPES: dict[str, pa.DataType] = {
    "episode_id": pa.string(),
    "invocation_index": pa.int32(),
    "model_id": CATEGORY,
    "prompt_ids": pa.list_(pa.int32()),
    "output_ids": pa.list_(pa.int32()),
    "parent_index": pa.int32(),
    "relation": CATEGORY,
    "rewrite_kind": CATEGORY,
    "rewrite_evidence": CATEGORY,
    "segments": pa.list_(SEGMENT),
    "group_id": pa.string(),
    "position_ids": pa.list_(pa.int32()),
    "visible_until": pa.list_(pa.int32()),
    "state_digest": pa.binary(32),
    "output_logprobs": pa.list_(pa.float32()),
    "logprob_kind": CATEGORY,
    "output_sampled": pa.list_(pa.bool_()),
    "output_loss_mask": pa.list_(pa.bool_()),
    "sampling": SAMPLING,
    "policy_version": pa.int64(),
    "output_policy_versions": pa.list_(pa.int64()),
    "finish_reason": CATEGORY,
    "token_source": CATEGORY,
    "accepted": pa.bool_(),
    "reward": pa.float64(),
    "terminated": pa.bool_(),
    "truncated": pa.bool_(),
    "x_mine": pa.int64(),
}


def canonical_digest(prompt: list[int], output: list[int]) -> bytes:
    """The state digest of a plain causal row, from its description in the format."""

    def array(values: list[int]) -> bytes:
        return struct.pack("<Q", len(values)) + struct.pack(f"<{len(values)}i", *values)

    defaults = struct.pack("<QQQQ", 0, 0, 0, 0)  # positions, visible from, visible until, slots
    media = struct.pack("<Q", 0)
    return hashlib.sha256(b"memopd-trace/state/1" + array(prompt) + array(output) + defaults + media).digest()


def rows() -> Rows:
    """Two rollouts of one question; the first reads, extends, and rewrites its memory."""
    same = {
        "model_id": "student",
        "group_id": "q1",
        "logprob_kind": "raw",
        "sampling": {"temperature": 1.0, "top_p": None, "top_k": None},
        "policy_version": 7,
        "finish_reason": "stop",
        "token_source": "engine",
    }
    first = {"episode_id": "a", "invocation_index": 0, "relation": "root", "prompt_ids": [1, 10, 11, 12]}
    second = {"episode_id": "a", "invocation_index": 1, "relation": "extend", "parent_index": 0}
    third = {"episode_id": "a", "invocation_index": 2, "relation": "rewrite", "parent_index": 1}
    other = {"episode_id": "b", "invocation_index": 0, "relation": "root", "prompt_ids": [1, 10, 11, 12]}
    return [
        {**same, **first, "output_ids": [20, 21, 2], "output_logprobs": [-0.51, -1.3, -0.02], "x_mine": 5},
        {
            **same,
            **second,
            "prompt_ids": [1, 10, 11, 12, 20, 21, 2, 30, 31],
            "output_ids": [22, 3],
            "output_logprobs": [-2.4, -0.33],
        },
        {
            **same,
            **third,
            "rewrite_kind": "memory",
            "rewrite_evidence": "explicit",
            "prompt_ids": [1, 10, 22, 40],
            "output_ids": [23, 24, 25, 2],
            "output_logprobs": [-0.7, None, -0.9, -0.1],
            "output_sampled": [True, False, True, True],
            "segments": [
                {"start": 0, "stop": 2, "kind": "task", "source_index": 0, "source_start": 0},
                {"start": 2, "stop": 3, "kind": "memory", "source_index": 1, "source_start": 9},
            ],
            "reward": 0.5,
            "terminated": True,
        },
        {
            **same,
            **other,
            "output_ids": [26, 27],
            "output_logprobs": [-0.8, -0.05],
            "finish_reason": "length",
            "state_digest": canonical_digest([1, 10, 11, 12], [26, 27]),
            "reward": 0.0,
            "truncated": True,
        },
    ]


def table(data: Rows, types: dict[str, pa.DataType] | None = None, metadata: Any = METADATA) -> pa.Table:
    types = TYPES if types is None else types
    arrays = []
    for name, kind in types.items():
        cells = [row.get(name) for row in data]
        if pa.types.is_dictionary(kind):
            arrays.append(pa.array(cells, pa.string()).dictionary_encode())
        else:
            arrays.append(pa.array(cells, kind))
    schema = pa.schema([pa.field(n, a.type) for n, a in zip(types, arrays, strict=True)])
    return pa.Table.from_arrays(arrays, schema=schema.with_metadata({"memopd_trace": json.dumps(metadata)}))


def judge(data: pa.Table, folder: Path) -> Report:
    path = folder / "trace.parquet"
    pq.write_table(data, path)
    return validate(path, "train")


def test_a_trace_by_plain_pyarrow_is_valid_for_training(tmp_path: Path) -> None:
    report = judge(table(rows()), tmp_path)
    assert report.clean, report.to_text()
    assert report.traces[0].rows == 4 and report.traces[0].episodes == 2
    ran = {r.code for r in report.rules if r.status == "pass"}
    assert {"E-DISCONTINUITY", "E-SEGMENT-COPY", "E-STATE-DIGEST", "E-LOGPROB-NULL", "E-NEEDS-REWARD"} <= ran


def cell(row: int, column: str, value: Any) -> Callable[[Rows], Any]:
    def change(data: Rows) -> None:
        data[row][column] = value

    return change


def item(row: int, column: str, index: int, value: Any) -> Callable[[Rows], Any]:
    def change(data: Rows) -> None:
        data[row][column][index] = value

    return change


def segment(index: int, **changes: Any) -> Callable[[Rows], Any]:
    def change(data: Rows) -> None:
        data[2]["segments"][index].update(changes)

    return change


FAULTS: list[tuple[str, str, Callable[[Rows], Any]]] = [
    ("a null prompt", "E-NULL", cell(1, "prompt_ids", None)),
    ("a row twice", "E-KEY-DUPLICATE", lambda d: d.insert(1, copy.deepcopy(d[0]))),
    ("a lost call", "E-INDEX", lambda d: d.pop(1)),
    ("a split episode", "E-EPISODE-SPLIT", lambda d: d.insert(1, d.pop(3))),
    ("an unknown model", "E-MODEL-UNKNOWN", cell(3, "model_id", "teacher")),
    ("a private relation", "E-CATEGORY", cell(1, "relation", "continue")),
    ("no sampled token", "E-OUTPUT-EMPTY", lambda d: d[3].update(output_ids=[], output_logprobs=[], state_digest=None)),
    ("a negative id", "E-ID-RANGE", item(2, "prompt_ids", 3, -1)),
    ("an id of a wider vocabulary", "E-ID-RANGE", item(2, "output_ids", 1, 1024)),
    ("an id without text", "W-ID-PADDED", item(2, "output_ids", 1, 1001)),
    ("two BOS", "W-DOUBLE-BOS", lambda d: d[2].update(prompt_ids=[1, 1, 22, 40], segments=None)),
    ("a logprob too many", "E-LENGTH-OUTPUT", cell(1, "output_logprobs", [-2.4, -0.33, -0.1])),
    ("a mask too short", "E-LENGTH-OUTPUT", cell(0, "output_loss_mask", [True])),
    ("positions of the prompt", "E-LENGTH-SEQUENCE", cell(2, "position_ids", [0, 1, 2, 3])),
    ("a later parent", "E-PARENT-INDEX", cell(1, "parent_index", 1)),
    ("a root with a parent", "E-ROOT-PARENT", cell(1, "relation", "root")),
    ("an extension of nothing", "E-PARENT-MISSING", cell(1, "parent_index", None)),
    ("an unexplained parent", "E-RELATION-MISSING", cell(1, "relation", None)),
    ("an undeclared rewrite", "E-REWRITE-UNDECLARED", cell(2, "rewrite_kind", None)),
    ("a re-encoded history", "E-DISCONTINUITY", item(1, "prompt_ids", 4, 99)),
    ("a rewrite called extension", "E-DISCONTINUITY", lambda d: d[2].update(relation="extend", rewrite_kind=None)),
    ("two groups", "E-EPISODE-CONSTANT", cell(2, "group_id", "q2")),
    ("a segment outside", "E-SEGMENT-BOUNDS", segment(1, stop=12, source_index=None, source_start=None)),
    ("overlapping segments", "E-SEGMENT-ORDER", segment(1, start=1, stop=3, source_index=None, source_start=None)),
    ("a copy of a later call", "E-SEGMENT-SOURCE", segment(0, source_index=2)),
    ("a false copy", "E-SEGMENT-COPY", segment(1, source_start=8)),
    ("a negative position", "E-POSITION-NEGATIVE", cell(2, "position_ids", [-1, 0, 1, 2, 3, 4, 5, 6])),
    ("a false digest", "E-STATE-DIGEST", cell(3, "state_digest", b"\0" * 32)),
    ("visibility undeclared", "E-FEATURE-UNDECLARED", cell(2, "visible_until", [8, 5, 8, 8, 8, 8, 8, 8])),
    ("a NaN logprob", "E-LOGPROB-NAN", item(0, "output_logprobs", 1, math.nan)),
    ("a probability above 1", "E-LOGPROB-POSITIVE", item(0, "output_logprobs", 1, 0.03)),
    ("a little above 1", "W-LOGPROB-ROUNDING", item(0, "output_logprobs", 1, 1e-5)),
    ("an impossible token", "E-LOGPROB-INF", item(0, "output_logprobs", 1, -math.inf)),
    ("a filler", "E-LOGPROB-SENTINEL", item(0, "output_logprobs", 1, -9999.0)),
    ("a missing logprob", "E-LOGPROB-NULL", item(0, "output_logprobs", 1, None)),
    ("an unclear kind", "E-LOGPROB-KIND", lambda d: d[0].update(logprob_kind="unknown", sampling={"temperature": 0.6})),
    (
        "an unknown support",
        "E-SUPPORT-UNKNOWN",
        lambda d: d[0].update(logprob_kind="processed", sampling={"temperature": 1.0, "top_k": 5}),
    ),
    ("a negative temperature", "E-SAMPLING-RANGE", cell(0, "sampling", {"temperature": -1.0})),
    ("a forced token in the loss", "E-LOSS-UNSAMPLED", cell(2, "output_loss_mask", [True] * 4)),
    (
        "a rejected call in the loss",
        "E-LOSS-REJECTED",
        lambda d: d[3].update(accepted=False, output_loss_mask=[True, True]),
    ),
    ("another version", "E-POLICY-VERSION", cell(0, "output_policy_versions", [6, 6, 6])),
    ("a dropped stop id", "W-STOP-MISSING", item(2, "output_ids", 3, 28)),
    ("ids after the stop", "W-IDS-AFTER-STOP", item(2, "output_ids", 0, 3)),
    ("a NaN reward", "E-REWARD-NONFINITE", cell(2, "reward", math.nan)),
    ("an early end", "E-END-EARLY", cell(0, "terminated", True)),
    ("no lineage", "E-NEEDS-RELATION", cell(3, "relation", None)),
    ("no logprobs", "E-NEEDS-LOGPROBS", cell(0, "output_logprobs", None)),
    ("no kind", "E-NEEDS-LOGPROB-KIND", cell(0, "logprob_kind", None)),
    ("no temperature", "E-NEEDS-SAMPLING", cell(0, "sampling", None)),
    ("no version", "E-NEEDS-POLICY-VERSION", cell(0, "policy_version", None)),
    ("ids from text", "E-NEEDS-ENGINE-IDS", cell(0, "token_source", None)),
    ("no reward", "E-NEEDS-REWARD", cell(3, "reward", None)),
    ("no end", "E-NEEDS-END", cell(3, "truncated", None)),
    ("no group", "E-NEEDS-GROUP", cell(3, "group_id", None)),
]  # fmt: skip


# an episode is judged when its run of rows ends: the half before the split has no end and no reward
@pytest.mark.parametrize(("name", "code", "fault"), FAULTS, ids=[f[0] for f in FAULTS])
def test_one_fault_is_found_and_named(name: str, code: str, fault: Callable[[Rows], Any], tmp_path: Path) -> None:
    data = rows()
    fault(data)
    report = judge(table(data), tmp_path)
    assert report.codes == {code}, report.to_text()
    assert report.exit_code("warning") == 1


METADATA_FAULTS = {
    "E-META-MISSING": None,
    "E-META-INVALID": {**METADATA, "models": {"student": {"name": "some/model"}}},
    "E-VERSION-MAJOR": {**METADATA, "spec_version": "2.0"},
    "E-FEATURE-UNKNOWN": {**METADATA, "required_features": ["mind_reading"]},
}


@pytest.mark.parametrize("code", METADATA_FAULTS)
def test_one_fault_of_the_metadata_is_refused(code: str, tmp_path: Path) -> None:
    data = table(rows(), metadata=METADATA_FAULTS[code])
    if METADATA_FAULTS[code] is None:
        data = data.replace_schema_metadata(None)
    report = judge(data, tmp_path)
    assert report.codes == {code} and report.exit_code() == 3


@pytest.mark.parametrize("name", ["episode_id", "invocation_index", "model_id", "prompt_ids", "output_ids"])
def test_a_missing_required_column_is_named_and_nothing_else_is_claimed(name: str, tmp_path: Path) -> None:
    report = judge(table(rows()).drop_columns([name]), tmp_path)
    assert report.codes == {"E-COLUMN-MISSING"}
    assert report.findings[0].column == name
    assert all(r.status == "not run" and r.reason for r in report.rules if r.code.startswith("E-LOGPROB"))


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("output_logprobs", pa.list_(pa.float16())),
        ("output_logprobs", pa.list_(pa.float64())),
        ("prompt_ids", pa.list_(pa.int64())),
        ("prompt_ids", pa.string()),
        ("reward", pa.float32()),
        ("policy_version", pa.int32()),
        ("episode_id", pa.binary()),
    ],
    ids=str,
)
def test_a_wrong_type_is_named_with_both_types(column: str, kind: pa.DataType, tmp_path: Path) -> None:
    data = table(rows())
    at = data.schema.get_field_index(column)
    if pa.types.is_string(kind):
        other = pa.array(["[1, 2]"] * 4)
    elif pa.types.is_binary(kind):
        other = data.column(at).cast(kind)
    else:
        other = data.column(at).cast(kind, safe=False)
    report = judge(data.set_column(at, column, other), tmp_path)
    assert report.codes == {"E-COLUMN-TYPE"}
    assert report.findings[0].column == column and report.findings[0].expected and report.findings[0].actual


def encodings(data: Rows) -> dict[str, pa.Table]:
    """The same trace in the encodings of other tools."""
    plain = table(data)

    def recast(**kinds: pa.DataType) -> pa.Table:
        out = plain
        for name, kind in kinds.items():
            cells = plain.column(name).to_pylist()
            plain_kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            column = pa.array(cells, plain_kind)
            column = column.cast(kind) if pa.types.is_dictionary(kind) else column
            out = out.set_column(out.schema.get_field_index(name), name, column)
        return out

    lists = {"prompt_ids": pa.int32(), "output_ids": pa.int32(), "output_logprobs": pa.float32()}
    text = ("episode_id", "group_id")
    categories = ("model_id", "relation", "logprob_kind", "finish_reason", "token_source")
    return {
        "plain": plain,
        "large lists": recast(**{n: pa.large_list(k) for n, k in lists.items()}),
        "list views": recast(**{n: pa.list_view(k) for n, k in lists.items()}),
        "other item names": recast(**{n: pa.list_(pa.field("element", k)) for n, k in lists.items()}),
        "large strings": recast(**{n: pa.large_string() for n in (*text, *categories)}),
        "string views": recast(**{n: pa.string_view() for n in text}),
        "dictionary ids": recast(**{n: pa.dictionary(pa.int16(), pa.string()) for n in text}),
        "another column order": plain.select(plain.column_names[::-1]),
        "a column less": plain.drop_columns(["x_mine"]),
    }


@pytest.mark.parametrize("fault", [None, "E-SEGMENT-COPY", "E-LOGPROB-SENTINEL"])
@pytest.mark.parametrize("storage", ["parquet", "ipc"])
def test_encodings_change_neither_digests_nor_the_verdict(fault: str | None, storage: str, tmp_path: Path) -> None:
    data_rows = rows()
    if fault:
        next(f for f in FAULTS if f[1] == fault)[2](data_rows)
    seen = set()
    for number, (name, data) in enumerate(encodings(data_rows).items()):
        path = tmp_path / f"{number}.{'parquet' if storage == 'parquet' else 'arrow'}"
        if storage == "parquet":
            pq.write_table(data, path)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, data.schema) as writer:
                writer.write_table(data)
        report = validate(path, "train")
        assert report.codes == ({fault} if fault else set()), name + report.to_text()
        seen.add((tuple(i.compute_digest() for i in read(path).iter_invocations()), _placeless(report)))
    assert len(seen) == 1


def _placeless(report: Report) -> tuple[Any, ...]:
    return tuple((f.code, f.row, f.message, f.expected, f.actual) for f in report.findings)


@pytest.mark.parametrize("fault", FAULTS, ids=[f[0] for f in FAULTS])
def test_a_sliced_batch_gives_the_verdict_of_a_copy(
    fault: tuple[str, str, Callable[[Rows], Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.values` of a sliced list array holds the rows before the slice as well."""
    data = rows()
    fault[2](data)
    whole = table(data)
    expected = judge(whole, tmp_path)
    poison = copy.deepcopy(data[0])
    poison.update(prompt_ids=[-5, -6], output_ids=[-7], output_logprobs=[math.nan], episode_id="poison")
    poison.update(output_loss_mask=[True], output_sampled=[False])
    padded = table([poison, *data, poison]).combine_chunks().to_batches()[0]
    sliced = padded.slice(1, len(data))
    assert sliced.column("prompt_ids").offset == 1, "the slice is what is tested"
    monkeypatch.setattr(TraceReader, "iter_raw", lambda self, index, rows=512: iter([sliced]))
    report = validate(tmp_path / "trace.parquet", "train")
    assert _placeless(report) == _placeless(expected)


def test_verdict_does_not_depend_on_batch_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many: Rows = []
    for episode in range(40):
        for row in rows():
            many.append({**copy.deepcopy(row), "episode_id": f"{row['episode_id']}{episode}"})
    for number in np.random.default_rng(3).choice(len(many), 12, replace=False):
        many[number]["output_logprobs"][0] = math.nan
    path = tmp_path / "many.parquet"
    pq.write_table(table(many), path)
    verdicts = []
    for size in (1, 3, 7, 512):
        monkeypatch.setattr(TraceReader, "iter_raw", _with_rows(TraceReader.iter_raw, size))
        verdicts.append(_placeless(validate(path, "train")))
        monkeypatch.undo()
    assert len(verdicts[0]) == 12
    assert all(v == verdicts[0] for v in verdicts)


def _with_rows(original: Callable[..., Any], size: int) -> Callable[..., Any]:
    return lambda self, index, rows=0: original(self, index, size)
