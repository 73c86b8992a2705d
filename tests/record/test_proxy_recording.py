"""What is recorded is what the upstream says that it produced, in the episode and with the lineage that it had."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers_proxy
import httpx2
import numpy as np
import pytest
from helpers_proxy import chat, rows

from memopd_trace import Invocation, validate

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def inside(upstream: helpers_proxy.Upstream, tmp_path: Path) -> Iterator[helpers_proxy.Inside]:
    with helpers_proxy.inside(tmp_path / "trace", upstream.url) as found:
        yield found


def labels(**given: Any) -> dict[str, str]:
    return {f"X-Memopd-{k.replace('_', '-')}": v if isinstance(v, str) else json.dumps(v) for k, v in given.items()}


def ask(client: httpx2.Client, proxy: helpers_proxy.Inside, asked: dict[str, Any], **given: Any) -> dict[str, Any]:
    path = CHAT if "messages" in asked else COMPLETIONS
    answer = client.post(proxy.url + path, json=asked, headers=labels(**{"episode": "e", **given}))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def said(answer: dict[str, Any]) -> str:
    """What the model said, as words that the upstream encodes as the same ids."""
    return str(answer["choices"][0]["message"]["content"])


def agree(row: Invocation, line: dict[str, Any]) -> None:
    """A row and an output that the upstream says it produced."""
    assert row.prompt_ids.tolist() == line["prompt"]
    assert row.output_ids.tolist() == line["output"]
    assert row.output_logprobs is not None
    assert np.ma.getdata(row.output_logprobs).tolist() == np.float32(line["logprobs"]).tolist()
    if line["finish"] is not None:
        assert row.finish_reason == line["finish"]


def test_two_hundred_streams_over_twenty_episodes_and_nothing_is_lost_or_mixed(
    upstream: helpers_proxy.Upstream, tmp_path: Path
) -> None:
    """Agents of two calls, the second built on the first one's answer; ten agents share each episode, all at once."""

    async def agent(client: httpx2.AsyncClient, url: str, number: int) -> int:
        rng = random.Random(number)
        words, episode = [f"w{900 + number} task"], f"many/{number % 20}"
        for turn in range(2):
            asked = chat(*words, stream=True, seed=number, max_tokens=12, delay=0.002 * rng.random())
            asked["request_id"] = f"many-{number}-{turn}"
            async with client.stream("POST", url + CHAT, json=asked, headers=labels(episode=episode)) as answer:
                text = (await answer.aread()).decode()
            events = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]
            words += ["".join(e["choices"][0]["delta"]["content"] for e in events), f"w{100 + turn} next"]
        return 2

    async def crowd(url: str) -> int:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(timeout=60, trust_env=False, limits=limits) as client:
            return sum(await asyncio.gather(*(agent(client, url, n) for n in range(200))))

    with helpers_proxy.proxy(tmp_path / "trace", upstream.url, "--logprob-kind", "raw") as found:
        assert asyncio.run(crowd(found.url)) == 400
        summary = found.stop()
    assert not summary["not_recorded"] and not summary["outputs_refused"], summary
    assert summary["rows"] == 400
    produced = {line["id"]: line for line in upstream.produced() if line["id"].startswith("many-")}
    recorded = rows(tmp_path / "trace")
    assert len(recorded) == len(produced) == 400
    by_episode: dict[str, list[Invocation]] = {}
    for row in recorded:
        assert row.extra is not None
        agree(row, produced.pop(row.extra["response_id"]))
        _, number, turn = row.extra["response_id"].split("-")
        assert row.episode_id == f"many/{int(number) % 20}"
        before = by_episode.setdefault(row.episode_id, [])
        before.append(row)
        if turn == "0":
            assert row.relation in ("root", "rewrite"), "agents of one episode share the first ids of the template"
        else:
            assert row.relation == "extend" and row.parent_index is not None
            parent = before[row.parent_index]
            assert parent.extra is not None and parent.extra["response_id"] == f"many-{number}-{int(turn) - 1}"
    assert not produced and len(by_episode) == 20
    report = validate(tmp_path / "trace", "lineage")
    assert report.clean, report.to_text()


