"""Rules about a whole file: its columns, its metadata, its place in a folder. They run after its last row."""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from memopd_trace.conform import Misfit
from memopd_trace.metadata import KEY, TraceMetadata, spec_version_of
from memopd_trace.places import Place, file_sha256
from memopd_trace.rules.registry import Hit, Inputs, rule
from memopd_trace.schema import COLUMN, SPEC_VERSION
from memopd_trace.storage import MANIFEST

FEATURE_COLUMNS = {
    "visibility": ("visible_from", "visible_until"),
    "output_slots": ("output_slots",),
    "media": ("media",),
    "routed_experts": ("routed_experts",),
}


@dataclass(slots=True)
class FileContext:
    """One file of a trace, and what was counted while its rows passed.

    `first_value` maps a column to the first row in which it is not null. `manifest` is the folder's (`None`
    for a single file), `part` this file's entry in it; `total_rows` and `total_episodes` are the whole
    trace's, set for its last file.
    """

    path: Place
    index: int
    schema: pa.Schema
    metadata: TraceMetadata
    first_schema: pa.Schema
    manifest: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    rows: int = 0
    episodes: int = 0
    total_rows: int | None = None
    total_episodes: int | None = None
    first_value: dict[str, int] = field(default_factory=dict)
    misfits: dict[str, Misfit] = field(default_factory=dict)
    inputs: Inputs = field(default_factory=Inputs)


def newer_minor(file: FileContext) -> str | None:
    """A reason not to judge what a newer minor version may have added."""
    newer = spec_version_of(file.metadata.spec_version) > spec_version_of(SPEC_VERSION)
    return f"spec version {file.metadata.spec_version} may know more than {SPEC_VERSION}" if newer else None


def no_manifest(file: FileContext) -> str | None:
    """A reason not to judge a manifest."""
    return "the input is one file, not a folder with a manifest" if file.manifest is None else None


@rule(
    "E-COLUMN-MISSING",
    "a required column is not there",
    phase="file",
    clause="A trace MUST have the five required columns.",
)
def column_missing(file: FileContext) -> Iterator[Hit]:
    for name, misfit in file.misfits.items():
        if misfit.kind == "missing" and name not in file.schema.names:
            yield Hit(None, f"column '{name}' is missing", name, misfit.expected, "no such column")


@rule(
    "E-COLUMN-TWICE",
    "two columns have one name",
    phase="file",
    clause="A declared column MUST NOT occur more than once.",
)
def column_twice(file: FileContext) -> Iterator[Hit]:
    for name in COLUMN:
        times = file.schema.names.count(name)
        if times > 1:
            yield Hit(None, f"column '{name}' occurs {times} times", name, "1", str(times))


@rule(
    "E-COLUMN-TYPE",
    "a column cannot be read as its declared type",
    phase="file",
    clause="A declared column MUST have its declared type, or one that differs only in encoding.",
    hint="write the declared type; `memopd-trace schema` prints it",
)
def column_type(file: FileContext) -> Iterator[Hit]:
    for name, misfit in file.misfits.items():
        if misfit.kind == "type":
            message = f"column '{name}' does not fit its type"
            yield Hit(None, message, name, misfit.expected, misfit.actual)


@rule(
    "W-COLUMN-UNKNOWN",
    "a column that the format does not know",
    phase="file",
    clause="A private column SHOULD have a name that begins with `x_`.",
    hint="rename it to x_…, or put it into `extra`; a misspelt name means that the real column is absent",
    unless=newer_minor,
)
def column_unknown(file: FileContext) -> Iterator[Hit]:
    for name in dict.fromkeys(file.schema.names):
        if name not in COLUMN and not name.startswith("x_"):
            yield Hit(None, f"column '{name}' is not a column of the format", name)


@rule(
    "W-VERSION-MINOR",
    "the file has a newer minor version than this reader",
    phase="file",
    clause="A reader SHOULD warn of a newer minor version and ignore the columns it does not know.",
    hint="a newer memopd-trace checks what that version added",
)
def version_minor(file: FileContext) -> Iterator[Hit]:
    if newer_minor(file):
        version = file.metadata.spec_version
        yield Hit(None, f"spec version {version}, this reader knows {SPEC_VERSION}", None, SPEC_VERSION, version)


@rule(
    "E-FEATURE-UNDECLARED",
    "a feature is used but not declared",
    phase="file",
    clause="A file whose rows use a feature's columns MUST name the feature in `required_features`.",
    hint="add it to `required_features`, so that a reader without the feature refuses instead of misreading",
)
def feature_undeclared(file: FileContext) -> Iterator[Hit]:
    for feature, columns in FEATURE_COLUMNS.items():
        used = [name for name in columns if name in file.first_value]
        if used and feature not in file.metadata.required_features:
            row = file.first_value[used[0]]
            message = f"'{used[0]}' has values (first in row {row}), feature '{feature}' is not declared"
            declared = ", ".join(file.metadata.required_features) or "none"
            yield Hit(None, message, used[0], f"required_features with '{feature}'", declared)


