"""A draft becomes rows: ids from text where there are none, log-probabilities that mean something, lineage, order.

Everything here is alike for all formats, so that a converter only has to say what its log says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from memopd_trace.convert.behaviour import behaviour_of, make_fit
from memopd_trace.convert.chat import CannotRender, Renderer, rendered
from memopd_trace.convert.draft import Call, Chat, Draft
from memopd_trace.convert.lineage import Declared, resolve
from memopd_trace.convert.losses import Losses
from memopd_trace.invocation import IDS, Invocation
from memopd_trace.lineage import common_prefix
from memopd_trace.pieces import Pieces

MAX_EXTRA = 4096  # bytes of one value in `extra`; a larger one goes to the side file
MAX_TOKENS = 2**28  # of one episode, which is in memory whole
EMPTY_MAY_STAND = ("abort", "content_filter")


@dataclass(slots=True)
class Row:
    """A row, and what of its record is too large for it."""

    invocation: Invocation
    aside: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assembler:
    """What all episodes of one conversion share: the tokenizer, if one is given, and what the caller declares where
    the log is silent."""

    losses: Losses
    renderer: Renderer | None = None
    pieces: Pieces | None = None
    model_id: str | None = None
    logprob_kind: str | None = None

    def rows(self, draft: Draft) -> list[Row]:
        """The rows of an episode, counted; every call is a row or dropped with a reason."""
        ready: list[tuple[Call, Invocation]] = []
        tokens = 0
        calls = _once(draft.calls, self.losses)
        for call in in_order(calls, self.losses):
            self.losses.place = call.place
            row = self._row(call, draft, len(ready)) if tokens <= MAX_TOKENS else None
            tokens += len(row) if row is not None else 0
            if tokens > MAX_TOKENS:
                self.losses.drop(f"an episode of more than {MAX_TOKENS} tokens")
            elif row is not None:
                ready.append((call, row))
        if not ready:
            return []
        self.losses.place = ready[0][0].place
        words = [Declared(c.key, c.parent, c.relation, c.rewrite_kind, c.reasoned) for c, _ in ready]
        rows = [row for _, row in ready]
        columns = resolve(rows, words, self.losses, self.pieces)
        columns[-1] |= self._end(draft, rows)
        if len(rows) < len(calls):
            self.losses.gap("lost_calls", "calls that could not be converted", len(calls) - len(rows))
        self.losses.rows += len(rows)
        self.losses.episodes += 1
        done: list[Row] = []
        tools = None
        for (call, row), changes in zip(ready, columns, strict=True):
            tools = _tools_of(call, tools)
            small, large = _extra({**(draft.extra if not row.invocation_index else {}), **call.extra})
            for name, value in (*changes.items(), ("extra", small or None)):
                object.__setattr__(
                    row, name, value
                )  # the row is this function's alone; a copy would cost as much again
            done.append(Row(row, large))
        return done

    def _row(self, call: Call, draft: Draft, index: int) -> Invocation | None:
        ids = self._ids(call)
        if ids is None:
            return None
        prompt, output, source = ids
        if not len(prompt) or (
            not len(output) and call.finish_reason not in EMPTY_MAY_STAND and call.accepted is not False
        ):
            self.losses.drop("no output" if len(prompt) else "an empty prompt")
            return None
        make_fit(call, len(output), self.losses)
        behaviour = behaviour_of(call, len(output), source, self.logprob_kind, self.losses)
        if self.model_id is not None and call.model not in (None, self.model_id):
            call.extra["model"] = call.model
        return Invocation(
            episode_id=draft.episode_id,
            invocation_index=index,
            model_id=self.model_id or call.model or "unknown",
            prompt_ids=prompt,
            output_ids=output,
            group_id=draft.group_id,
            task_id=draft.task_id,
            agent_id=call.agent_id,
            attempt=call.attempt,
            accepted=call.accepted,
            output_logprobs=behaviour.logprobs,
            logprob_kind=behaviour.kind,
            output_sampled=call.sampled,
            output_loss_mask=behaviour.mask,
            sampling=call.sampling,
            policy_version=call.policy_version,
            output_policy_versions=call.output_policy_versions,
            finish_reason=call.finish_reason,
            token_source=source,
            reward=call.reward,
            rewards=_numbers(call.rewards, self.losses),
            **_mirrors(call),
            started_at=call.started_at,
            ended_at=call.ended_at,
        )

    def _ids(self, call: Call) -> tuple[IDS, IDS, str] | None:
        """(prompt ids, output ids, where they come from); `None` for a call that is dropped."""
        text: tuple[IDS, IDS, list[str]] | str | None = None
        if self.renderer is not None and call.prompt is not None and call.answer is not None:
            try:
                text = rendered(call, self.renderer)
            except CannotRender as error:
                text = str(error)
        if call.prompt_ids is not None and call.output_ids is not None:
            if isinstance(text, tuple):
                self._compare(call, text[0], text[1])
            self._count(call, call.prompt_ids, call.output_ids, "recorded")
            return call.prompt_ids, call.output_ids, "engine"
        if isinstance(text, tuple):
            prompt, output, faults = text
            for fault in faults:
                self.losses.degrade(fault)
            self._count(call, prompt, output, "rendered")
            return prompt, output, "retokenized"
        self.losses.drop(*_why_no_ids(call, text, self.renderer is not None))
        return None

    def _count(self, call: Call, prompt: IDS, output: IDS, how: str) -> None:
        """Say where the log counted other numbers of tokens."""
        for name, ids, counted in zip(("prompt", "output"), (prompt, output), call.counts, strict=True):
            if counted is not None and counted != len(ids):
                self.losses.degrade(
                    f"the {how} {name} has another length than the log counted",
                    f"{len(ids)} ids, the log counted {counted}",
                )

    def _compare(self, call: Call, prompt: IDS, output: IDS) -> None:
        """Say where the tokenizer's own rendering is another than the recorded ids, which hold."""
        assert call.prompt_ids is not None and call.output_ids is not None
        for name, have, made in (("prompt", call.prompt_ids, prompt), ("output", call.output_ids, output)):
            if not np.array_equal(have, made):
                at = common_prefix(have, made)
                self.losses.degrade(
                    f"the rendered {name} is another than the recorded ids, which hold",
                    f"{len(made)} ids, recorded {len(have)}, equal up to {at}",
                )

    def _end(self, draft: Draft, rows: Sequence[Invocation]) -> dict[str, Any]:
        """The outcome of the episode, as columns of its last row. Rewards stay on the level on which the log has them:
        an episode's own is credited at its last row, unless its calls have rewards too, which would count twice."""
        last = rows[-1]
        changes: dict[str, Any] = {"terminated": draft.terminated, "truncated": draft.truncated}
        own = [r.reward for r in rows if r.reward is not None]
        if draft.reward is not None and not own:
            changes["reward"] = draft.reward
        elif draft.reward is not None:
            draft.extra["episode_reward"] = draft.reward
            if abs(sum(own) - draft.reward) > 1e-6:
                self.losses.degrade(
                    "the episode's reward is not the sum of its calls', which hold", f"{draft.reward} and {sum(own)}"
                )
        named = _numbers(draft.rewards, self.losses)
        if named is not None:
            changes["rewards"] = {**named, **(last.rewards or {})}
        return changes


