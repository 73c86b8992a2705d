"""Whatever an upstream sends, the proxy stays up, the client gets it or an error, and what is recorded is valid."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import helpers_proxy
import helpers_upstream
import httpx2
import pytest
from helpers_proxy import chat

from memopd_trace import validate

CHAT = "/v1/chat/completions"
PIECES = [b"null", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'"\\ud800"', b"99999999999999999999", b"true", b"[" * 2000,
          b"\xff\xfe", b"\n\n", b"data: ", b"data: [DONE]\n\n", b": \n\n", b"\x00", b"]", b"}", b'"index":1,',
          b'"id":7,', b'"error":{},', b"9" * 5000]  # fmt: skip


class Raw:
    """A server that answers each connection with the bytes that it was last told."""

    def __init__(self) -> None:
        self.answer = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                data = b""
                while b"\r\n\r\n" not in data and (more := connection.recv(65536)):
                    data += more
                if data.startswith(b"STOP"):
                    return
                head, _, body = data.partition(b"\r\n\r\n")
                length = next((int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if b"content-length" in x), 0)
                while len(body) < length and (more := connection.recv(65536)):
                    body += more
                connection.sendall(self.answer)

    def close(self) -> None:
        with socket.create_connection(self._listener.getsockname()) as connection:
            connection.sendall(b"STOP\r\n\r\n")
        self._thread.join(10)
        self._listener.close()


@contextmanager
def raw() -> Iterator[Raw]:
    found = Raw()
    try:
        yield found
    finally:
        found.close()


def valid_answers(seed: int) -> list[tuple[bytes, bytes]]:
    """(content type, body) of answers that can be recorded: whole and streamed."""

    async def streamed(call: helpers_upstream.Call) -> bytes:
        return "".join([part async for part in call.stream(0)]).encode()

    import asyncio

    found = []
    asked = {"messages": [{"role": "user", "content": "w1 w2"}], "return_token_ids": True, "logprobs": True}
    for n in (1, 2):
        call = helpers_upstream.Call(True, asked | {"n": n, "seed": seed, "max_tokens": 5}, f"fuzz-{seed}-{n}")
        found.append((b"application/json", json.dumps(call.whole()).encode()))
        found.append((b"text/event-stream", asyncio.run(streamed(call))))
    return found


def damaged(body: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(body) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            body = body[:at]
        elif kind == 1:
            body = body[:at] + rng.choice(PIECES) + body[at:]
        elif kind == 2:
            body = body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
        elif kind == 3:
            body = body[:at] + body[at + rng.randrange(40) :]
        else:
            numbers = [i for i in range(len(body)) if body[i : i + 1].isdigit()] or [0]
            place = rng.choice(numbers)
            body = body[:place] + rng.choice(PIECES) + body[place + 1 :]
    return body


def head(kind: bytes, body: bytes, rng: random.Random) -> bytes:
    """An answer's first bytes, now and then wrong."""
    length = len(body) + (rng.choice([-3, 5, 10**6]) if rng.random() < 0.1 else 0)
    framing = rng.choice([b"Content-Length: %d" % length, b"Connection: close"])
    if rng.random() < 0.1:
        framing = rng.choice(
            [b"Transfer-Encoding: chunked", b"Content-Length: x", b"Content-Encoding: gzip", b"\x00: \x00"]
        )
    return b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\n" + framing + b"\r\n\r\n"


def _fuzz(folder: Path, trials: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers_upstream, "LOG", [(folder.parent / "produced.jsonl").open("w")])
    rng = random.Random(seed)
    statuses: set[int] = set()
    with raw() as server, helpers_proxy.inside(folder, server.url, timeout=60.0) as found, httpx2.Client() as client:
        for trial in range(trials):
            kind, body = rng.choice(valid_answers(trial % 4))
            server.answer = head(kind, hurt := damaged(body, rng), rng) + hurt
            asked = chat("w1 w2", stream=kind == b"text/event-stream", n=body.count(b'"index": 1') + 1)
            try:
                answer = client.post(found.url + CHAT, json=asked, headers={"X-Memopd-Episode": f"e{trial % 7}"})
                statuses.add(answer.status_code)
            except httpx2.RequestError:
                statuses.add(0)
        assert client.get(f"{found.url}/memopd/status").status_code == 200
        summary = found.stop()
    helpers_upstream.LOG[0].close()
    assert {0, 200, 502} >= statuses and 200 in statuses
    assert summary["calls"] > trials // 10 and sum(summary["not_recorded"].values()) > trials // 10
    report = validate(folder, "lineage")
    assert report.exit_code() == 0, report.to_text()


def test_no_answer_of_an_upstream_breaks_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fuzz(tmp_path / "trace", 150, 0, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
def test_no_answer_breaks_the_proxy_at_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    _fuzz(tmp_path / "trace", 2500, seed, monkeypatch)
