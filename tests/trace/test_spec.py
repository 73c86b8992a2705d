"""The specification and the rules say the same: every clause has a code or a reason, and every code a clause."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from memopd_trace.invocation import Invocation
from memopd_trace.rules import RULES

SPEC = Path(__file__).parents[2] / "spec"
TEXT = (SPEC / "trace.md").read_text()
CLAUSE = re.compile(r'^- <a id="([a-z0-9-]+)"></a>(.*?)(?=^- |^\S|\Z)', re.MULTILINE | re.DOTALL)
CLAUSES = {anchor: " ".join(text.split()) for anchor, text in CLAUSE.findall(TEXT)}


def code_of(text: str) -> str | None:
    found = re.search(r"`([EW]-[A-Z0-9-]+)`\.?$", text)
    return found[1] if found else None


def test_every_clause_has_a_code_or_a_reason_why_no_program_can_check_it() -> None:
    assert len(CLAUSES) > 80
    for anchor, text in CLAUSES.items():
        assert "MUST" in text or "SHOULD" in text, anchor
        code = code_of(text)
        assert (code is None) == ("*Not checkable" in text), anchor
        if code is not None:
            assert code.startswith("E-" if "MUST" in text else "W-"), anchor


def test_every_code_of_the_validator_has_exactly_one_clause() -> None:
    codes = [code for text in CLAUSES.values() if (code := code_of(text)) is not None]
    assert sorted(codes) == sorted(c for c, r in RULES.items() if r.phase != "run")


def test_no_must_stands_outside_a_clause() -> None:
    prose = CLAUSE.sub("", TEXT).split("## 1. Terms")[1]
    outside = [line for line in prose.splitlines() if re.search(r"\bMUST\b|\bSHOULD\b", line)]
    assert outside == ["new MUST that files of this major version may break; other canonical bytes of the digest."]


def test_anchors_occur_once() -> None:
    anchors = re.findall(r'<a id="([a-z0-9-]+)">', TEXT)
    assert len(anchors) == len(set(anchors)) == len(CLAUSES)


def test_the_examples_numbers_are_right() -> None:
    row = Invocation(episode_id="e", invocation_index=0, model_id="m", prompt_ids=[7, 8, 9], output_ids=[10, 11])
    assert row.compute_digest().hex() in TEXT
    z = np.array([2.0, 1.0, 0.0])
    raw, tempered = (t * z[0] - np.log(np.exp(t * z).sum()) for t in (1, 2))
    for value in (raw, tempered, np.log(0.5 / 0.8), np.log(0.8), np.log(0.5)):
        assert f"{value:.5f}" in TEXT
