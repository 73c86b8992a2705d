"""What a trace, or its name, says cannot become a part of a report's format: an element, a command, a link, a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit
from xml.etree import ElementTree as ET

import pytest
from helpers_report import HOSTILE, hostile

from memopd_trace import Report
from memopd_trace.errors import printable
from memopd_trace.report import FORMATS

# the workflow commands that a GitHub runner obeys
COMMANDS = {"add-mask", "add-matcher", "add-path", "debug", "echo", "endgroup", "error", "group", "notice"}
COMMANDS |= {"remove-matcher", "save-state", "set-env", "set-output", "stop-commands", "warning"}


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return hostile(tmp_path)


def obeyed(line: str) -> tuple[str, dict[str, str], str] | None:
    """What a runner makes of a line: command, properties, data; `None` if it only prints it.

    `::name key=value,key=value::data` at its start, or else `##[name key=value;key=value]data` anywhere.
    """
    text = line.lstrip()
    if text.startswith("::") and "::" in text[2:]:
        head, data = text[2:].split("::", 1)
        name, _, properties = head.partition(" ")
        if name in COMMANDS:
            pairs = [p.split("=", 1) for p in properties.strip().split(",") if "=" in p]
            return name, {k: unescape(v, {"%3A": ":", "%2C": ","}) for k, v in pairs}, unescape(data, {})
    if "##[" in line and "]" in line.split("##[", 1)[1]:
        head, data = line.split("##[", 1)[1].split("]", 1)
        if head.partition(" ")[0] in COMMANDS:
            return head.partition(" ")[0], {}, data
    return None


def unescape(text: str, more: dict[str, str]) -> str:
    for code, character in ({"%0D": "\r", "%0A": "\n"} | more | {"%25": "%"}).items():
        text = text.replace(code, character)
    return text


def test_the_report_is_hostile_and_the_runner_would_obey_it(report: Report) -> None:
    ids = {f.episode_id for f in report.findings}
    assert any(i and "\n::error::x\n##[add-mask]x" in i for i in ids)
    assert set(HOSTILE) - {"\ufffe"} <= {c for i in ids if i for c in i}
    assert any("\udcff" in f.path for f in report.findings)
    assert obeyed("x ##[add-mask]y") and obeyed(" ::error::x") and obeyed("::set-output name=a::b")
    assert obeyed("a ::error::b") is None and obeyed("##[x]y") is None


def test_annotations_are_the_only_commands_and_say_what_the_findings_say(report: Report) -> None:
    lines = report.render("github").split("\n")
    commands = [c for line in lines if (c := obeyed(line)) is not None]
    assert len(commands) == len(report.findings) > 3
    for (name, properties, data), finding in zip(commands, report.findings, strict=True):
        assert name == finding.severity
        assert properties.keys() == {"file", "title"}
        assert properties["file"] == printable(finding.path, None)
        assert properties["title"].startswith(f"{finding.code}: ")
        assert data.startswith(printable(finding.message, None))
        if finding.episode_id is not None:
            assert f"episode '{printable(finding.episode_id)}'" in data
    quiet = [line for line in lines if obeyed(line) is None]
    assert quiet[-1] == "" and all("add-mask" not in line for line in quiet)


def test_junit_is_well_formed_and_keeps_what_can_be_printed(report: Report) -> None:
    text = report.render("junit")
    root = ET.fromstring(text.encode("ascii"))
    odd, gone = root
    assert [odd.get("name"), gone.get("name")] == [printable(t.path, None) for t in report.traces]
    producer = odd.find("properties/property[@name='producer']")
    assert producer is not None and producer.get("value") == printable(HOSTILE)
    failures = odd.findall(".//failure")
    assert {f.get("type") for f in failures} == {f.code for f in report.findings} - {"E-UNREADABLE"}
    assert any(f.text is not None and "]]></failure>&\\x00\\x1b" in f.text for f in failures)


def test_sarif_holds_the_paths_bytes_and_no_link_or_broken_string(report: Report) -> None:
    document = json.loads(report.render("sarif"))
    json.dumps(document, ensure_ascii=False).encode("utf-8")  # no half of a surrogate pair
    (run,) = document["runs"]
    for result, finding in zip(run["results"], report.findings, strict=True):
        uri = urlsplit(result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"])
        assert (uri.scheme, uri.netloc, uri.query, uri.fragment) == ("file", "", "", "")
        assert unquote_to_bytes(uri.path) == os.fsencode(finding.path)
        assert "](" not in result["message"]["text"]
    assert "x] (https:" in json.dumps(run["results"])


@pytest.mark.parametrize("format", FORMATS)
def test_no_control_character_reaches_a_terminal(format: str, report: Report) -> None:
    text = report.render(format)  # type: ignore[arg-type]
    assert len(text) > 3000
    assert not {c for c in text if not c.isprintable() and c != "\n"}
