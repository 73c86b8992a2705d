"""Rules about how turns stand in a prompt: control ids in what others wrote, separators, calls that are not there."""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memopd_trace.invocation import IDS, Invocation, Segment
from memopd_trace.lineage import common_prefix, final_ids, inherited
from memopd_trace.pieces import Pieces
from memopd_trace.rules.episode import Run
from memopd_trace.rules.registry import Hit, rule
from memopd_trace.rules.segments import CONTENT
from memopd_trace.rules.text import other_tokenizer

MAX_HEADER = 16  # ids of the header with which a template opens the model's turn


def _controls(run: Run, invocation: Invocation) -> NDArray[np.int32]:
    """The ids that steer the row's model: those that the metadata names, and the tokenizer's."""
    model, pieces = run.model(invocation), run.pieces(invocation)
    named = model.tokenizer.controls if model else []
    return np.union1d(np.array(named, np.int32), pieces.controls if pieces else []).astype(np.int32)


def _stops(run: Run, invocation: Invocation) -> list[int]:
    model = run.model(invocation)
    return model.tokenizer.stops if model else []


@rule(
    "W-CONTROL-IN-CONTENT",
    "a control id in text that came from outside",
    phase="episode",
    clause="A `task`, `user`, `observation` or `tool_result` segment SHOULD hold no control id but those of its frame.",
    columns=("segments", "output_slots", "model_id"),
    needs=("segments",),
    hint="text such as '<|im_end|>' was encoded as the control id; or a segment holds several turns: give each its own",
)
def control_in_content(run: Run) -> Iterator[Hit]:
    controls: dict[str, NDArray[np.int32]] = {}
    for at, child in enumerate(run.invocations):
        if child.model_id not in controls:
            controls[child.model_id] = _controls(run, child)
        for number, s in enumerate(child.segments or ()):
            offset = _stray_control(child, s, controls[child.model_id], run.pieces(child))
            if offset is not None:
                message = f"segments[{number}] '{s.kind}' holds a control id at offset {offset}"
                yield Hit(at, message, "segments", "text", str(final_ids(child)[s.start + offset]))
                break


def _stray_control(child: Invocation, s: Segment, controls: NDArray[np.int32], pieces: Pieces | None) -> int | None:
    """The offset of the first control id of a content segment that is no frame: a frame begins with control ids (a
    tokenizer knows them all), and may then end with one, and one id of white space behind it."""
    if s.kind not in CONTENT or s.source_index is not None or not 0 <= s.start < s.stop <= len(child):
        return None
    ids = final_ids(child)[s.start : s.stop]
    steers = np.isin(ids, controls)
    if not steers.any():
        return None
    head = _head(ids, steers, pieces)
    inner = np.flatnonzero(steers[head:]) + head
    if (head or pieces is None) and len(inner) and inner[-1] >= len(steers) - 2:
        inner = inner[:-1]
    return int(inner[0]) if len(inner) else None


def _head(ids: IDS, steers: NDArray[np.bool_], pieces: Pieces | None) -> int:
    """The length of the control ids with which a segment begins, white space in front of each included: what stands
    between two turns is often written with the second. Without a tokenizer any id between two of them counts."""
    at = 0
    while at < len(ids):
        step = 1 if steers[at] else 2
        blank = step == 2 and (_blank(pieces, ids[at]) if pieces else at > 0)
        if step == 2 and not (blank and steers[at + 1 : at + 2].any()):
            break
        at += step
    return at


def _blank(pieces: Pieces, token: int) -> bool:
    """Whether an id is white space. Its text says so: a piece may be written in signs for bytes."""
    text = pieces.text([token])
    return bool(text) and not text.strip()


def _extensions(run: Run) -> Iterator[tuple[int, Invocation, Invocation, Pieces]]:
    """(number in the run, row, parent, the tokenizer's pieces) of every `extend` row that is one."""
    for at, child in enumerate(run.invocations):
        parent, pieces = run.parent(child), run.pieces(child)
        if child.relation != "extend" or parent is None or pieces is None:
            continue
        if inherited(parent, child) == len(parent):
            yield at, child, parent, pieces


