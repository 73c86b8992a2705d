"""Rules about lineage, segments and keys: what each relation promises, and what it does not."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
from helpers_trace import changed, judge, valid

from memopd_trace.rules import RULES
from memopd_trace.rules.episode import MAX_RANGES
from memopd_trace.schema import COLUMN


def codes(folder: Path, *changes: tuple[int, dict[str, Any]], base: str = "train", profile: str = "core") -> set[str]:
    return judge(changed(base, *changes), folder, profile).codes


def test_nothing_is_invented_for_rows_without_lineage(tmp_path: Path) -> None:
    """Two rows whose prompts have nothing in common, and no word about it."""
    assert codes(tmp_path, (1, {"prompt_ids": [40, 41]}), base="plain") == set()
    assert codes(tmp_path, (1, {"prompt_ids": [40, 41]}), base="plain", profile="lineage") == {"E-NEEDS-RELATION"}


def test_a_declared_rewrite_may_change_everything(tmp_path: Path) -> None:
    assert codes(tmp_path, (2, {"prompt_ids": [77], "segments": None})) == set()


def test_a_discontinuity_names_index_cause_and_both_sides(tmp_path: Path) -> None:
    vector = changed("train", (1, {"prompt_ids": [5, 6, 7, 8, 9, 2, 11, 12][1:]}), (2, {"segments": None}))
    (finding,) = judge(vector, tmp_path).findings
    assert finding.code == "E-DISCONTINUITY" and finding.row == 1
    assert "at index 0; likely truncated_left: the parent's first id is gone" in finding.message
    assert finding.expected == "[0:] 5, 6, 7, 8, 9, 2" and finding.actual == "[0:] 6, 7, 8, 9, 2, 11, … (1 more)"
    assert finding.hint and "rewrite" in finding.hint


def test_the_recorded_parent_wins_over_a_longer_prefix(tmp_path: Path) -> None:
    """Calls 0, 1 and 2 end in states that are all prefixes of call 3's prompt; 1 is recorded, so 1 it is."""
    vector = valid("plain")
    rows = [([9], [8]), ([9, 8, 7], [6]), ([9], [8, 7, 6, 5]), ([9, 8, 7, 6, 5, 4], [3])]
    vector["rows"] = [
        {"episode_id": "e", "invocation_index": i, "model_id": "m", "prompt_ids": p, "output_ids": o}
        for i, (p, o) in enumerate(rows)
    ]
    vector["rows"][3].update(parent_index=1, relation="extend")
    assert judge(vector, tmp_path).codes == set()
    vector["rows"][1]["output_ids"] = [60]
    assert judge(vector, tmp_path).codes == {"E-DISCONTINUITY"}


@pytest.mark.parametrize(
    ("relation", "code"),
    [("retry", None), ("fork", None), ("spawn", "E-PARENT-REJECTED"), ("rewrite", "E-PARENT-REJECTED")],
)
def test_a_rejected_attempt_may_be_retried_and_forked_only(relation: str, code: str | None, tmp_path: Path) -> None:
    kind = {"rewrite_kind": "rewind", "rewrite_evidence": "explicit"} if relation == "rewrite" else {}
    cells = {"prompt_ids": [5, 6, 7], "relation": relation, "parent_index": 0, **kind}
    assert codes(tmp_path, (2, cells), base="relations") == ({code} if code else set())


def test_a_retry_may_be_neither_longer_nor_shorter(tmp_path: Path) -> None:
    alone = (4, {"relation": None, "parent_index": None})
    for prompt in ([5, 6, 7, 40], [5, 6]):
        assert codes(tmp_path, (1, {"prompt_ids": prompt}), alone, base="relations") == {"E-RETRY-PROMPT"}


def test_a_parent_that_is_no_earlier_row_is_one_finding_and_stops_the_others(tmp_path: Path) -> None:
    for parent in (1, 2, -1, 2_000_000_000):
        assert codes(tmp_path, (1, {"parent_index": parent})) == {"E-PARENT-INDEX"}


@pytest.mark.parametrize(
    ("segment", "code"),
    [
        ({"start": 0, "stop": 8, "kind": "x"}, None),
        ({"start": 3, "stop": 3, "kind": "empty"}, None),
        ({"start": 8, "stop": 8, "kind": "empty"}, None),
        ({"start": 0, "stop": 9, "kind": "x"}, "E-SEGMENT-BOUNDS"),
        ({"start": -1, "stop": 2, "kind": "x"}, "E-SEGMENT-BOUNDS"),
        ({"start": 4, "stop": 3, "kind": "x"}, "E-SEGMENT-BOUNDS"),
        ({"start": 0, "stop": 2, "kind": "x", "source_index": 1, "source_start": 0}, None),
        ({"start": 0, "stop": 2, "kind": "x", "source_index": 1, "source_start": 1}, "E-SEGMENT-COPY"),
        ({"start": 0, "stop": 2, "kind": "x", "source_index": 2, "source_start": 0}, "E-SEGMENT-SOURCE"),
        ({"start": 0, "stop": 2, "kind": "x", "source_index": -1, "source_start": 0}, "E-SEGMENT-SOURCE"),
        ({"start": 0, "stop": 2, "kind": "x", "source_index": 1, "source_start": -1}, "E-SEGMENT-SOURCE"),
        ({"start": 0, "stop": 2, "kind": "x", "source_index": 1, "source_start": 9}, "E-SEGMENT-SOURCE"),
        ({"start": 0, "stop": 2, "kind": "x", "source_start": 0}, "E-SEGMENT-SOURCE"),
    ],
)
def test_a_segment_lies_inside_and_is_the_copy_it_claims_to_be(
    segment: dict[str, Any], code: str | None, tmp_path: Path
) -> None:
    """Row 2 of the vector has 8 tokens and begins with the two ids of row 1."""
    assert codes(tmp_path, (2, {"segments": [segment]})) == ({code} if code else set())


