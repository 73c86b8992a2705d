"""Mutations of whole episodes: keys, lineage, segments, and the outcome."""

# ruff: noqa: D103 - the code that each function is tied to says what it breaks
from __future__ import annotations

import math

from memopd_trace.invocation import Episode, Segment
from memopd_trace.metadata import TraceMetadata
from memopd_trace.testing.mutation import Rows, breaks, edit, edit_episode, on_tail, site, tail, where


@breaks("E-KEY-DUPLICATE")
def row_written_twice(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return [rows[0], *rows]


@breaks("E-KEY-DUPLICATE")
def episode_written_twice(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return [*rows, *rows] if len({row.episode_id for row in rows}) > 1 else None


@breaks("E-INDEX")
def call_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = where(rows, lambda row: row.invocation_index == 1)
    return None if at is None else rows[: at - 1] + rows[at:]


@breaks("E-EPISODE-SPLIT")
def last_call_at_the_end(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    own = [row for row in rows if row.episode_id == rows[0].episode_id]
    others = rows[len(own) :]
    return [*own[:-1], *others, own[-1]] if others and len(own) > 1 else None


parent_of_its_own = on_tail("E-PARENT-INDEX", "parent_of_its_own", {}, parent_index=lambda s: s.index + 1)
parent_before_the_first = on_tail("E-PARENT-INDEX", "parent_before_the_first", {}, parent_index=-1)
root_with_a_parent = on_tail("E-ROOT-PARENT", "root_with_a_parent", {}, relation="root")


@breaks("E-PARENT-MISSING")
def parent_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit(rows, where(rows, lambda row: row.parent_index is not None), parent_index=None)


@breaks("E-RELATION-MISSING")
def relation_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = where(rows, lambda row: row.parent_index is not None)
    return edit(rows, at, relation=None, rewrite_kind=None, rewrite_evidence=None)


@breaks("E-REWRITE-UNDECLARED")
def rewrite_kind_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit(rows, where(rows, lambda row: row.relation == "rewrite"), rewrite_kind=None)


@breaks("E-REWRITE-UNDECLARED")
def rewrite_evidence_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit(rows, where(rows, lambda row: row.relation == "rewrite"), rewrite_evidence=None)


@breaks("W-REWRITE-STRAY")
def rewrite_kind_left_over(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = where(rows, lambda row: row.relation in ("root", "extend", "fork", "retry", "spawn"))
    return edit(rows, at, rewrite_kind="memory")


@breaks("E-NEEDS-RELATION", profile="lineage")
def lineage_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = where(rows, lambda row: row.relation is not None)
    return edit(rows, at, relation=None, parent_index=None, rewrite_kind=None, rewrite_evidence=None)


answer_forgotten = on_tail("E-DISCONTINUITY", "answer_forgotten", {}, relation="extend")


@breaks("E-DISCONTINUITY")
def rewrite_called_extension(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = where(rows, lambda row: row.relation == "rewrite" and row.kv_policy_version is not None)
    return edit(rows, at, relation="extend", rewrite_kind=None, rewrite_evidence=None)


ROOT = {"relation": "root", "parent_index": None}
EXTENSION = {"relation": "extend", "prompt_ids": lambda s: [*s.ids, *s.ids]}
extension_at_other_positions = on_tail(
    "E-EXTEND-STATE", "extension_at_other_positions", {}, position_ids=range(1, 10), **EXTENSION
)
extension_after_an_eviction = on_tail(
    "E-EXTEND-STATE", "extension_after_an_eviction", {}, visible_until=[2, *[9] * 8], **EXTENSION
)
extension_that_its_parent_saw = on_tail(
    "E-EXTEND-STATE", "extension_that_its_parent_saw", {}, visible_from=[*range(6), 5, 7, 8], **EXTENSION
)
cache_of_unknown_weights = on_tail("W-KV-UNKNOWN", "cache_of_unknown_weights", {}, policy_version=1, **EXTENSION)
REWRITE = {"relation": "rewrite", "rewrite_evidence": "explicit"}
extension_called_rewrite = on_tail(
    "W-REWRITE-KIND", "extension_called_rewrite", {}, **EXTENSION | REWRITE, rewrite_kind="memory"
)
extension_called_root = on_tail("W-PARENT-OTHER", "extension_called_root", {}, **EXTENSION | ROOT)


@breaks("W-PARENT-AMBIGUOUS")
def one_of_two_parents(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return tail(metadata, rows, {}, ROOT, EXTENSION | ROOT | {"relation": None})


RETRY = {"relation": "retry", "attempt": 1}
retry_of_another_prompt = on_tail(
    "E-RETRY-PROMPT", "retry_of_another_prompt", {"accepted": False}, prompt_ids=lambda s: s.ids[:2], **RETRY
)
fate_of_the_first_attempt_unknown = on_tail("W-ATTEMPT-OPEN", "fate_of_the_first_attempt_unknown", {}, **RETRY)


@breaks("E-ATTEMPT-DUPLICATE")
def one_attempt_twice(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return tail(metadata, rows, {"accepted": False}, RETRY | {"accepted": False}, RETRY)


fork_of_nothing = on_tail("E-FORK-PREFIX", "fork_of_nothing", {}, prompt_ids=lambda s: s.ids[1:])
child_of_a_rejected_call = on_tail(
    "E-PARENT-REJECTED", "child_of_a_rejected_call", {"accepted": False}, relation="spawn"
)
two_tasks = on_tail("E-EPISODE-CONSTANT", "two_tasks", {}, task_id="another task")
two_groups = on_tail("E-EPISODE-CONSTANT", "two_groups", {}, group_id="another group")
segment_outside = on_tail("E-SEGMENT-BOUNDS", "segment_outside", {}, segments=[Segment(0, 7, "thought")])
segment_backwards = on_tail("E-SEGMENT-BOUNDS", "segment_backwards", {}, segments=[Segment(3, 2, "user")])
segments_overlap = on_tail(
    "E-SEGMENT-ORDER", "segments_overlap", {}, segments=[Segment(0, 2, "user"), Segment(1, 3, "memory")]
)
source_in_the_future = on_tail(
    "E-SEGMENT-SOURCE", "source_in_the_future", {}, segments=lambda s: [Segment(0, 2, "memory", s.index + 1, 0)]
)
half_a_source = on_tail("E-SEGMENT-SOURCE", "half_a_source", {}, segments=[Segment(0, 2, "memory", 0, None)])
source_too_short = on_tail(
    "E-SEGMENT-SOURCE", "source_too_short", {}, segments=lambda s: [Segment(0, 2, "memory", s.index, 5)]
)
copy_of_another_stretch = on_tail(
    "E-SEGMENT-COPY", "copy_of_another_stretch", {}, segments=lambda s: [Segment(0, 2, "memory", s.index, 1)]
)
tool_result_trained = on_tail("E-LOSS-CONTENT", "tool_result_trained", segments=[Segment(4, 6, "tool_result")])


@breaks("W-CONTROL-IN-CONTENT")
def control_id_from_outside(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = site(metadata, rows)
    controls = at.model.tokenizer.controls
    call = {"prompt_ids": [at.ids[0], *controls[:1], *at.ids], "segments": [Segment(0, 5, "user")]}
    return tail(metadata, rows, call) if controls else None


end_in_the_middle = on_tail("E-END-EARLY", "end_in_the_middle", {"terminated": True})
cut_in_the_middle = on_tail("E-END-EARLY", "cut_in_the_middle", {"truncated": True})


@breaks("E-REWARD-NONFINITE")
def reward_nan(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit(rows, 0, reward=math.nan)


@breaks("E-REWARD-NONFINITE")
def part_of_the_reward_infinite(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit(rows, 0, rewards={"f1": math.inf})


def _trains(episode: Episode) -> bool:
    return any(row.loss_mask().any() for row in episode)


@breaks("E-NEEDS-REWARD", profile="train")
def rewards_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit_episode(rows, _trains, reward=None)


@breaks("E-NEEDS-END", profile="train")
def end_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit_episode(rows, _trains, terminated=None, truncated=None)


@breaks("E-NEEDS-GROUP", profile="train")
def group_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit_episode(rows, _trains, group_id=None, task_id=None)
