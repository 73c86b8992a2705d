"""A client sees through the proxy what it sees without it, and the upstream sees only what it should."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from pathlib import Path
from typing import Any

import helpers_proxy
import httpx2
import pytest
from helpers_proxy import chat

EPISODE = {"X-Memopd-Episode": "bytes"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DIALS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat("the w70 task", seed=1)),
    (CHAT, chat("the w70 task", seed=2, n=3)),
    (CHAT, chat("the w70 task", seed=3, logprobs=True, top_logprobs=2)),
    (CHAT, chat("the w70 task", seed=4, return_token_ids=True)),
    (CHAT, chat("the w70 task", seed=5, hold_back=True, max_tokens=12)),
    (CHAT, chat("the w70 task", seed=6, hold_back=True, logprobs=True, max_tokens=12)),
    (CHAT, chat("ünï¢ödé 😀", seed=7, stream_options={"include_usage": True})),
    (COMPLETIONS, {"model": "toy", "prompt": "one two", "temperature": 1.0}),
    (COMPLETIONS, {"model": "toy", "prompt": ["one", "two w80"], "n": 2, "logprobs": 0}),
    (COMPLETIONS, {"model": "toy", "prompt": [[50, 51], [52]], "return_token_ids": True}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dial", range(len(DIALS)))
def test_the_bytes_are_those_of_the_upstream(
    upstream: helpers_proxy.Upstream, proxy: helpers_proxy.Proxy, client: httpx2.Client, dial: int, stream: bool
) -> None:
    path, asked = DIALS[dial]
    asked = {**asked, "stream": stream, "request_id": f"bytes-{dial}-{stream}"}
    before = _rows(client, proxy)
    direct, through = (
        client.post(upstream.url + path, json=asked),
        client.post(proxy.url + path, json=asked, headers=EPISODE),
    )
    assert through.content == direct.content
    assert len(direct.content) > 200, "an answer was compared, not an error"
    assert through.status_code == direct.status_code == 200
    assert through.headers["content-type"] == direct.headers["content-type"]
    assert _rows(client, proxy) > before, "and it was recorded"
    sent = json.loads(upstream.seen()[-1]["body"])
    assert sent["return_token_ids"] is True and "logprobs" in sent, "ids were asked for behind the client's back"


def test_an_event_that_only_carries_ids_is_not_shown(
    upstream: helpers_proxy.Upstream, proxy: helpers_proxy.Proxy, client: httpx2.Client
) -> None:
    """Where a parser holds text back, vLLM sends nothing, but for ids an event without content."""
    asked = chat("w71", seed=5, hold_back=True, max_tokens=12, stream=True)
    with_ids = client.post(upstream.url + CHAT, json={**asked, "return_token_ids": True}).text
    assert '"delta":{}' in with_ids, "the upstream has such events"
    shown = client.post(proxy.url + CHAT, json=asked, headers=EPISODE).text
    assert '"delta":{}' not in shown and shown.count("data:") < with_ids.count("data:")


def test_other_paths_go_through_as_they_are(proxy: helpers_proxy.Proxy, client: httpx2.Client) -> None:
    body = bytes(range(256)) * 100
    answer = client.put(
        f"{proxy.url}/v1/files/a%2Fb?status=418", content=body, headers={"X-Mine": "1", "X-Memopd-Episode": "e"}
    )
    assert (answer.status_code, answer.content) == (418, body)
    assert answer.headers["x-path"] == "/v1/files/a/b" and answer.headers["x-mine"] == "1"
    assert "x-memopd-episode" not in answer.headers, "the label was not sent on"
    assert client.get(f"{proxy.url}/v1/models").json()["data"][0]["id"] == "toy"


def test_labels_and_the_episode_behind_the_key_stay_here(
    upstream: helpers_proxy.Upstream, proxy: helpers_proxy.Proxy, client: httpx2.Client
) -> None:
    headers = {
        "Authorization": "Bearer sk-12345#run/7",
        "X-Memopd-Group": "g",
        "Cookie": "session=hush",
        "Connection": "X-Private",
        "X-Private": "hop",
    }
    assert client.post(proxy.url + CHAT, json=chat("w72", request_id="keys"), headers=headers).status_code == 200
    got = upstream.seen()[-1]["headers"]
    assert got["authorization"] == "Bearer sk-12345", "the upstream's key is the client's, without the episode"
    assert not [name for name in got if name.startswith("x-memopd")] and "x-private" not in got
    assert got["cookie"] == "session=hush"
    client.post(proxy.url + CHAT, json=chat("w72"), headers={"Authorization": "Bearer #run/8"})
    got = upstream.seen()[-1]["headers"]
    assert "authorization" not in got and "cookie" not in got, "nothing of one client reaches the next one's request"


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Memopd-Eposide": "e"},
        {"X-Memopd-Reward": "much"},
        {"X-Memopd-Reward": "nan"},
        {"X-Memopd-End": "maybe"},
        {"X-Memopd-Relation": "cousin"},
        {"X-Memopd-Rewrite": "somehow"},
        {"X-Memopd-Segments": "[1]"},
        {"X-Memopd-Segments": "[" * 20000},
        {"X-Memopd-Policy-Version": "-1"},
        {"X-Memopd-Episode": "x" * 2000},
    ],
)
def test_a_label_that_is_wrong_is_refused_before_anything_is_asked(
    upstream: helpers_proxy.Upstream, proxy: helpers_proxy.Proxy, client: httpx2.Client, headers: dict[str, str]
) -> None:
    before = len(upstream.seen())
    answer = client.post(proxy.url + CHAT, json=chat("w73"), headers=EPISODE | headers)
    assert answer.status_code == 400
    assert next(iter(headers)) in answer.json()["error"]["message"]
    assert len(upstream.seen()) == before


def test_one_episode_has_one_group(proxy: helpers_proxy.Proxy, client: httpx2.Client) -> None:
    labels = {"X-Memopd-Episode": "grouped", "X-Memopd-Group": "a"}
    assert client.post(proxy.url + CHAT, json=chat("w74"), headers=labels).status_code == 200
    answer = client.post(proxy.url + CHAT, json=chat("w74"), headers=labels | {"X-Memopd-Group": "b"})
    assert answer.status_code == 400 and "'b', and the episode has 'a'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"messages": 5}', b"{}"])
def test_a_request_that_is_no_call_gets_the_upstreams_own_answer(
    upstream: helpers_proxy.Upstream, proxy: helpers_proxy.Proxy, client: httpx2.Client, body: bytes
) -> None:
    answers = [client.post(url + CHAT, content=body, headers=EPISODE) for url in (upstream.url, proxy.url)]
    assert [a.status_code for a in answers] == [500, 500], "what this upstream answers to it"
    assert answers[0].content == answers[1].content


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
def test_an_error_of_the_upstream_goes_through_with_its_body(
    upstream: helpers_proxy.Upstream, proxy: helpers_proxy.Proxy, client: httpx2.Client, status: int
) -> None:
    asked = chat("w75", mode=f"status{status}", stream=True)
    answers = [client.post(url + CHAT, json=asked, headers=EPISODE) for url in (upstream.url, proxy.url)]
    assert [a.status_code for a in answers] == [status, status]
    assert answers[0].content == answers[1].content and answers[1].headers["x-reason"] == "because"
    skipped = client.get(f"{proxy.url}/memopd/status").json()["not_recorded"]
    assert skipped[f"upstream answered {status}"] >= 1


def test_an_upstream_that_refuses_our_fields_is_asked_again_without(
    proxy: helpers_proxy.Proxy, client: httpx2.Client
) -> None:
    before = _rows(client, proxy)
    answer = client.post(proxy.url + CHAT, json=chat("w76", mode="strict"), headers=EPISODE)
    assert answer.status_code == 200 and answer.json()["choices"][0]["token_ids"] is None
    assert _rows(client, proxy) == before
    assert client.get(f"{proxy.url}/memopd/status").json()["not_recorded"]["the upstream gives no ids"] >= 1


def test_a_request_may_be_compressed(
    upstream: helpers_proxy.Upstream, proxy: helpers_proxy.Proxy, client: httpx2.Client
) -> None:
    headers = EPISODE | {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    body = gzip.compress(json.dumps(chat("w77", request_id="packed")).encode())
    answer = client.post(proxy.url + CHAT, content=body, headers=headers)
    assert answer.status_code == 200 and answer.json()["id"] == "packed"
    assert "content-encoding" not in upstream.seen()[-1]["headers"]


def test_no_body_over_the_limit_however_it_comes(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path
) -> None:
    with helpers_proxy.inside(tmp_path / "trace", upstream.url, max_body=2**20) as small:
        before = len(upstream.seen())
        large = b" " * (2**20 + 1)
        assert client.post(small.url + CHAT, content=large).status_code == 413
        assert client.post(small.url + CHAT, content=iter([large[: 2**19], large[2**19 :]])).status_code == 413
        assert client.post(f"{small.url}/v1/files", content=large).status_code == 413
        bomb = gzip.compress(b" " * 2**26)
        assert len(bomb) < 2**20, "small on the way"
        headers = EPISODE | {"Content-Encoding": "gzip"}
        assert client.post(small.url + CHAT, content=bomb, headers=headers).status_code == 413
        assert len(upstream.seen()) == before
        assert client.post(small.url + CHAT, json=chat("w78"), headers=EPISODE).status_code == 200, "and it goes on"


def test_one_connection_serves_many_requests(proxy: helpers_proxy.Proxy) -> None:
    host, port = proxy.url.removeprefix("http://").split(":")
    body = json.dumps(chat("w79")).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX-Memopd-Episode: alive\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        source = connection.makefile("rb")
        for _ in range(3):
            connection.sendall(head + body)
            assert source.readline().startswith(b"HTTP/1.1 200")
            length = 0
            while (line := source.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            assert json.loads(source.read(length))["object"] == "chat.completion"


def test_an_upstream_that_is_not_there_or_silent_is_told(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
        with helpers_proxy.inside(tmp_path / "dead", dead, episode="e") as found:
            for stream in (False, True):
                answer = client.post(found.url + CHAT, json=chat("w80", stream=stream))
                assert answer.status_code == 502 and "cannot be reached" in answer.json()["error"]["message"]
            assert client.get(f"{found.url}/v1/models").status_code == 502
    with helpers_proxy.inside(tmp_path / "slow", upstream.url, episode="e", timeout=0.3) as slow:
        answer = client.post(slow.url + CHAT, json=chat("w81", mode="never"))
        assert answer.status_code == 504 and "sent nothing for 0.3 s" in answer.json()["error"]["message"]
        assert slow.stop()["not_recorded"] == {"the upstream sent nothing for 0.3 s": 1}


def test_a_stream_that_the_upstream_cuts_does_not_look_whole(proxy: helpers_proxy.Proxy, client: httpx2.Client) -> None:
    asked = chat("w82", mode="cut", stream=True, max_tokens=30, seed=3)
    with pytest.raises(httpx2.RemoteProtocolError):
        client.post(proxy.url + CHAT, json=asked, headers=EPISODE)


def _rows(client: httpx2.Client, proxy: helpers_proxy.Proxy) -> int:
    return int(client.get(f"{proxy.url}/memopd/status").json()["rows"])


def test_so_many_calls_run_at_once_so_many_wait_and_others_are_told_to_come_again(
    upstream: helpers_proxy.Upstream, tmp_path: Path
) -> None:
    async def crowd(url: str, upstream: str) -> list[int]:
        """The upstream answers nobody until five were sent away."""
        async with httpx2.AsyncClient(timeout=60, trust_env=False) as client:
            asked = [chat(f"w83{n}", mode="held") for n in range(12)]
            calls = [asyncio.ensure_future(client.post(url + CHAT, json=a, headers=EPISODE)) for a in asked]
            while sum(c.done() for c in calls) < 5:
                await asyncio.sleep(0.02)
            while not all(c.done() for c in calls):
                await client.get(f"{upstream}/release")
                await asyncio.sleep(0.02)
            return sorted(c.result().status_code for c in calls)

    with helpers_proxy.upstream(tmp_path) as own:
        with helpers_proxy.inside(tmp_path / "trace", own.url, max_calls=2, max_waiting=5) as found:
            assert asyncio.run(crowd(found.url, own.url)) == [200] * 7 + [503] * 5
            assert found.stop()["rows"] == 7
        assert httpx2.get(f"{own.url}/most", trust_env=False).json() == 2


@pytest.mark.parametrize(("pause", "stall"), [(0.05, 30.0), (4.0, 1.0)])
def test_a_slow_client_gets_all_and_one_that_takes_nothing_is_given_up(
    upstream: helpers_proxy.Upstream, tmp_path: Path, pause: float, stall: float
) -> None:
    """Of an answer that no socket's buffers hold: the proxy waits `stall` seconds for each piece to be taken."""
    body = bytes(16 * 2**20)
    with helpers_proxy.inside(tmp_path / "trace", upstream.url, stall=stall) as found:
        host, port = found.url.removeprefix("http://").split(":")
        head = f"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        received = 0
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(head + body)
            while received < len(body):
                time.sleep(pause if pause < stall or not received else 0)
                chunk = connection.recv(2**20, socket.MSG_WAITALL)
                received += len(chunk)
                if not chunk:
                    break
        assert (received >= len(body)) == (pause < stall)


def test_a_client_that_sends_no_more_of_its_body_is_told_and_let_go(
    upstream: helpers_proxy.Upstream, tmp_path: Path
) -> None:
    with helpers_proxy.inside(tmp_path / "trace", upstream.url, stall=0.3) as found:
        host, port = found.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
            assert connection.recv(2**16).startswith(b"HTTP/1.1 408")


def test_a_port_that_is_taken_is_told_and_nothing_is_left(upstream: helpers_proxy.Upstream, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["record", "--upstream", upstream.url, "--listen", address, "-o", str(tmp_path / "trace")]
        found = helpers_proxy.run(*arguments)
    assert found.returncode == 3 and "cannot be listened at" in found.stderr and "Traceback" not in found.stderr
    assert not (tmp_path / "trace").exists()