def test_a_segment_may_copy_what_was_filled_in_place(tmp_path: Path) -> None:
    copy = {"start": 0, "stop": 4, "kind": "history", "source_index": 0, "source_start": 0}
    assert codes(tmp_path, (1, {"segments": [copy]}), base="slots") == set()


def test_duplicates_say_whether_their_ids_agree(tmp_path: Path) -> None:
    vector = valid("plain")
    vector["rows"].append(dict(vector["rows"][1]))
    assert "with the same ids" in judge(vector, tmp_path).findings[0].message
    vector["rows"][2]["output_ids"] = [11]
    assert "with other ids" in judge(vector, tmp_path).findings[0].message


def test_an_episode_written_twice_in_two_parts_is_a_duplicate(tmp_path: Path) -> None:
    vector = valid("train")
    vector["rows"] = [vector["rows"][3], dict(vector["rows"][3])]
    vector.update(storage="folder", parts=[1, 1])
    report = judge(vector, tmp_path)
    assert report.codes == {"E-KEY-DUPLICATE"}
    assert report.findings[0].path.endswith("part-00001.parquet")


def two_episodes(order: list[int], length: int = 2, last: dict[str, Any] | None = None) -> dict[str, Any]:
    """Rows of e0 (numbers below `length`) and e1 (those from it on), in this order; `last` = cells of last rows."""
    vector = valid("plain")
    rows = [{**vector["rows"][0], "episode_id": f"e{n // length}", "invocation_index": n % length} for n in order]
    for row in rows:
        row.update((last or {}) if row["invocation_index"] == length - 1 else {})
    return {**vector, "rows": rows}


ORDER_KINDS = {  # of the rows (e0,0) (e0,1) (e1,0) (e1,1): their order in the file, and the codes
    "by descending index": ([1, 3, 0, 2], {"E-INDEX", "E-EPISODE-SPLIT"}),
    "interleaved": ([0, 2, 1, 3], {"E-EPISODE-SPLIT"}),
    "an episode again, whole": ([0, 1, 2, 3, 0, 1], {"E-KEY-DUPLICATE"}),
    "one row again, behind another episode": ([0, 1, 2, 3, 0], {"E-KEY-DUPLICATE"}),
    "resumed from the row before": ([0, 2, 3, 0, 1], {"E-KEY-DUPLICATE", "E-EPISODE-SPLIT"}),
}


@pytest.mark.parametrize("kind", ORDER_KINDS)
def test_only_a_key_that_stood_there_is_a_duplicate(kind: str, tmp_path: Path) -> None:
    order, wanted = ORDER_KINDS[kind]
    assert judge(two_episodes(order), tmp_path).codes == wanted


def test_an_episode_in_very_many_pieces_is_split_and_no_row_a_duplicate(tmp_path: Path) -> None:
    scattered = [n for index in range(0, 4 * MAX_RANGES, 2) for n in (index, index + 4 * MAX_RANGES)]
    vector = two_episodes([*scattered, 1], length=4 * MAX_RANGES)
    report = judge(vector, tmp_path)
    assert report.codes == {"E-EPISODE-SPLIT"}
    assert report.errors == len(scattered) + 1 - 2, "each piece but the first of either"


def test_half_of_a_split_episode_is_not_blamed_for_what_the_other_half_brings(tmp_path: Path) -> None:
    asked = {"E-NEEDS-REWARD", "E-NEEDS-END"}
    ended = {"reward": 1.0, "terminated": True}
    for order, codes in (([0, 1, 2, 3], set()), ([0, 2, 3, 1], {"E-EPISODE-SPLIT"}), ([0, 2, 3], asked)):
        for most in (100, 0):  # what is not shown is not counted either
            vector = two_episodes(order, last=ended)
            report = judge(vector, tmp_path, "train", select=[*asked, "E-EPISODE-SPLIT"], max_findings=most)
            assert {r.code for r in report.rules if r.status == "fail"} == codes, report.to_text()
            assert report.errors == len(codes)
            assert {f.code for f in report.findings} == (codes if most else set())


def test_broken_keys_are_reported_once_and_end_the_judgement_of_the_episode(tmp_path: Path) -> None:
    vector = valid("train")
    del vector["rows"][0]
    report = judge(vector, tmp_path, "train")
    assert report.codes == {"E-INDEX"} and len(report.findings) == 1
    assert (report.findings[0].expected, report.findings[0].actual) == ("0", "1")


def test_an_episode_rule_declares_every_column_it_names() -> None:
    """What it reads through helpers is covered by the vectors; what it names itself is covered here."""
    checked = 0
    for rule in RULES.values():
        if rule.phase != "episode" or rule.check is None:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(rule.check)))
        body = next(n for n in tree.body if isinstance(n, ast.FunctionDef)).body
        named = {n.attr for part in body for n in ast.walk(part) if isinstance(n, ast.Attribute)} & set(COLUMN)
        named -= {c for c in named if COLUMN[c].required}
        assert named <= set(rule.columns), rule.code
        checked += 1
    assert checked > 15
