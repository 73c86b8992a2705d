"""How an agent's next context follows from what went before: one short function a step.

Each gives a `Draft`: prompt ids with their segments (copies name their source, and are ones), the media that the copied
stretches hold, and the lineage columns. Nothing here knows what the validator thinks of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from memopd_trace.invocation import Invocation, Media
from memopd_trace.lineage import common_prefix, final_ids
from memopd_trace.record.prompt import Prompt
from memopd_trace.testing.values import BOS, FIRST_ID, PLACEHOLDER, REWRITES, STEPS, Plan

Rows = Sequence[Invocation]


@dataclass(slots=True)
class Draft:
    """A prompt being put together. The first `shared` tokens stay in the parent's state."""

    parent: Invocation | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    prompt: Prompt = field(default_factory=Prompt)
    media: list[Media] = field(default_factory=list)
    shared: int = 0

    def new(self, plan: Plan, draw: st.DrawFn, kind: str, least: int = 1, most: int = 4) -> Draft:
        """Append ids that were not there before, at times a framed run of placeholders."""
        self.prompt.add(kind, plan.ids(draw, least, most))
        if plan.may("media", draw):
            self.prompt.add(kind, plan.ids(draw, 1, 1))
            start = len(self.prompt)
            self.prompt.add(kind, [PLACEHOLDER] * draw(st.integers(1, 3)))
            content = draw(st.binary(min_size=32, max_size=32))
            mime = draw(st.sampled_from([None, "image/png", "audio/wav"]))
            self.media.append(Media(start, len(self.prompt), content, mime, draw(st.none() | plan.text())))
            self.prompt.add(kind, plan.ids(draw, 1, 1))
        return self

    def copy(self, kind: str, source: Invocation, start: int = 0, stop: int | None = None) -> Draft:
        """Append about `[start, stop)` of an earlier row's final ids, with its media; no run and no frame is cut."""
        start, stop = (_whole(source, at) for at in (start, len(source) if stop is None else stop))
        self._carry(source, start, stop)
        self.prompt.copy(kind, source, start, stop)
        return self

    def repeat(self, source: Invocation, stop: int | None = None) -> Draft:
        """Append about the first `stop` ids of an earlier row's prompt as it was given, of which slots are no copy."""
        stop = _whole(source, len(source.prompt_ids) if stop is None else stop)
        self._carry(source, 0, stop)
        self.prompt.add("history", source.prompt_ids[:stop])
        return self

    def _carry(self, source: Invocation, start: int, stop: int) -> None:
        offset = len(self.prompt) - start
        for m in source.media or ():
            if start <= m.start and m.stop <= stop:
                self.media.append(Media(m.start + offset, m.stop + offset, m.sha256, m.mime, m.uri))


def _whole(source: Invocation, at: int) -> int:
    """`at`, or the end of the framed media run that it would cut."""
    return next((m.stop + 1 for m in source.media or () if m.start - 1 < at < m.stop + 1), at)


def root(plan: Plan, draw: st.DrawFn, columns: dict[str, Any]) -> Draft:
    """A first context."""
    draft = Draft(columns={"relation": "root", **columns})
    if plan.tokenizer.bos_id is not None and draw(st.booleans()):
        draft.prompt.add("template", [BOS])
    return draft.new(plan, draw, "system").new(plan, draw, "task").new(plan, draw, "user")


def follow(plan: Plan, draw: st.DrawFn, rows: list[Invocation]) -> Draft:
    """The context of the next call of an episode; a retry marks the attempt before it in `rows` as rejected."""
    step = draw(st.sampled_from([s for s in STEPS if s in plan.kinds]))
    if step == "retry":
        return _retry(draw, rows)
    if step == "fork":
        return _fork(plan, draw, draw(st.sampled_from(rows)))
    accepted = [row for row in rows if row.accepted is not False]
    parent = draw(st.sampled_from([accepted[-1], *accepted]))
    if step == "extend":
        return _extend(plan, draw, parent, rows)
    if step == "spawn":
        return _spawn(plan, draw, parent, len(rows))
    assert step in REWRITES
    return _rewrite(plan, draw, parent, rows, step)


def _lineage(parent: Invocation, relation: str, **columns: Any) -> dict[str, Any]:
    kept = {"model_id": parent.model_id, "agent_id": parent.agent_id}
    return {**kept, "parent_index": parent.invocation_index, "relation": relation, **columns}


def _extend(plan: Plan, draw: st.DrawFn, parent: Invocation, rows: Rows) -> Draft:
    draft = Draft(parent, _lineage(parent, "extend"), shared=len(parent)).copy("history", parent)
    draft.new(plan, draw, "observation", least=0)
    while any(row.parent_index == parent.invocation_index and _same(row, draft) for row in rows):
        draft.prompt.add("observation", [FIRST_ID])  # the same call again would be another attempt of it
    return draft


def _same(row: Invocation, draft: Draft) -> bool:
    return np.array_equal(row.prompt_ids, draft.prompt.ids)


def _fork(plan: Plan, draw: st.DrawFn, parent: Invocation) -> Draft:
    stop = draw(st.integers(1, len(parent.prompt_ids)))
    draft = Draft(parent, _lineage(parent, "fork"))
    if parent.output_slots is None:
        draft.copy("history", parent, 0, stop)
    else:
        draft.repeat(parent, stop)
    draft.shared = len(draft.prompt)
    return draft.new(plan, draw, "user", least=2)


