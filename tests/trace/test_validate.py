"""The engine: what is counted, capped, chosen, left out and said; rules themselves are tested elsewhere."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers_trace import VECTORS, build, builder, changed, judge, valid

from memopd_trace import Invocation, TraceMetadata, TraceWriter, validate
from memopd_trace.conform import conform_batch
from memopd_trace.errors import UsageError
from memopd_trace.metadata import parse_metadata
from memopd_trace.pieces import load_pieces
from memopd_trace.report import Report, RuleResult
from memopd_trace.rules import RULES
from memopd_trace.rules.batch import Batch
from memopd_trace.rules.registry import Inputs
from memopd_trace.schema import TRACE_COLUMNS
from memopd_trace.storage import TraceReader


def result(report: Report, code: str) -> RuleResult:
    return next(r for r in report.rules if r.code == code)


def many_faults(number: int) -> dict[str, Any]:
    """`number` rows, each with a NaN logprob."""
    vector = valid("plain")
    row = {**vector["rows"][0], "output_logprobs": ["NaN", -0.5]}
    vector["rows"] = [{**row, "invocation_index": i} for i in range(number)]
    return vector


def test_the_verb_is_the_function_even_after_its_module_is_imported() -> None:
    import memopd_trace.validate

    assert callable(memopd_trace.validate)


def test_findings_are_capped_per_code_and_counts_stay_true(tmp_path: Path) -> None:
    report = judge(many_faults(150), tmp_path)
    assert report.errors == result(report, "E-LOGPROB-NAN").count == 150
    assert len(report.findings) == 100
    few = judge(many_faults(150), tmp_path, max_findings=3)
    assert (few.errors, len(few.findings)) == (150, 3)
    assert "E-LOGPROB-NAN: 150 findings, 3 shown" in few.to_text()
    assert judge(many_faults(2), tmp_path, max_findings=0).exit_code() == 1


def test_a_row_with_many_bad_tokens_is_one_finding_that_names_the_first(tmp_path: Path) -> None:
    report = judge(changed("train", (0, {"output_logprobs": [-0.7, "NaN", "NaN"]})), tmp_path)
    (finding,) = report.findings
    assert finding.message == "output_logprobs[1] is NaN (and 1 more in this row)"
    assert (finding.row, finding.episode_id, finding.invocation_index) == (0, "e0", 0)
    assert (finding.column, finding.actual) == ("output_logprobs", "nan")


def test_rows_count_from_0_in_their_own_file(tmp_path: Path) -> None:
    vector = changed("train", (3, {"output_logprobs": [-1.2, "NaN"]}))
    assert judge(vector, tmp_path).findings[0].row == 3
    folder = judge({**vector, "storage": "folder", "parts": [3, 1]}, tmp_path)
    (finding,) = folder.findings
    assert finding.row == 0 and finding.path.endswith("part-00001.parquet")


def test_an_episode_that_spans_batches_is_judged_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = changed("train", (1, {"prompt_ids": [5, 6, 7, 8, 9, 3, 11, 12]}), (2, {"segments": None}))
    path = build(vector, tmp_path)
    whole = validate(path, "train")
    assert whole.codes == {"E-DISCONTINUITY"}
    original = TraceReader.iter_raw
    monkeypatch.setattr(TraceReader, "iter_raw", lambda self, index, rows=0: original(self, index, 1))
    assert validate(path, "train") == whole


def test_select_and_ignore_take_codes_and_globs_in_any_case(tmp_path: Path) -> None:
    vector = changed("train", (0, {"output_logprobs": [0.0005, "NaN", -1.6]}))
    assert judge(vector, tmp_path).codes == {"E-LOGPROB-NAN", "W-LOGPROB-ROUNDING"}
    assert judge(vector, tmp_path, ignore=["e-logprob-*"]).codes == {"W-LOGPROB-ROUNDING"}
    only = judge(vector, tmp_path, select=["E-LOGPROB-NAN"])
    assert only.codes == {"E-LOGPROB-NAN"} and [r.code for r in only.rules] == ["E-LOGPROB-NAN"]


def test_a_pattern_that_matches_nothing_is_a_usage_error(tmp_path: Path) -> None:
    path = build(valid("plain"), tmp_path)
    with pytest.raises(UsageError, match="E-LOGPROB-NAN"):
        validate(path, ignore=["E-LOGPROB-NANN"])
    with pytest.raises(UsageError, match="core, lineage, policy, train"):
        validate(path, "strict")


def test_a_refused_input_cannot_be_ignored_and_does_not_stop_the_others(tmp_path: Path) -> None:
    good, bad = build(valid("train"), tmp_path, "good"), tmp_path / "nothing.parquet"
    report = validate([bad, good], "train", ignore=["E-NO-INPUT"])
    assert [t.refused for t in report.traces] == ["E-NO-INPUT", None]
    assert report.exit_code(exit_zero=True) == 3
    assert report.traces[1].rows == 4 and not report.clean


def test_several_traces_give_one_report_and_may_share_episode_ids(tmp_path: Path) -> None:
    paths = [build(valid("train"), tmp_path, name) for name in ("one", "two")]
    report = validate(paths, "train")
    assert report.clean and [t.rows for t in report.traces] == [4, 4]


def test_shape_faults_keep_a_row_from_value_rules_even_when_ignored(tmp_path: Path) -> None:
    """Values that are shifted by one would be judged against the wrong tokens."""
    vector = changed("train", (0, {"output_logprobs": ["NaN", -0.1]}))
    report = judge(vector, tmp_path, ignore=["E-LENGTH-OUTPUT"])
    assert report.codes == set() and report.traces[0].rows_unsound == 1
    assert "1 row not checked for values" in report.to_text()


def test_a_null_in_a_required_column_leaves_its_episode_out_and_judges_the_others(tmp_path: Path) -> None:
    vector = changed("train", (1, {"prompt_ids": None}), (2, {"parent_index": 0}), (3, {"reward": "NaN"}))
    report = judge(vector, tmp_path)
    assert report.codes == {"E-NULL", "E-REWARD-NONFINITE"}
    assert report.traces[0].episodes_unsound == 1 and report.traces[0].episodes == 2


def test_rules_say_why_they_were_not_run(tmp_path: Path) -> None:
    report = judge(valid("train"), tmp_path)
    assert result(report, "E-VISIBILITY").reason == "no row has a value in its columns"
    assert "no model has a begin-of-sequence id" in str(result(report, "W-DOUBLE-BOS").reason)
    assert "not a folder" in str(result(report, "E-MANIFEST-ROWS").reason)
    assert result(report, "E-LOGPROB-NAN").status == "pass"
    misfit = judge({**valid("train"), "types": {"output_logprobs": "list<float16>"}}, tmp_path)
    assert "output_logprobs" in str(result(misfit, "E-LOGPROB-NAN").reason)
    assert "output_logprobs" in str(result(misfit, "E-NEEDS-LOGPROBS").reason)
    assert result(misfit, "E-DISCONTINUITY").status == "pass"
    required = [c.name for c in TRACE_COLUMNS if c.required]
    empty = judge({**valid("plain"), "rows": [], "empty": required}, tmp_path)
    assert result(empty, "E-INDEX").reason == "there is no row"
    refused = validate(tmp_path / "gone")
    assert result(refused, "E-INDEX").reason == "the input was refused"


def test_a_column_that_stops_fitting_half_way_is_not_called_passed(tmp_path: Path) -> None:
    path = build({**valid("plain"), "storage": "ipc", "types": {"output_logprobs": "list<float32>"}}, tmp_path)
    table = pa.ipc.open_file(path).read_all()
    bools = pa.array([[True, False], [True]], pa.list_(pa.bool_()))
    holes = pa.array([[True, None], [True]], pa.list_(pa.bool_()))
    with pa.OSFile(str(path), "wb") as sink:
        first = table.append_column("output_sampled", bools)
        second = table.append_column("output_sampled", holes)
        second = second.set_column(0, "episode_id", pa.array(["f", "f"]))
        with pa.ipc.new_file(sink, first.schema) as writer:
            writer.write_table(first)
            writer.write_table(second)
    report = validate(path)
    assert report.codes == {"E-COLUMN-TYPE"}
    assert result(report, "E-NO-CONTEXT").status == "not run"


def test_the_json_report_has_its_documented_keys(tmp_path: Path) -> None:
    vector = changed("train", (0, {"output_logprobs": [-0.7, "NaN", -1.6]}))
    vector["metadata"]["source"] = {"format": "log", "gaps": [{"code": "seed", "detail": "not in the log"}]}
    document = json.loads(judge(vector, tmp_path).to_json())
    assert document["report_version"] == "1"
    schema = json.loads((Path(__file__).parents[2] / "spec" / "report.schema.json").read_text())
    declared = {"Trace": document["traces"][0], "Rule": document["rules"][0], "Finding": document["findings"][0]}
    assert list(document) == list(schema["properties"])
    for name, level in declared.items():
        assert list(level) == list(schema["$defs"][f"{name}Document"]["properties"])
    assert document["traces"][0]["gaps"] == [{"code": "seed", "detail": "not in the log"}]
    assert "seed (not in the log)" in judge(vector, tmp_path).to_text()


def test_hostile_strings_stay_on_their_line(tmp_path: Path) -> None:
    name = "e\n\x1b[31mfake: 0 errors" + "x" * 5000
    report = judge(changed("plain", (0, {"episode_id": name, "prompt_ids": [-1]})), tmp_path)
    text = report.to_text()
    assert "\x1b" not in text and "\nfake" not in text
    assert max(map(len, text.splitlines())) < 2000
    assert report.findings[0].episode_id == name, "data is not changed, only its rendering"


def test_text_ends_in_one_line_of_totals(tmp_path: Path) -> None:
    last = judge(changed("train", (0, {"output_logprobs": [0.0005, "NaN", -1.6]})), tmp_path).to_text()
    assert last.splitlines()[-1].startswith("1 error, 1 warning; 4 rows, 2 episodes; profile train: ")


def test_a_rule_declares_every_column_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would run on a column that does not fit the schema, and see nulls."""
    read: set[str] = set()
    original = Batch.column

    def column(self: Batch, name: str) -> pa.Array:
        read.add(name)
        return original(self, name)

    monkeypatch.setattr(Batch, "column", column)
    required = {c.name for c in TRACE_COLUMNS if c.required}
    given = Inputs(tokenizer=load_pieces(VECTORS / "toy-tokenizer"))
    for name in ("train", "processed", "visibility", "slots", "routed", "versions", "relations", "text"):
        vector = valid(name)
        table = builder.to_table(vector, vector["rows"], vector["metadata"])
        batch, _ = conform_batch(table.combine_chunks().to_batches()[0])
        metadata = parse_metadata(table.schema.metadata, where=name)
        for rule in RULES.values():
            if rule.phase == "batch" and rule.check is not None:
                read.clear()
                list(rule.check(Batch(batch, metadata, given)))
                assert read <= required | set(rule.columns), rule.code


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    metadata = TraceMetadata.model_validate(valid("train")["metadata"])

    def peak(episodes: int) -> int:
        path = tmp_path / f"{episodes}.parquet"
        with TraceWriter(path, metadata) as writer:
            for e in range(episodes):
                for i in range(8):
                    ids = np.arange(5, 95, dtype=np.int32).repeat(20)
                    writer.write(
                        Invocation(episode_id=f"e{e}", invocation_index=i, model_id="m", prompt_ids=ids, output_ids=[8])
                    )
        tracemalloc.start()
        try:
            assert validate(path).clean
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(400), peak(1600)  # both more rows than a batch has
    assert large < 1.5 * small, (small, large)


