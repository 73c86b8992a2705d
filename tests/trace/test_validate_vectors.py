"""Every vector gives exactly its codes; every code has a vector, a page and an entry, and nothing is left over."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pyarrow as pa
import pytest
from helpers_trace import VECTORS, build, builder, inputs

import memopd_trace
from memopd_trace import rules, validate
from memopd_trace.errors import InputError
from memopd_trace.rules import RULES
from memopd_trace.schema import TRACE_COLUMNS

VALID = sorted((VECTORS / "valid").glob("*.json"))
INVALID = sorted((VECTORS / "invalid").glob("*.json"))
PAGES = Path(rules.__file__).parent / "pages"


def code_of(path: Path) -> str:
    return path.stem if path.stem in RULES else re.sub(r"-\d+$", "", path.stem)


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_valid_vector_has_no_finding(path: Path, tmp_path: Path) -> None:
    vector = builder.load(path)
    report = validate(build(vector, tmp_path), vector["profile"], **inputs(vector, tmp_path))
    assert report.clean, report.to_text()
    assert sum(t.rows for t in report.traces) == len(vector["rows"]) > 0


@pytest.mark.parametrize("path", INVALID, ids=lambda p: p.stem)
def test_invalid_vector_gives_exactly_its_codes(path: Path, tmp_path: Path) -> None:
    vector = builder.load(path)
    trace = build(vector, tmp_path)
    report = validate(trace, vector["profile"], **inputs(vector, tmp_path))
    assert report.codes == set(vector["codes"]), report.to_text()
    assert {f.code for f in report.findings} == report.codes
    assert code_of(path) in {*vector["codes"], vector.get("read")}, "a vector is named after its code"
    refused = any(RULES[c].phase == "open" for c in vector["codes"])
    warnings_only = all(c.startswith("W-") for c in vector["codes"])
    assert report.exit_code() == (3 if refused else 0 if warnings_only else 1)
    if "read" in vector:
        with pytest.raises(InputError) as error:
            list(memopd_trace.read(trace).iter_invocations())
        assert error.value.code == vector["read"]


def test_every_code_has_a_vector_and_none_is_left_over() -> None:
    assert {code_of(p) for p in INVALID} == {code for code, rule in RULES.items() if rule.phase != "run"}


def test_every_code_that_the_source_raises_is_explained() -> None:
    root = Path(__file__).parents[2]
    raised = {
        code
        for folder in ("memopd_trace", "scorer", "trainer")
        for file in (root / folder).rglob("*.py")
        for code in re.findall(r'code="([EW]-[A-Z0-9-]+)"', file.read_text())
    }
    assert len(raised) > 15
    assert raised <= set(RULES)


def test_every_code_has_a_page_that_begins_with_its_title() -> None:
    assert {p.stem for p in PAGES.iterdir()} == set(RULES)
    for code, rule in RULES.items():
        lines = rule.page.splitlines()
        assert lines[0] == f"# {code}: {rule.title}"
        assert 10 <= len(lines) <= 30, code
        assert all(f"**{part}" in rule.page for part in ("Why.", "Wrong", "Right", "Fix.")), code


def test_pages_and_the_table_of_cases_name_each_other() -> None:
    rows = re.findall(
        r"^\| ([A-J]\d\d) \|(.*)\|$", (VECTORS.parent / "cases.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    table = {(code, case) for case, text in rows for code in re.findall(r"`([EW]-[A-Z0-9-]+)`", text)}
    lines = {code: re.findall(r"^\*\*Cases\.\*\* (.*)$", rule.page, re.MULTILINE) for code, rule in RULES.items()}
    pages = {(code, case) for code, found in lines.items() for line in found for case in line.split(", ")}
    assert len(rows) > 50 and len(table) > 100
    assert table == pages
    assert all(("**Seen as.**" in rule.page) == bool(lines[code]) for code, rule in RULES.items())


def test_every_case_is_caught_by_a_code_or_by_a_part_that_has_tests() -> None:
    root = Path(__file__).parents[2]
    for line in (VECTORS.parent / "cases.md").read_text(encoding="utf-8").splitlines():
        if re.match(r"\| [A-J]\d\d \|", line):
            tests = re.findall(r"`(tests/[a-z_/]+\.py)`", line)
            assert tests or re.search(r"`[EW]-", line), line
            assert all((root / name).is_file() for name in tests), line


def test_codes_json_is_what_the_registry_renders() -> None:
    text = (VECTORS.parent / "codes.json").read_text(encoding="utf-8")
    assert text == rules.codes_json(), "run: python -m memopd_trace.rules > spec/codes.json"


def test_a_code_states_a_must_or_a_should() -> None:
    for code, rule in RULES.items():
        assert ("MUST" if code.startswith("E-") else "SHOULD") in rule.clause, code
        assert rule.severity == ("error" if code.startswith("E-") else "warning")


def test_profiles_differ_only_in_what_must_be_present() -> None:
    for code, rule in RULES.items():
        if rule.phase == "run":
            assert rule.profiles == (), code
            continue
        assert (set(rule.profiles) == {"core", "lineage", "policy", "train"}) != code.startswith("E-NEEDS-"), code
    presence = {p: {c for c, r in RULES.items() if p in r.profiles} for p in ("core", "lineage", "policy", "train")}
    assert presence["core"] < presence["lineage"] < presence["train"]
    assert presence["core"] < presence["policy"] < presence["train"]


def test_a_rule_is_short() -> None:
    checked = 0
    for path in Path(rules.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("rule" in ast.dump(d) for d in node.decorator_list):
                checked += 1
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 25, f"{path.name}: {node.name}"
    assert checked == sum(1 for r in RULES.values() if r.check is not None) > 80


def test_the_builder_states_the_same_types_as_the_schema() -> None:
    assert list(builder.TYPES) == [c.name for c in TRACE_COLUMNS]
    for column in TRACE_COLUMNS:
        assert _plain(builder.parse_type(builder.TYPES[column.name])) == _plain(column.type), column.name


def _plain(kind: pa.DataType) -> str:
    return str(kind).replace(" not null", "")


def test_the_builder_imports_nothing_of_this_project() -> None:
    tree = ast.parse((VECTORS / "build.py").read_text(encoding="utf-8"))
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert not any("memopd" in str(m) for m in modules)


def test_vectors_are_described() -> None:
    future = sorted((VECTORS / "future").glob("*.json"))
    keys = {k for p in (*VALID, *INVALID, *future) for k in json.loads(p.read_text(encoding="utf-8"))}
    readme = (VECTORS / "README.md").read_text(encoding="utf-8")
    assert not {k for k in keys if f"`{k}`" not in readme}
