"""What a trace really shows, so that a test can prove what it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from memopd_trace.invocation import Invocation
from memopd_trace.metadata import TraceMetadata


def traits(metadata: TraceMetadata, invocations: Iterable[Invocation]) -> set[str]:
    """The words for what is there: each of `TRAITS`, each relation, and each `rewrite_kind` (private ones as `x_`).

    Example:
        for trait in traits(metadata, invocations):
            hypothesis.event(trait)
    """
    rows = list(invocations)
    found = {name for name, shows in _OF_A_ROW.items() if any(shows(row) for row in rows)}
    found |= {row.relation for row in rows if row.relation is not None}
    kinds = {row.rewrite_kind for row in rows if row.rewrite_kind is not None}
    found |= {"x_" if kind.startswith("x_") else kind for kind in kinds}
    members = {(row.group_id, row.episode_id) for row in rows if row.group_id is not None}
    if len(members) > len({group for group, _ in members}):
        found.add("groups")
    if len({row.model_id for row in rows}) > 1:
        found.add("models")
    return found


def _nulls(row: Invocation) -> bool:
    return row.output_logprobs is not None and bool(np.ma.getmaskarray(row.output_logprobs).any())


def _sources(row: Invocation) -> bool:
    return any(s.source_index is not None for s in row.segments or ())


def _looks_ahead(row: Invocation) -> bool:
    return row.visible_from is not None and bool((row.visible_from < np.arange(len(row))).any())


def _evicts(row: Invocation) -> bool:
    return row.visible_until is not None and bool((row.visible_until < len(row)).any())


def _versions(row: Invocation) -> bool:
    return row.output_policy_versions is not None and len(set(row.output_policy_versions.tolist())) > 1


def _unicode(row: Invocation) -> bool:
    return not all((text or "").isascii() for text in (row.episode_id, row.model_id, row.prompt_text))


_OF_A_ROW: dict[str, Callable[[Invocation], bool]] = {
    "attempts": lambda row: row.accepted is False,
    "bidirectional": _looks_ahead,
    "bare": lambda row: row.output_logprobs is None,
    "copies": _sources,
    "empty_output": lambda row: len(row.output_ids) == 0,
    "eviction": _evicts,
    "forced": lambda row: not row.sampled().all(),
    "in_place": lambda row: row.output_slots is not None,
    "media": lambda row: bool(row.media),
    "mirrors": lambda row: row.messages is not None,
    "nulls": _nulls,
    "positions": lambda row: row.position_ids is not None,
    "processed": lambda row: row.logprob_kind == "processed" and row.output_kept_logmass is not None,
    "retokenized": lambda row: row.token_source == "retokenized",
    "routed": lambda row: row.routed_experts is not None,
    "sub_agents": lambda row: row.agent_id is not None and row.relation == "spawn",
    "tempered": lambda row: row.logprob_kind == "tempered",
    "unicode": _unicode,
    "untrained": lambda row: not (row.loss_mask() == row.sampled()).all(),
    "versions": _versions,
}
TRAITS = (*_OF_A_ROW, "groups", "models")