@rule(
    "E-TOKENIZER-SIZE",
    "a model's tokenizer has more ids than the model",
    phase="file",
    clause="A model's `tokenizer.size` MUST NOT exceed its `tokenizer.vocab_size`.",
)
def tokenizer_size(file: FileContext) -> Iterator[Hit]:
    for name, model in file.metadata.models.items():
        t = model.tokenizer
        if t.size > t.vocab_size:
            yield Hit(None, f"model '{name}': size > vocab_size", None, f"at most {t.vocab_size}", str(t.size))


@rule(
    "E-SPECIAL-ID",
    "a special token's id is outside the vocabulary",
    phase="file",
    clause="`bos_id`, `eos_ids`, `pad_id` and `stop_ids` MUST be ids from 0 to `vocab_size` - 1.",
)
def special_id(file: FileContext) -> Iterator[Hit]:
    for name, model in file.metadata.models.items():
        t = model.tokenizer
        named = [("bos_id", t.bos_id), ("pad_id", t.pad_id)]
        named += [("eos_ids", i) for i in t.eos_ids] + [("stop_ids", i) for i in t.stop_ids]
        for key, value in named:
            if value is not None and not 0 <= value < t.vocab_size:
                yield Hit(None, f"model '{name}': {key} {value}", None, f"0 to {t.vocab_size - 1}", str(value))


@rule(
    "W-NO-ROWS",
    "the file holds no row",
    phase="file",
    clause="A trace file SHOULD hold at least one row.",
    hint="nothing was checked; is this the file you meant?",
)
def no_rows(file: FileContext) -> Iterator[Hit]:
    if file.rows == 0:
        yield Hit(None, "no rows", None, "at least 1", "0")


@rule(
    "E-MANIFEST-ROWS",
    "the manifest's row count is not the file's",
    phase="file",
    clause="The manifest's `rows` MUST be the number of rows, for each part and in total.",
    hint="a part was replaced or rewritten after the manifest; write the folder again",
    unless=no_manifest,
)
def manifest_rows(file: FileContext) -> Iterator[Hit]:
    yield from _count_hits(file, "rows", file.rows, file.total_rows)


@rule(
    "E-MANIFEST-EPISODES",
    "the manifest's episode count is not the file's",
    phase="file",
    clause="The manifest's `episodes` MUST be the number of episodes, for each part and in total.",
    hint="a part was replaced or rewritten after the manifest; write the folder again",
    columns=("episode_id",),
    unless=no_manifest,
)
def manifest_episodes(file: FileContext) -> Iterator[Hit]:
    yield from _count_hits(file, "episodes", file.episodes, file.total_episodes)


def _count_hits(file: FileContext, key: str, count: int, total: int | None) -> Iterator[Hit]:
    stated = (file.part or {}).get(key)
    if stated != count:
        yield Hit(None, f"{MANIFEST} states {stated} {key} for this part", None, str(stated), str(count))
    stated = (file.manifest or {}).get(key)
    if total is not None and stated != total:
        yield Hit(None, f"{MANIFEST} states {stated} {key} in all", None, str(stated), str(total))


@rule(
    "E-MANIFEST-SHA256",
    "a part's bytes are not the ones the manifest names",
    phase="file",
    clause="The manifest's `sha256` MUST be the hex SHA-256 of the part's bytes.",
    hint="the part changed after it was written; fetch or write it again",
    unless=no_manifest,
)
def manifest_sha256(file: FileContext) -> Iterator[Hit]:
    stated, actual = (file.part or {}).get("sha256"), file_sha256(file.path)
    if stated != actual:
        yield Hit(None, f"{MANIFEST} names another SHA-256", None, str(stated), actual)


@rule(
    "W-MANIFEST-STRAY",
    "a part lies in the folder that the manifest does not list",
    phase="file",
    clause="A trace folder SHOULD hold no part that its manifest does not list.",
    hint="left over from an earlier write? it is not read",
    unless=no_manifest,
)
def manifest_stray(file: FileContext) -> Iterator[Hit]:
    listed = {part["name"] for part in (file.manifest or {}).get("files", ())}
    if file.index == 0:
        for name in sorted(path.name for path in file.path.parent.glob("*.parquet")):
            if name not in listed:
                yield Hit(None, f"'{name}' is not listed in {MANIFEST}", None, "a listed part", name)


@rule(
    "E-PART-METADATA",
    "two parts of one trace have different metadata",
    phase="file",
    clause="All parts of a trace MUST carry the same metadata.",
    hint="the first part's metadata is what readers use; write the trace again with one metadata",
    unless=no_manifest,
)
def part_metadata(file: FileContext) -> Iterator[Hit]:
    first, own = ((s.metadata or {}).get(KEY, b"null") for s in (file.first_schema, file.schema))
    if first != own and _json(first) != _json(own):
        message = "the metadata differs from the first part's"
        yield Hit(None, message, None, _head(first), _head(own))


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw


def _head(raw: bytes) -> str:
    return raw[:200].decode(errors="replace")