def in_order(calls: list[Call], losses: Losses) -> list[Call]:
    """The calls in the order of the log, or of its numbers where all have one, but none in front of its parent."""
    if calls and all(c.order is not None for c in calls):
        calls = sorted(calls, key=lambda c: c.order or 0.0)
    named = {c.key for c in calls if c.key is not None}
    waiting: dict[str, list[Call]] = {}
    placed: list[Call] = []
    done: set[str | None] = set()
    for call in calls:
        if call.parent in named and call.parent not in done:
            waiting.setdefault(str(call.parent), []).append(call)
        else:
            _place(call, placed, done, waiting)
    while waiting:
        name = next(iter(waiting))
        first = waiting[name].pop(0)
        if not waiting[name]:
            del waiting[name]
        losses.degrade("declared parents go in a circle, and one is left out", first.place)
        _place(replace(first, parent=None, relation=None), placed, done, waiting)
    return placed


def _place(call: Call, placed: list[Call], done: set[str | None], waiting: dict[str, list[Call]]) -> None:
    """Put a call in its place, and then those that waited for it."""
    stack = [call]
    while stack:
        call = stack.pop()
        placed.append(call)
        done.add(call.key)
        stack += reversed(waiting.pop(call.key, [])) if call.key is not None else []


def _once(calls: list[Call], losses: Losses) -> list[Call]:
    """Each call once: a log may tell of one again, and then the last word holds, at the first one's place."""
    found: dict[str, Call] = {}
    for number, call in enumerate(calls):
        losses.calls += 1
        name = f"#{number}" if call.key is None else f"key {call.key}"
        if name in found:
            losses.place = call.place
            same = all(np.array_equal(getattr(call, n), getattr(found[name], n)) for n in ("prompt_ids", "output_ids"))
            losses.drop("told again" if same else "told again and differently, the last word holds")
        found[name] = call
    return list(found.values())


def _numbers(rewards: dict[str, float] | None, losses: Losses) -> dict[str, float] | None:
    """Named rewards without those that are no finite numbers."""
    found = {name: value for name, value in (rewards or {}).items() if math.isfinite(value)}
    lost = [name for name in rewards or () if name not in found]
    if lost:
        losses.degrade("a named reward that is not finite is left out", lost[0], len(lost))
    return found or None


def _mirrors(call: Call) -> dict[str, Any]:
    """The text columns of a call: what the log has beside ids, or what its ids were made from."""
    found: dict[str, Any] = {}
    if isinstance(call.prompt, Chat):
        answer = [call.answer] if isinstance(call.answer, dict) else []
        found["messages"] = to_text([*call.prompt.messages, *answer])
    elif call.prompt is not None:
        found["prompt_text"] = call.prompt
    if isinstance(call.answer, str):
        found["output_text"] = call.answer
    return found


def _tools_of(call: Call, last: Any) -> Any:
    """The tools that a call could see, where they are others than those of the call before."""
    tools = call.prompt.tools if isinstance(call.prompt, Chat) else None
    if tools and tools != last:
        call.extra["tools"] = tools
    return tools


def _why_no_ids(call: Call, text: object, given: bool) -> tuple[str, str]:
    if isinstance(text, str):
        return f"cannot be rendered: {text}", ""
    if call.prompt is None or call.answer is None:
        what = "prompt" if call.prompt is None and call.prompt_ids is None else "answer"
        return f"no {what}: neither ids nor text", ""
    assert not given
    return "no token ids, and no tokenizer to make them (--tokenizer)", ""


def _extra(values: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """(small values as texts, the others as they are)."""
    small: dict[str, str] = {}
    large: dict[str, Any] = {}
    for name, value in values.items():
        text = value if isinstance(value, str) else to_text(value)
        if len(text) <= MAX_EXTRA:
            small[name] = text
        else:
            large[name] = value
    return small, large


def to_text(value: Any) -> str:
    """Any JSON value as compact JSON; what JSON cannot hold as Python writes it."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str).decode()
    except (TypeError, ValueError, RecursionError):
        return repr(value)
