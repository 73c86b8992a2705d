"""Rules about segments: spans of the sequence, and the claim that one is a copy of an earlier stretch."""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from memopd_trace.invocation import Invocation, Segment
from memopd_trace.lineage import common_prefix, final_ids
from memopd_trace.rules.episode import Run
from memopd_trace.rules.registry import Hit, rule

CONTENT = ("task", "user", "observation", "tool_result")  # kinds that hold what others wrote, and no template
FOREIGN = ("system", *CONTENT)  # kinds that the model did not write


def _inside(segment: Segment, length: int) -> bool:
    return 0 <= segment.start <= segment.stop <= length


def _name(number: int, s: Segment) -> str:
    return f"segments[{number}] [{s.start}, {s.stop}) '{s.kind}'"


@rule(
    "E-SEGMENT-BOUNDS",
    "a segment outside its sequence",
    phase="episode",
    clause="A segment MUST lie in its sequence: 0 <= `start` <= `stop` <= n.",
    columns=("segments", "output_slots"),
    needs=("segments",),
)
def segment_bounds(run: Run) -> Iterator[Hit]:
    for at, invocation in enumerate(run.invocations):
        for number, s in enumerate(invocation.segments or ()):
            if not _inside(s, len(invocation)):
                expected = f"within [0, {len(invocation)})"
                yield Hit(at, f"{_name(number, s)} is outside", "segments", expected, f"[{s.start}, {s.stop})")
                break


@rule(
    "E-SEGMENT-ORDER",
    "segments overlap or are out of order",
    phase="episode",
    clause="Segments MUST be sorted by `start` and MUST NOT overlap.",
    columns=("segments",),
)
def segment_order(run: Run) -> Iterator[Hit]:
    for at, invocation in enumerate(run.invocations):
        segments = invocation.segments or ()
        for number, (before, s) in enumerate(pairwise(segments), start=1):
            if s.start < before.stop:
                message = f"{_name(number, s)} begins before the one in front of it ends"
                yield Hit(at, message, "segments", f"start >= {before.stop}", str(s.start))
                break


@rule(
    "E-SEGMENT-SOURCE",
    "a copied segment's source does not exist",
    phase="episode",
    clause="A segment's source MUST be given by both fields and lie inside an earlier row's sequence.",
    columns=("segments", "output_slots"),
    needs=("segments",),
)
def segment_source(run: Run) -> Iterator[Hit]:
    for at, child in enumerate(run.invocations):
        for number, s in enumerate(child.segments or ()):
            fault = _source_fault(run, child, s)
            if fault is not None:
                actual = f"source_index {s.source_index}, source_start {s.source_start}"
                yield Hit(at, f"{_name(number, s)}: {fault[0]}", "segments", fault[1], actual)
                break


def _source_fault(run: Run, child: Invocation, s: Segment) -> tuple[str, str] | None:
    if s.source_index is None and s.source_start is None:
        return None
    if s.source_index is None or s.source_start is None:
        return "half a source", "both source fields, or neither"
    source = run.earlier(child, s.source_index)
    if source is None:
        return "its source is no earlier row", f"source_index from 0 to {child.invocation_index - 1}"
    last = len(source) - (s.stop - s.start)
    if not 0 <= s.source_start <= last:
        return "its source runs past that row's sequence", f"source_start from 0 to {last}"
    return None


@rule(
    "E-SEGMENT-COPY",
    "a segment is not the copy it claims to be",
    phase="episode",
    clause="A segment with a source MUST equal that stretch of the earlier row's sequence, id for id.",
    columns=("segments", "output_slots"),
    needs=("segments",),
    hint="re-encoded text gives other ids; without a source the segment claims nothing",
)
def segment_copy(run: Run) -> Iterator[Hit]:
    for at, child in enumerate(run.invocations):
        for number, s in enumerate(child.segments or ()):
            source = run.earlier(child, s.source_index)
            if source is None or _source_fault(run, child, s) or not _inside(s, len(child)):
                continue
            copy = final_ids(child)[s.start : s.stop]
            original = final_ids(source)[s.source_start :][: len(copy)]
            same = common_prefix(copy, original)
            if same < len(copy):
                message = f"{_name(number, s)} differs from invocation {s.source_index} at offset {same}"
                yield Hit(at, message, "segments", str(original[same]), str(copy[same]))
                break


@rule(
    "E-LOSS-CONTENT",
    "a token that came from outside is to be trained",
    phase="episode",
    clause="A token to be trained MUST NOT lie in a segment of a kind that the model does not write.",
    columns=("segments", "output_slots", "output_sampled", "output_loss_mask", "accepted"),
    needs=("segments",),
    hint="what a tool or user wrote inside an output was not sampled: output_sampled is false there",
)
def loss_content(run: Run) -> Iterator[Hit]:
    for at, invocation in enumerate(run.invocations):
        if invocation.output_slots is not None:
            continue
        first = len(invocation.prompt_ids)
        for number, s in enumerate(invocation.segments or ()):
            if s.kind in FOREIGN and s.stop > first:
                start = max(s.start - first, 0)
                trained = invocation.loss_mask()[start : s.stop - first]
                if trained.any():
                    index = start + int(trained.argmax())
                    message = f"{_name(number, s)} holds output[{index}], which is trained"
                    yield Hit(at, message, "output_loss_mask", "false", "true")
                    break