def test_nan_is_not_written_into_json(tmp_path: Path) -> None:
    report = judge(changed("train", (2, {"reward": "NaN"})), tmp_path)
    assert math.isnan(float(report.findings[0].actual or ""))
    assert json.loads(report.to_json())["findings"][0]["actual"] == "nan"


def test_nothing_to_validate_is_not_clean() -> None:
    with pytest.raises(UsageError, match="no trace is given"):
        validate([])
    with pytest.raises(UsageError, match="max_findings: at least 0, got -1"):
        validate("gone.parquet", max_findings=-1)


def test_a_single_pattern_need_not_be_a_list(tmp_path: Path) -> None:
    path = build(valid("tiny"), tmp_path)
    assert validate(path, select="E-NULL") == validate(path, select=["E-NULL"])
    assert validate(path, ignore="W-*", per_file_ignores={"*": "E-*"}) == validate(
        path, ignore=["W-*"], per_file_ignores={"*": ["E-*"]}
    )


def test_versions_may_lie_any_distance_apart(tmp_path: Path) -> None:
    least, most = -(2**63), 2**63 - 1
    vector = changed("tiny", (0, {"policy_version": most, "kv_policy_version": least}))
    report = judge(vector, tmp_path)
    assert [f.message for f in report.findings if f.code == "W-KV-STALE"] == [
        f"keys and values are {most - least} versions old"
    ]


def test_a_word_that_is_not_known_is_quoted_like_those_that_are(tmp_path: Path) -> None:
    report = judge(changed("train", (0, {"relation": "Root", "model_id": "null"})), tmp_path)
    category, model = (next(f for f in report.findings if f.code == c) for c in ("E-CATEGORY", "E-MODEL-UNKNOWN"))
    assert category.actual == "'Root'" and "'root', " in (category.expected or "") and category.hint
    assert (model.expected, model.actual) == ("'m'", "'null'") and model.hint


def test_a_folder_of_traces_is_told_from_a_trace_that_is_a_folder(tmp_path: Path) -> None:
    for name in ("empty", "traces"):
        (tmp_path / name).mkdir()
    build(valid("plain"), tmp_path / "traces", "one")
    empty, traces = (validate(tmp_path / name).findings[0] for name in ("empty", "traces"))
    assert empty.code == traces.code == "E-INCOMPLETE"
    assert "one trace with a manifest" in (empty.hint or "") and "*" not in (empty.hint or "")
    assert f"give {tmp_path}/traces/*.parquet" in (traces.hint or "")
