"""SARIF 2.1.0, for code scanning.

A row of a Parquet file is no line. GitHub takes no result without `region.startLine`, so each has line 1, and the row
stands in the message and in `properties.row`; episode and invocation are the logical location. Results are told apart
by their fingerprint (rule, file, episode, invocation, column), which does not move when rows are put before them. It
has the name that GitHub reads, `primaryLocationLineHash`: left to itself GitHub would hash line 1, and take all
findings of a rule for one.

The clause that a rule enforces is in its `properties`, its page in `help`; both are part of the document, since the
specification has no address of its own that a `helpUri` could give.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from memopd_trace import __version__
from memopd_trace.errors import printable
from memopd_trace.report.locations import uri
from memopd_trace.report.model import MAX_TEXT, Finding, Report
from memopd_trace.report.text import message_lines
from memopd_trace.rules import RULES
from memopd_trace.rules.registry import Rule

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def to_sarif(report: Report) -> str:
    """The report as JSON text in plain ASCII, ending in a newline."""
    index = {rule.code: place for place, rule in enumerate(report.rules)}
    run = {
        "tool": {
            "driver": {
                "name": "memopd-trace",
                "version": __version__,
                "semanticVersion": __version__,
                "rules": [_descriptor(RULES[code]) for code in index],
            }
        },
        "automationDetails": {"id": f"memopd-trace/{report.profile}/"},
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": not report.refused,
                "toolExecutionNotifications": list(_notifications(report, index)),
            }
        ],
        "results": list(_results(report, index)),
        "properties": {"counts": {rule.code: rule.count for rule in report.rules if rule.count}},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _descriptor(rule: Rule) -> dict[str, Any]:
    title, page = rule.page.split("\n", 1)
    summary = " ".join(page.strip().split("\n\n", 1)[0].split())
    return {
        "id": rule.code,
        "name": "".join(word.capitalize() for word in rule.code.split("-")[1:]),
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": summary},
        "help": {"text": rule.page, "markdown": f"#{title}\n{page}"},
        "defaultConfiguration": {"level": rule.severity},
        "properties": {
            "tags": ["memopd-trace", rule.phase],
            "problem.severity": rule.severity,
            "clause": rule.clause,
            "clause_url": rule.clause_url,
        },
    }


def _results(report: Report, index: dict[str, int]) -> Iterator[dict[str, Any]]:
    seen = Counter[str]()
    for finding in report.findings:
        mark = _fingerprint(finding)
        seen[mark] += 1
        yield {
            "ruleId": finding.code,
            "ruleIndex": index[finding.code],
            "level": finding.severity,
            "message": {"text": _message(finding)},
            "locations": [_location(finding)],
            "partialFingerprints": {"primaryLocationLineHash": f"{mark}:{seen[mark]}"},
            "properties": {"row": finding.row, "column": finding.column},
        }


def _message(finding: Finding) -> str:
    return "\n".join(message_lines(finding)).replace("](", "] (")  # a trace's string must not become a link


def _location(finding: Finding) -> dict[str, Any]:
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": {"uri": uri(finding.path)}, "region": {"startLine": 1}}
    }
    if finding.episode_id is not None:
        episode = printable(finding.episode_id)
        name, kind = episode, "episode"
        if finding.invocation_index is not None:
            name, kind = str(finding.invocation_index), "invocation"
            episode = f"{episode}/{name}"
        location["logicalLocations"] = [{"name": name, "fullyQualifiedName": episode, "kind": kind}]
    return location


def _fingerprint(finding: Finding) -> str:
    key = (finding.code, uri(finding.path), finding.episode_id, finding.invocation_index, finding.column)
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _notifications(report: Report, index: dict[str, int]) -> Iterator[dict[str, Any]]:
    for finding in report.findings:
        if RULES[finding.code].phase == "open":
            yield _notification(finding.code, index, "error", _message(finding), [_location(finding)])
    for rule in report.rules:
        if rule.status == "not run":
            yield _notification(rule.code, index, "note", f"not run: {printable(rule.reason or '', MAX_TEXT)}", [])


def _notification(
    code: str, index: dict[str, int], level: str, text: str, locations: list[dict[str, Any]]
) -> dict[str, Any]:
    rule = {"id": code, "index": index[code]}
    return {"level": level, "message": {"text": text}, "associatedRule": rule, "locations": locations}
