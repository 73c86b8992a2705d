"""Harmless differences between Arrow writers read alike; a difference that could change a value is named."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from memopd_trace.conform import MisfitError, conform, conform_batch
from memopd_trace.invocation import invocations_from_batch
from memopd_trace.schema import COLUMN, TRACE_COLUMNS

IDS = [[1], [1, 2], [1, 2, 3]]
TEXT = ["a", "a", "b"]
SEGMENTS = [[{"start": 0, "stop": 1, "kind": "task"}], None, []]


def table(**columns: pa.Array) -> pa.Table:
    base = {
        "episode_id": pa.array(TEXT),
        "invocation_index": pa.array([0, 1, 0], pa.int32()),
        "model_id": pa.array(["m"] * 3),
        "prompt_ids": pa.array(IDS, pa.list_(pa.int32())),
        "output_ids": pa.array(IDS, pa.list_(pa.int32())),
        "output_logprobs": pa.array([[-1.0], [None, -2.0], None], pa.list_(pa.float32())),
        "rewards": pa.array([[("f1", 1.0)], None, []], pa.map_(pa.string(), pa.float64())),
        "state_digest": pa.array([b"a" * 32, None, b"b" * 32], pa.binary(32)),
    }
    return pa.table({**base, **columns})


def batch_of(data: pa.Table) -> pa.RecordBatch:
    return data.combine_chunks().to_batches()[0]


def content(data: pa.Table) -> list[dict[str, object]]:
    conformed, misfits = conform_batch(batch_of(data))
    assert not misfits
    conformed.validate(full=True)
    return conformed.to_pylist()


ENCODINGS: dict[str, Callable[[], dict[str, pa.Array]]] = {
    "large_list": lambda: {"prompt_ids": pa.array(IDS, pa.large_list(pa.int32()))},
    "list_view": lambda: {"prompt_ids": pa.array(IDS, pa.list_view(pa.int32()))},
    "item name and nullability": lambda: {
        "prompt_ids": pa.array(IDS, pa.list_(pa.field("element", pa.int32(), nullable=False)))
    },
    "large_string": lambda: {"episode_id": pa.array(TEXT, pa.large_string())},
    "string_view": lambda: {"episode_id": pa.array(TEXT, pa.string_view())},
    "dictionary of strings": lambda: {"episode_id": pa.array(TEXT).dictionary_encode()},
    "dictionary with int8 indices": lambda: {
        "model_id": pa.array(["m"] * 3).cast(pa.dictionary(pa.int8(), pa.string()))
    },
    "plain string for a dictionary": lambda: {"model_id": pa.array(["m"] * 3, pa.large_string())},
    "map as a list of pairs": lambda: {
        "rewards": pa.array(
            [[{"key": "f1", "value": 1.0}], None, []],
            pa.list_(pa.struct([("key", pa.string()), ("value", pa.float64())])),
        )
    },
    "variable-size binary": lambda: {"state_digest": pa.array([b"a" * 32, None, b"b" * 32])},
    "binary_view": lambda: {"state_digest": pa.array([b"a" * 32, None, b"b" * 32], pa.binary_view())},
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_reads_alike(name: str) -> None:
    assert content(table(**ENCODINGS[name]())) == content(table())


def test_struct_fields_and_columns_may_come_in_any_order() -> None:
    usual = pa.array(
        SEGMENTS, pa.list_(pa.struct([("start", pa.int32()), ("stop", pa.int32()), ("kind", pa.string())]))
    )
    other = pa.array(
        SEGMENTS, pa.large_list(pa.struct([("kind", pa.large_string()), ("stop", pa.int32()), ("start", pa.int32())]))
    )
    expected = content(table(segments=usual))
    assert expected[0]["segments"] == [
        {"start": 0, "stop": 1, "kind": "task", "source_index": None, "source_start": None}
    ]
    assert expected[1]["segments"] is None and expected[2]["segments"] == []
    data = table(segments=other)
    assert content(data.select(data.column_names[::-1])) == expected


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
def test_a_view_without_values_reads_as_no_values(kind: pa.DataType) -> None:
    """Polars writes such columns for a list of structs that holds nothing; their buffer is no multiple of a view."""
    column = pa.Array.from_buffers(kind, 0, [None, pa.py_buffer(bytes(8))])
    assert conform(column, pa.string() if kind == pa.string_view() else pa.binary(32)).to_pylist() == []


def test_a_slice_reads_as_its_copy() -> None:
    data = table()
    assert content(data.slice(1)) == content(data)[1:]
    sliced, _ = conform_batch(batch_of(data).slice(1, 2))
    assert [i.prompt_ids.tolist() for i in invocations_from_batch(sliced)] == IDS[1:]


def test_null_empty_and_zero_stay_three_things() -> None:
    rows = content(table(output_logprobs=pa.array([[], None, [0.0, None, 1.0]], pa.list_(pa.float32()))))
    assert [r["output_logprobs"] for r in rows] == [[], None, [0.0, None, 1.0]]


@pytest.mark.parametrize(
    ("columns", "column", "kind", "named"),
    [
        ({"output_logprobs": pa.array([[-1.0], [], []], pa.list_(pa.float16()))}, "output_logprobs", "type", "float16"),
        ({"prompt_ids": pa.array(IDS, pa.list_(pa.int64()))}, "prompt_ids", "type", "int64"),
        ({"prompt_ids": pa.array([[1], [None], []], pa.list_(pa.int32()))}, "prompt_ids", "type", "row 1"),
        ({"prompt_ids": pa.array([1, 2, 3], pa.int32())}, "prompt_ids", "type", "int32"),
        ({"model_id": pa.array(["m", None, "m"])}, "model_id", "null", "null"),
        ({"state_digest": pa.array([b"short", None, None])}, "state_digest", "type", "32 bytes"),
        ({"state_digest": pa.array([b"short", None, None], pa.binary_view())}, "state_digest", "type", "32 bytes"),
        ({"invocation_index": pa.array([0, 1, 0], pa.int64())}, "invocation_index", "type", "int64"),
        (
            {"segments": pa.array([[{"start": 0}], None, []], pa.list_(pa.struct([("start", pa.int32())])))},
            "segments",
            "type",
            "stop",
        ),
    ],
)
def test_what_could_change_a_value_is_a_misfit(
    columns: dict[str, pa.Array], column: str, kind: str, named: str
) -> None:
    conformed, (misfit,) = conform_batch(batch_of(table(**columns)))
    assert (misfit.column, misfit.kind) == (column, kind)
    assert named in misfit.actual
    if kind == "type":  # the others can still be judged
        assert conformed.column(column).null_count == 3
    assert conformed.column("output_ids").to_pylist() == IDS


@pytest.mark.parametrize("column", ["segments", "media"])
@pytest.mark.parametrize("skip", [0, 1])
def test_a_null_in_a_field_that_says_it_has_none_is_a_misfit(column: str, skip: int) -> None:
    kind, count = COLUMN[column].type, 2 + skip
    values = {"start": [0] * (count - 1) + [None], "stop": [1] * count, "kind": ["a"] * count}
    values["sha256"] = [b"a" * 32] * count
    fields = list(kind.value_type)
    children = [pa.array(values.get(f.name, [None] * count), f.type) for f in fields]
    offsets = pa.array([*range(count + 1), count], pa.int32())
    lie = pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(children, fields=fields), type=kind)
    assert lie.type == kind
    batch = batch_of(table(**{column: lie.slice(skip)}))
    batch.validate(full=True)  # Arrow does not see it
    _, (misfit,) = conform_batch(batch)
    assert (misfit.column, misfit.kind) == (column, "type") and "null in 'start'" in misfit.actual


def test_missing_and_doubled_columns_are_named() -> None:
    _, (misfit,) = conform_batch(batch_of(table().drop_columns(["output_ids"])))
    assert (misfit.column, misfit.kind) == ("output_ids", "missing")
    batch = batch_of(table())
    twice = pa.RecordBatch.from_arrays([*batch.columns, batch.column(0)], [*batch.schema.names, "episode_id"])
    _, (misfit,) = conform_batch(twice)
    assert (misfit.column, misfit.actual) == ("episode_id", "the name twice")


def test_a_dictionary_index_out_of_range_is_a_misfit_and_no_crash() -> None:
    broken = pa.DictionaryArray.from_arrays(pa.array([0, 5, 0], pa.int8()), pa.array(["m"]), safe=False)
    _, (misfit,) = conform_batch(batch_of(table()).set_column(2, "model_id", broken))
    assert "out of range" in misfit.actual


def test_absent_columns_come_as_nulls_and_unknown_ones_are_left_out() -> None:
    conformed, misfits = conform_batch(batch_of(table(x_mine=pa.array([1, 2, 3]))))
    assert not misfits
    assert conformed.schema.names == [c.name for c in TRACE_COLUMNS]
    assert pc.all(conformed.column("position_ids").is_null()).as_py()


def test_that_items_may_be_null_is_told_only_where_it_is_the_fault() -> None:
    target = COLUMN["prompt_ids"].type
    with pytest.raises(MisfitError) as wider:
        conform(pa.array([[1]], pa.list_(pa.int64())), target)
    assert (wider.value.expected, wider.value.actual) == ("list<int32>", "list<int64>")
    with pytest.raises(MisfitError) as null:
        conform(pa.array([[None]], pa.list_(pa.int32())), target)
    assert (null.value.expected, null.value.actual) == ("list<int32>", "list<int32 | null>")
