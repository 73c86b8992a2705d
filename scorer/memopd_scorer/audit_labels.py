"""By what an audit splits its comparison: the labels of an invocation's tokens, as text.

Shape legend: M tokens that are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from memopd_trace.invocation import IDS, Invocation

NONE = "none"
Labels = dict[str, str | NDArray[np.object_]]


def depths_of(group: list[Invocation]) -> dict[tuple[str, int], str]:
    """Number of ancestors of each invocation of whole episodes; `none` for one without a recorded lineage."""
    depths: dict[tuple[str, int], int | None] = {}
    for row in group:
        if row.parent_index is None:
            depths[row.key] = None if row.relation is None else 0
        else:  # a parent that is not there has no depth either
            above = depths.get((row.episode_id, row.parent_index))
            depths[row.key] = None if above is None else above + 1
    return {key: NONE if depth is None else str(depth) for key, depth in depths.items()}


def labels_of(row: Invocation, depths: dict[tuple[str, int], str], output_M: IDS, tables: Collection[str]) -> Labels:
    """{table: label of all tokens, or object[M] of each} for some tables (`memopd_scorer.audit_report.TABLES`)."""
    makers: dict[str, Callable[[], str | NDArray[np.object_]]] = {
        "by_segment_kind": lambda: _kinds(row, output_M),
        "by_policy_version": lambda: _versions(row, output_M),
        "by_depth": lambda: depths[row.key],
        "by_relation": lambda: "/".join(filter(None, (row.relation or NONE, row.rewrite_kind))),
        "by_output_index": lambda: _index_ranges(output_M),
    }
    return {name: makers[name]() for name in tables}


def parts_of(labels: Labels) -> Iterator[tuple[str, str, NDArray[np.bool_] | None]]:
    """(table, label, which tokens have it) of every label that occurs; `None` = all of them."""
    for name, label in labels.items():
        if isinstance(label, str):
            yield name, label, None
            continue
        each_M = label.tolist()  # numpy's own strings would lose a trailing NUL
        values = list(dict.fromkeys(each_M))
        if len(values) == 1:
            yield name, values[0], None
            continue
        numbers = {value: number for number, value in enumerate(values)}
        number_M = np.array([numbers[value] for value in each_M])
        for value, number in numbers.items():
            yield name, value, number_M == number


def _versions(row: Invocation, output_M: IDS) -> str | NDArray[np.object_]:
    if row.output_policy_versions is not None:
        return row.output_policy_versions[output_M].astype(str).astype(object)
    return NONE if row.policy_version is None else str(row.policy_version)


def _kinds(row: Invocation, output_M: IDS) -> str | NDArray[np.object_]:
    """The segment that each token lies in, else `after KIND` of the last one before it."""
    if not row.segments:
        return NONE
    kinds = np.full(len(row), NONE, dtype=object)
    end = 0
    for segment in sorted(row.segments, key=lambda s: s.start):
        kinds[segment.start : segment.stop] = segment.kind
        kinds[max(end, segment.stop) :] = f"after {segment.kind}"
        end = max(end, segment.stop)
    slots = row.output_slots
    return kinds[len(row.prompt_ids) + output_M if slots is None else slots[output_M]]


def _index_ranges(output_M: IDS) -> NDArray[np.object_]:
    """`0`, `1`, `2-3`, `4-7`, …"""
    bits_M = np.frexp(output_M.astype(np.float64))[1]  # 0 for 0, b for 2^(b-1) … 2^b - 1
    names = np.array(["0", "1", *(f"{2 ** (b - 1)}-{2**b - 1}" for b in range(2, 33))], dtype=object)
    return names[bits_M]
