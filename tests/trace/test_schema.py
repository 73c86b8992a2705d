"""One column table: its renderings in `spec/schema/` are current, and nothing else declares a column."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pyarrow as pa
import pytest

from memopd_trace.cli import run
from memopd_trace.invocation import Invocation
from memopd_trace.metadata import json_schema
from memopd_trace.rules.segments import FOREIGN
from memopd_trace.schema import (
    COLUMN,
    FEATURES,
    REWRITE_KINDS,
    SCORES_COLUMNS,
    TABLES,
    TRACE_COLUMNS,
    Table,
    arrow_schema,
    type_name,
)
from memopd_trace.schema_text import to_json

SPEC = Path(__file__).parents[2] / "spec" / "schema"


@pytest.mark.parametrize("table", ["trace", "views", "scores"])
@pytest.mark.parametrize(("format", "suffix"), [("markdown", "md"), ("json", "json"), ("arrow", "arrow.txt")])
def test_the_renderings_in_spec_are_current(
    table: str, format: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["schema", table, "--format", format]) == 0
    printed = capsys.readouterr().out
    assert (SPEC / f"{table}.{suffix}").read_text() == printed, "run `make spec` and read the difference"


def test_five_columns_are_required_and_only_they_are_not_nullable() -> None:
    required = [c.name for c in TRACE_COLUMNS if c.required]
    assert required == ["episode_id", "invocation_index", "model_id", "prompt_ids", "output_ids"]
    assert [f.name for f in arrow_schema() if not f.nullable] == required


def test_an_invocation_has_exactly_the_columns_as_fields() -> None:
    assert [f.name for f in dataclasses.fields(Invocation)] == list(COLUMN)


def test_every_per_token_list_says_what_it_is_as_long_as() -> None:
    for column in TRACE_COLUMNS:
        per_token = pa.types.is_list(column.type) and not pa.types.is_struct(column.type.value_type)
        assert (column.length is not None) == (per_token and column.name != "routed_experts"), column.name


def test_only_logprob_lists_may_hold_nulls() -> None:
    assert [c.name for c in TRACE_COLUMNS if c.items_nullable] == ["output_logprobs", "output_kept_logmass"]


def test_types_are_written_in_the_specifications_words() -> None:
    assert type_name(COLUMN["output_logprobs"].type) == "list<float32 | null>"
    assert type_name(COLUMN["prompt_ids"].type) == "list<int32>"
    assert type_name(COLUMN["model_id"].type) == "dictionary<string>"
    assert type_name(COLUMN["rewards"].type) == "map<string, float64>"
    assert type_name(next(c for c in SCORES_COLUMNS if c.name == "hidden").type) == "list<fixed_size_list<T>[D]>"


def test_the_json_rendering_loses_no_column() -> None:
    for table, columns in TABLES.items():
        rendered = json.loads(json.dumps(to_json(table)))["columns"]  # type: ignore[arg-type]
        assert [c["name"] for c in rendered] == [c.name for c in columns]


@pytest.mark.parametrize(
    ("table", "name"), [("trace", "metadata"), ("views", "views-metadata"), ("scores", "scores-metadata")]
)
def test_the_metadatas_schemas_in_spec_are_current(table: Table, name: str) -> None:
    assert (SPEC.parent / f"{name}.schema.json").read_text() == json_schema(table), "run `make spec`"


def test_the_registry_has_the_words_of_the_schema() -> None:
    text = (SPEC.parent / "registry.md").read_text()
    sections = {
        part.split("\n")[0]: re.findall(r"^\| `([a-z_]+)` \|", part, re.MULTILINE) for part in text.split("## ")
    }
    assert sections["`rewrite_kind`"] == list(REWRITE_KINDS)
    assert sections["`required_features`"] == list(FEATURES)
    assert sorted(sections["Segment kinds"][:5]) == sorted(FOREIGN), "what the model never writes comes first"