def _spawn(plan: Plan, draw: st.DrawFn, parent: Invocation, index: int) -> Draft:
    columns = _lineage(
        parent, "spawn", agent_id=f"sub-{index}", model_id=draw(st.sampled_from([*plan.metadata.models]))
    )
    draft = Draft(parent, columns).new(plan, draw, "system")
    return draft.copy("task", parent, *_answer(parent)).new(plan, draw, "user", least=2)


def _retry(draw: st.DrawFn, rows: list[Invocation]) -> Draft:
    """The last call again; the attempt before is rejected, and trains nothing."""
    last = rows[-1]
    nothing = np.zeros(len(last.output_ids), bool)
    rows[-1] = last.replace(accepted=False, output_loss_mask=draw(st.sampled_from([None, nothing])))
    columns = _lineage(last, "retry", attempt=(last.attempt or 0) + 1)
    return Draft(last, columns, shared=len(last.prompt_ids)).repeat(last)


def _rewrite(plan: Plan, draw: st.DrawFn, parent: Invocation, rows: Rows, step: str) -> Draft:
    kind = step
    if step == "reencode":
        kind = draw(st.sampled_from(["reencode", "reserialise"]))
    elif step == "opaque" and draw(st.booleans()):
        kind = f"x_{draw(plan.text())}"
    evidence = draw(st.sampled_from(["explicit", "inferred"]))
    columns = _lineage(parent, "rewrite", rewrite_kind=kind, rewrite_evidence=evidence)
    draft = _REWRITTEN[step](plan, draw, Draft(parent, columns), parent, rows[0]).new(plan, draw, "user", least=2)
    if not _goes_on(rows, parent, draft):
        return draft
    begun = {int(final_ids(row)[0]) for row in rows}  # by chance it was an extension, or one of another call
    draft = Draft(parent, columns | {"rewrite_kind": "opaque"})
    draft.prompt.add("memory", [next(i for i in range(FIRST_ID, plan.tokenizer.size) if i not in begun)])
    return draft.new(plan, draw, "user", least=2)


def _goes_on(rows: Rows, parent: Invocation, draft: Draft) -> bool:
    """Whether the prompt begins with all of the parent, or of a row that the parent does not go back to."""
    back, index = set(), parent.parent_index
    while index is not None:
        back.add(index)
        index = rows[index].parent_index
    others = (final_ids(row) for row in rows if row.invocation_index not in back)
    return any(common_prefix(ids, draft.prompt.ids) == len(ids) for ids in others)


Rewriter = Callable[[Plan, st.DrawFn, Draft, Invocation, Invocation], Draft]


def _answer(parent: Invocation) -> tuple[int, int]:
    """Where the parent's output stands among its final ids."""
    if parent.output_slots is not None:
        return int(parent.output_slots.min()), int(parent.output_slots.max()) + 1
    return len(parent.prompt_ids), len(parent)


def _memory(plan: Plan, draw: st.DrawFn, draft: Draft, parent: Invocation, first: Invocation) -> Draft:
    return draft.copy("task", first, 0, draw(st.integers(1, 3))).copy("memory", parent, *_answer(parent))


def _cut(draw: st.DrawFn, parent: Invocation) -> tuple[int, int]:
    """A stretch inside the parent that leaves something on both sides."""
    start = draw(st.integers(1, len(parent) - 2))
    return start, draw(st.integers(start + 1, len(parent) - 1))


def _summary(plan: Plan, draw: st.DrawFn, draft: Draft, parent: Invocation, first: Invocation) -> Draft:
    start, stop = _cut(draw, parent)
    return draft.copy("history", parent, 0, start).new(plan, draw, "memory").copy("history", parent, stop)


def _truncate_left(plan: Plan, draw: st.DrawFn, draft: Draft, parent: Invocation, first: Invocation) -> Draft:
    return draft.copy("history", parent, draw(st.integers(1, len(parent) - 1)))


def _elide(plan: Plan, draw: st.DrawFn, draft: Draft, parent: Invocation, first: Invocation) -> Draft:
    start, stop = _cut(draw, parent)
    return draft.copy("history", parent, 0, start).copy("history", parent, stop)


def _strip_thinking(plan: Plan, draw: st.DrawFn, draft: Draft, parent: Invocation, first: Invocation) -> Draft:
    start, stop = _answer(parent)
    if start == stop:
        return _elide(plan, draw, draft, parent, first)
    kept = draw(st.integers(start + 1, stop))
    return draft.copy("history", parent, 0, start).copy("action", parent, kept)


def _rewind(plan: Plan, draw: st.DrawFn, draft: Draft, parent: Invocation, first: Invocation) -> Draft:
    return draft.copy("history", parent, 0, draw(st.integers(1, len(parent) - 1)))


def _reset(plan: Plan, draw: st.DrawFn, draft: Draft, parent: Invocation, first: Invocation) -> Draft:
    return draft.copy("task", first, 0, draw(st.integers(1, 3)))


def _opaque(plan: Plan, draw: st.DrawFn, draft: Draft, parent: Invocation, first: Invocation) -> Draft:
    return draft.new(plan, draw, "memory", least=1)


_REWRITTEN: dict[str, Rewriter] = {
    "memory": _memory,
    "summary": _summary,
    "truncate_left": _truncate_left,
    "elide": _elide,
    "strip_thinking": _strip_thinking,
    "reencode": _summary,
    "rewind": _rewind,
    "reset": _reset,
    "opaque": _opaque,
}