def test_the_longest_prefix_is_the_parent_and_a_changed_context_is_a_rewrite(
    client: httpx2.Client, inside: helpers_proxy.Inside
) -> None:
    task = "w300 " * 12
    first = ask(client, inside, chat(task, seed=1))
    second = ask(client, inside, chat(task, said(first), "w301 more", seed=1))
    ask(client, inside, chat(task, said(first), "w301 more", said(second), "w302 on", seed=1))
    ask(client, inside, chat(task, said(first), "w303 other", seed=1))
    ask(client, inside, chat(task, "w304 w305 summary", "w306 go", seed=1))
    inside.stop()
    found = [(i.relation, i.parent_index, i.rewrite_kind, i.rewrite_evidence) for i in rows(inside.folder)]
    assert found == [
        ("root", None, None, None),
        ("extend", 0, None, None),
        ("extend", 1, None, None),
        ("extend", 0, None, None),
        ("rewrite", 3, "opaque", "inferred"),
    ]


def test_what_a_client_declares_is_taken_where_the_ids_bear_it_out(
    client: httpx2.Client, inside: helpers_proxy.Inside
) -> None:
    asked = chat("w310 task", seed=1, request_id="first")
    first = ask(client, inside, asked, group="g", task="t", agent="a", policy_version=7)
    ask(client, inside, chat("w311 else", seed=1, request_id="second"), parent="none")
    ask(client, inside, chat("w310 w312 short", seed=1), parent="first", rewrite="summary")
    ask(client, inside, chat("w310 task", said(first), "w313 x", seed=1), parent="first", agent="b")
    ask(client, inside, chat("w314 sub", seed=1), parent="second", relation="spawn")
    ask(client, inside, chat("w310 task", said(first), "w315 y", seed=1), parent="second", relation="extend")
    ask(client, inside, chat("w310 task", said(first), "w316 z", seed=1), parent="nobody")
    summary = inside.stop()
    found = [(i.relation, i.parent_index, i.rewrite_kind, i.rewrite_evidence) for i in rows(inside.folder)]
    assert found == [
        ("root", None, None, None),
        ("root", None, None, None),
        ("rewrite", 0, "summary", "explicit"),
        ("extend", 0, None, None),
        ("spawn", 1, None, None),
        ("extend", 0, None, None),
        ("extend", 0, None, None),
    ]
    assert summary["left_out_of_rows"] == {"declared lineage not borne out by the ids": 2}
    recorded = rows(inside.folder)
    assert {(i.group_id, i.task_id) for i in recorded} == {("g", "t")}, "of the whole episode"
    assert [i.agent_id for i in recorded[:4]] == ["a", None, None, "b"]
    assert [i.policy_version for i in recorded[:2]] == [7, None]


def test_segments_name_their_sources_by_response(client: httpx2.Client, inside: helpers_proxy.Inside) -> None:
    ask(client, inside, {"model": "toy", "prompt": [50, 51, 52], "request_id": "one", "max_tokens": 3, "seed": 9})
    declared = [{"start": 0, "stop": 2, "kind": "task", "source": "one", "source_start": 1}]
    ask(client, inside, {"model": "toy", "prompt": [51, 52, 60], "max_tokens": 3}, segments=declared)
    ask(client, inside, {"model": "toy", "prompt": [70, 71, 72], "max_tokens": 3}, segments=declared)
    summary = inside.stop()
    recorded = rows(inside.folder)
    assert recorded[1].segments is not None
    first, output = recorded[1].segments
    assert (first.start, first.stop, first.kind, first.source_index, first.source_start) == (0, 2, "task", 0, 1)
    assert (output.kind, output.start) == ("action", 3)
    assert recorded[2].segments is None, "a copy that is none is no segment, and no reason to lose the call"
    assert summary["left_out_of_rows"] == {"segments left out: they do not fit (E-SEGMENT-COPY)": 1}


