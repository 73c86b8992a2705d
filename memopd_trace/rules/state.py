"""Rules about the state beyond ids: positions, visibility, in-place slots, media, and their digest."""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from memopd_trace.digest import state_digest
from memopd_trace.invocation import read_column
from memopd_trace.rules.batch import Batch
from memopd_trace.rules.episode import Run
from memopd_trace.rules.registry import Hit, rule
from memopd_trace.schema import COLUMN

DIGESTED = ("position_ids", "visible_from", "visible_until", "output_slots")  # the optional parts of a digest


@rule(
    "E-POSITION-NEGATIVE",
    "a negative position id",
    phase="batch",
    clause="Every item of `position_ids` MUST be 0 or more.",
    columns=("position_ids", "prompt_ids", "output_ids", "output_slots"),
    needs=("position_ids",),
)
def position_negative(b: Batch) -> Iterator[Hit]:
    p = b.sequence("position_ids")
    yield from b.sequence_hits(p.values < 0, "position_ids", "is negative", p.values, expected="0 or more")


@rule(
    "E-VISIBILITY",
    "a visibility range that is empty or leaves the sequence",
    phase="batch",
    clause="For each token k of n it MUST hold that 0 <= `visible_from[k]` <= k < `visible_until[k]` <= n.",
    columns=("visible_from", "visible_until", "prompt_ids", "output_ids", "output_slots"),
    needs=("visible_from", "visible_until"),
    hint="a token always sees itself; to hide it from all later ones, visible_until[k] = k + 1",
)
def visibility(b: Batch) -> Iterator[Hit]:
    start, until = b.sequence("visible_from"), b.sequence("visible_until")
    k, n = b.index_of_sequence, np.repeat(b.sequence_lengths, b.sequence_lengths)
    bad = start.given & ((start.values < 0) | (start.values > k))
    yield from b.sequence_hits(bad, "visible_from", "is out of range", start.values, expected="0 to its own index k")
    bad = until.given & ((until.values <= k) | (until.values > n))
    yield from b.sequence_hits(bad, "visible_until", "is out of range", until.values, expected="k + 1 to n")


@rule(
    "E-SLOT-RANGE",
    "an output slot outside the prompt",
    phase="batch",
    clause="Every item of `output_slots` MUST be an index into `prompt_ids`.",
    columns=("output_slots", "prompt_ids"),
    needs=("output_slots",),
)
def slot_range(b: Batch) -> Iterator[Hit]:
    slots = b.lists("output_slots")
    bad = (slots.values < 0) | (slots.values >= np.repeat(b.prompt_lengths, slots.lengths))
    yield from b.item_hits(bad, "output_slots", "is no index into the prompt", expected="0 to len(prompt_ids) - 1")


@rule(
    "E-SLOT-DUPLICATE",
    "two output tokens fill one slot",
    phase="batch",
    clause="The items of `output_slots` MUST be distinct.",
    columns=("output_slots",),
)
def slot_duplicate(b: Batch) -> Iterator[Hit]:
    slots = b.lists("output_slots")
    key = np.repeat(np.arange(len(b)), slots.lengths) * 2**33 + slots.values
    order = np.argsort(key, kind="stable")
    bad = np.zeros(len(key), bool)
    bad[order[1:]] = key[order[1:]] == key[order[:-1]]
    yield from b.item_hits(bad, "output_slots", "was filled before", expected="distinct slots")


@rule(
    "E-MEDIA-RANGE",
    "a media run outside the prompt",
    phase="episode",
    clause="A media run MUST lie in the prompt and hold a token: 0 <= `start` < `stop` <= len(`prompt_ids`).",
    columns=("media",),
)
def media_range(run: Run) -> Iterator[Hit]:
    for at, invocation in enumerate(run.invocations):
        for number, m in enumerate(invocation.media or ()):
            if not 0 <= m.start < m.stop <= len(invocation.prompt_ids):
                expected = f"within [0, {len(invocation.prompt_ids)}), not empty"
                yield Hit(at, f"media[{number}] is out of range", "media", expected, f"[{m.start}, {m.stop})")
                break


@rule(
    "E-MEDIA-ORDER",
    "media runs overlap or are out of order",
    phase="episode",
    clause="Media runs MUST be sorted by `start` and MUST NOT overlap.",
    columns=("media",),
)
def media_order(run: Run) -> Iterator[Hit]:
    for at, invocation in enumerate(run.invocations):
        media = invocation.media or ()
        for number, (before, m) in enumerate(pairwise(media), start=1):
            if m.start < before.stop:
                message = f"media[{number}] begins before the run in front of it ends"
                yield Hit(at, message, "media", f"start >= {before.stop}", str(m.start))
                break


@rule(
    "E-MEDIA-RUN",
    "placeholders outside every media run",
    phase="episode",
    clause="The id with which a media run begins MUST NOT stand in the prompt outside of all media runs.",
    columns=("media",),
    hint="placeholders were expanded twice, or a run was cut: the model then maps contents to the wrong places",
)
def media_run(run: Run) -> Iterator[Hit]:
    for at, invocation in enumerate(run.invocations):
        ids = invocation.prompt_ids
        runs = [m for m in invocation.media or () if 0 <= m.start < m.stop <= len(ids)]
        loose = np.isin(ids, [ids[m.start] for m in runs]) if runs else np.zeros(0, bool)
        for m in runs:
            loose[m.start : m.stop] = False
        if loose.any():
            index, inside = int(loose.argmax()), sum(m.stop - m.start for m in runs)
            message = f"placeholder {ids[index]} at index {index} is in no run ({int(loose.sum())} such ids)"
            yield Hit(at, message, "media", f"{inside} in {len(runs)} runs", f"{inside + int(loose.sum())}")


@rule(
    "E-STATE-DIGEST",
    "the state digest is not that of the row",
    phase="batch",
    clause="`state_digest` MUST be null or the SHA-256 of the row's canonical state bytes.",
    columns=("state_digest", *DIGESTED, "media"),
    needs=("state_digest",),
    hint="ids or state changed after the digest was computed; if the change was meant, compute it again",
)
def digest(b: Batch) -> Iterator[Hit]:
    names = ("prompt_ids", "output_ids", *DIGESTED)
    arrays = [read_column(b.column(name), COLUMN[name], copy=False) for name in names]
    media = [
        [(m.start, m.stop, m.sha256) for m in runs or ()] for runs in read_column(b.column("media"), COLUMN["media"])
    ]
    stated = b.column("state_digest").to_pylist()
    for row, (digest, *state) in enumerate(zip(stated, *arrays, media, strict=True)):
        if digest is not None and digest != (actual := state_digest(*state)):
            yield Hit(row, "the row's state has another digest", "state_digest", actual.hex(), digest.hex())
