"""One call of a generated agent: the state in which it ran, what it sampled, and what is known of that."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from memopd_trace.invocation import Invocation, Sampling, Segment
from memopd_trace.testing.contexts import Draft
from memopd_trace.testing.values import MASK, Plan, rarely

TEMPERATURES = (0.0, 0.5, 1.0, 1.3)
CUTS: tuple[dict[str, Any], ...] = ({"top_p": 0.9}, {"top_k": 4}, {"top_p": 0.5, "top_k": 8}, {"min_p": 0.05})
MORE: tuple[dict[str, Any], ...] = ({}, {"seed": 2**40}, {"top_p": 1.0, "top_k": 0}, {"repetition_penalty": 1.1})
logprobs = st.floats(-30, 0, width=32)
masses = st.floats(-5, 0, width=32)


def call(plan: Plan, draw: st.DrawFn, draft: Draft, identity: dict[str, Any], version: int) -> Invocation:
    """The row of a call whose context is `draft`; its policy is of `version` or newer."""
    slots = _slots(plan, draw, draft)
    prompt = draft.prompt.ids  # after `_slots`, which may add some
    columns: dict[str, Any] = {**identity, **draft.columns, "prompt_ids": prompt, "media": tuple(draft.media) or None}
    columns |= _output(plan, draw, slots)
    output = columns["output_ids"]
    n = len(prompt) + (0 if slots is not None else len(output))
    columns |= _state(plan, draw, draft, len(prompt), n)
    columns |= _behaviour(plan, draw, output) | _versions(plan, draw, len(output), draft, version)
    columns["segments"] = _segments(draw, draft, n, slots)
    model = plan.metadata.models[columns["model_id"]]
    if model.num_moe_layers and model.experts_per_token and model.num_experts and plan.may("routed", draw):
        random = np.random.default_rng(draw(st.integers(0, 2**16)))
        order = random.random(((n - 1) * model.num_moe_layers, model.num_experts)).argsort(axis=1)
        columns["routed_experts"] = order[:, : model.experts_per_token].ravel()
    if plan.may("mirrors", draw):
        columns |= _mirrors(plan, draw, identity["invocation_index"])
    return Invocation(**columns)


def _slots(plan: Plan, draw: st.DrawFn, draft: Draft) -> list[int] | None:
    """The masked prompt positions that an in-place call fills, in any order; a retry runs as its first attempt did."""
    retry = draft.parent if draft.columns.get("relation") == "retry" else None
    in_place = retry.output_slots is not None if retry else plan.may("in_place", draw)
    if not in_place:
        return None
    if MASK not in draft.prompt.ids:
        draft.prompt.add("template", [MASK] * draw(st.integers(1, 4)))
    masked = np.flatnonzero(draft.prompt.ids == MASK).tolist()
    order: list[int] = draw(st.permutations(masked))
    return order[: draw(st.integers(1, min(6, len(order))))]


def _output(plan: Plan, draw: st.DrawFn, slots: list[int] | None) -> dict[str, Any]:
    if slots is not None:
        ids = plan.ids(draw, len(slots), len(slots))
        return {"output_ids": ids, "output_slots": slots, "finish_reason": draw(st.sampled_from([None, "length"]))}
    reason = draw(st.sampled_from([None, "stop", "stop", "length", "tool_calls", "abort", "content_filter"]))
    ids = plan.ids(draw, 0, 1) if reason in ("abort", "content_filter") else plan.ids(draw, 1, 5)
    if reason == "stop" and plan.stop_ids:
        ids.append(draw(st.sampled_from(plan.stop_ids)))
    return {"output_ids": ids, "finish_reason": reason}


def _segments(draw: st.DrawFn, draft: Draft, n: int, slots: list[int] | None) -> tuple[Segment, ...] | None:
    """The prompt's segments and the output's; a stretch with a slot in it is no copy once that is filled."""
    if draw(rarely):
        return None
    filled = np.zeros(n, bool)
    filled[slots or []] = True
    found = [
        Segment(s.start, s.stop, "history") if filled[s.start : s.stop].any() else s for s in draft.prompt.segments
    ]
    if len(draft.prompt) < n:
        found.append(Segment(len(draft.prompt), n, draw(st.sampled_from(["action", "thought"]))))
    return tuple(found)


def _state(plan: Plan, draw: st.DrawFn, draft: Draft, prompt: int, n: int) -> dict[str, Any]:
    """Positions and visibility: the parent's for what is shared, for the rest what a decoder can do."""
    k, shared = np.arange(n), draft.shared
    positions, start, until = k.copy(), k.copy(), np.full(n, n)
    if draft.parent is not None and shared:
        parent_from, parent_until = draft.parent.visibility()
        positions[:shared] = draft.parent.positions()[:shared]
        positions[shared:] = positions[shared - 1] + 1 + np.arange(n - shared)
        start[:shared] = parent_from[:shared]
        until[:shared] = np.where(parent_until[:shared] < shared, parent_until[:shared], n)
    if shared < n and plan.may("positions", draw):
        positions[draw(st.integers(shared, n - 1)) :] += draw(st.integers(1, 9))
    if shared + 1 < prompt and plan.may("bidirectional", draw):
        block = draw(st.integers(shared, prompt - 2))
        start[block : draw(st.integers(block + 2, prompt))] = block
    if plan.may("eviction", draw):
        for key in draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=3, unique=True)):
            if until[key] == n:  # what was evicted stays evicted
                until[key] = draw(st.integers(max(key + 1, shared), n))
    return {
        "position_ids": _unless(positions, k),
        "visible_from": _unless(start, k),
        "visible_until": _unless(until, np.full(n, n)),
    }


