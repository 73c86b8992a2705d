"""Inputs that were made to hurt, and accidents: what they can cost is bounded, and the rest goes on."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers_convert import LOGS, converted, write_lines

from memopd_trace.cli import run
from memopd_trace.convert import convert, linewise, losses, records, transcript
from memopd_trace.convert.draft import Draft
from memopd_trace.convert.formats import find
from memopd_trace.convert.known import Known
from memopd_trace.convert.losses import Issue, Losses
from memopd_trace.convert.records import Record, find_files, json_files, json_records
from memopd_trace.convert.run import _hold, _renamed
from memopd_trace.errors import InputError, UsageError

LINES = [json.dumps({"n": n, "text": "x" * 50}).encode() for n in range(2000)]


def packed(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    return path


def test_all_in_front_of_the_place_where_a_packed_file_breaks_off_is_read(tmp_path: Path) -> None:
    whole = packed(tmp_path / "log.jsonl.gz", LINES)
    whole.write_bytes(whole.read_bytes()[:-30])
    *found, last = json_records([whole])
    assert [r.value["n"] for r in found if isinstance(r, Record)] == list(range(len(found))) and len(found) > 1000
    assert isinstance(last, Issue) and "cannot be read to its end" in last.reason


def test_a_file_is_measured_by_what_it_unpacks_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = packed(tmp_path / "log.jsonl.gz", LINES)
    limit = 4 * file.stat().st_size
    (issue,) = json_files([file], limit)
    assert isinstance(issue, Issue) and f"a file of more than {limit} bytes" in issue.reason
    (record,) = json_files([file], 10 * limit)
    assert isinstance(record, Record) and record.size == len(LINES) and record.length > limit
    monkeypatch.setattr(transcript, "MAX_RECORD", limit)
    (issue,) = transcript.gathered([file], lambda value: True)
    assert isinstance(issue, Issue) and "a conversation of more than" in issue.reason
    monkeypatch.setattr(linewise, "MAX_RECORD", record.length)
    twice = [file, packed(tmp_path / "more.jsonl.gz", LINES)]
    assert [r.size for r in linewise.families(twice) if isinstance(r, Record)] == [len(LINES)] * 2


def test_a_file_is_read_once_by_whatever_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write_lines(tmp_path / "a.jsonl", LOGS["vllm"])
    (tmp_path / "link.jsonl").symlink_to(log)
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    assert find_files(["a.jsonl", log, "link.jsonl", ".", "*.jsonl"]) == [Path("a.jsonl")]
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("pipe", "a pipe or a device"), ("loop", "no such file"), ("a\0b", "no such file")):
        with pytest.raises(InputError, match=why):
            find_files([name])


@pytest.mark.parametrize(
    "name", ["vllm", "inspect", "mini-swe-agent", "slime", "openhands"]
)  # each reads in its own way
def test_a_file_that_vanishes_meanwhile_costs_no_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [write_lines(tmp_path / f"{n}.jsonl", LOGS[name]) for n in range(2)]

    def gone(inputs: Any, suffixes: Any) -> list[Path]:
        logs[0].unlink()
        return logs

    monkeypatch.setattr("memopd_trace.convert.run.find_files", gone)
    result = convert(name, logs, tmp_path / "t.parquet")
    assert result.exit_code() == 1 and result.losses.rows and result.losses.issues[0].place == str(logs[0])
    assert "an input that cannot be read is not named in the metadata" in result.losses.degraded


def test_an_output_is_never_replaced_and_what_a_kill_left_goes(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", LOGS["vllm"])
    left, held = (tmp_path / f".t.parquet.{name}.tmp" for name in ("killed00", "at_work0"))
    for folder in (left, held):
        folder.mkdir()
        (folder / "t.parquet").write_bytes(b"half")
    handle = _hold(held)
    assert convert("vllm", log, tmp_path / "t.parquet").exit_code() == 0
    os.close(handle)
    assert not left.exists() and (held / "t.parquet").exists(), "one that another process is at stays"
    target = tmp_path / "u.parquet"
    with pytest.raises(UsageError, match="exists already"):
        convert("vllm", log, target, on_record=lambda number: target.write_bytes(b"of another"))
    assert target.read_bytes() == b"of another" and not list(tmp_path.glob(".u*"))


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_an_output_without_a_name_is_a_usage_error(name: str, tmp_path: Path, capsys: Any) -> None:
    log = write_lines(tmp_path / "log.jsonl", LOGS["vllm"])
    assert run(["convert", "vllm", str(log), "-o", name]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_episode_that_occurs_very_often_is_named_without_a_search() -> None:
    class Names(dict[str, Any]):
        asked = 0

        def __contains__(self, name: object) -> bool:
            self.asked += 1
            return super().__contains__(name)

    names, again = Names({"e": set(), "e~3": set()}), dict[str, int]()
    known = Known(outcome=names)
    for _ in range(100):
        names[_renamed(Draft(episode_id="e"), known, Losses(), again).episode_id] = set()
    assert len(names) == 102 and names.asked < 400


TALKS = ["messages", "codex", "openhands", "claude-code", "gemini-cli", "atif", "nemo-gym", "mini-swe-agent"]


@pytest.mark.parametrize("name", TALKS)
def test_a_conversation_that_would_fill_memory_is_one_issue(
    name: str, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "MAX_HISTORY", 0)
    options = {"tokenizer": tokenizer} if find(name).exactness == "text" else {}
    result, _ = converted(tmp_path, name, LOGS[name], **options)
    assert "messages in the prompts of one conversation" in result.to_text()


def with_template(folder: Path, source: Path, template: str) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        if not file.name.startswith("chat_template"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}", "takes too long"),
        ("{{ 'x' * 100000000000 }}", "takes too much memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ cycler.__init__.__globals__.os.getcwd() }}", "unsafe"),
    ],
)
def test_a_chat_template_that_was_made_to_hurt_costs_a_bounded_amount(
    template: str, why: str, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memopd_trace.convert.chat.TEMPLATE_SECONDS", 0.2)
    folder = with_template(tmp_path / "model", tokenizer, template)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    talks = [{"id": str(n), "messages": messages} for n in range(9)]
    result, rows = converted(tmp_path, "messages", talks, tokenizer=folder)
    assert not rows and result.exit_code() == 3 and why in result.to_text()
    if "takes" in why:
        said = {reason: count.number for reason, count in result.losses.dropped_calls.items()}
        assert sorted(said.values()) == [3, 6] and any("is not run again" in reason for reason in said)


def test_what_a_small_pickle_stands_for_is_bounded_by_its_size(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    shared: list[Any] = [1]
    for _ in range(40):
        shared = [shared, shared]
    for name, tokens in (("tensor", torch.zeros(1, dtype=torch.int64).expand(2**31)), ("list", shared)):
        torch.save({"samples": [{"index": 0, "tokens": tokens, "response_length": 2}]}, tmp_path / f"{name}.pt")
        result = convert("slime", tmp_path / f"{name}.pt", tmp_path / f"{name}.parquet")
        assert result.exit_code() == 3 and "the limit for its size" in result.to_text()


@pytest.mark.parametrize(
    ("name", "place", "junk"),
    [
        ("verifiers", ("semantic_parents", "type"), {}),
        ("verifiers", ("prompt_mask",), -1),
        ("langfuse", ("scores", "value"), float("nan")),
        ("skyrl", ("rewards",), [[float("nan")] * 9] * 9),
        ("skyrl", ("rewards",), [[1e308] * 9] * 9),
        ("skyrl", ("rewards",), [[10**400] * 9] * 9),
    ],
)
def test_values_that_once_were_a_fault_are_reported_or_left_out(
    name: str, place: tuple[str, ...], junk: Any, tmp_path: Path, tokenizer: Path
) -> None:
    bent = [json.loads(json.dumps(record)) for record in LOGS[name]]
    assert sum(_put(record, place, junk) for record in bent)
    given = {"tokenizer": tokenizer} if find(name).exactness == "text" else {}
    result, _ = converted(tmp_path, name, bent, **given)
    assert "fault of the converter" not in result.to_text() and (result.report is None or result.valid)


def _put(value: Any, place: tuple[str, ...], junk: Any) -> int:
    """Put `junk` wherever a field of this name stands inside the field before; how often."""
    done = 0
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(inner):
        if key == place[0] and len(place) == 1:
            value[key], done = junk, done + 1
        else:
            done += _put(item, place[1:] if key == place[0] else place, junk)
    return done


def test_records_know_the_length_of_their_json(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", LINES[:2])
    assert [r.length for r in records.json_records([log]) if isinstance(r, Record)] == [len(x) + 1 for x in LINES[:2]]
