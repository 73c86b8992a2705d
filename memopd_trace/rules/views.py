"""Rules about views: whose tokens they are for, and whether the viewed prompt makes a state with them."""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memopd_trace.invocation import read_column
from memopd_trace.rules import state, structure
from memopd_trace.rules.batch import Bools
from memopd_trace.rules.files import FEATURE_COLUMNS
from memopd_trace.rules.joined import ViewBatch, ViewsContext, misfit_hit
from memopd_trace.rules.registry import Hit, rule
from memopd_trace.rules.rowindex import digest_cells, digest_hex
from memopd_trace.schema import COLUMN, RECORDED

KEY = ("episode_id", "invocation_index", "view")
SEQUENCE = ("position_ids", "visible_from", "visible_until")


@rule(
    "E-VIEW-COLUMN",
    "a views file's column is missing, does not fit its type, or holds a null",
    phase="views-file",
    clause="A views file MUST have its five required columns, without a null, and every column in its declared type.",
    wants="views",
    hint="`memopd-trace schema views` prints the columns",
)
def column(file: ViewsContext) -> Iterator[Hit]:
    for misfit in file.misfits.values():
        yield misfit_hit(misfit)


@rule(
    "E-VIEW-FEATURE",
    "a views file uses a feature that it does not name",
    phase="views-file",
    clause="A views file whose rows use a feature's columns MUST name the feature in `required_features`.",
    wants="views",
    hint="add it to the metadata's required_features",
)
def feature(file: ViewsContext) -> Iterator[Hit]:
    for name, columns in FEATURE_COLUMNS.items():
        used = [c for c in columns if c in file.first_value]
        if used and name not in file.metadata.required_features:
            message = f"rows use '{used[0]}', but required_features does not name '{name}'"
            yield Hit(None, message, used[0], name, str(file.metadata.required_features))


@rule(
    "E-VIEW-TOKENIZER",
    "a views file's ids are of another tokenizer than the trace's",
    phase="views-file",
    clause="A views file's `tokenizer_fingerprint` MUST be that of the models of the rows it is for.",
    wants="views",
    hint="encode the views with the tokenizer that the trace's ids come from",
)
def tokenizer(file: ViewsContext) -> Iterator[Hit]:
    stated = file.metadata.tokenizer_fingerprint
    for name, model in file.index.metadata.models.items():
        theirs = model.tokenizer.fingerprint
        if file.index.models.index(model) in file.models and theirs != stated:
            yield Hit(None, f"the trace's model '{name}' has another tokenizer", None, theirs, stated)


@rule(
    "E-VIEW-NAME",
    "a view's name is reserved or not described",
    phase="views-shape",
    clause="`view` MUST be a key of the metadata's `views` and MUST NOT be `recorded`.",
    columns=("view",),
    wants="views",
    hint="`recorded` is the row's own state and needs no view",
)
def name(b: ViewBatch) -> Iterator[Hit]:
    described = [v for v in b.context.metadata.views if v != RECORDED]
    bad = ~b.equals("view", *described)
    yield from b.row_hits(bad, "view", "is no view of the metadata", expected=f"one of {described}")


@rule(
    "E-VIEW-ROW",
    "a view of a row that the trace does not hold",
    phase="views-shape",
    clause="A view MUST be for a row of the trace.",
    columns=KEY,
    wants="views",
    hint="are these views of another trace?",
)
def row(b: ViewBatch) -> Iterator[Hit]:
    yield from b.unknown_hits()


@rule(
    "E-VIEW-DUPLICATE",
    "a row has the same view twice",
    phase="views-shape",
    clause="A triple (`episode_id`, `invocation_index`, `view`) MUST occur once in a views file.",
    columns=KEY,
    wants="views",
)
def duplicate(b: ViewBatch) -> Iterator[Hit]:
    yield from b.row_hits(b.repeated, "view", "the row has this view already")


@rule(
    "E-VIEW-STATE",
    "a view is not for these tokens",
    phase="views-shape",
    clause="A view's `state_digest` MUST be the state digest of the trace row it is for.",
    columns=("state_digest",),
    wants="views",
    hint="the trace changed after the views were made, or they are of another trace; make them again",
)
def same_state(b: ViewBatch) -> Iterator[Hit]:
    yield from b.state_hits()


@rule(
    "E-VIEW-SLOTS",
    "a view's output slots do not fit what it views",
    phase="views-shape",
    clause="`output_slots` MUST be given if and only if the trace row gives them: distinct indices into this "
    "`prompt_ids`, one for each output token.",
    columns=("output_slots", "prompt_ids"),
    wants="views",
)
def slots(b: ViewBatch) -> Iterator[Hit]:
    given = b.given("output_slots")
    stray = given != b.known["slots"]
    yield from b.row_hits(stray, "output_slots", "is given in only one of view and trace row")
    lengths = np.where(stray, b.lists("output_slots").lengths, b.output_lengths)
    yield from structure.length_hits(b, "output_slots", lengths, "len(output_ids)")
    assert state.slot_range.check is not None and state.slot_duplicate.check is not None
    yield from state.slot_range.check(b)
    yield from state.slot_duplicate.check(b)


