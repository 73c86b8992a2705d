"""Time: an episode of which nothing is heard any more ends by itself and for good, and answers are not held up."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import helpers_proxy
import httpx2
from helpers_proxy import chat, rows

from memopd_trace.record.proxy import Options, record
from memopd_trace.record.proxy.server import listen

CHAT = "/v1/chat/completions"
IDLE = 0.3


def ask(client: httpx2.Client, url: str, episode: str, **more: object) -> httpx2.Response:
    return client.post(url + CHAT, json=chat("w50 task", **more), headers={"X-Memopd-Episode": episode})


def wait_for(client: httpx2.Client, url: str, ended: int) -> dict[str, object]:
    until = time.monotonic() + 30
    while (status := client.get(f"{url}/memopd/status").json())["episodes"]["ended"] < ended:
        assert time.monotonic() < until, status
        time.sleep(0.02)
    return dict(status)


def test_a_silent_episode_is_ended_and_one_with_a_call_under_way_is_not(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path
) -> None:
    with helpers_proxy.inside(tmp_path / "trace", upstream.url, idle=IDLE) as found:
        slow = threading.Thread(target=lambda: httpx2.post(
            found.url + CHAT, json=chat("w51 held-call", mode="held"), headers={"X-Memopd-Episode": "slow"},
            timeout=60, trust_env=False,
        ))  # fmt: skip
        slow.start()
        upstream.wait_for("held-call")
        ask(client, found.url, "slow")
        ask(client, found.url, "silent")
        assert wait_for(client, found.url, 1)["episodes"] == {"open": 1, "ended": 1}
        upstream.release()
        slow.join()
        assert ask(client, found.url, "silent").status_code == 200  # goes through, and is not recorded
        wait_for(client, found.url, 2)
        summary = found.stop()
    assert summary["rows"] == 3 and summary["not_recorded"] == {"the episode has ended": 1}
    assert (
        "an episode was ended: nothing was heard of it for 0.3 s (told once; the summary counts them)" in found.notices
    )
    assert [r.terminated for r in rows(tmp_path / "trace")] == [None] * 3  # how they ended is not known


def test_a_killed_proxy_knows_which_episodes_had_ended(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path
) -> None:
    folder = tmp_path / "trace"
    with helpers_proxy.proxy(folder, upstream.url, "--idle", str(IDLE)) as found:
        ask(client, found.url, "silent")
        wait_for(client, found.url, 1)
        found.kill()
    with helpers_proxy.proxy(folder, upstream.url, "--idle", "0") as found:
        ask(client, found.url, "silent")
        ask(client, found.url, "new")
        time.sleep(2 * IDLE)
        status = client.get(f"{found.url}/memopd/status").json()
        assert status["episodes"] == {"open": 1, "ended": 1}  # 0: never
        assert status["not_recorded"] == {"the episode has ended": 1}
        found.kill()
    record(folder, Options(upstream="http://127.0.0.1"), models=["toy"], serve=False)
    assert [r.episode_id for r in rows(folder)] == ["silent", "new"]


def test_the_end_of_an_answer_does_not_wait_for_its_head_to_be_acknowledged() -> None:
    with listen(Options(upstream="http://127.0.0.1", port=0)) as found:
        with socket.create_connection(found.getsockname()):
            taken, _ = found.accept()
        with taken:
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
