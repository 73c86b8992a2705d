"""The limits of `spec/files.md`, stated as numbers: at the limit a trace is read, beyond it the named thing happens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers_trace import VECTORS, build, judge, valid

import memopd_trace
from memopd_trace.conform import MisfitError, conform
from memopd_trace.errors import InputError
from memopd_trace.schema import COLUMN

TEXT = (VECTORS.parent / "files.md").read_text(encoding="utf-8")
INT32 = 2**31 - 1
MIB = 2**20


def test_every_limit_is_shown_by_something_that_exists() -> None:
    table = TEXT.split("## 5. Limits")[1]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) >= 9
    for what, *_, shown in rows:
        witnesses = re.findall(r"`([^`]+)`", shown)
        assert witnesses, what
        for witness in witnesses:
            file, _, test = witness.partition("::")
            if test:
                assert f"def {test}(" in (Path(__file__).parent / file).read_text(encoding="utf-8"), witness
            else:
                assert (VECTORS / f"{file}.json").is_file(), witness


def with_metadata(**changes: Any) -> dict[str, Any]:
    vector = valid("plain")
    return {**vector, "metadata": {**vector["metadata"], **changes}}


def refusal(vector: dict[str, Any], folder: Path) -> str | None:
    with pytest.raises(InputError) as error:
        memopd_trace.read(build(vector, folder))
    return error.value.code


def test_metadata_has_a_limit(tmp_path: Path) -> None:
    limit = 16 * MIB
    assert f"| metadata | {limit:,} bytes |" in TEXT
    vector = {**with_metadata(), "storage": "ipc"}
    short = len(json.dumps({**vector["metadata"], "x_notes": ""}).encode())
    at_limit = {**vector, "raw_metadata": json.dumps({**vector["metadata"], "x_notes": "x" * (limit - short)})}
    assert len(at_limit["raw_metadata"]) == limit
    assert memopd_trace.read(build(at_limit, tmp_path)).metadata.models
    beyond = {**vector, "raw_metadata": json.dumps({**vector["metadata"], "x_notes": "x" * (limit - short + 1)})}
    assert refusal(beyond, tmp_path) == "E-META-INVALID"


def test_a_version_number_has_six_digits(tmp_path: Path) -> None:
    assert judge(with_metadata(spec_version="1.999999"), tmp_path).codes == {"W-VERSION-MINOR"}
    for version in ("1.1000000", "01.0", "1", "1.0.0", "1.x", ""):
        assert refusal(with_metadata(spec_version=version), tmp_path) == "E-META-INVALID", version


@pytest.mark.parametrize("key", ["size", "vocab_size"])
def test_the_vocabulary_is_int32(key: str, tmp_path: Path) -> None:
    model = valid("limits")["metadata"]["models"]["m"]
    assert model["tokenizer"][key] == INT32
    tokenizer = {**model["tokenizer"], key: INT32 + 1}
    assert refusal(with_metadata(models={"m": {**model, "tokenizer": tokenizer}}), tmp_path) == "E-META-INVALID"


@pytest.mark.parametrize("key", ["num_moe_layers", "experts_per_token", "num_experts"])
def test_experts_are_int16(key: str, tmp_path: Path) -> None:
    model = valid("limits")["metadata"]["models"]["m"]
    assert judge(with_metadata(models={"m": {**model, key: 2**15}}), tmp_path).codes == set()
    assert refusal(with_metadata(models={"m": {**model, key: 2**15 + 1}}), tmp_path) == "E-META-INVALID"


def test_a_batch_holds_two_billion_items() -> None:
    """Items of type null take no memory, so the limit itself can be tried."""
    for items, fits in ((INT32, True), (INT32 + 1, False)):
        array = pa.LargeListArray.from_arrays(pa.array([0, items], pa.int64()), pa.nulls(items))
        target = pa.list_(pa.field("item", pa.null()))
        if fits:
            assert len(conform(array, target)[0]) == items
        else:
            with pytest.raises(MisfitError, match=r"2147483648 items in one batch, limit 2\^31-1"):
                conform(array, target)


def test_an_index_is_int32() -> None:
    assert COLUMN["invocation_index"].type == pa.int32()
    with pytest.raises(pa.ArrowInvalid):
        pa.array([INT32 + 1], pa.int32())
    with pytest.raises(MisfitError, match="expected int32, got int64"):
        conform(pa.array([INT32 + 1], pa.int64()), COLUMN["invocation_index"].type)