@rule(
    "E-VIEW-LENGTH",
    "a view's arrays are not as long as what it views",
    phase="views-shape",
    clause="`position_ids`, `visible_from`, `visible_until` MUST have one item for each token of the viewed sequence.",
    columns=(*SEQUENCE, "prompt_ids", "output_slots"),
    wants="views",
    hint="the viewed sequence is this prompt and the trace row's output_ids",
)
def length(b: ViewBatch) -> Iterator[Hit]:
    for column in SEQUENCE:
        yield from structure.length_hits(b, column, b.sequence_lengths, "the viewed sequence's length")


@rule(
    "E-VIEW-ORDER",
    "views stand in another order than the trace's rows",
    phase="views",
    clause="The rows of a views file MUST stand in the order of the trace's rows.",
    columns=KEY,
    wants="views",
    hint="readers stream both files side by side; sort the views as the trace is",
)
def order(b: ViewBatch) -> Iterator[Hit]:
    message = "a view of a later row of the trace stands before this one"
    yield from b.row_hits(b.backwards & ~b.repeated, "invocation_index", message)


@rule(
    "E-VIEW-EMPTY",
    "a view without a token before the output",
    phase="views",
    clause="A view MUST have a prompt token before the first output token.",
    columns=("prompt_ids",),
    wants="views",
    hint="nothing predicts the first output token of an empty prompt; leave the row out",
)
def empty(b: ViewBatch) -> Iterator[Hit]:
    yield from b.row_hits((b.prompt_lengths == 0) & (b.output_lengths > 0), "prompt_ids", "is empty")


@rule(
    "E-VIEW-ID-RANGE",
    "a view holds an id outside the vocabulary",
    phase="views",
    clause="Every id of a view MUST be from 0 to the `vocab_size` - 1 of its row's model.",
    columns=("prompt_ids",),
    wants="views",
    hint="another tokenizer's ids, a mask value, or damage",
)
def id_range(b: ViewBatch) -> Iterator[Hit]:
    sizes = np.array([*(m.tokenizer.vocab_size for m in b.index.models), 2**31], np.int64)[b.known["model"]]
    ids = b.lists("prompt_ids")
    bad: Bools = (ids.values < 0) | (ids.values >= np.repeat(sizes, ids.lengths))
    yield from b.item_hits(bad, "prompt_ids", "is no id of the model", expected="0 to vocab_size - 1")


@rule(
    "E-VIEW-POSITION",
    "a view has a negative position id",
    phase="views",
    clause="Every item of a view's `position_ids` MUST be 0 or more.",
    columns=("position_ids",),
    wants="views",
)
def position(b: ViewBatch) -> Iterator[Hit]:
    assert state.position_negative.check is not None
    yield from state.position_negative.check(b)


@rule(
    "E-VIEW-VISIBILITY",
    "a view has a visibility range that is empty or leaves the sequence",
    phase="views",
    clause="For each token k of the viewed sequence: 0 <= `visible_from[k]` <= k < `visible_until[k]` <= n MUST hold.",
    columns=("visible_from", "visible_until"),
    wants="views",
    hint="a token always sees itself; to hide it from all later ones, visible_until[k] = k + 1",
)
def visibility(b: ViewBatch) -> Iterator[Hit]:
    assert state.visibility.check is not None
    yield from state.visibility.check(b)


@rule(
    "E-VIEW-MEDIA",
    "a view's media runs leave its prompt, overlap or are out of order",
    phase="views",
    clause="A view's media runs MUST lie in its prompt, hold a token each, be sorted by `start` and not overlap.",
    columns=("media", "prompt_ids"),
    wants="views",
)
def media(b: ViewBatch) -> Iterator[Hit]:
    for at, runs in enumerate(read_column(b.column("media"), COLUMN["media"])):
        end = 0
        for number, run in enumerate(runs or ()):
            if not end <= run.start < run.stop <= b.prompt_lengths[at]:
                expected = f"within [{end}, {b.prompt_lengths[at]}), not empty"
                yield Hit(at, f"media[{number}] is out of range", "media", expected, f"[{run.start}, {run.stop})")
                break
            end = run.stop


@rule(
    "E-VIEW-DIGEST",
    "the view digest is not that of the viewed sequence",
    phase="views",
    clause="`view_digest` MUST be null or the state digest of the viewed sequence.",
    columns=("view_digest",),
    wants="views",
    hint="the prompt changed after the digest was computed",
)
def digest(b: ViewBatch) -> Iterator[Hit]:
    stated = digest_cells(b.column("view_digest"))
    for at in np.flatnonzero(b.given("view_digest")):
        actual, given = b.digest(int(at)).hex(), digest_hex(stated[at])
        if actual != given:
            yield Hit(int(at), "the viewed sequence has another digest", "view_digest", actual, given)
