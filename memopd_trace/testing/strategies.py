"""Hypothesis strategies of episodes and of whole traces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from memopd_trace.errors import UsageError
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.lineage import common_prefix, final_ids
from memopd_trace.metadata import TraceMetadata
from memopd_trace.rules.files import FEATURE_COLUMNS
from memopd_trace.testing.calls import call
from memopd_trace.testing.contexts import follow, root
from memopd_trace.testing.values import KINDS, STEPS, Plan, checked_kinds, checked_profile, metadata, rarely

Trace = tuple[TraceMetadata, list[Invocation]]


def episodes(
    metadata: TraceMetadata,
    profile: str = "train",
    kinds: Iterable[str] = KINDS,
    *,
    episode_id: str = "e",
    group_id: str | None = "g",
    task_id: str | None = None,
    max_calls: int = 4,
) -> st.SearchStrategy[Episode]:
    """Agents' runs, valid under `profile` in a file of `metadata` (once it declares what they use: `declared`).

    Each call after the first is one of the steps among `kinds`; where there is none, an episode is a single call.

    Raises:
        UsageError: an unknown kind or profile, or `max_calls` below 1.
    """
    if max_calls < 1:
        raise UsageError(f"max_calls is {max_calls}", hint="an episode has at least one call")
    plan = Plan(metadata, checked_kinds(kinds), checked_profile(profile))
    constant = {"episode_id": episode_id, "group_id": group_id, "task_id": task_id}
    return _episodes(plan, constant, max_calls)


@st.composite
def traces(
    draw: st.DrawFn, profile: str = "train", kinds: Iterable[str] = KINDS, *, max_episodes: int = 3, max_calls: int = 4
) -> Trace:
    """Valid traces: `(metadata, invocations)` in file order, the state digests filled in, features declared.

    Raises:
        UsageError: as `episodes`.
    """
    chosen = checked_kinds(kinds)
    plan = Plan(draw(metadata(chosen)), chosen, checked_profile(profile))
    names = draw(st.lists(plan.text(), min_size=1, max_size=max_episodes, unique=True))
    rows: list[Invocation] = []
    group, task = _group(plan, draw, 0)
    for number, name in enumerate(names):
        if "groups" not in chosen or draw(st.booleans()):
            group, task = _group(plan, draw, number)
        run = episodes(
            plan.metadata, profile, chosen, episode_id=name, group_id=group, task_id=task, max_calls=max_calls
        )
        rows += draw(run)
    return declared(plan.metadata, rows), rows


def declared(metadata: TraceMetadata, invocations: Iterable[Invocation]) -> TraceMetadata:
    """`metadata` with `required_features` naming just the features that the rows use."""
    rows = list(invocations)
    used = [
        feature
        for feature, columns in FEATURE_COLUMNS.items()
        if any(getattr(row, name) is not None for row in rows for name in columns)
    ]
    return metadata.model_copy(update={"required_features": used})


def _group(plan: Plan, draw: st.DrawFn, number: int) -> tuple[str | None, str | None]:
    """(group, task), the two never both null where training needs one."""
    group, task = f"g{number}", f"t{number}"
    either: list[tuple[str | None, str | None]] = [(group, task), (group, None), (None, task)]
    return draw(st.sampled_from(either if plan.needs("train") else [*either, (None, None)]))


@st.composite
def _episodes(draw: st.DrawFn, plan: Plan, constant: dict[str, Any], max_calls: int) -> Episode:
    calls = draw(st.integers(1, max_calls)) if plan.kinds & set(STEPS) else 1
    rows: list[Invocation] = []
    version = draw(st.integers(0, 5))
    for index in range(calls):
        if rows:
            draft = follow(plan, draw, rows)
        else:
            model_id = draw(st.sampled_from([*plan.metadata.models]))
            draft = root(plan, draw, {"model_id": model_id, "agent_id": draw(st.sampled_from([None, "main"]))})
        row = call(plan, draw, draft, {**constant, "invocation_index": index}, version)
        if not plan.needs("lineage") and draw(st.booleans()) and _parent_is_plain(rows, row):
            row = row.replace(**dict.fromkeys(("relation", "parent_index", "rewrite_kind", "rewrite_evidence")))
        rows.append(row)
        version = version_of(row, version) + draw(st.integers(0, 1))
    if "retry" in plan.kinds and draw(rarely):
        rows[-1] = rows[-1].replace(accepted=False, output_loss_mask=None)
    _outcome(plan, draw, rows)
    return Episode(constant["episode_id"], tuple(row.replace(state_digest=row.compute_digest()) for row in rows))


def _parent_is_plain(rows: list[Invocation], row: Invocation) -> bool:
    """Whether who has no recorded parent finds one at most."""
    states = [final_ids(other) for other in rows]
    return sum(common_prefix(ids, row.prompt_ids) == len(ids) for ids in states) < 2


def version_of(row: Invocation, default: int) -> int:
    """The newest weights that sampled a token of the row."""
    if row.output_policy_versions is not None:
        return int(row.output_policy_versions[-1])
    return default if row.policy_version is None else row.policy_version


def _outcome(plan: Plan, draw: st.DrawFn, rows: list[Invocation]) -> None:
    """Rewards and the end, set on the rows in place."""
    values = st.floats(-10, 10)
    if not plan.needs("train") and draw(st.booleans()):
        return
    for at in range(len(rows) - 1):
        if draw(rarely):
            rows[at] = rows[at].replace(reward=draw(values), terminated=False, truncated=False)
    terminated, truncated = draw(st.sampled_from([(True, False), (False, True), (True, None), (None, False)]))
    parts = draw(st.none() | st.dictionaries(plan.text(), values, max_size=2))
    rows[-1] = rows[-1].replace(reward=draw(values), rewards=parts, terminated=terminated, truncated=truncated)