def test_two_calls_of_one_state_make_the_parent_ambiguous_and_that_is_told(
    client: httpx2.Client, inside: helpers_proxy.Inside
) -> None:
    first = ask(client, inside, chat("w320", seed=1))
    ask(client, inside, chat("w320", seed=1))
    ask(client, inside, chat("w320", said(first), "w321", seed=1))
    summary = inside.stop()
    _, again, last = rows(inside.folder)
    assert again.relation == "fork", "the same prompt once more, and nobody says that it is a retry"
    assert (last.relation, last.parent_index) == ("extend", 1)
    assert last.extra is not None and last.extra["parent_candidates"] == "0"
    assert summary["left_out_of_rows"] == {"parent ambiguous: the longest was taken": 1}


def test_choices_and_prompts_of_one_call_are_rows_of_their_own(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, inside: helpers_proxy.Inside
) -> None:
    for stream in (False, True):
        asked = {
            "model": "toy",
            "prompt": [[50, 51], [60]],
            "n": 3,
            "stream": stream,
            "request_id": f"choices-{stream}",
        }
        answer = client.post(inside.url + COMPLETIONS, json=asked, headers=labels(episode=f"e{stream}"))
        assert answer.status_code == 200
    inside.stop()
    recorded = rows(inside.folder)
    produced = {(line["id"], line["choice"]): line for line in upstream.produced()}
    assert len(recorded) == 12
    for row in recorded:
        assert row.extra is not None
        agree(row, produced[row.extra["response_id"], int(row.extra["choice"])])
    assert [(i.relation, i.parent_index) for i in recorded[:6]] == [
        ("root", None), ("fork", 0), ("fork", 0), ("root", None), ("fork", 3), ("fork", 3),
    ]  # fmt: skip


