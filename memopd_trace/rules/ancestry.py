"""Rules about which call a context goes on from, where the record is silent or the ids say otherwise; and attempts.

A call is looked for in a tree of the states of all earlier ones, as where lineage is inferred (`parents`).
"""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

from memopd_trace.causes import explain
from memopd_trace.invocation import Invocation
from memopd_trace.lineage import Cause, final_ids, inherited, state_difference
from memopd_trace.prefixtree import PrefixTree
from memopd_trace.rules.episode import Run
from memopd_trace.rules.registry import Hit, rule

MAX_BRANCHES = 8  # calls that are named as what one prompt goes on from
FREE = ("opaque", "rewind")  # rewrites that say nothing of how the prompt begins, or that go back to an earlier call

# causes that text leaves no doubt of, and the rewrites that may show them; the others are guesses or fit any rewrite
KINDS: dict[Cause, tuple[str, ...]] = {
    "retokenised": ("reencode",),
    "placeholder": ("reencode",),
    "reserialised": ("reserialise", "memory", "summary", "reset", "elide"),
    "double_encoded": ("reserialise", "memory", "summary", "reset", "elide"),
    "stripped_thinking": ("strip_thinking", "elide"),
    "separator": ("reencode", "reserialise"),
    "whitespace": ("reencode", "reserialise"),
    "controls": ("reencode", "reserialise"),
}


@rule(
    "W-REWRITE-KIND",
    "a rewrite that did something else than it says",
    phase="episode",
    clause="`rewrite_kind` SHOULD be what was done: a rewrite changes the parent's state, and as declared.",
    columns=(
        "relation", "parent_index", "rewrite_kind", "output_slots", "media", "position_ids", "visible_from",
        "visible_until",
    ),
    needs=("rewrite_kind",),
    hint="the row may be true and its label wrong; with a tokenizer more kinds can be told",
)  # fmt: skip
def rewrite_kind(run: Run) -> Iterator[Hit]:
    for at, child in enumerate(run.invocations):
        parent, kind = run.parent(child), child.rewrite_kind or "opaque"
        if child.relation != "rewrite" or parent is None:
            continue
        pieces, private = run.pieces(child), kind == "opaque" or kind.startswith("x_")
        if inherited(parent, child) == len(parent):
            if not state_difference(parent, child):
                yield Hit(at, f"declared '{kind}', and nothing of the parent changed", "relation", "extend", "rewrite")
        elif pieces is not None and not private:
            d = explain(parent, child, None, pieces)
            fits = KINDS.get(d.cause, () if kind == "reencode" else (kind,))
            if kind not in fits:
                message = f"declared '{kind}', ids and text show {d.cause}: {d.detail}"
                yield Hit(at, message, "rewrite_kind", " or ".join(fits) or "another kind", kind)


@rule(
    "W-PARENT-AMBIGUOUS",
    "several earlier calls could be the parent, and none is recorded",
    phase="episode",
    clause="Where a prompt begins with the states of calls of separate branches, its parent SHOULD be recorded.",
    columns=("relation", "parent_index", "output_slots", "accepted"),
    needs=(),
    hint="who guesses takes the longest; the first match would make another branch's answer this one's context",
)
def parent_ambiguous(run: Run) -> Iterator[Hit]:
    for at, longest, others in _followed(run, lambda i: i.relation is None and i.parent_index is None, {}):
        if others:
            names = ", ".join(str(i.invocation_index) for i in others)
            message = f"the prompt goes on from invocation {longest.invocation_index} (the longest), or from {names}"
            yield Hit(at, message, "parent_index", str(longest.invocation_index), "null")


@rule(
    "W-PARENT-OTHER",
    "the prompt goes on from another call than the recorded parent",
    phase="episode",
    clause="A row whose prompt begins with the state of a call on another branch SHOULD be recorded as its extension.",
    columns=("relation", "parent_index", "rewrite_kind", "output_slots", "accepted"),
    needs=("relation",),
    hint="a parent guessed too early, or a lineage lost on the way; a return to an earlier call is a 'rewind'",
)
def parent_other(run: Run) -> Iterator[Hit]:
    rows, guessed = {i.invocation_index: i for i in run.known}, dict[int, int]()
    for at, longest, _ in _followed(run, _claims_a_new_context, guessed):
        child = run.invocations[at]
        above = (rows.get(i) for i in _ancestors(child.parent_index, rows, guessed))
        if not any(i is not None and len(i) == len(longest) and inherited(i, child) == len(i) for i in above):
            message = f"{child.relation}, but the prompt begins with all {len(longest)} ids of"
            message += f" invocation {longest.invocation_index}"
            found = "null" if child.parent_index is None else str(child.parent_index)
            yield Hit(at, message, "parent_index", str(longest.invocation_index), found)


