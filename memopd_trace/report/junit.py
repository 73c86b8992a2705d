"""JUnit XML: a test suite for each input, a test case for each rule.

A rule that was not run is skipped, with the reason; a refusal is an error; findings that fail the run are failures.
Warnings that do not fail it stand in `system-out` of a test case that passes, so that the file says what the exit code
says. It is plain ASCII: any encoding of the stream gives the same document.
"""

from __future__ import annotations

from pathlib import PurePath
from xml.etree import ElementTree as ET

from memopd_trace.errors import printable
from memopd_trace.report.model import MAX_TEXT, Finding, Report, RuleResult, TraceSummary
from memopd_trace.report.text import MAX_PATH, finding_lines
from memopd_trace.rules import RULES
from memopd_trace.rules.registry import Severity

NAME = "memopd-trace validate"


def to_junit(report: Report, fail_on: Severity = "error") -> str:
    """The report as an XML document, ending in a newline."""
    root = ET.Element("testsuites", name=NAME)
    for trace in report.traces:
        paths = [PurePath(trace.path), *(PurePath(i.path) for i in trace.inputs)]
        findings = [f for f in report.findings if any(PurePath(f.path).is_relative_to(path) for path in paths)]
        root.append(_suite(trace, findings, report.profile, fail_on))
    for key in ("tests", "failures", "errors", "skipped"):
        root.set(key, str(sum(int(suite.get(key, 0)) for suite in root)))
    ET.indent(root, " ")
    return ET.tostring(root, encoding="us-ascii", xml_declaration=True).decode("ascii") + "\n"


def _suite(trace: TraceSummary, findings: list[Finding], profile: str, fail_on: Severity) -> ET.Element:
    suite = ET.Element("testsuite", name=printable(trace.path, MAX_PATH))
    properties = ET.SubElement(suite, "properties")
    known = {"profile": profile, "spec_version": trace.spec_version, "producer": trace.producer}
    for name, value in {**known, "rows": str(trace.rows), "episodes": str(trace.episodes)}.items():
        if value is not None:
            ET.SubElement(properties, "property", name=name, value=printable(value))
    for rule in trace.rules:
        suite.append(_case(rule, [f for f in findings if f.code == rule.code], profile, fail_on))
    for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(trace.rules)))
    return suite


def _case(rule: RuleResult, findings: list[Finding], profile: str, fail_on: Severity) -> ET.Element:
    entry = RULES[rule.code]
    case = ET.Element("testcase", classname=f"memopd-trace.{profile}", name=f"{rule.code}: {entry.title}")
    if rule.status == "not run":
        ET.SubElement(case, "skipped", message=printable(rule.reason or "", MAX_TEXT))
    elif rule.count:
        lines = [line for finding in findings for line in finding_lines(finding)]
        if rule.count > len(findings):
            lines.append(f"{rule.count} findings, {len(findings)} shown")
        what = _outcome(case, rule, fail_on)
        what.text = "\n".join(["", *lines, ""])
    return case


def _outcome(case: ET.Element, rule: RuleResult, fail_on: Severity) -> ET.Element:
    if rule.status == "warn" and fail_on == "error":
        return ET.SubElement(case, "system-out")
    tag = "error" if RULES[rule.code].phase == "open" else "failure"
    number = f"{rule.count} finding" + ("" if rule.count == 1 else "s")
    return ET.SubElement(case, tag, type=rule.code, message=f"{number}: {RULES[rule.code].title}")
