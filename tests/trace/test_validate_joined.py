"""Views and scores beside a trace: where findings stand, what is not said twice, and what is not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_trace import VECTORS, build, builder, inputs, judge, valid

from memopd_trace import Report, joined, validate
from memopd_trace.cli import run
from memopd_trace.errors import UsageError
from memopd_trace.rules import RULES
from memopd_trace.rules.rowindex import ROW, TOKEN

Capture = pytest.CaptureFixture[str]


def invalid(code: str) -> dict[str, Any]:
    vector: dict[str, Any] = builder.load(VECTORS / "invalid" / f"{code}.json")
    return vector


def status(report: Report, code: str) -> tuple[str, str | None]:
    (result,) = (r for r in report.rules if r.code == code)
    return result.status, result.reason


def test_without_scores_and_views_their_rules_say_what_they_need(tmp_path: Path) -> None:
    report = validate(build(valid("tiny"), tmp_path))
    assert report.clean and report.traces[0].inputs == ()
    for code, rule in RULES.items():
        if rule.wants in ("views", "scores"):
            assert status(report, code) == ("not run", f"needs --{rule.wants}")


def test_every_rule_about_views_runs_on_a_views_file(tmp_path: Path) -> None:
    report = judge(valid("views"), tmp_path)
    assert all(status(report, code)[0] == "pass" for code, rule in RULES.items() if rule.wants == "views")


def test_what_a_signal_cannot_tell_is_not_run_and_says_why(tmp_path: Path) -> None:
    report = judge(valid("scores-sampled"), tmp_path)
    assert status(report, "E-SCORES-TOPK-MASS") == ("not run", "the scores hold no signal 'topk'")
    assert status(report, "E-SCORES-CHECK") == ("not run", "the scores hold no states")
    assert status(report, "E-SCORES-DISAGREE")[0] == status(report, "E-SCORES-SHIFT")[0] == "not run"
    assert status(report, "W-SCORES-TEMPERATURE")[0] == status(report, "E-SCORES-MISSING")[0] == "pass"


def test_states_are_not_checked_without_a_tensor_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "find_spec", lambda name: None)
    report = judge(invalid("E-SCORES-CHECK"), tmp_path)
    assert report.clean
    why = status(report, "E-SCORES-CHECK")[1]
    assert why is not None and "the extra 'score'" in why


def test_a_finding_names_the_row_of_the_shard_and_the_key(tmp_path: Path) -> None:
    (finding,) = judge(invalid("E-SCORES-LENGTH-1"), tmp_path).findings
    assert Path(finding.path).name.startswith("shard-000001-") and finding.row == 0
    assert (finding.episode_id, finding.invocation_index, finding.column) == ("e1", 0, "entropy")
    assert (finding.expected, finding.actual) == ("3 items", "2 items")


def test_a_missing_score_is_shown_at_the_row_of_the_trace(tmp_path: Path) -> None:
    (finding,) = judge(invalid("E-SCORES-MISSING-2"), tmp_path).findings
    assert Path(finding.path) == tmp_path / "trace.parquet" and finding.row == 2
    assert finding.message.startswith("1 tokens to be trained have no score")


def test_untrained_tokens_and_those_that_no_teacher_can_score_may_be_missing(tmp_path: Path) -> None:
    vector = invalid("E-SCORES-MISSING-2")
    vector["rows"][2]["output_loss_mask"] = [True, False, True]
    assert judge(vector, tmp_path).clean
    vector = invalid("E-SCORES-MISSING-1")
    vector["rows"][2]["accepted"] = False
    (tmp_path / "b").mkdir()
    assert judge(vector, tmp_path / "b").clean
    vector = invalid("E-SCORES-MISSING-1")  # three tokens: beyond the tokenizer, that is padded, and two that are not
    vector["rows"][2]["output_ids"][0] = 3
    (tmp_path / "c").mkdir()
    report = judge(vector, tmp_path / "c")
    assert report.codes == {"E-SCORES-MISSING", "W-ID-PADDED"}
    assert "2 tokens" in next(f.message for f in report.findings if f.code == "E-SCORES-MISSING")


def test_a_row_that_is_reported_is_not_missing_as_well(tmp_path: Path) -> None:
    for code in ("E-SCORES-STATE", "E-SCORES-LENGTH-1", "E-SCORES-TOKENIZER-1", "E-SCORES-DAMAGED-1"):
        folder = tmp_path / code
        folder.mkdir()
        report = judge(invalid(code), folder)
        assert len(report.codes) == 1, report.to_text()


def test_a_row_of_the_trace_that_is_broken_is_not_unknown_to_its_scores(tmp_path: Path) -> None:
    for base in ("scores-full", "views"):
        vector = valid(base)
        vector["rows"][2]["output_logprobs"] = [-0.1]
        (tmp_path / base).mkdir()
        assert judge(vector, tmp_path / base).codes == {"E-LENGTH-OUTPUT"}


def test_a_trace_without_a_required_column_is_not_joined_at_all(tmp_path: Path) -> None:
    vector = valid("scores-full")
    vector["drop"] = ["prompt_ids"]
    assert judge(vector, tmp_path).codes == {"E-COLUMN-MISSING"}


def test_a_state_digest_that_the_trace_leaves_out_is_computed(tmp_path: Path) -> None:
    vector = invalid("E-SCORES-STATE")
    assert all("state_digest" not in row for row in vector["rows"])
    (finding,) = judge(vector, tmp_path).findings
    assert finding.expected == valid("scores-sampled")["scores"]["rows"][0]["state_digest"]
    assert finding.actual == vector["scores"]["rows"][0]["state_digest"] != finding.expected


def test_the_order_of_score_rows_and_shards_is_free(tmp_path: Path) -> None:
    vector = valid("scores-topk")
    vector["scores"]["rows"] = vector["scores"]["rows"][::-1]
    vector["scores"]["shards"] = [1, 2]
    assert judge(vector, tmp_path).clean


def test_rules_are_chosen_as_for_a_trace(tmp_path: Path) -> None:
    report = judge(invalid("E-SCORES-STATE"), tmp_path, ignore=["E-SCORES-STATE"])
    assert report.clean
    (tmp_path / "b").mkdir()
    report = judge(invalid("E-SCORES-TARGET-1"), tmp_path / "b", select=["E-SCORES-ENTROPY"])
    assert report.clean and status(report, "E-SCORES-ENTROPY")[0] == "pass"


def test_a_refused_input_is_counted_and_exits_3(tmp_path: Path) -> None:
    trace = build(valid("tiny"), tmp_path)
    report = validate(trace, scores=tmp_path / "none", views=tmp_path / "none.parquet")
    assert report.refused == 2 and report.exit_code(exit_zero=True) == 3 and not report.clean
    assert [i.refused for i in report.traces[0].inputs] == ["E-NO-INPUT", "E-NO-INPUT"]
    assert report.traces[0].refused is None and report.traces[0].rows == 3
    assert status(report, "E-SCORES-STATE") == ("not run", "the scores were refused")
    assert validate(trace, scores=trace).codes == {"E-UNREADABLE"}


def test_several_traces_have_no_scores_in_common(tmp_path: Path) -> None:
    trace = build(valid("tiny"), tmp_path)
    with pytest.raises(UsageError, match="one trace"):
        validate([trace, trace], scores=tmp_path)


def test_the_command_line_takes_scores_and_views(tmp_path: Path, capsys: Capture) -> None:
    vector = valid("scores-view")
    trace = str(build(vector, tmp_path))
    given = inputs(vector, tmp_path)
    options = ["--scores", str(given["scores"]), "--views", str(given["views"])]
    assert run(["validate", trace, *options, "--format", "json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["traces"]
    assert [(i["kind"], i["rows"]) for i in document["inputs"]] == [("views", 4), ("scores", 3)]
    assert run(["validate", trace, *options, *options[:2]]) == 0, "the same folder twice agrees with itself"
    assert run(["validate", trace, "--scores", str(tmp_path / "none")]) == 3
    assert run(["validate", trace, trace, *options]) == 2
    assert run(["validate", trace, *options, "-o", str(given["scores"] / "report.txt")]) == 2


def test_scores_under_a_view_of_which_nothing_is_known_are_not_missing(tmp_path: Path) -> None:
    vector = valid("scores-view")
    vector["scores"]["rows"] = vector["scores"]["rows"][:2]
    vector["views"]["rows"] = vector["views"]["rows"][:3]
    assert judge(vector, tmp_path).clean, "the third row has no view"
    (tmp_path / "b").mkdir()
    del vector["views"]
    report = judge(vector, tmp_path / "b")
    assert report.clean and status(report, "E-SCORES-MISSING") == ("not run", "which rows have the view needs --views")


def test_junit_holds_the_findings_of_scores(tmp_path: Path) -> None:
    report = judge(invalid("E-SCORES-ENTROPY"), tmp_path)
    assert "entropy[1] is out of range" in report.render("junit")
    assert all("entropy" in report.render(format) for format in ("text", "json", "sarif", "github"))


def test_the_index_takes_the_memory_that_it_states() -> None:
    assert ROW.itemsize <= 90 and TOKEN.itemsize == 9


def test_rows_are_found_among_many_batches(tmp_path: Path) -> None:
    vector = valid("scores-sampled")
    rows, scores = vector["rows"], vector["scores"]["rows"]
    many = range(700)  # more than one batch of a trace
    vector["rows"] = [{**rows[0], "episode_id": f"e{i}"} for i in many]
    vector["scores"]["rows"] = [{**scores[0], "episode_id": f"e{i}"} for i in np.random.default_rng(0).permutation(700)]
    vector["scores"]["shards"] = [300, 400]
    report = judge(vector, tmp_path)
    assert report.clean and report.traces[0].inputs[0].rows == 700