def _unless(values: NDArray[Any], default: NDArray[Any]) -> NDArray[np.int32] | None:
    return None if np.array_equal(values, default) else values.astype(np.int32)


def _behaviour(plan: Plan, draw: st.DrawFn, output: list[int]) -> dict[str, Any]:
    """Masks, logprobs and what they mean. Only a token that is not trained may be without a logprob; a stop id that was
    sampled is trained."""
    length = len(output)
    if not plan.needs("policy") and draw(rarely):
        return {"token_source": draw(st.sampled_from([None, "engine", "retokenized"]))}
    columns: dict[str, Any] = {"token_source": "engine"}
    sampled, trained = np.ones(length, bool), np.ones(length, bool)
    if plan.may("nulls", draw):
        sampled = trained = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), bool)
        columns["output_sampled"] = sampled
    if plan.may("nulls", draw):
        wanted = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), bool)
        columns["output_loss_mask"] = trained = sampled & (wanted | np.isin(output, plan.stop_ids))
    columns |= _sampling(plan, draw)
    values: list[float | None] = list(draw(st.lists(logprobs, min_size=length, max_size=length)))
    for at in np.flatnonzero(~trained):
        values[at] = draw(st.sampled_from([None, values[at], None if sampled[at] else -np.inf]))
    columns["output_logprobs"] = values
    if columns["logprob_kind"] == "processed":
        kept: list[float | None] = list(draw(st.lists(masses, min_size=length, max_size=length)))
        columns["output_kept_logmass"] = [None if v is None else m for v, m in zip(values, kept, strict=True)]
    return columns


def _sampling(plan: Plan, draw: st.DrawFn) -> dict[str, Any]:
    """Sampling settings and the kind of logprob; the kind is left out only where they change nothing."""
    kinds = [k for k in ("raw", "tempered", "processed") if k == "raw" or k in plan.kinds]
    kind = draw(st.sampled_from(kinds))
    temperature = draw(st.sampled_from(TEMPERATURES))
    more = draw(st.sampled_from(CUTS if kind == "processed" else MORE))
    if not plan.needs("policy") and draw(st.booleans()):
        return {"logprob_kind": draw(st.sampled_from([None, "unknown"])), "sampling": draw(st.sampled_from(PLAIN))}
    return {"logprob_kind": kind, "sampling": Sampling(temperature=temperature, **more)}


PLAIN = (None, Sampling(), Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0))


def _versions(plan: Plan, draw: st.DrawFn, length: int, draft: Draft, version: int) -> dict[str, Any]:
    """The weights that sampled: one version, or several in one call; keys and values no staler than the oldest, and
    named where the parent's could have been used."""
    if length and plan.may("versions", draw):
        steps = draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
        each = version + np.cumsum(steps, dtype=np.int64)
        last, oldest = int(each[-1]), int(each[0])
        known = draw(st.sampled_from([None, last]))
        return {"output_policy_versions": each, "policy_version": known, "kv_policy_version": oldest}
    if not plan.needs("policy") and draw(st.booleans()):
        return {}
    unnamed = draft.columns["relation"] != "extend" and draw(st.booleans())
    return {"policy_version": version, "kv_policy_version": None if unnamed else version}


def _mirrors(plan: Plan, draw: st.DrawFn, index: int) -> dict[str, Any]:
    started = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=index, microseconds=draw(st.integers(0, 10**9)))
    return {
        "prompt_text": draw(plan.text()),
        "output_text": draw(st.sampled_from(["", "text"])),
        "messages": '[{"role": "user", "content": "text"}]',
        "started_at": started,
        "ended_at": started + timedelta(microseconds=draw(st.integers(0, 10**9))),
        "extra": draw(st.dictionaries(plan.text(), plan.text(), max_size=2)),
    }
