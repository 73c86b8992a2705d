"""What others build on: names, signatures, fields. A change here changes the interface: say so in CHANGELOG.md."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import memopd_trace
from memopd_trace import report
from memopd_trace.report.document import FindingDocument, ReportDocument, RuleDocument, TraceDocument


def shape(function: Any) -> str:
    """The parameters of a function without their annotations: names, order, kinds and defaults."""
    parameters = inspect.signature(function).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters if p.name != "self"]
    return str(inspect.Signature(plain))


def fields(kind: type) -> str:
    return " ".join(f.name for f in dataclasses.fields(kind))


def test_the_exported_names() -> None:
    assert sorted(memopd_trace.__all__) == [
        "Episode",
        "Finding",
        "Invocation",
        "Media",
        "Report",
        "Sampling",
        "Segment",
        "TraceMetadata",
        "TraceReader",
        "TraceWriter",
        "__version__",
        "read",
        "validate",
        "write",
    ]
    for module in (memopd_trace, report):
        assert all(hasattr(module, name) for name in module.__all__)


SIGNATURES = {
    "read": "(path)",
    "write": "(path, metadata, invocations, *, overwrite=False)",
    "validate": "(path, profile='core', *, select=(), ignore=(), max_findings=100, per_file_ignores=None, "
    "tokenizer=None, views=None, scores=None, sample=None, jobs=1)",
    "TraceReader": "(path)",
    "TraceReader.iter_invocations": "(columns=None)",
    "TraceReader.iter_episodes": "(columns=None)",
    "TraceWriter": "(path, metadata, *, overwrite=False, rows_per_part=100000)",
    "TraceWriter.write": "(invocation)",
    "TraceWriter.write_batch": "(batch)",
    "TraceWriter.write_episode": "(episode)",
    "TraceWriter.close": "()",
    "Invocation.replace": "(**changes)",
    "Invocation.compute_digest": "()",
    "Report.exit_code": "(fail_on='error', *, exit_zero=False)",
    "Report.render": "(format='text', *, fail_on='error')",
    "Report.to_dict": "()",
    "Report.to_json": "()",
    "Report.to_text": "()",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_of(name: str) -> None:
    found: Any = memopd_trace
    for part in name.split("."):
        found = getattr(found, part)
    assert shape(found) == SIGNATURES[name]


def test_an_invocation_takes_its_columns_by_name_and_needs_five() -> None:
    parameters = inspect.signature(memopd_trace.Invocation).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    required = [p.name for p in parameters if p.default is p.empty]
    assert required == ["episode_id", "invocation_index", "model_id", "prompt_ids", "output_ids"]


def test_the_fields_of_a_report() -> None:
    assert fields(report.Report) == "profile traces rules findings errors warnings"
    assert fields(report.RuleResult) == "code status count reason"
    assert fields(report.Finding) == (
        "code severity path message row episode_id invocation_index column expected actual hint clause_url"
    )
    assert fields(report.TraceSummary) == (
        "path refused spec_version producer rows episodes rows_unsound episodes_unsound gaps rules inputs of_rows "
        "of_episodes"
    )
    assert report.FORMATS == ("text", "json", "junit", "sarif", "github")


def test_the_keys_of_the_json_report() -> None:
    assert report.REPORT_VERSION == "1", "keys may be added within a version; these stay"
    names = {"report_version", "profile", "clean", "errors", "warnings", "refused"}
    assert set(ReportDocument.__annotations__) >= names | {"traces", "rules", "findings"}
    assert set(FindingDocument.__annotations__) == {f.name for f in dataclasses.fields(report.Finding)}
    assert set(RuleDocument.__annotations__) == {f.name for f in dataclasses.fields(report.RuleResult)}
    summary = {f.name for f in dataclasses.fields(report.TraceSummary)}
    assert set(TraceDocument.__annotations__) == summary - {"rules"} | {"counts"}
