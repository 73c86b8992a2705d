"""How one state follows from another: prefix tests, and what probably happened where the prefix breaks.

An invocation's *final ids* are what its successor must begin with: prompt + output, or for in-place
generation the prompt with every output token written into its slot.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from memopd_trace.invocation import IDS, Invocation

Cause = Literal[
    "none",
    "unrelated",
    "cut_short",
    "double_bos",
    "truncated_left",
    "elided",
    "inserted",
    "replaced",
    "diverged",
    # told by `memopd_trace.causes`, from text or from what a call is made of
    "placeholder",
    "response_prefix",
    "retokenised",
    "reserialised",
    "double_encoded",
    "stripped_thinking",
    "separator",
    "whitespace",
    "controls",
    "system_inserted",
    "other_output",
]
STATE = ("position_ids", "visible_from", "visible_until", "media")
ANCHOR = 4  # ids that must agree again before a later stretch counts as the parent's
MAX_CANDIDATES = 512  # alignments tried, so that one repeated id cannot make this quadratic


@dataclass(frozen=True, slots=True)
class Difference:
    """Why a prompt does not begin with its parent's ids.

    `index` is the first id that differs (the common prefix's length); `detail` one clause for a person. The
    cause is a guess from ids alone:

        none            nothing differs: the prompt begins with all of the parent's ids
        unrelated       not even the first id agrees, and no later stretch does
        cut_short       the prompt ends inside the parent: a rewind, or a cut on the right
        double_bos      one more begin-of-sequence id in front, then all of the parent
        truncated_left  the parent's first ids are gone, the rest follows at once
        elided          a stretch inside the parent is gone, the rest follows at once
        inserted        ids stand between two stretches of the parent, nothing is gone
        replaced        a stretch became other ids, and the parent's end comes back after it (re-encoded text,
                        re-serialised tool call, summary in place)
        diverged        the prompts agree up to `index`, and the rest of the parent does not follow there; ids of it
                        may stand further on

    `memopd_trace.causes.explain` knows more: it compares the calls and, given a tokenizer, their texts.
    """

    cause: Cause
    index: int
    detail: str


def common_prefix(a: IDS, b: IDS) -> int:
    """How many leading ids of `a` and `b` (int32 arrays) are equal."""
    n = min(len(a), len(b))
    if a[:n].tobytes() == b[:n].tobytes():  # the usual case, and for short ones twice as fast
        return n
    return int((a[:n] != b[:n]).argmax())  # the first true one


def is_prefix(a: IDS, b: IDS) -> bool:
    """Whether `a` is not empty, and `b` begins with all of it."""
    return 0 < len(a) == common_prefix(a, b)


def inherited(parent: Invocation, child: Invocation) -> int:
    """How many leading ids of the child's prompt are the parent's final ids, which are not copied for it."""
    if parent.output_slots is not None:
        return common_prefix(final_ids(parent), child.prompt_ids)
    same = common_prefix(parent.prompt_ids, child.prompt_ids)
    if same < len(parent.prompt_ids):
        return same
    return same + common_prefix(parent.output_ids, child.prompt_ids[same:])


def final_ids(invocation: Invocation) -> IDS:
    """int32[n]: prompt + output, or the prompt with the output in its slots (in-place generation)."""
    slots = invocation.output_slots
    if slots is None:
        return invocation.sequence_ids
    ids = invocation.prompt_ids.copy()
    if len(slots) == len(invocation.output_ids):
        inside = (slots >= 0) & (slots < len(ids))
        ids[slots[inside]] = invocation.output_ids[inside]
    return ids


def is_extension(parent: Invocation, child: Invocation) -> bool:
    """Whether the child's prompt starts with the parent's final ids, at the same positions, under the same
    visibility and media: whether a key/value cache of the parent would serve the child."""
    return inherited(parent, child) == len(parent) and not state_difference(parent, child)


def state_difference(parent: Invocation, child: Invocation) -> str | None:
    """The first state column (other than the ids) whose part shared with the parent differs, or `None`.

    A key that the parent's last query still saw may be evicted later in the child; one that was evicted
    inside the parent must have been evicted at the same query. No query of the parent's may see a key behind the
    parent's end. An array of the wrong length counts as different.
    """
    if all(getattr(i, name) is None for i in (parent, child) for name in STATE):  # defaults agree
        return None
    n = len(parent)
    parent_from, parent_until = parent.visibility()
    child_from, child_until = child.visibility()
    if not np.array_equal(parent.positions(), child.positions()[:n]):
        return "position_ids"
    if not np.array_equal(parent_from, child_from[:n]) or (child_from[n:] < n).any():
        return "visible_from"
    if not np.array_equal(parent_until, np.minimum(child_until[:n], n)):
        return "visible_until"
    runs = [(m.start, m.stop, m.sha256) for m in parent.media or ()]
    kept = [(m.start, m.stop, m.sha256) for m in child.media or () if m.start < n]
    return None if runs == kept else "media"


def shareable_length(n: int, visible_from: IDS | None, visible_until: IDS | None) -> int:
    """How many leading tokens of a sequence of n another one may share, by its visibility (int32[n], `None` = default):
    up to the first token that has another than the default, and before the first query that it lets look ahead."""
    limit = n
    if visible_until is not None:
        limit = min(limit, first_true(visible_until != n, n))
    if visible_from is not None:
        other = visible_from != np.arange(n)
        if other.any():
            limit = min(limit, first_true(other, n), max(0, int(visible_from[other].min())))
    return limit


def realm(invocation: Invocation) -> tuple[bytes, NDArray[np.int16] | None]:
    """(what two invocations must have in common to share any token: the digest of model and media; the recorded expert
    routes [n-1, layers * k], if there are any). Routes of an unknown width are part of the digest instead."""
    digest = hashlib.sha256(invocation.model_id.encode())
    for media in invocation.media or ():
        digest.update(b"%d,%d" % (media.start, media.stop) + media.sha256)
    routes, steps = invocation.routed_experts, max(1, len(invocation) - 1)
    if routes is not None and len(routes) % steps:
        digest.update(routes.tobytes())
        routes = None
    return digest.digest(), None if routes is None else routes.reshape(steps, -1)


def first_true(flags: NDArray[np.bool_], default: int) -> int:
    """Index of the first true flag."""
    return int(flags.argmax()) if flags.any() else default


def many(ids: int) -> str:
    """So many ids, in words."""
    return "1 id" if ids == 1 else f"{ids} ids"


def explain_difference(parent_ids: IDS, prompt_ids: IDS, bos_id: int | None = None) -> Difference:
    """Where and probably why `prompt_ids` is no extension of `parent_ids` (the parent's final ids)."""
    at = common_prefix(parent_ids, prompt_ids)
    lost, new = parent_ids[at:], prompt_ids[at:]
    if not len(lost):
        return Difference("none", at, "the prompt begins with all of the parent's ids")
    if not len(new):
        return Difference("cut_short", at, f"the prompt ends {many(len(lost))} before the parent does")
    if bos_id is not None and _is_double_bos(parent_ids, prompt_ids, bos_id):
        return Difference("double_bos", at, f"begin-of-sequence id {bos_id} stands twice in front")
    gap = _find(new, lost)
    if gap is not None:
        stand = "stands" if gap == 1 else "stand"
        return Difference("inserted", at, f"{many(gap)} {stand} in front of the parent's id {at}")
    kept = _overlap(lost, new)
    if kept:
        gone = len(lost) - kept
        if at == 0:
            first = "first id is" if gone == 1 else f"first {gone} ids are"
            return Difference("truncated_left", at, f"the parent's {first} gone, the rest follows")
        which = f"id {at} is" if gone == 1 else f"ids {at} to {at + gone - 1} are"
        return Difference("elided", at, f"the parent's {which} gone, the rest follows")
    middle = _replaced_middle(lost, new)
    if middle is not None:
        others = "1 other" if middle[1] == 1 else f"{middle[1]} others"
        return Difference("replaced", at, f"{many(middle[0])} of the parent became {others}, then it goes on")
    if at == 0:
        return Difference("unrelated", at, "the prompt shares nothing with the parent from the first id on")
    return Difference("diverged", at, f"the parent's ids from index {at} on do not follow")


def _is_double_bos(parent_ids: IDS, prompt_ids: IDS, bos_id: int) -> bool:
    doubled = len(prompt_ids) > 1 and prompt_ids[0] == prompt_ids[1] == bos_id
    return bool(doubled and common_prefix(parent_ids, prompt_ids[1:]) == len(parent_ids))


def _overlap(lost: IDS, new: IDS) -> int:
    """The most trailing ids of `lost` (not all) with which `new` begins; 0 = too few to mean anything."""
    starts = np.flatnonzero(lost[1:] == new[0]) + 1
    starts = starts[len(lost) - starts <= len(new)]
    for start in starts[:MAX_CANDIDATES]:
        kept = len(lost) - int(start)
        if np.array_equal(lost[start:], new[:kept]) and (kept >= ANCHOR or len(lost) <= 2 * ANCHOR):
            return kept
    return 0


def _find(new: IDS, lost: IDS) -> int | None:
    """Where all of `lost` comes back in `new`; a short `lost` counts only close by."""
    starts = np.flatnonzero(new == lost[0])
    starts = starts[starts + len(lost) <= len(new)]
    for start in starts[:MAX_CANDIDATES]:
        near = len(lost) >= ANCHOR or start <= len(lost)
        if near and np.array_equal(new[start : start + len(lost)], lost):
            return int(start)
    return None


def _replaced_middle(lost: IDS, new: IDS) -> tuple[int, int] | None:
    """(ids gone, ids that stand there instead) if `lost` ends with a stretch that comes back in `new`.

    A short `lost` may come back with its last id alone, but then close by.
    """
    short = len(lost) <= 2 * ANCHOR
    anchor = 1 if short else ANCHOR
    reach = new[: 2 * len(lost)] if short else new
    if len(lost) <= anchor or len(reach) < anchor:
        return None
    windows: NDArray[np.bool_] = (sliding_window_view(reach, anchor) == lost[-anchor:]).all(axis=1)
    best: tuple[int, int] | None = None
    for start in np.flatnonzero(windows)[:MAX_CANDIDATES]:
        back = _common_suffix(lost[:-anchor], new[:start])
        gone, instead = len(lost) - anchor - back, int(start) - back
        if best is None or gone < best[0]:
            best = gone, instead
    return best


def _common_suffix(a: IDS, b: IDS) -> int:
    return common_prefix(a[::-1], b[::-1])