def test_rewards_and_ends(client: httpx2.Client, inside: helpers_proxy.Inside) -> None:
    def own(path: str, **body: Any) -> httpx2.Response:
        return client.post(f"{inside.url}/memopd/{path}", json=body)

    ask(client, inside, chat("w330", request_id="r1"), episode="a", reward=0.25)
    ask(client, inside, chat("w331", request_id="r2"), episode="a")
    ask(client, inside, chat("w332", request_id="r3"), episode="a")
    assert own("reward", episode="a", response_id="r2", reward=-1, rewards={"format": 0.5}).status_code == 200
    assert own("reward", episode="a", response_id="r2", reward=2).status_code == 409, "given once"
    assert own("reward", episode="a", response_id="nobody", reward=2).status_code == 409
    assert own("reward", episode="b", reward=2).status_code == 409
    for wrong in ({"reward": "much"}, {"reward": True}, {"rewards": [1]}, {}, {"reward": 1, "more": 2}):
        assert own("reward", episode="a", **wrong).status_code == 400
    huge, unwritable = {"reward": 10**400}, {"rewards": {"\ud800": 1}}  # which no float and no table can hold
    for wrong in (huge, {"rewards": {"a": 10**400}}, unwritable, {"rewards": {"": 1}}, {"rewards": {"a\nb": 1}}):
        body = json.dumps({"episode": "a", **wrong})
        answer = client.post(f"{inside.url}/memopd/reward", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
    assert client.post(f"{inside.url}/memopd/end", content=b'{"episode": "a"}').status_code == 400, "no JSON type"
    assert own("end", episode="a", reward=1, truncated=True).status_code == 200
    assert own("end", episode="a").status_code == 409
    ask(client, inside, chat("w333"), episode="a")
    ask(client, inside, chat("w334"), episode="c", end="true")
    ask(client, inside, chat("w335"), episode="open")
    summary = inside.stop()
    assert summary["not_recorded"] == {"the episode has ended": 1}
    first, second, last, short, left_open = rows(inside.folder)
    assert [first.reward, second.reward, last.reward] == [0.25, -1.0, 1.0]
    assert second.rewards == {"format": 0.5}
    assert (first.truncated, last.truncated, last.terminated) == (None, True, False)
    assert (short.terminated, short.truncated) == (True, False)
    assert (left_open.terminated, left_open.truncated) == (None, None), "how it ended is not known"


def test_an_answer_that_its_client_left_is_an_attempt_that_nobody_accepted(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, inside: helpers_proxy.Inside
) -> None:
    asked = chat("w340", stream=True, delay=0.02, max_tokens=200, seed=2, request_id="left")
    seen = ""
    with client.stream("POST", inside.url + CHAT, json=asked, headers=labels(episode="e")) as answer:
        for text in answer.iter_text():
            seen += text
            if seen.count("data:") > 4:
                break
    until = time.monotonic() + 60
    while inside.proxy.recording.episodes.rows == 0 and time.monotonic() < until:
        time.sleep(0.01)
    ask(client, inside, chat("w340", seed=3, request_id="again"))
    inside.stop()
    left, again = rows(inside.folder)
    assert (left.accepted, left.finish_reason, left.relation) == (False, "abort", "root")
    assert (again.relation, again.parent_index, again.attempt) == ("retry", 0, 1)
    line = next(line for line in upstream.produced() if line["id"] == "left")
    assert 3 <= len(left.output_ids) <= len(line["output"]) < 200, "the upstream was told to stop, too"
    assert left.output_ids.tolist() == line["output"][: len(left.output_ids)]
    assert left.prompt_ids.tolist() == line["prompt"]
    assert validate(inside.folder, "lineage").clean


def test_a_request_that_says_it_was_sent_before_is_a_retry(client: httpx2.Client, inside: helpers_proxy.Inside) -> None:
    ask(client, inside, chat("w350", seed=1))
    headers = labels(episode="e") | {"X-Stainless-Retry-Count": "1"}
    client.post(inside.url + CHAT, json=chat("w350", seed=2), headers=headers)
    inside.stop()
    first, second = rows(inside.folder)
    assert (first.accepted, second.relation, second.attempt) == (False, "retry", 1)
    assert validate(inside.folder, "lineage").clean


def test_an_upstream_that_dies_in_a_stream_leaves_an_attempt(
    client: httpx2.Client, inside: helpers_proxy.Inside
) -> None:
    with pytest.raises(httpx2.RemoteProtocolError):
        ask(client, inside, chat("w351", stream=True, mode="cut", max_tokens=30, seed=3))
    inside.stop()
    (row,) = rows(inside.folder)
    assert row.accepted is False and row.finish_reason == "abort" and len(row.output_ids) == 2


def test_an_error_in_a_stream_is_shown_and_what_came_before_it_is_an_attempt(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, inside: helpers_proxy.Inside
) -> None:
    asked = chat("w352", stream=True, mode="error", max_tokens=30, seed=3, request_id="same", ignore_eos=True)
    sent = labels(episode="e", reward=1.0, end="true")
    answers = [client.post(url + CHAT, json=asked, headers=sent) for url in (upstream.url, inside.url)]
    assert answers[0].content == answers[1].content and "out of memory" in answers[1].text
    ask(client, inside, chat("w352", seed=4))
    inside.stop()
    row, again = rows(inside.folder)
    assert row.accepted is False and row.finish_reason == "abort" and len(row.output_ids) == 2
    assert (row.reward, row.terminated, again.relation) == (None, None, "retry"), "it earned and ended nothing"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (chat("w360", mode="no_ids"), "the upstream gives no ids"),
        (chat("w360", stream=True, mode="no_ids"), "the upstream gives no ids"),
        ({"model": "toy", "prompt": "w361", "echo": True}, "echo"),
        ({"model": "toy", "prompt": "w361", "best_of": 4}, "best_of"),
        ({"model": "toy", "prompt": "w361", "use_beam_search": True}, "beam search"),
        (chat("w362") | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "media"),
    ],
)
def test_what_cannot_be_recorded_goes_through_and_is_counted(
    upstream: helpers_proxy.Upstream,
    client: httpx2.Client,
    inside: helpers_proxy.Inside,
    asked: dict[str, Any],
    reason: str,
) -> None:
    path = CHAT if "messages" in asked else COMPLETIONS
    answers = [
        client.post(url + path, json=asked | {"request_id": "same"}, headers=labels(episode="e"))
        for url in (upstream.url, inside.url)
    ]
    assert answers[0].status_code == 200 and answers[0].content == answers[1].content
    summary = inside.stop()
    assert summary["not_recorded"] == {reason: 1} and summary["rows"] == 0
    assert [n for n in inside.notices if reason in n], "and told"


