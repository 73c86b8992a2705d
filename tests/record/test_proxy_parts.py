"""The proxy's parts one by one: JSON edited in place, events cut, records and journal, labels, hostile answers."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_trace import Invocation, Sampling
from memopd_trace.errors import InputError
from memopd_trace.record.call import CallRecord, DeclaredSegment, Labels, Sampled
from memopd_trace.record.checks import check_episode
from memopd_trace.record.proxy.answer import Answer, for_client
from memopd_trace.record.proxy.episodes import Episodes
from memopd_trace.record.proxy.journal import Found, Journal, journal_files, read_journal
from memopd_trace.record.proxy.jsonedit import without
from memopd_trace.record.proxy.records import EndRecord, RewardRecord, from_bytes, to_bytes
from memopd_trace.record.proxy.request import read_request
from memopd_trace.record.proxy.server import make_metadata
from memopd_trace.record.proxy.sse import Splitter

KEYS = ["token_ids", "prompt_token_ids", "logprobs", "choices", "index", "delta", "finish_reason", "content", "error"]
KEYS += ["usage", "completion_tokens", "id", "model", "token_logprobs", "logprob", "text", "message", "stop_reason"]
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 5), st.integers(), st.floats(), st.text(max_size=5), st.just(2**70)
)
documents = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=3)), inner, max_size=6),
    ),
    max_leaves=30,
)
objects = st.dictionaries(st.sampled_from(KEYS), documents, max_size=8)
choices = st.lists(objects, max_size=3)
answers = st.builds(lambda top, inner: {**top, "choices": inner}, objects, st.one_of(choices, documents))


def spaced(value: Any, draw: Any) -> str:
    """JSON text of a value with odd but legal spaces."""
    return json.dumps(value, indent=draw(st.sampled_from([None, 0, 3])), ensure_ascii=draw(st.booleans()))


@given(data=st.data(), document=answers)
def test_only_the_named_members_become_null_and_no_other_byte_changes(data: Any, document: dict[str, Any]) -> None:
    text = spaced(document, data.draw)
    edited = without(text, ["prompt_token_ids"], ["token_ids", "logprobs"])
    wanted = {k: None if k == "prompt_token_ids" else v for k, v in document.items()}
    if isinstance(wanted.get("choices"), list):
        hidden = ("token_ids", "logprobs")
        wanted["choices"] = [
            {k: None if k in hidden else v for k, v in c.items()} if isinstance(c, dict) else c
            for c in wanted["choices"]
        ]
    assert json.dumps(json.loads(edited)) == json.dumps(wanted)
    assert without(edited, ["prompt_token_ids"], ["token_ids", "logprobs"]) == edited
    assert without(text, [], []) == text


def test_numbers_escapes_and_spaces_outside_stay_as_they_were_written() -> None:
    text = '{ "a":1.0E+2 ,\t"choices" : [ {"token_ids":[1, 2],"x":"\\u00e9é"} ],"prompt_token_ids":[9],"b":-0.0}'
    assert without(text, ["prompt_token_ids"], ["token_ids"]) == (
        '{ "a":1.0E+2 ,\t"choices" : [ {"token_ids":null,"x":"\\u00e9é"} ],"prompt_token_ids":null,"b":-0.0}'
    )


@given(feeds=st.lists(st.one_of(answers, objects, documents), max_size=4), chat=st.booleans(), stream=st.booleans())
def test_no_answer_of_an_upstream_raises(feeds: list[Any], chat: bool, stream: bool) -> None:
    kind = "chat" if chat else "completions"
    body = {"messages": [], "prompt": "a", "stream": stream, "n": 2}
    answer = Answer(read_request(kind, json.dumps(body).encode(), None))  # type: ignore[arg-type]
    for document in feeds:
        answer.feed(document)
        if isinstance(document, dict):
            for_client(json.dumps(document), document, answer._request)
    for broken_off in (True, False):
        for output in answer.sampled(broken_off=broken_off):
            assert output.output.dtype == np.int32 and len(output.output)
            assert output.logprobs is None or len(output.logprobs) == len(output.output)
    assert answer.why_not or answer.sampled()


def read(*chunks: dict[str, Any], kind: str = "chat", **asked: Any) -> Answer:
    body = {"messages": [], "prompt": "a", "stream": len(chunks) > 1, **asked}
    answer = Answer(read_request(kind, json.dumps(body).encode(), None))  # type: ignore[arg-type]
    for chunk in chunks:
        answer.feed(chunk)
    return answer


def test_a_fillers_place_has_no_log_probability() -> None:
    content = [{"logprob": v} for v in (-1.5, -9999.0, None, math.inf, "x", True, 0)]
    choice = {"index": 0, "token_ids": [1, 2, 3, 4, 5, 6, 7], "logprobs": {"content": content}, "finish_reason": "stop"}
    (output,) = read({"prompt_token_ids": [9], "choices": [choice]}).sampled()
    assert output.logprobs is not None
    assert [None if math.isnan(v) else v for v in output.logprobs.tolist()] == [-1.5, *[None] * 5, 0.0]


@pytest.mark.parametrize(
    ("change", "why_not"),
    [
        ({"token_ids": None}, "the upstream gives no ids"),
        ({"token_ids": []}, "ids that do not add up to the stated usage"),
        ({"token_ids": [1, "2"]}, "unreadable answer"),
        ({"token_ids": [1, 2**31]}, "unreadable answer"),
        ({"token_ids": [[1], [2]]}, "unreadable answer"),
        ({"token_ids": "12"}, "unreadable answer"),
        ({"index": 1}, "unreadable answer"),
        ({"index": True}, "unreadable answer"),
        ({"token_ids": [1]}, "ids that do not add up to the stated usage"),
    ],
)
def test_an_answer_that_does_not_fit_is_not_recorded(change: dict[str, Any], why_not: str) -> None:
    choice = {"index": 0, "token_ids": [1, 2], "message": {"content": "hi"}, "finish_reason": "stop"}
    whole = {"prompt_token_ids": [9], "choices": [choice], "usage": {"completion_tokens": 2}}
    (output,) = read(whole).sampled()
    assert output.output.tolist() == [1, 2] and output.logprobs is None, "ids are enough"
    answer = read(whole | {"choices": [choice | change]})
    assert (answer.sampled(), answer.why_not) == ((), why_not)


def test_a_stream_whose_ids_have_a_hole_is_not_recorded() -> None:
    first = {"prompt_token_ids": [9], "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    told = {"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [1]}]}
    untold = {"choices": [{"index": 0, "delta": {"content": "b"}}]}
    end = {"choices": [{"index": 0, "delta": {}, "token_ids": [2], "finish_reason": "stop"}]}
    assert read(first, told, end).finished and len(read(first, told, end).sampled()) == 1
    assert read(first, told, untold, end).sampled() == ()


@given(
    events=st.lists(
        st.sampled_from(["data: {}", "data:x", ": ping", "event: a\ndata: 1", "data: a\ndata: b"]), max_size=6
    ),
    end=st.sampled_from(["\n\n", "\r\n\r\n"]),
    cuts=st.lists(st.integers(1, 9), min_size=1),
)
def test_events_come_out_whole_however_they_come_in(events: list[str], end: str, cuts: list[int]) -> None:
    raw = "".join(e.replace("\n", end[: len(end) // 2]) + end for e in events).encode()
    splitter, found, at = Splitter(), [], 0
    while at < len(raw):
        step = cuts[at % len(cuts)]
        found += list(splitter.feed(raw[at : at + step]))
        at += step
    assert b"".join(e.raw for e in found) + splitter.rest == raw
    assert len(found) == len(events) and not splitter.rest
    known = {"data: {}": b"{}", "data:x": b"x", ": ping": None, "event: a\ndata: 1": b"1", "data: a\ndata: b": None}
    assert [e.data for e in found] == [known[e] for e in events]
    for event in found:
        if event.data is not None:
            assert event.with_data(b"new").replace(b"new", event.data) == event.raw


def record(number: int = 0, **more: Any) -> CallRecord:
    prompt = np.arange(number, number + 3, dtype=np.int32)
    outputs = tuple(
        Sampled(n, prompt, np.array([7, 2], np.int32), np.array([-0.5, np.nan], np.float32), "stop", {"choice": str(n)})
        for n in range(2)
    )
    segments = (DeclaredSegment(0, 1, "task", "id", 2),)
    values: dict[str, Any] = {
        "episode": f"e{number}",
        "model_id": "m",
        "response_id": None,
        "labels": Labels(episode="e", segments=segments, reward=0.5, end="truncated"),
        "outputs": outputs,
        "sampling": Sampling(temperature=0.5, seed=2**40),
        "logprob_kind": "raw",
        "policy_version": 3,
        "started": 1,
        "ended": 2,
    }
    return CallRecord(**values | more)


def test_a_record_comes_back_bit_for_bit() -> None:
    for original in (record(), record(sampling=None, labels=Labels(), accepted=False, extra={"ü": "\ud800"})):
        back = from_bytes(to_bytes(original))
        assert isinstance(back, CallRecord)
        for a, b in zip(original.outputs, back.outputs, strict=True):
            assert a.prompt.tolist() == b.prompt.tolist() and a.output.tolist() == b.output.tolist()
            assert a.logprobs is not None and b.logprobs is not None
            assert a.logprobs.tobytes() == b.logprobs.tobytes()
            assert (a.choice, a.finish_reason, a.extra) == (b.choice, b.finish_reason, b.extra)
        for name in ("episode", "labels", "sampling", "accepted", "extra", "started"):
            assert getattr(original, name) == getattr(back, name)
    assert len(to_bytes(record())) < len(to_bytes(record())) + 12, "a shared prompt is kept once"
    for other in (
        RewardRecord(episode="e", reward=None, rewards={"a": 1.0}, response_id="x"),
        EndRecord(episode="e", end="truncated"),
    ):
        assert from_bytes(to_bytes(other)) == other


ids = st.lists(st.integers(10, 11), min_size=1, max_size=5)
names = st.sampled_from(["r0", "r1", "r2", "r2/1", "none", "nobody"])
labels = st.builds(
    Labels,
    agent=st.sampled_from([None, "a"]),
    group=st.sampled_from([None, "g"]),
    parent=st.one_of(st.none(), names),
    relation=st.sampled_from([None, None, "root", "extend", "rewrite", "fork", "retry", "spawn"]),
    rewrite=st.sampled_from([None, None, "summary", "elide"]),
    segments=st.one_of(
        st.none(),
        st.lists(
            st.builds(
                DeclaredSegment, st.integers(0, 3), st.integers(0, 6), st.sampled_from(["task", "x"]), names, st.just(0)
            ),
            max_size=2,
        ).map(tuple),
    ),
    reward=st.sampled_from([None, 1.0]),
    end=st.sampled_from([None, None, None, "truncated"]),
    retry=st.sampled_from([0, 0, 1]),
)


@st.composite
def calls(draw: Any, number: int) -> CallRecord:
    prompt = np.array(draw(ids), np.int32)
    outputs = []
    for choice in range(draw(st.integers(1, 2))):
        output = np.array(draw(ids)[:2], np.int32)
        values = draw(
            st.lists(st.sampled_from([-0.5, 0.0, float("nan"), 5.0]), min_size=len(output), max_size=len(output))
        )
        kept = np.array(values, np.float32) if draw(st.booleans()) else None
        outputs.append(Sampled(choice, prompt, output, kept, draw(st.sampled_from(["stop", None])), {}))
    return record(
        episode="e",
        labels=draw(labels),
        response_id=f"r{number}",
        outputs=tuple(outputs),
        accepted=draw(st.sampled_from([None, None, False])),
        logprob_kind=draw(st.sampled_from(["raw", "unknown", "processed"])),
        sampling=draw(st.sampled_from([None, Sampling(temperature=0.5, top_p=0.9), Sampling(top_p=7.0)])),
    )


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_is_declared_the_rows_are_valid_and_a_replay_makes_the_same(data: Any) -> None:
    records = [data.draw(calls(number)) for number in range(data.draw(st.integers(1, 6)))]
    metadata = make_metadata(["m"], None)
    first, again = Episodes(metadata), Episodes(metadata)
    for call in records:
        first.apply(call)
        again.apply(from_bytes(to_bytes(call)))
    for episodes in (first, again):
        episodes.end_all()
    (episode,), (replayed,) = first.ended, again.ended
    check_episode(list(episode), metadata, "lineage")
    assert not [r for r in first.refused if r != "the episode has ended"], "no label costs a call"
    for a, b in zip(episode, replayed, strict=True):
        for name in Invocation.__dataclass_fields__:
            one, other = getattr(a, name), getattr(b, name)
            assert repr(one) == repr(other), name


@given(data=st.binary(max_size=80))
def test_bytes_that_are_no_record_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        from_bytes(data)


def written(folder: Path, count: int, roll: int = 2**26) -> list[bytes]:
    async def write() -> list[bytes]:
        journal = Journal(folder, b"meta", {}, roll)
        records = [to_bytes(record(n)) for n in range(count)]
        await asyncio.gather(*(journal.append(f"e{n}", r) for n, r in enumerate(records)))
        assert journal.records == count and journal.syncs < count, "waiting records share a sync"
        await journal.close()
        return records

    return asyncio.run(write())


def test_wherever_a_journal_is_torn_all_whole_records_are_read(tmp_path: Path) -> None:
    records = written(tmp_path, 3)
    (path,) = journal_files(tmp_path)
    raw = path.read_bytes()
    assert read_journal(path) == Found(b"meta", records)
    last = len(raw) - len(records[-1]) - 8
    for cut in [*range(last, last + 12), *range(last + 12, len(raw), 61), len(raw) - 1]:
        path.write_bytes(raw[:cut])
        assert read_journal(path) == Found(b"meta", records[:2], cut - last)
        assert path.stat().st_size == last, "cut, so that what is appended is found"
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert read_journal(path).records == records[:2]
    path.write_bytes(raw + bytes(4096))
    assert read_journal(path) == Found(b"meta", records, 4096), "zeros are what some file systems leave"
    path.write_bytes(b"")
    assert read_journal(path) == Found(None, [])


def test_a_damaged_record_costs_none_of_those_behind_it_and_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    records = written(tmp_path, 4)
    (path,) = journal_files(tmp_path)
    raw = path.read_bytes()
    first, second = 8 + len(b"meta"), 8 + len(records[0])
    for at in (
        first,
        first + 3,
        first + 5,
        first + 9,
        first + 40,
        first + second - 1,
    ):  # its length, checksum, text, end
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x40]) + raw[at + 1 :])
        assert read_journal(path) == Found(b"meta", records[1:], 0, second)
        assert path.stat().st_size == len(raw), "nothing of it is cut off"
    path.write_bytes(bytes([raw[0] ^ 0x40]) + raw[1:])
    assert read_journal(path) == Found(None, records, 0, first)
    for foreign in (b"some notes of mine\n" * 9, b'[{"a": 1}, {"b": 2}]', b"PAR1" * 9):
        path.write_bytes(foreign)
        with pytest.raises(InputError, match="is no journal of a recording"):
            read_journal(path)
        assert path.read_bytes() == foreign


def test_a_journal_file_goes_when_all_its_episodes_are_in_the_trace(tmp_path: Path) -> None:
    async def write() -> None:
        journal = Journal(tmp_path, b"meta", {}, roll=1)
        for n in range(3):
            await journal.append(f"e{n}", to_bytes(record(n)))
        async with asyncio.timeout(60):
            while len(journal_files(tmp_path)) < 4:
                await asyncio.sleep(0.01)
        assert len(journal_files(tmp_path)) == 4, "each roll begins a file"
        journal.release(["e1"])
        assert [p.stem[-1] for p in journal_files(tmp_path)] == ["0", "2", "3"]
        await journal.append("e0", to_bytes(record()))
        journal.release(["e2"])
        assert "000002" not in str(journal_files(tmp_path))
        await journal.close()

    asyncio.run(write())
    assert [len(read_journal(p).records) for p in journal_files(tmp_path)][:2] == [1, 1]