def _claims_a_new_context(child: Invocation) -> bool:
    if child.relation == "root":
        return child.invocation_index > 0
    kind = child.rewrite_kind or "opaque"
    return child.relation == "rewrite" and kind not in FREE and not kind.startswith("x_")


def _ancestors(index: int | None, rows: dict[int, Invocation], guessed: dict[int, int]) -> set[int]:
    """`index` and what it goes back to, by the recorded parents and those guessed."""
    found: set[int] = set()
    while index is not None and index not in found:
        found.add(index)
        row = rows.get(index)
        if row is None:
            break
        index = guessed.get(index) if row.parent_index is None else row.parent_index
    return found


def _followed(
    run: Run, asks: Callable[[Invocation], bool], guessed: dict[int, int]
) -> Iterator[tuple[int, Invocation, list[Invocation]]]:
    """For each row that `asks`, the longest earlier state with which its prompt begins, and the others that do and are
    no ancestors of that; a row without any lineage is taken to follow the longest, which `guessed` then tells."""
    if not any(asks(i) for i in run.invocations[1:]):
        return
    rows = {i.invocation_index: i for i in run.known}
    states = PrefixTree()
    for at, child in enumerate(run.invocations):
        asked = asks(child)
        if asked or (child.parent_index is None and child.relation is None):
            followed = (run.invocations[i] for _, i in states.match(child.prompt_ids).ends(MAX_BRANCHES))
            found = _branches(followed, rows, guessed)
            if found:
                guessed.setdefault(child.invocation_index, found[0].invocation_index)
            if found and asked:
                yield at, found[0], found[1:]
        if len(child.output_ids) and child.accepted is not False:
            states.add(final_ids(child), at)


def _branches(calls: Iterable[Invocation], rows: dict[int, Invocation], guessed: dict[int, int]) -> list[Invocation]:
    """Of `calls` those that are no ancestors of one in front of them."""
    found: list[Invocation] = []
    above: set[int] = set()
    for other in calls:
        if other.invocation_index not in above:
            above |= _ancestors(other.invocation_index, rows, guessed)
            found.append(other)
        if len(found) == MAX_BRANCHES:
            break
    return found


@rule(
    "E-ATTEMPT-DUPLICATE",
    "one attempt of a call stands there twice",
    phase="episode",
    clause="Attempts of one call (rows of equal prompt and parent, and their retries) MUST differ in `attempt`.",
    columns=("attempt", "relation", "parent_index"),
    needs=("attempt",),
    hint="a request that was sent again was recorded as two calls; keep one row, or number the attempts",
)
def attempt_duplicate(run: Run) -> Iterator[Hit]:
    family: dict[int, object] = {}
    first: dict[tuple[object, int], int] = {}
    for at, child in enumerate(run.invocations):
        own: object = child.invocation_index
        if child.relation == "retry":
            own = family.get(child.parent_index or 0, own)
        elif child.relation in ("extend", "rewrite"):
            own = child.parent_index, hashlib.sha256(child.prompt_ids.tobytes()).digest()
        family[child.invocation_index] = own
        if child.attempt is None:
            continue
        twin = first.setdefault((own, child.attempt), child.invocation_index)
        if twin != child.invocation_index:
            message = f"attempt {child.attempt} of the call of invocation {twin} again"
            yield Hit(at, message, "attempt", "another number", str(child.attempt))


@rule(
    "W-ATTEMPT-OPEN",
    "a call was tried again, and it is not said what became of the first attempt",
    phase="episode",
    clause="A row that has a `retry` SHOULD say by `accepted` whether it was used.",
    columns=("relation", "parent_index", "accepted"),
    needs=("relation",),
    hint="null counts as used, and both attempts are trained: set accepted to false where the retry stands for it",
)
def attempt_open(run: Run) -> Iterator[Hit]:
    place = {i.invocation_index: at for at, i in enumerate(run.invocations)}
    told: set[int] = set()
    for child in run.invocations:
        parent = run.parent(child)
        if child.relation != "retry" or parent is None or parent.accepted is not None:
            continue
        index = parent.invocation_index
        if index in place and index not in told:
            told.add(index)
            message = f"invocation {child.invocation_index} is a retry of it"
            yield Hit(place[index], message, "accepted", "true or false", "null")