def test_without_ids_is_an_error_if_ids_are_required(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path
) -> None:
    with helpers_proxy.inside(tmp_path / "trace", upstream.url, require_ids=True) as found:
        for mode, stream in (("no_ids", False), ("no_ids", True), ("strict", False)):
            asked = chat("w363", mode=mode, stream=stream)
            answer = client.post(found.url + CHAT, json=asked, headers=labels(episode="e"))
            assert answer.status_code == 502 and answer.json()["error"]["code"] == "no_token_ids"
        assert found.stop()["not_recorded"] == {"the upstream gives no ids": 3}


def test_a_call_without_an_episode_or_of_another_model_is_not_recorded(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path
) -> None:
    with helpers_proxy.inside(tmp_path / "trace", upstream.url, models=("other",)) as found:
        assert client.post(found.url + CHAT, json=chat("w364")).status_code == 200
        assert client.post(found.url + CHAT, json=chat("w364"), headers=labels(episode="e")).status_code == 200
        assert found.stop()["not_recorded"] == {
            "names no episode": 1,
            "a model that the recording does not know": 1,
        }
    assert validate(found.folder, "lineage").exit_code() == 0, "a recording without a row is a whole trace"


def test_log_probabilities_of_an_unknown_kind_are_kept_only_where_it_does_not_matter(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path
) -> None:
    more = {"logprob_kind": "unknown", "defaults": None}
    whole = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "seed": 5}
    with helpers_proxy.inside(tmp_path / "trace", upstream.url, **more) as found:
        ask(client, found, chat("w370", temperature=0.7))
        ask(client, found, chat("w371") | whole)
        ask(client, found, chat("w372") | whole | {"temperature": 1.0, "top_p": 1})
        summary = found.stop()
    silent, cut, plain = rows(found.folder)
    assert silent.sampling is None, "top_p and others may be anything where the request is silent"
    assert silent.output_logprobs is not None and silent.logprob_kind == "unknown"
    assert cut.sampling is not None and (cut.sampling.top_p, cut.sampling.top_k, cut.sampling.seed) == (0.9, 0, 5)
    assert cut.output_logprobs is None and cut.logprob_kind is None
    assert plain.output_logprobs is not None
    assert summary["left_out_of_rows"] == {"log-probabilities left out (E-LOGPROB-KIND)": 1}


def test_no_secret_is_in_any_file(upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path) -> None:
    secrets = ["sk-topsecret", "hush-cookie", "my-words-are-mine"]
    headers = {"Authorization": f"Bearer {secrets[0]}#e", "Cookie": f"s={secrets[1]}", "Api-Key": secrets[0]}
    with helpers_proxy.inside(tmp_path / "trace", upstream.url, part_seconds=3600.0) as found:
        asked = chat(secrets[2], user=secrets[0], metadata={"k": secrets[1]})
        assert client.post(found.url + CHAT, json=asked, headers=headers).status_code == 200
        logs = b"".join(p.read_bytes() for p in found.folder.glob("journal-*"))
        assert b"CallRecord" in logs
        summary = found.stop()
    files = b"".join(p.read_bytes() for p in found.folder.iterdir())
    table = json.dumps([{**(i.extra or {}), "episode": i.episode_id} for i in rows(found.folder)])
    for secret in secrets:
        for place in (logs.decode("latin-1"), files.decode("latin-1"), table, json.dumps(summary)):
            assert secret not in place
    assert '"episode": "e"' in table
