"""Inspect: zips and JSON, pooled messages and attachments, compaction, scores; and zips that are bombs."""

from __future__ import annotations

import copy
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from helpers_convert import FIXTURES, LOGS, converted

from memopd_trace import Invocation, read
from memopd_trace.convert import Conversion, convert, evalfile
from memopd_trace.convert.losses import Issue

LOG = LOGS["inspect"][0]
SAMPLE = LOG["samples"][0]


def zipped(path: Path, **members: Any) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({"version": 2, "eval": LOG["eval"]}))
        for name, value in members.items():
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            archive.writestr(f"samples/{name.replace('__', '/')}.json", data)
    return path


def through(folder: Path, source: Path, **options: Any) -> tuple[Conversion, list[Invocation]]:
    result = convert("inspect", source, folder / "t.parquet", **options)
    assert result.losses.balanced(), result.to_text()
    return result, list(read(result.trace).iter_invocations()) if result.trace else []


def test_a_zip_that_inspect_wrote_is_read_with_its_own_packing(tmp_path: Path, tokenizer: Path) -> None:
    source = FIXTURES / "inspect_two_calls.eval"
    with zipfile.ZipFile(source) as archive:
        assert {m.compress_type for m in archive.infolist()} == {evalfile.ZSTD}
    result, rows = through(tmp_path, source, tokenizer=tokenizer)
    assert [(r.relation, r.finish_reason, r.reward) for r in rows] == [
        ("root", "tool_calls", None), ("extend", "stop", 1.0),
    ] * 2  # fmt: skip
    assert {r.group_id for r in rows} == {"task/1"} and len({r.episode_id for r in rows}) == 2  # two epochs
    assert rows[1].rewards == {"match": 1.0} and rows[0].sampling is not None and rows[0].sampling.temperature == 0.5
    said = json.loads(rows[1].messages or "")
    assert [m["role"] for m in said] == ["system", "user", "assistant", "tool", "assistant"]
    assert said[1]["content"].startswith("What is 1 + 2?")  # it was an attachment
    assert said[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert json.loads((rows[0].extra or {})["tools"])[0]["function"]["name"] == "add" and result.exit_code() == 0


def test_ids_of_the_providers_answer_hold_and_a_compaction_is_an_explicit_rewrite(tmp_path: Path) -> None:
    _, (first, second) = converted(tmp_path, "inspect", [LOG])
    assert first.prompt_ids.tolist() == list(range(100, 140)) and first.token_source == "engine"
    assert (second.relation, second.rewrite_kind, second.rewrite_evidence) == ("rewrite", "summary", "explicit")
    assert [m["content"] for m in json.loads(second.messages or "")] == ["be brief", "sum: looked", "done"]
    assert second.reward == 1.0 and (first.task_id, first.episode_id) == ("t/1", "u")


def test_a_sample_in_pieces_is_put_together(tmp_path: Path) -> None:
    shell = {k: v for k, v in SAMPLE.items() if k not in ("events", "events_data", "attachments")}
    pool = copy.deepcopy(SAMPLE["events_data"]["messages"])
    pool[0]["content"] = "attachment://1"
    source = zipped(
        tmp_path / "log.eval", a__sample=shell, a__events__0=SAMPLE["events"][:1], a__events__1=SAMPLE["events"][1:],
        a__messages__0=pool[:3], a__messages__3=pool[3:], a__calls__0=pool, a__attachments__0=["no", "be brief"],
        a__skeleton={"x": 1},
    )  # fmt: skip
    result, rows = through(tmp_path, source)
    assert json.loads(rows[1].messages or "")[0]["content"] == "be brief" and result.exit_code() == 0


@pytest.mark.parametrize(("limit", "truncated"), [(None, None), ({"type": "token", "limit": 9}, True)])
def test_a_limit_that_was_hit_is_a_cut(limit: Any, truncated: bool | None, tmp_path: Path) -> None:
    sample = {**SAMPLE, "limit": limit}
    _, rows = converted(tmp_path, "inspect", [{**LOG, "samples": [sample]}])
    assert rows[-1].truncated is truncated


def test_scores_of_several_scorers_and_kinds_keep_their_names(tmp_path: Path) -> None:
    scores = {"a": {"value": {"x": 1, "y": "I"}}, "b": {"value": True}, "c": {"value": "text"}, "d": {"value": 0.5}}
    _, rows = converted(tmp_path, "inspect", [{**LOG, "samples": [{**SAMPLE, "scores": scores}]}])
    assert rows[-1].rewards == {"a.x": 1.0, "a.y": 0.0, "b": 1.0, "d": 0.5} and rows[-1].reward is None


def test_a_reference_to_nothing_is_reported(tmp_path: Path) -> None:
    sample = copy.deepcopy(SAMPLE)
    sample["events"][0]["call"] = None
    sample["events"][0]["input_refs"] = [[0, 9]]
    result, _ = converted(tmp_path, "inspect", [LOG, {**LOG, "samples": [sample]}])
    assert "a reference to [0, 9] of a pool of 4" in str(result.losses.issues[0])


def test_a_sample_that_is_broken_costs_no_other(tmp_path: Path) -> None:
    broken = {**SAMPLE, "id": 2, "uuid": "w", "events": "none"}
    result, rows = converted(tmp_path, "inspect", [{**LOG, "samples": [broken, SAMPLE, 3], "stats": {"x": 1}}])
    assert len(rows) == 2 and [i.reason.partition(":")[0] for i in result.losses.issues] == [
        "samples[0].events",
        "samples[2]",
    ]


def test_a_call_that_failed_is_counted(tmp_path: Path) -> None:
    failed = {**SAMPLE["events"][0], "error": "no connection", "uuid": "f"}
    sample = {**SAMPLE, "events": [failed, *SAMPLE["events"]]}
    result, rows = converted(tmp_path, "inspect", [{**LOG, "samples": [sample]}])
    assert len(rows) == 2 and result.losses.dropped_calls["a model event without an answer"].number == 1


def test_a_member_that_unpacks_to_more_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = zipped(tmp_path / "log.eval", good=SAMPLE, bomb=b'{"x": "' + b"0" * 10_000_000 + b'"}')
    assert source.stat().st_size < 50_000
    good, bomb = evalfile.eval_samples(source, limit=1_000_000)
    assert isinstance(bomb, Issue) and "more than 1000000 bytes" in bomb.reason and not isinstance(good, Issue)


def test_members_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    source = zipped(tmp_path / "log.eval", a=SAMPLE)
    with zipfile.ZipFile(source, "a") as archive:
        for number in range(9):  # entries of the directory that all stand for one member
            member = copy.copy(archive.getinfo("samples/a.json"))
            member.filename = f"samples/b{number}.json"
            archive.filelist.append(member)
        archive._didModify = True  # type: ignore[attr-defined]
    result, rows = through(tmp_path, source)
    assert rows == [] and "overlap" in result.losses.issues[0].reason and result.exit_code() == 3


@pytest.mark.parametrize("cut", [4, 100, -30])
def test_a_torn_zip_is_reported(cut: int, tmp_path: Path) -> None:
    source = zipped(tmp_path / "log.eval", a=SAMPLE)
    source.write_bytes(source.read_bytes()[:cut])
    result, rows = through(tmp_path, source)
    assert rows == [] and result.losses.broken == 1


def test_damaged_members_are_reported_and_the_others_converted(tmp_path: Path) -> None:
    source = zipped(tmp_path / "log.eval", a=SAMPLE, b=b"{", c=[1], d=SAMPLE)
    data = bytearray(source.read_bytes())
    at = data.index(b"samples/d.json") + 60
    data[at : at + 8] = b"\xff" * 8
    source.write_bytes(bytes(data))
    result, rows = through(tmp_path, source)
    assert len(rows) == 2 and result.losses.broken == 3
