"""Rules about shape and keys: nulls, array lengths, the order of an episode's rows, ids and categories."""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow.compute as pc

from memopd_trace.invocation import Invocation
from memopd_trace.rules.batch import Batch, Ints
from memopd_trace.rules.episode import EpisodesSeen, Run
from memopd_trace.rules.files import FileContext, newer_minor
from memopd_trace.rules.registry import Hit, rule
from memopd_trace.schema import COLUMN, TRACE_COLUMNS

REQUIRED = tuple(c.name for c in TRACE_COLUMNS if c.required)
OUTPUT_COLUMNS = tuple(c.name for c in TRACE_COLUMNS if c.length == "output" and not c.required)
SEQUENCE_COLUMNS = tuple(c.name for c in TRACE_COLUMNS if c.length == "sequence")
CATEGORY_COLUMNS = tuple(c.name for c in TRACE_COLUMNS if c.values)
NO_OUTPUT_REASONS = ("abort", "content_filter")  # calls that may end before the first token


@rule(
    "E-NULL",
    "a required cell is null",
    phase="shape",
    clause="A cell of a required column MUST NOT be null.",
    columns=REQUIRED,
)
def required_null(b: Batch) -> Iterator[Hit]:
    for name in REQUIRED:
        for row in np.flatnonzero(~b.given(name)):
            yield Hit(int(row), f"{name} is null", name, COLUMN[name].doc, "null")


@rule(
    "E-LENGTH-OUTPUT",
    "a per-output-token array is not as long as `output_ids`",
    phase="shape",
    clause="An array of length `output` MUST have one item for each id of `output_ids`.",
    columns=("output_ids", *OUTPUT_COLUMNS),
    needs=OUTPUT_COLUMNS,
    hint="one item longer or more: the stop token or stop words were cut from the ids alone; "
    "shorter: from this array alone",
)
def output_length(b: Batch) -> Iterator[Hit]:
    for name in OUTPUT_COLUMNS:
        yield from length_hits(b, name, b.output_lengths, "len(output_ids)")


@rule(
    "E-LENGTH-SEQUENCE",
    "a per-token array is not as long as the sequence",
    phase="shape",
    clause="An array of length `sequence` MUST have one item for each token of prompt and output.",
    columns=("prompt_ids", "output_ids", "output_slots", *SEQUENCE_COLUMNS),
    needs=SEQUENCE_COLUMNS,
    hint="it covers prompt and output, stop token included (the prompt alone where `output_slots` is given)",
)
def sequence_length(b: Batch) -> Iterator[Hit]:
    for name in SEQUENCE_COLUMNS:
        yield from length_hits(b, name, b.sequence_lengths, "the sequence's length")


def length_hits(b: Batch, name: str, lengths: Ints, meaning: str) -> Iterator[Hit]:
    """One hit per row whose list of this column is given and not as long as `lengths` [B] says."""
    lists = b.lists(name)
    for row in np.flatnonzero(lists.given & (lists.lengths != lengths)):
        want, have = lengths[row], lists.lengths[row]
        yield Hit(int(row), f"{name} has {have} items, {meaning} is {want}", name, str(want), str(have))


@rule(
    "E-KEY-DUPLICATE",
    "two rows have one key",
    phase="key",
    clause="A pair (`episode_id`, `invocation_index`) MUST occur once.",
    columns=REQUIRED,
    hint="a resumed or resent call was written twice; keep one row, or give the retry its own index",
)
def key_duplicate(run: Run, seen: EpisodesSeen) -> Iterator[Hit]:
    before = seen.indices(run.episode_id)
    first: dict[int, Invocation] = {}
    for at, invocation in enumerate(run.invocations):
        index = invocation.invocation_index
        twin = first.setdefault(index, invocation)
        if twin is not invocation:
            same = "the same" if _same_ids(twin, invocation) else "other"
            yield Hit(at, f"invocation {index} occurs again, with {same} ids", "invocation_index")
        elif any(index in each for each in before):
            yield Hit(at, f"invocation {index} of this episode stood further up", "invocation_index")


def _same_ids(a: Invocation, b: Invocation) -> bool:
    return np.array_equal(a.prompt_ids, b.prompt_ids) and np.array_equal(a.output_ids, b.output_ids)


@rule(
    "E-INDEX",
    "an episode's indices are not 0, 1, 2…",
    phase="key",
    clause="The rows of an episode MUST stand in the order of `invocation_index` 0, 1, 2…, without a hole.",
    columns=REQUIRED,
    hint="a hole is a lost call: the episode is incomplete; otherwise sort by (episode, index)",
)
def index_order(run: Run, seen: EpisodesSeen) -> Iterator[Hit]:
    if seen.holds(run.episode_id):
        return
    expected, known = 0, set()
    for at, invocation in enumerate(run.invocations):
        index = invocation.invocation_index
        if index == expected:
            expected += 1
        elif index not in known:
            yield Hit(at, f"invocation_index {index}", "invocation_index", str(expected), str(index))
            return
        known.add(index)


@rule(
    "E-EPISODE-SPLIT",
    "an episode's rows are not contiguous",
    phase="key",
    clause="The rows of an episode MUST be contiguous in one file.",
    columns=REQUIRED,
    hint="sort the rows by (episode, index), and never split an episode over two parts",
)
def episode_split(run: Run, seen: EpisodesSeen) -> Iterator[Hit]:
    if seen.goes_on(run):
        yield Hit(0, "the episode goes on here, other rows of it stood further up", "episode_id")


