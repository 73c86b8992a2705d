"""The specification and the rules say the same: every clause has a code or a reason, and every code a clause."""

from __future__ import annotations

import re
from pathlib import Path

from memopd_trace.rules import RULES, clauses

SPEC = Path(__file__).parents[2] / "spec"
NORMATIVE = {name: (SPEC / name).read_text() for name in ("trace.md", "files.md", "arrays.md", "views.md", "scores.md")}
CLAUSE = re.compile(r'^- <a id="([a-z0-9-]+)"></a>(.*?)(?=^- |^\S|\Z)', re.MULTILINE | re.DOTALL)
CLAUSES = {anchor: " ".join(clause.split()) for text in NORMATIVE.values() for anchor, clause in CLAUSE.findall(text)}


def code_of(text: str) -> str | None:
    found = re.search(r"`([EW]-[A-Z0-9-]+)`\.?$", text)
    return found[1] if found else None


def test_every_clause_has_a_code_or_a_reason_why_no_program_can_check_it() -> None:
    assert len(CLAUSES) > 140
    for anchor, text in CLAUSES.items():
        assert "MUST" in text or "SHOULD" in text, anchor
        code = code_of(text)
        assert (code is None) == ("*Not checkable" in text), anchor
        if code is not None:
            assert code.startswith("E-" if "MUST" in text else "W-"), anchor


def test_every_code_of_the_validator_has_exactly_one_clause() -> None:
    codes = [code for text in CLAUSES.values() if (code := code_of(text)) is not None]
    assert sorted(codes) == sorted(c for c, r in RULES.items() if r.phase != "run")


def test_every_rule_knows_its_clause_and_every_clause_its_rule() -> None:
    texts = sorted(SPEC.glob("*.md"))
    stated = {
        f"spec/{path.name}#{anchor}": code
        for path in texts
        for anchor, text in CLAUSE.findall(path.read_text())
        if (code := code_of(" ".join(text.split()))) is not None
    }
    assert {rule.clause_url: code for code, rule in RULES.items() if rule.clause_url} == stated
    assert len(stated) > 90
    carried = (Path(clauses.__file__).parent / "clauses.json").read_text(encoding="utf-8")
    assert carried == clauses.clauses_json(texts), "`make spec` renders it"


def test_no_must_stands_outside_a_clause() -> None:
    outside = []
    for text in NORMATIVE.values():
        prose = CLAUSE.sub("", text).split("\n## 1. ")[1]
        outside += [line for line in prose.splitlines() if re.search(r"\bMUST\b|\bSHOULD\b", line)]
    assert outside == ["- a new MUST that files of this major version may break;"]


def test_the_codes_of_runs_are_named_and_have_no_clause() -> None:
    named = set(re.findall(r"`(E-[A-Z-]+)`", NORMATIVE["scores.md"].split("## 5. Codes of runs")[1]))
    assert {code for code, rule in RULES.items() if rule.phase == "run"} <= named <= set(RULES)


def test_anchors_occur_once() -> None:
    anchors = re.findall(r'<a id="([a-z0-9-]+)">', "".join(NORMATIVE.values()))
    assert len(anchors) == len(set(anchors)) == len(CLAUSES)
