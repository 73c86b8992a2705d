"""Rules about where a context comes from: parent, relation, and what each relation promises about ids."""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

from collections.abc import Iterator

from memopd_trace.causes import explain
from memopd_trace.invocation import IDS, Invocation
from memopd_trace.lineage import common_prefix, final_ids, inherited, state_difference
from memopd_trace.rules.batch import Batch
from memopd_trace.rules.episode import Run
from memopd_trace.rules.registry import Hit, rule

BUILDS_ON_OUTPUT = ("extend", "rewrite", "spawn")  # relations that take the parent's output as a fact


@rule(
    "E-PARENT-INDEX",
    "the parent is not an earlier row",
    phase="batch",
    clause="`parent_index` MUST be null or the index of an earlier row of the episode.",
    columns=("parent_index",),
)
def parent_index(b: Batch) -> Iterator[Hit]:
    parent, index = b.numbers("parent_index"), b.numbers("invocation_index")
    bad = b.given("parent_index") & ((parent < 0) | (parent >= index))
    yield from b.row_hits(bad, "parent_index", "the parent is no earlier row", expected="0 to invocation_index - 1")


@rule(
    "E-ROOT-PARENT",
    "a root with a parent",
    phase="batch",
    clause="A row whose `relation` is `root` MUST have no `parent_index`.",
    columns=("relation", "parent_index"),
    needs=("relation",),
)
def root_parent(b: Batch) -> Iterator[Hit]:
    bad = b.equals("relation", "root") & b.given("parent_index")
    yield from b.row_hits(bad, "parent_index", "a root has no parent", expected="null")


@rule(
    "E-PARENT-MISSING",
    "a relation without a parent",
    phase="batch",
    clause="A row whose `relation` is other than `root` MUST have a `parent_index`.",
    columns=("relation", "parent_index"),
    needs=("relation",),
)
def parent_missing(b: Batch) -> Iterator[Hit]:
    bad = b.given("relation") & ~b.equals("relation", "root") & ~b.given("parent_index")
    yield from b.row_hits(bad, "relation", "this relation has no parent_index", expected="a parent_index, or root")


@rule(
    "E-RELATION-MISSING",
    "a parent without a relation",
    phase="batch",
    clause="A row with a `parent_index` MUST have a `relation`.",
    columns=("relation", "parent_index"),
    needs=("parent_index",),
)
def relation_missing(b: Batch) -> Iterator[Hit]:
    bad = b.given("parent_index") & ~b.given("relation")
    yield from b.row_hits(bad, "relation", "a parent is given, how it is followed is not", expected="a relation")


@rule(
    "E-REWRITE-UNDECLARED",
    "a rewrite that does not say what it did, or how that is known",
    phase="batch",
    clause="A row whose `relation` is `rewrite` MUST have a `rewrite_kind` and a `rewrite_evidence`.",
    columns=("relation", "rewrite_kind", "rewrite_evidence"),
    needs=("relation",),
    hint="where the kind is not known, `opaque` says so",
)
def rewrite_undeclared(b: Batch) -> Iterator[Hit]:
    for name in ("rewrite_kind", "rewrite_evidence"):
        bad = b.equals("relation", "rewrite") & ~b.given(name)
        yield from b.row_hits(bad, name, f"a rewrite without {name}", expected="a value")


@rule(
    "W-REWRITE-STRAY",
    "a rewrite kind on a row that is no rewrite",
    phase="batch",
    clause="`rewrite_kind` SHOULD be null where `relation` is not `rewrite`.",
    columns=("relation", "rewrite_kind"),
    needs=("rewrite_kind",),
)
def rewrite_stray(b: Batch) -> Iterator[Hit]:
    bad = b.given("rewrite_kind") & ~b.equals("relation", "rewrite")
    yield from b.row_hits(bad, "rewrite_kind", "rewrite_kind on a row that is no rewrite", expected="null")


@rule(
    "E-DISCONTINUITY",
    "the prompt does not begin with its parent's ids, and no rewrite is declared",
    phase="episode",
    clause="The prompt of an `extend` row MUST begin with the parent's prompt and output, id for id.",
    columns=("relation", "parent_index", "output_slots"),
    needs=("relation",),
    hint="record what happened: relation 'rewrite' and its rewrite_kind; the row itself may be true",
)
def discontinuity(run: Run) -> Iterator[Hit]:
    for at, child in enumerate(run.invocations):
        parent = run.parent(child) if child.relation == "extend" else None
        if parent is None:
            continue
        if inherited(parent, child) == len(parent):
            continue
        before = final_ids(parent)
        model = run.model(child)
        d = explain(parent, child, model.tokenizer.bos_id if model else None, run.pieces(child))
        message = f"prompt differs from invocation {child.parent_index} at index {d.index}"
        message += f"; likely {d.cause}: {d.detail}"
        yield Hit(at, message, "prompt_ids", _around(before, d.index), _around(child.prompt_ids, d.index))