@rule(
    "E-MODEL-UNKNOWN",
    "a row names a model that the metadata does not describe",
    phase="batch",
    clause="`model_id` MUST be a key of the metadata's `models`.",
    columns=("model_id",),
    hint="add the model to `models` in the metadata, or write its key into the row",
)
def model_unknown(b: Batch) -> Iterator[Hit]:
    known = ", ".join(f"'{name}'" for name in b.metadata.models) or "no model"
    yield from b.row_hits(~b.equals("model_id", *b.metadata.models), "model_id", "unknown model", expected=known)


@rule(
    "E-CATEGORY",
    "a category column holds a word outside its registry",
    phase="batch",
    clause="A category MUST be a registered word of its column, or a private `rewrite_kind` (`x_…`).",
    columns=CATEGORY_COLUMNS,
    hint="spec/registry.md says what each word means; null where none fits, x_… for a rewrite_kind of your own",
    unless=newer_minor,
)
def category(b: Batch) -> Iterator[Hit]:
    for name in CATEGORY_COLUMNS:
        words = COLUMN[name].values or ()
        bad = b.given(name) & ~b.equals(name, *words)
        if name == "rewrite_kind":
            bad &= ~np.asarray(pc.fill_null(pc.starts_with(b.strings(name), "x_"), False))
        yield from b.row_hits(bad, name, f"{name} is not a registered word", expected=", ".join(map(repr, words)))


@rule(
    "E-OUTPUT-EMPTY",
    "a call without an output token",
    phase="batch",
    clause="`output_ids` MUST NOT be empty, unless the call was aborted, filtered or rejected.",
    columns=("output_ids", "finish_reason", "accepted"),
    needs=("output_ids",),
    hint="a lost capture looks like this; where nothing was sampled, say so by finish_reason 'abort'",
)
def output_empty(b: Batch) -> Iterator[Hit]:
    bad = (b.output_lengths == 0) & ~b.equals("finish_reason", *NO_OUTPUT_REASONS) & b.flags("accepted", True)
    for row in np.flatnonzero(bad):
        yield Hit(int(row), "output_ids is empty", "output_ids", "at least 1 id", "0 ids")


@rule(
    "E-ID-RANGE",
    "an id outside the model's vocabulary",
    phase="batch",
    clause="Every id of `prompt_ids` and `output_ids` MUST be from 0 to the model's `vocab_size` - 1.",
    columns=("prompt_ids", "output_ids", "model_id"),
    hint="the model cannot have consumed or sampled it: another tokenizer's ids, a mask value, or damage",
)
def id_range(b: Batch) -> Iterator[Hit]:
    limit = b.per_model(lambda m: m.tokenizer.vocab_size, np.iinfo(np.int32).max)
    for name in ("prompt_ids", "output_ids"):
        if b.all_below(name, limit):
            continue
        ids = b.lists(name)
        bad = (ids.values < 0) | (ids.values >= np.repeat(limit, ids.lengths))
        yield from b.item_hits(bad, name, "is no id of the model", expected="0 to vocab_size - 1")


@rule(
    "W-ID-PADDED",
    "an id in the padded part of the vocabulary",
    phase="batch",
    clause="Ids SHOULD be below the tokenizer's `size`.",
    columns=("prompt_ids", "output_ids", "model_id"),
    hint="the model can sample it, so the row is true; a trainer with an exact embedding cannot take it",
)
def id_padded(b: Batch) -> Iterator[Hit]:
    size = b.per_model(lambda m: m.tokenizer.size, np.iinfo(np.int32).max)
    limit = b.per_model(lambda m: m.tokenizer.vocab_size, np.iinfo(np.int32).max)
    for name in ("prompt_ids", "output_ids"):
        if b.all_below(name, size):
            continue
        ids = b.lists(name)
        bad = (ids.values >= np.repeat(size, ids.lengths)) & (ids.values < np.repeat(limit, ids.lengths))
        yield from b.item_hits(bad, name, "has no text in the tokenizer", expected="below the tokenizer's size")


@rule(
    "E-NO-CONTEXT",
    "a sampled token with nothing before it",
    phase="batch",
    clause="A sampled token MUST have at least one token before it.",
    columns=("prompt_ids", "output_ids", "output_sampled", "output_slots"),
    needs=("output_ids",),
    hint="the begin-of-sequence id belongs into the prompt, or output_sampled is false for it",
)
def no_context(b: Batch) -> Iterator[Hit]:
    bare = (b.prompt_lengths == 0) & ~b.given("output_slots")
    if not bare.any():
        return
    bad = bare[b.row_of_output] & (b.index_of_output == 0) & b.sampled
    yield from b.output_hits(bad, "output_ids", "has no context: prompt_ids is empty", b.lists("output_ids").values)


def _no_bos(file: FileContext) -> str | None:
    known = any(m.tokenizer.bos_id is not None for m in file.metadata.models.values())
    return None if known else "no model has a begin-of-sequence id"


@rule(
    "W-DOUBLE-BOS",
    "the prompt begins with two begin-of-sequence ids",
    phase="batch",
    clause="A prompt SHOULD begin with at most one begin-of-sequence id.",
    columns=("prompt_ids", "model_id"),
    hint="the template writes one and the tokenizer adds another; the row is true, the model saw both",
    unless=_no_bos,
)
def double_bos(b: Batch) -> Iterator[Hit]:
    bos = b.per_model(lambda m: m.tokenizer.bos_id, -1)
    ids = b.lists("prompt_ids")
    long = np.flatnonzero((ids.lengths >= 2) & (bos >= 0))
    start = ids.offsets[long]
    for row in long[(ids.values[start] == bos[long]) & (ids.values[start + 1] == bos[long])]:
        yield Hit(int(row), "the prompt begins with two begin-of-sequence ids", "prompt_ids", "1", "2")
