"""The proxy and its upstream as processes on loopback, and what the upstream says that it produced."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from memopd_trace import Invocation, Sampling, read
from memopd_trace.metadata import TraceMetadata
from memopd_trace.record.proxy import Options, server
from memopd_trace.record.proxy.recording import begin
from memopd_trace.record.proxy.server import make_metadata

HERE = Path(__file__).parent
MAIN = "from memopd_trace.cli import main; main()"
CLI = ["-c", MAIN]
SMALL_PARTS = "from memopd_trace.record.proxy import Options; Options.__init__.__kwdefaults__['part_rows'] = 6"
START_SECONDS = 60


@dataclass
class Upstream:
    """The toy server."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def produced(self) -> list[dict[str, Any]]:
        """Every output that it sampled."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def seen(self) -> list[dict[str, Any]]:
        """Every request that it got."""
        return list(httpx2.get(f"{self.url}/seen", trust_env=False, timeout=60).json())

    def wait_for(self, text: str) -> None:
        """Until a request with this text has come."""
        end = time.monotonic() + START_SECONDS
        while not any(text in request["body"] for request in self.seen()):
            assert time.monotonic() < end, f"{text} did not come"
            time.sleep(0.02)

    def release(self) -> None:
        """Answer the requests that it holds (`mode="held"`)."""
        httpx2.get(f"{self.url}/release", trust_env=False, timeout=60)


@dataclass
class Proxy:
    """A proxy that is running; `notices` is its stderr."""

    process: subprocess.Popen[str]
    url: str
    folder: Path
    notices: list[str] = field(default_factory=list)

    def stop(self) -> dict[str, Any]:
        """End it as Ctrl-C does; its summary."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=60)
        self.notices += err.splitlines()
        assert self.process.returncode == 0, (self.process.returncode, out, self.notices)
        return dict(json.loads(out))

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def upstream(folder: Path, port: int = 0, dialect: str = "vllm") -> Iterator[Upstream]:
    log = folder / "produced.jsonl"
    process = _start([str(HERE / "helpers_upstream.py"), str(log), str(port), dialect])
    assert process.stdout is not None
    try:
        yield Upstream(process, f"http://127.0.0.1:{int(process.stdout.readline())}", log)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def proxy(folder: Path, url: str, *more: str, small_parts: bool = False) -> Iterator[Proxy]:
    found = start(folder, url, *more, small_parts=small_parts)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.kill()


def start(folder: Path, url: str, *more: str, small_parts: bool = False) -> Proxy:
    """Start `memopd-trace record` on a free port and wait until it listens; `small_parts` have six rows."""
    arguments = ["record", "--upstream", url, "--listen", "127.0.0.1:0", "-o", str(folder), *more]
    process = _start(["-c", f"{SMALL_PARTS}; {MAIN}" if small_parts else MAIN, *arguments])
    assert process.stderr is not None
    notices: list[str] = []
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        line = process.stderr.readline()
        notices.append(line.rstrip())
        if "recording at " in line:
            return Proxy(process, line.split("recording at ")[1].split("/v1")[0], folder, notices)
        if not line:
            break
    process.kill()
    raise AssertionError(f"the proxy did not start: {notices} {process.communicate()}")


@contextmanager
def inside(
    folder: Path, url: str, *, models: tuple[str, ...] = ("toy",), metadata: TraceMetadata | None = None, **more: Any
) -> Iterator[Inside]:
    """A proxy in a thread of this process, with `more` of its options: starts at once, cannot be killed."""
    options = Options(upstream=url, port=0, **{"logprob_kind": "raw", "defaults": Sampling(), **more})
    notices: list[str] = []
    listens: queue.Queue[str] = queue.Queue()
    with begin(folder, lambda: metadata or make_metadata(list(models), None), None, notices.append) as begun:
        application = server.Proxy(begun, options)
        running = _Threaded(server.server_config(application, options), lambda h, p: listens.put(f"http://{h}:{p}"))
        application.failed = running.stop
        thread = threading.Thread(target=running.run)
        thread.start()
        try:
            yield Inside(listens.get(timeout=START_SECONDS), folder, application, running, thread, notices)
        finally:
            running.stop()
            thread.join(60)


class _Threaded(server.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class Inside:
    """A proxy in a thread."""

    url: str
    folder: Path
    proxy: server.Proxy
    server: server.Server
    thread: threading.Thread
    notices: list[str]

    def stop(self) -> dict[str, Any]:
        """End it; its summary."""
        self.server.stop()
        self.thread.join(60)
        return self.proxy.recording.summary()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *CLI, *arguments], capture_output=True, text=True, timeout=120, env=_env(), check=False
    )


def rows(folder: Path) -> list[Invocation]:
    return list(read(folder).iter_invocations())


def chat(*words: str, **more: Any) -> dict[str, Any]:
    """A request for a chat; words alternate between the user and the model."""
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(words)]
    return {"model": "toy", "messages": messages, "temperature": 1.0, **more}


def _start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_env()
    )


def _env() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