def _around(ids: IDS, index: int) -> str:
    """The ids from `index` on, a few of them."""
    shown = ", ".join(str(i) for i in ids[index : index + 6])
    more = len(ids) - index - 6
    return f"[{index}:] {shown}" + (f", … ({more} more)" if more > 0 else "") if shown else "no more ids"


def _fits(invocation: Invocation) -> bool:
    arrays = (invocation.position_ids, invocation.visible_from, invocation.visible_until)
    return all(a is None or len(a) == len(invocation) for a in arrays)


@rule(
    "E-EXTEND-STATE",
    "an extension changes positions, visibility or media of what it shares",
    phase="episode",
    clause="An `extend` row MUST keep positions, visibility and media of what it shares with its parent.",
    columns=(
        "relation", "parent_index", "position_ids", "visible_from", "visible_until", "output_slots", "media",
    ),
    needs=("position_ids", "visible_from", "visible_until", "media"),
    hint="equal ids in another state are a rewrite: the parent's keys and values would not serve this call",
)  # fmt: skip
def extend_state(run: Run) -> Iterator[Hit]:
    for at, child in enumerate(run.invocations):
        parent = run.parent(child) if child.relation == "extend" else None
        if parent is None:
            continue
        if not (_fits(parent) and _fits(child)):  # E-LENGTH-SEQUENCE speaks of it
            continue
        if inherited(parent, child) < len(parent):
            continue
        name = state_difference(parent, child)
        if name is not None:
            message = f"{name} gives {len(parent)} shared tokens another state than invocation {child.parent_index}"
            yield Hit(at, message, name, "the parent's values")


@rule(
    "E-RETRY-PROMPT",
    "a retry with another prompt",
    phase="episode",
    clause="The prompt of a `retry` row MUST be its parent's prompt, id for id.",
    columns=("relation", "parent_index"),
    needs=("relation",),
    hint="with another prompt it is a rewrite or a fork of the attempt before",
)
def retry_prompt(run: Run) -> Iterator[Hit]:
    for at, child in enumerate(run.invocations):
        parent = run.parent(child) if child.relation == "retry" else None
        if parent is None:
            continue
        a, b = parent.prompt_ids, child.prompt_ids
        same = common_prefix(a, b)
        if not same == len(a) == len(b):
            message = f"the prompt differs from invocation {child.parent_index} at index {same}"
            yield Hit(at, message, "prompt_ids", _around(a, same), _around(b, same))


@rule(
    "E-FORK-PREFIX",
    "a fork that shares nothing with its parent's prompt",
    phase="episode",
    clause="A `fork` row's prompt MUST share a prefix of at least one token with its parent's prompt.",
    columns=("relation", "parent_index"),
    needs=("relation",),
)
def fork_prefix(run: Run) -> Iterator[Hit]:
    for at, child in enumerate(run.invocations):
        parent = run.parent(child) if child.relation == "fork" else None
        if parent is not None and common_prefix(parent.prompt_ids, child.prompt_ids) == 0:
            message = f"the prompt shares no first token with invocation {child.parent_index}"
            yield Hit(at, message, "prompt_ids", _around(parent.prompt_ids, 0), _around(child.prompt_ids, 0))


@rule(
    "E-PARENT-REJECTED",
    "a rejected attempt is the parent of a later call",
    phase="episode",
    clause="A row with `accepted` = false MUST NOT be the parent of an `extend`, `rewrite` or `spawn` row.",
    columns=("relation", "parent_index", "accepted"),
    needs=("accepted",),
    hint="the accepted attempt is the parent; a retry may name the rejected one",
)
def parent_rejected(run: Run) -> Iterator[Hit]:
    for at, child in enumerate(run.invocations):
        parent = run.parent(child) if child.relation in BUILDS_ON_OUTPUT else None
        if parent is not None and parent.accepted is False:
            message = f"{child.relation} of invocation {child.parent_index}, which was rejected"
            yield Hit(at, message, "parent_index", "an accepted attempt", str(child.parent_index))


@rule(
    "E-EPISODE-CONSTANT",
    "one episode belongs to two groups or tasks",
    phase="episode",
    clause="`group_id` and `task_id` MUST be the same on all rows of an episode.",
    columns=("group_id", "task_id"),
)
def episode_constant(run: Run) -> Iterator[Hit]:
    for name in ("group_id", "task_id"):
        first = getattr(run.invocations[0], name)
        for at, invocation in enumerate(run.invocations):
            value = getattr(invocation, name)
            if value != first:
                yield Hit(at, f"{name} changes within the episode", name, str(first or "null"), str(value or "null"))
                break
