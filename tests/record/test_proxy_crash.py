"""A killed proxy loses no call whose answer was complete, and a recording goes on where it was."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from pathlib import Path

import helpers_proxy
import httpx2
import numpy as np
import pytest
from helpers_proxy import chat, rows

from memopd_trace import validate
from memopd_trace.errors import InputError, UsageError
from memopd_trace.record.proxy import Options, record

CHAT = "/v1/chat/completions"
CLIENTS = 8


class Crowd:
    """Clients that ask without a pause, streams and whole answers, until they are stopped; `whole` names the calls
    whose answers they had to the end."""

    def __init__(self, url: str, run: int) -> None:
        self.whole: list[str] = []
        self._stopping = False
        self._threads = [threading.Thread(target=self._ask, args=(url, f"{run}-{n}")) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, url: str, name: str) -> None:
        rng = random.Random(name)
        with httpx2.Client(timeout=20, trust_env=False) as client:
            for number in range(10_000):
                if self._stopping:
                    return
                call, stream = f"kill-{name}-{number}", rng.random() < 0.5
                asked = chat(f"w{500 + number} task", seed=number, stream=stream, delay=0.001, request_id=call)
                labels = {"X-Memopd-Episode": f"{name}/{number // 2}"}
                if number % 2 == 1:
                    labels["X-Memopd-End"] = "terminated"
                try:
                    answer = client.post(url + CHAT, json=asked, headers=labels)
                except httpx2.TransportError:
                    continue
                if answer.status_code == 200 and ("[DONE]" in answer.text or not stream):
                    self.whole.append(call)

    def stop(self) -> list[str]:
        self._stopping = True
        for thread in self._threads:
            thread.join()
        return self.whole


def finish(folder: Path) -> None:
    """What `record --finish` does."""
    record(folder, Options(upstream="http://127.0.0.1"), models=["toy"], serve=False)


def _kill_in_a_loop(upstream: helpers_proxy.Upstream, folder: Path, rounds: int, seed: int) -> None:
    rng, whole = random.Random(seed), list[str]()
    for number in range(rounds):
        with helpers_proxy.proxy(folder, upstream.url, "--logprob-kind", "raw", small_parts=True) as found:
            crowd = Crowd(found.url, 1000 * seed + number)
            until = time.monotonic() + 60
            while len(crowd.whole) < 30 and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(rng.random() * 0.2)
            found.kill()
            whole += crowd.stop()
    assert len(whole) >= 30 * rounds
    assert len(list(folder.glob("part-*.parquet"))) > 1, "parts were written while it was killed"
    finish(folder)
    recorded = {(i.extra or {})["response_id"]: i for i in rows(folder)}
    assert len(recorded) == len(rows(folder)), "nothing is there twice"
    lost = [call for call in whole if call not in recorded or recorded[call].accepted is False]
    assert not lost
    produced = {line["id"]: line for line in upstream.produced()}
    for call in whole:
        row, line = recorded[call], produced[call]
        assert row.prompt_ids.tolist() == line["prompt"] and row.output_ids.tolist() == line["output"]
        assert row.output_logprobs is not None
        assert np.ma.getdata(row.output_logprobs).tolist() == np.float32(line["logprobs"]).tolist()
    report = validate(folder, "lineage")
    assert report.exit_code() == 0, report.to_text()
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith("journal")) == []


def test_no_call_whose_answer_was_complete_is_lost_by_a_kill(upstream: helpers_proxy.Upstream, tmp_path: Path) -> None:
    _kill_in_a_loop(upstream, tmp_path / "trace", rounds=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 4))
def test_no_call_whose_answer_was_complete_is_lost_by_many_kills(
    upstream: helpers_proxy.Upstream, tmp_path: Path, seed: int
) -> None:
    _kill_in_a_loop(upstream, tmp_path / "trace", rounds=12, seed=seed)


def test_a_recording_goes_on_in_its_episodes_and_its_parts(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path
) -> None:
    """Copies of the folder stand for kills: what was on disk at that moment is taken up elsewhere."""
    folder, copy = tmp_path / "trace", tmp_path / "copy"
    with helpers_proxy.inside(folder, upstream.url, part_rows=2) as found:
        for number in range(3):
            labels = {"X-Memopd-Episode": f"done-{number}", "X-Memopd-End": "true"}
            client.post(found.url + CHAT, json=chat("w600", request_id=f"d{number}"), headers=labels)
        labels = {"X-Memopd-Episode": "open", "X-Memopd-Group": "g"}
        first = client.post(found.url + CHAT, json=chat("w601", request_id="o1"), headers=labels).json()
        until = time.monotonic() + 60
        while not (folder / "part-00000.parquet").exists() and time.monotonic() < until:
            time.sleep(0.01)
        shutil.copytree(folder, copy)
    part = copy / "part-00000.parquet"
    assert validate(part, "lineage").clean and len(rows(part)) == 2, "a part is a trace of its own"
    assert not (copy / "manifest.json").exists()
    assert validate(copy, "lineage").exit_code() == 3, "a recording that goes on is no whole trace yet"
    with helpers_proxy.inside(copy, upstream.url) as found:
        words = ("w601", first["choices"][0]["message"]["content"], "w602")
        labels = {"X-Memopd-Episode": "open"}
        assert client.post(found.url + CHAT, json=chat(*words), headers=labels).status_code == 200
        labels = {"X-Memopd-Episode": "open", "X-Memopd-Group": "other"}
        assert client.post(found.url + CHAT, json=chat(*words), headers=labels).status_code == 400
        again = client.post(found.url + CHAT, json=chat("w603"), headers={"X-Memopd-Episode": "done-0"})
        assert again.status_code == 200
        assert found.stop()["not_recorded"] == {"the episode has ended": 1}
    recorded = rows(copy)
    assert [(i.episode_id, i.relation) for i in recorded] == [
        ("done-0", "root"), ("done-1", "root"), ("done-2", "root"), ("open", "root"), ("open", "extend"),
    ]  # fmt: skip
    assert [i.group_id for i in recorded[3:]] == ["g", "g"]
    assert validate(copy, "lineage").clean


def test_a_torn_end_is_cut_and_told(upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path) -> None:
    folder, copy = tmp_path / "trace", tmp_path / "copy"
    with helpers_proxy.inside(folder, upstream.url) as found:
        client.post(found.url + CHAT, json=chat("w610"), headers={"X-Memopd-Episode": "e"})
        shutil.copytree(folder, copy)
    (log,) = copy.glob("journal-*.log")
    with log.open("ab") as out:
        out.write(b"\x40\x00\x00\x00half of a record")
    assert f"memopd-trace record --finish -o {copy}" in validate(copy).to_text()  # how to make it whole
    finished = helpers_proxy.run("record", "--finish", "-o", str(copy))
    assert finished.returncode == 0 and json.loads(finished.stdout)["rows"] == 1
    assert "20 bytes of a call that was not finished were cut off" in finished.stderr
    assert len(rows(copy)) == 1


def test_where_no_recording_is_there_is_none_to_finish(tmp_path: Path) -> None:
    """And nothing is asked of an upstream that was not given."""
    with pytest.raises(InputError, match="no recording to finish"):
        finish(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_call_that_the_disk_damaged_costs_no_other_and_is_told(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path
) -> None:
    folder, copy = tmp_path / "trace", tmp_path / "copy"
    with helpers_proxy.inside(folder, upstream.url) as found:
        for name in ("a", "b", "c"):
            asked = chat("w611", request_id=name)
            assert client.post(found.url + CHAT, json=asked, headers={"X-Memopd-Episode": name}).status_code == 200
        shutil.copytree(folder, copy)
    (log,) = copy.glob("journal-*.log")
    raw = log.read_bytes()
    at = raw.index(b'"episode":"b"')
    log.write_bytes(raw[:at] + b"X" + raw[at + 1 :])
    damaged = log.read_bytes()
    finished = helpers_proxy.run("record", "--finish", "-o", str(copy))
    assert finished.returncode == 0 and "are damaged, and calls in them are lost" in finished.stderr
    assert [(i.extra or {})["response_id"] for i in rows(copy)] == ["a", "c"] and validate(copy, "lineage").clean
    assert log.with_name(f"{log.name}.damaged").read_bytes() == damaged


def test_a_folder_that_is_no_recording_or_is_one_already_is_left_alone(
    upstream: helpers_proxy.Upstream, tmp_path: Path
) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(UsageError) as error:
            finish(folder)
        return str(error.value)

    with helpers_proxy.inside(tmp_path / "trace", upstream.url):
        assert "another process is recording into it" in refused(tmp_path / "trace")
    assert "holds a complete trace" in refused(tmp_path / "trace")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert "is not empty, and no recording" in refused(tmp_path / "other")
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["notes.txt"]


def test_a_full_disk_ends_the_recording_and_no_answer_is_given_that_is_not_kept(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {"X-Memopd-Episode": "e"}
    with helpers_proxy.inside(tmp_path / "trace", upstream.url) as found:
        assert client.post(found.url + CHAT, json=chat("w620", request_id="kept"), headers=labels).status_code == 200

        def full(data: bytes) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(found.proxy.recording.journal, "_put", full)
        answer = client.post(found.url + CHAT, json=chat("w621", request_id="lost"), headers=labels)
        assert answer.status_code == 503 and "No space left" in answer.json()["error"]["message"]
        found.thread.join(30)
        assert not found.thread.is_alive(), "it ended by itself"
    assert not (tmp_path / "trace" / "manifest.json").exists()
    finish(tmp_path / "trace")
    assert [(i.extra or {})["response_id"] for i in rows(tmp_path / "trace")] == ["kept"]


def test_what_runs_when_the_recording_is_ended_is_an_attempt(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path
) -> None:
    with helpers_proxy.inside(tmp_path / "trace", upstream.url, grace=1.0) as found:
        asked = chat("w630", stream=True, delay=0.02, max_tokens=2000, ignore_eos=True)
        with (
            pytest.raises(httpx2.RemoteProtocolError),
            client.stream("POST", found.url + CHAT, json=asked, headers={"X-Memopd-Episode": "e"}) as answer,
        ):
            for number, _ in enumerate(answer.iter_lines()):
                if number == 5:
                    found.server.stop()
        found.thread.join(30)
    (row,) = rows(tmp_path / "trace")
    assert row.accepted is False and row.finish_reason == "abort" and len(row.output_ids) >= 2
    assert validate(tmp_path / "trace", "lineage").exit_code() == 0