@rule(
    "W-SEPARATOR-MISSING",
    "what stands between turns elsewhere is missing behind an output",
    phase="episode",
    clause="Between an output's stop id and the control id behind it, a prompt SHOULD have the white space that stands "
    "there elsewhere in it.",
    columns=("relation", "parent_index", "output_slots", "model_id"),
    needs=("relation",),
    hint="the next turn was rendered alone; the row is true, but training and serving by the template will not agree",
    wants="tokenizer",
    unless=other_tokenizer,
)
def separator_missing(run: Run) -> Iterator[Hit]:
    ends: dict[int, set[int]] = {}  # of each row, where outputs end in its prompt
    for at, child, parent, pieces in _extensions(run):
        end = len(parent) - 1
        ends[child.invocation_index] = own = ends.get(parent.invocation_index, set()) | {end}
        if parent.output_ids[-1:].tolist() and parent.output_ids[-1] in _stops(run, child):
            between = _separator(child.prompt_ids, end, own, pieces.controls)
            if between is not None and _blank(pieces, between):
                message = f"no separator behind the output of invocation {child.parent_index}, at index {end + 1}"
                yield Hit(at, message, "prompt_ids", str(between), str(child.prompt_ids[end + 1]))


def _separator(prompt: IDS, end: int, ends: set[int], controls: NDArray[np.int32]) -> int | None:
    """The one id that elsewhere stands between the id at `end` and the control id that here follows it at once."""
    if end + 1 >= len(prompt) or prompt[end + 1] not in controls:
        return None
    places = np.setdiff1d(np.flatnonzero(prompt[:-2] == prompt[end]), sorted(ends))
    between, behind = prompt[places + 1], prompt[places + 2]
    if (between == prompt[end + 1]).any():
        return None
    found = np.unique(between[behind == prompt[end + 1]])
    return int(found[0]) if len(found) == 1 else None


@rule(
    "W-CALL-MISSING",
    "a turn of the model for which there is no call",
    phase="episode",
    clause="A turn of the model that an `extend` row adds to its parent's state SHOULD be a recorded output.",
    columns=("relation", "parent_index", "output_slots", "model_id"),
    needs=("relation",),
    hint="a call was lost, and what it sampled counts as given: leave the episode out",
    wants="tokenizer",
    unless=other_tokenizer,
)
def call_missing(run: Run) -> Iterator[Hit]:
    for at, child, parent, pieces in _extensions(run):
        new = child.prompt_ids[len(parent) :]
        header = _header(parent.prompt_ids, new, pieces.controls)
        stops = np.isin(new, _stops(run, child))
        for start in _places(new[: len(new) - len(header)], header):
            if stops[start + len(header) : len(new) - len(header)].any():
                index = len(parent) + start
                message = f"the model's turn at index {index} of the prompt is no recorded output"
                yield Hit(at, message, "prompt_ids", "a call for each turn", f"{len(header)} header ids at {index}")
                break


def _header(prompt: IDS, new: IDS, controls: NDArray[np.int32]) -> IDS:
    """The ids from the last control id on with which both prompts open the model's turn; none if there are none."""
    same = common_prefix(prompt[::-1], new[::-1][:MAX_HEADER])
    tail = new[len(new) - same :]
    steers = np.flatnonzero(np.isin(tail, controls))
    return tail[steers[-1] :] if len(steers) and len(tail) - steers[-1] > 1 else tail[:0]


def _places(ids: IDS, wanted: IDS) -> list[int]:
    """Where `wanted` stands in `ids`; nowhere if it is empty."""
    if not len(wanted) or len(ids) < len(wanted):
        return []
    starts = np.flatnonzero(ids[: len(ids) - len(wanted) + 1] == wanted[0])
    return [int(s) for s in starts if np.array_equal(ids[s : s + len(wanted)], wanted)]
