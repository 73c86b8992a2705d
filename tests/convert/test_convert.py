"""The verb and its command: what is written, what is printed, and which exit code."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers_convert import converted, write_lines

from memopd_trace import Sampling, read, validate
from memopd_trace.cli import run
from memopd_trace.convert import convert
from memopd_trace.convert import run as run_module
from memopd_trace.convert.draft import Call, Draft
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.records import Record, json_files
from memopd_trace.errors import CheckFailed, UsageError

PROMPT = list(range(100, 120))


def exchange(name: str, prompt: list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    answer = {"choices": [{"message": {"content": "x"}, "token_ids": [7, 2], "finish_reason": "stop"}]}
    return {"session_id": name, "response": {**answer, "model": "m", "prompt_token_ids": prompt}, **fields}


def of_calls(monkeypatch: pytest.MonkeyPatch, read_record: Any) -> None:
    """Let `convert("x", …)` read records by this function."""
    chosen = Format(name="x", title="x", exactness="some ids", read=read_record)
    monkeypatch.setattr(run_module, "find", lambda name: chosen)


def call(**fields: Any) -> Call:
    ids = {"prompt_ids": np.array(PROMPT, np.int32), "output_ids": np.array([7, 8, 2], np.int32)}
    return Call(**{"place": "log:1", "model": "m", **ids, **fields})


def logprobs(*values: float | None) -> Any:
    return np.ma.masked_array([v or 0.0 for v in values], [v is None for v in values], dtype=np.float32)


def row_of(draft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    of_calls(monkeypatch, lambda value, losses: [draft])
    return converted(tmp_path, "x", [{}], **options)


def test_a_broken_record_gives_exit_code_1_and_the_rest_is_converted(tmp_path: Path, capsys: Any) -> None:
    log = write_lines(tmp_path / "log.jsonl", [exchange("a"), b'{"cut": ', exchange("b")])
    assert run(["convert", "vllm", str(log), "-o", str(tmp_path / "t.parquet")]) == 1
    out = capsys.readouterr().out
    assert f"{log}:2: is no JSON" in out and "3 in, 2 converted, 1 dropped" in out
    assert validate(tmp_path / "t.parquet", "lineage").clean
    assert run(["convert", "vllm", str(log), "-o", str(tmp_path / "u.parquet"), "--strict"]) == 1
    assert "log.jsonl:2" in capsys.readouterr().err and not (tmp_path / "u.parquet").exists()


def test_the_table_as_json(tmp_path: Path, capsys: Any) -> None:
    log = write_lines(tmp_path / "log.jsonl", [exchange("a"), {"status_code": 500}])
    assert run(["convert", "vllm", str(log), "-o", str(tmp_path / "t.parquet"), "--format", "json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["records"]["in"] == 2 and table["records"]["converted"] == 1
    assert [v["count"] for v in table["records"]["dropped"].values()] == [1]
    assert table["calls"] == {"in": 1, "rows": 1, "dropped": {}}
    assert table["validated"] == {"profile": "lineage", "errors": 0, "warnings": 0}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["vlm", "LOG", "-o", "OUT"], 2, "did you mean 'vllm'?"),
        (["openai", "LOG", "-o", "OUT"], 2, "--tokenizer DIR"),
        (["vllm", "none", "-o", "OUT"], 3, "E-NO-INPUT"),
        (["vllm", "LOG", "-o", "LOG"], 2, "exists already"),
        (["vllm", "LOG", "-o", "out.txt"], 2, "unknown suffix"),
        (["vllm", "LOG", "-o", "OUT", "--tokenizer", "none"], 3, "no such folder"),
        (["vllm", "LOG", "-o", "OUT", "--tokenizer", "."], 3, "no tokenizer"),
        (["vllm", "LOG", "-o", "OUT", "--logprob-kind", "warm"], 2, "warm"),
    ],
)
def test_a_wrong_call_is_one_line(
    arguments: list[str], code: int, said: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "log.jsonl", [exchange("a")])
    names = {"LOG": "log.jsonl", "OUT": "t.parquet"}
    assert run(["convert", *(names.get(a, a) for a in arguments)]) == code
    err = capsys.readouterr().err
    assert said in err.replace("\n", " ") and "Traceback" not in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl"]


def test_the_lines_that_the_docs_write_by_hand_are_converted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "converters.md").read_text()
    ours, conversation = (block.split("```")[0] for block in page.split("```json\n")[1:])
    (tmp_path / "log.jsonl").write_text(ours)
    result = convert("vllm", tmp_path / "log.jsonl", tmp_path / "t.parquet", logprob_kind="raw")
    assert result.exit_code() == 0 and set(result.losses.gaps) == {"no_end", "no_tokenizer"}
    assert result.report is not None and result.report.profile == "policy"
    (row,) = read(tmp_path / "t.parquet").iter_invocations()
    assert (row.group_id, row.reward, list(row.output_ids)) == ("q1", 1.0, [4, 5, 2])
    assert [m["role"] for m in json.loads(conversation)["messages"]] == ["user", "assistant"]


def test_a_log_of_another_format_is_told_where_the_formats_are(tmp_path: Path, capsys: Any) -> None:
    log = write_lines(tmp_path / "log.jsonl", [{"type": "summary"}, {"type": "user"}])
    assert run(["convert", "vllm", str(log), "-o", str(tmp_path / "t.parquet")]) == 3
    assert "is it a log of 'vllm'? `memopd-trace formats` lists the others" in capsys.readouterr().out
    log = write_lines(tmp_path / "log.jsonl", [{"status_code": 500}, {"type": "user"}])
    assert run(["convert", "vllm", str(log), "-o", str(tmp_path / "t.parquet")]) == 3
    assert "formats" not in capsys.readouterr().out  # one of them was understood


def test_without_a_tokenizer_the_ids_of_all_calls_are_nobodys(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", [exchange("a"), exchange("b")])
    result = convert("vllm", log, tmp_path / "t.parquet")
    assert "         2  no_tokenizer (2 of 2 calls)\n" in result.to_text()
    gaps = {gap.code: gap.detail for gap in read(tmp_path / "t.parquet").metadata.source.gaps}
    assert gaps["no_tokenizer"] == "2 of 2 calls"


def test_one_row_is_counted_as_one(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", [exchange("a")])
    assert "1 row in 1 episode, " in convert("vllm", log, tmp_path / "t.parquet").to_text()


def test_nothing_to_convert_is_exit_code_3_and_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    log = write_lines(tmp_path / "log.jsonl", [{"status_code": 500}])
    assert run(["convert", "vllm", str(log), "-o", str(tmp_path / "t.parquet")]) == 3
    assert "no call could be converted" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_an_invalid_trace_is_kept_under_another_name(tmp_path: Path, tokenizer: Path) -> None:
    result, _ = converted(tmp_path, "vllm", [exchange("a", [10**6, 5, 6])], tokenizer=tokenizer)  # not that model's ids
    assert result.exit_code() == 1 and not result.valid
    assert result.trace == tmp_path / "out0.parquet.invalid" and not (tmp_path / "out0.parquet").exists()
    assert [f.code for f in validate(result.trace, select=["E-*"]).findings] == [
        "E-ID-RANGE"
    ] and "E-ID-RANGE" in result.to_text()
    with pytest.raises(UsageError, match="exists already"):
        convert("vllm", tmp_path / "log0.jsonl", tmp_path / "out0.parquet")


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "folder"])
def test_each_form_of_a_trace_can_be_written(name: str, tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", [exchange("a"), exchange("b")])
    result = convert("vllm", log, tmp_path / name)
    assert result.exit_code() == 0 and validate(tmp_path / name, "lineage").clean
    assert not list(tmp_path.glob(".*"))


def test_the_metadata_says_what_the_trace_was_made_from(tmp_path: Path) -> None:
    result, _ = converted(tmp_path, "vllm", [exchange("a")])
    source = read(result.trace or "").metadata.source
    assert source is not None and source.converter is not None and source.converter.startswith("memopd-trace ")
    (given,) = source.inputs
    assert given.name == str(tmp_path / "log0.jsonl")
    assert given.sha256 == hashlib.sha256((tmp_path / "log0.jsonl").read_bytes()).hexdigest()


def test_the_same_records_give_the_same_states_and_an_unknown_tokenizer_is_like_no_other(tmp_path: Path) -> None:
    (one, a), (two, b) = (converted(tmp_path, "vllm", [exchange("a")]) for _ in range(2))
    assert [r.compute_digest() for r in a] == [r.compute_digest() for r in b]
    prints = [read(r.trace or "").metadata.models["m"].tokenizer.fingerprint for r in (one, two)]
    assert all(p.startswith("unknown:") for p in prints) and len(set(prints)) == 2


def test_an_episode_told_in_two_files_is_not_mixed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_calls(monkeypatch, lambda value, losses: [Draft(episode_id="e", calls=[call()])])
    result, rows = converted(tmp_path, "x", [{}, {}, {}])
    assert [r.episode_id for r in rows] == ["e", "e~2", "e~3"]
    assert result.losses.degraded["an episode's id occurs again"].number == 2


def test_pieces_of_an_episode_are_joined_and_differences_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = iter([Draft(episode_id="e", calls=[call()], whole=False, task_id="t", reward=1.0),
                   Draft(episode_id="e", whole=False, task_id="u", reward=2.0, terminated=True)])  # fmt: skip
    of_calls(monkeypatch, lambda value, losses: [next(pieces)])
    result, (row,) = converted(tmp_path, "x", [{}, {}])
    assert (row.task_id, row.reward, row.terminated) == ("u", 2.0, True)
    assert sum("told twice and differently" in reason for reason in result.losses.degraded) == 2


def test_small_leftovers_are_extra_and_large_ones_lie_beside_the_trace(tmp_path: Path) -> None:
    result, (row,) = converted(tmp_path, "vllm", [exchange("a", note="é", deep={"a": [1]}, long="x" * 10_000)])
    assert row.extra is not None and row.extra["note"] == "é" and row.extra["deep"] == '{"a":[1]}'
    assert "long" not in row.extra and result.aside == tmp_path / "out0.parquet.aside.jsonl.zst"
    with pa.CompressedInputStream(pa.OSFile(str(result.aside)), "zstd") as stream:
        (line,) = stream.read().splitlines()
    assert json.loads(line) == {"episode_id": "a", "invocation_index": 0, "extra": {"long": "x" * 10_000}}


def test_rewards_keep_their_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = call(prompt_ids=np.array([*PROMPT, 7, 8, 2, 9], np.int32))
    _, rows = row_of(
        Draft(episode_id="e", calls=[call(), later], reward=1.0, rewards={"f1": 0.5}), tmp_path, monkeypatch
    )
    assert [r.reward for r in rows] == [None, 1.0] and rows[1].rewards == {"f1": 0.5}
    own = [call(reward=0.25), call(reward=0.5)]
    result, rows = row_of(Draft(episode_id="e", calls=own, reward=1.0), tmp_path, monkeypatch)
    assert [r.reward for r in rows] == [0.25, 0.5] and (rows[0].extra or {})["episode_reward"] == "1.0"
    assert any("not the sum" in reason for reason in result.losses.degraded)


NUCLEUS = Sampling(temperature=1.0, top_p=0.9)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"logprobs": logprobs(-1, -2)}, "not as many as the ids"),
        ({"logprobs": logprobs(-1, -2, -3), "sampling": Sampling(temperature=0.5)}, "not told"),
        ({"logprobs": logprobs(-1, -2, -3), "sampling": Sampling(temperature=0.0)}, "not told"),
        ({"logprobs": logprobs(-1, -2, -3), "sampling": Sampling(top_k=5)}, "not told"),
        ({"logprobs": logprobs(-1, -2, -3), "sampling": NUCLEUS, "logprob_kind": "processed"}, "unknown mass"),
    ],
)  # fmt: skip
def test_logprobs_that_mean_nothing_are_left_out(
    fields: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, (row,) = row_of(Draft(episode_id="e", calls=[call(**fields)]), tmp_path, monkeypatch)
    assert row.output_logprobs is None and row.logprob_kind is None and result.exit_code() == 0
    assert any(why in reason for reason in result.losses.degraded)
    assert "log_probabilities" in (row.extra or {})


def test_settings_that_cannot_be_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Sampling(temperature=-1.0, top_p=0.0, top_k=2**40, min_p=0.5, repetition_penalty=0.0, seed=3)
    result, (row,) = row_of(Draft(episode_id="e", calls=[call(sampling=odd, attempt=-1)]), tmp_path, monkeypatch)
    assert row.sampling == Sampling(min_p=0.5, seed=3) and row.attempt is None
    assert sum("out of its range" in reason for reason in result.losses.degraded) == 5


def test_masks_and_versions_that_do_not_fit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {"sampled": np.ones(2, bool), "trained": np.ones(4, bool), "output_policy_versions": np.ones(1, np.int64)}
    result, (row,) = row_of(Draft(episode_id="e", calls=[call(**odd)]), tmp_path, monkeypatch)
    assert row.output_sampled is row.output_loss_mask is row.output_policy_versions is None
    assert sum("not as many as the ids" in reason for reason in result.losses.degraded) == 3


def test_what_was_not_sampled_is_not_trained_and_needs_no_logprob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"sampled": np.array([True, False, True]), "trained": np.ones(3, bool), "logprobs": logprobs(-1, None, -2)}
    result, (row,) = row_of(Draft(episode_id="e", calls=[call(**fields)]), tmp_path, monkeypatch)
    assert row.loss_mask().tolist() == [True, False, True] and not result.losses.degraded


def test_an_exact_and_complete_log_is_held_to_the_profile_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = call(logprobs=logprobs(-1, -2, -3), logprob_kind="raw", sampling=Sampling(temperature=1.0), policy_version=3,
                finish_reason="stop")  # fmt: skip
    result, _ = row_of(
        Draft(episode_id="e", calls=[full], reward=1.0, task_id="t", terminated=True), tmp_path, monkeypatch
    )
    assert result.report is not None and result.report.profile == "train" and result.valid
    assert list(result.losses.gaps) == ["no_tokenizer"]


def test_what_a_converter_refuses_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: Any, losses: Losses) -> Any:
        raise {"broken": BrokenRecord("no"), "other": NotACall("a note")}[value["kind"]]

    of_calls(monkeypatch, refuse)
    result, _ = converted(tmp_path, "x", [{"kind": "broken"}, {"kind": "other"}, {"kind": "other"}])
    assert {k: v.number for k, v in result.losses.dropped_records.items()} == {"broken": 1, "no call: a note": 2}
    with pytest.raises(CheckFailed, match=r"log0\.jsonl:1: no"):
        convert("x", tmp_path / "log0.jsonl", tmp_path / "t.parquet", strict=True)


def test_a_file_whose_lines_belong_together_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_file(lines: list[Record], losses: Losses) -> Any:
        for line in lines:
            if "note" in line.value:
                losses.skip("a note")
        yield Draft(episode_id="e", calls=[call(place=line.place) for line in lines if "call" in line.value])

    chosen = Format(name="x", title="x", exactness="some ids", read=read_file, records=json_files)
    monkeypatch.setattr(run_module, "find", lambda name: chosen)
    result, rows = converted(tmp_path, "x", [{"call": 1}, {"note": 1}, b"{broken", {"note": 1}, {"call": 2}])
    assert len(rows) == 2 and result.losses.records == 5 and result.losses.converted == 2
    assert {k: v.number for k, v in result.losses.dropped_records.items()} == {"no call: a note": 2, "broken": 1}


def test_of_many_broken_records_a_few_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "vllm", [exchange("a"), *({"x": i} for i in range(150))])
    assert len(rows) == 1 and result.losses.broken == 150 and len(result.losses.issues) == 100
    assert "… and 130 more" in result.to_text() and result.to_text().count("log0.jsonl:") == 20 + 1
    assert result.to_json()["broken_total"] == 150


def test_progress_is_told_record_by_record(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", [exchange("a"), exchange("b")])
    seen: list[int] = []
    convert("vllm", log, tmp_path / "t.parquet", on_record=seen.append)
    assert seen == [1, 2]


def test_a_fault_of_a_converter_costs_its_record_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(value: Any, losses: Losses) -> Any:
        return [Draft(episode_id="e", calls=[call()])] if value["good"] else value["missing"]

    of_calls(monkeypatch, fail)
    result, rows = converted(tmp_path, "x", [{"good": True}, {"good": False}, {"good": True}])
    assert len(rows) == 2 and result.exit_code() == 1
    assert str(result.losses.issues[0]).endswith(f"log0.jsonl:2: {run_module.FAULT}: KeyError: 'missing'")


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "validate", stop)
    log = write_lines(tmp_path / "log.jsonl", [exchange("a", long="x" * 10_000)])
    with pytest.raises(KeyboardInterrupt):
        convert("vllm", log, tmp_path / "t.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_importing_the_package_needs_no_json_library() -> None:
    check = (
        "import sys, memopd_trace, memopd_trace.cli; assert not {'orjson', 'transformers', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
