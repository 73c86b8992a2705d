"""vLLM's CPU server, in an environment of its own (`sh benchmarks/setup_vllm.sh`): started, asked, and stopped again.

It is asked for `prompt_logprobs` of whole sequences over HTTP, all requests at once, which is how it is quickest. Left
to itself it keeps a core for its own bookkeeping, and burns a fifth of one while nobody asks: here it has all cores,
and its processes are stopped while others are measured.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from .measure import status_bytes

FOLDER = Path(__file__).parents[2] / ".venv-vllm"
CLIENTS = 32  # requests under way at once
START_SECONDS = 300
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VllmServer:
    """A running server; use as a context manager, so that none of its processes stays behind.

    Raises:
        RuntimeError: it did not start, with the end of its log.
    """

    def __init__(self, model: Path, log: Path, python: Path = FOLDER / "bin" / "python") -> None:
        self._log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "PYTHON", "VIRTUAL_ENV"))}
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [
                    *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.resolve())),
                    *("--served-model-name", "m", "--dtype", "float32", "--enforce-eager"),
                    *("--host", "127.0.0.1", "--port", str(port), "--max-logprobs", "1"),
                ],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=inherited | SETTINGS,
                start_new_session=True,
            )
        self._parent = psutil.Process(self._process.pid)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prompt_logprobs(self, sequences: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
        """([n] log-probability of every token of each sequence, NaN for the first; bytes of the answers)."""
        processes = self._processes()
        for process in processes:
            process.resume()
        try:
            with ThreadPoolExecutor(CLIENTS) as clients:
                answers = list(clients.map(self._ask, sequences))
        finally:
            for process in processes:
                process.suspend()
        found = [_own_logprobs(json.loads(a), ids) for a, ids in zip(answers, sequences, strict=True)]
        return found, sum(map(len, answers))

    def peak_bytes(self) -> int:
        """The most memory that its processes have held, summed."""
        return sum(_peak(p) for p in self._processes())

    def close(self) -> None:
        """Stop it and all that it has started."""
        processes = self._processes()
        for process in processes:
            process.resume()
        self._process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, timeout=20)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=20)
        self._process.wait()

    def _ask(self, ids: np.ndarray) -> bytes:
        body = {"model": "m", "prompt": ids.tolist(), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
        request = urllib.request.Request(
            f"{self.address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            content: bytes = answer.read()
        return content

    def _processes(self) -> list[psutil.Process]:
        try:
            return [self._parent, *self._parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError(f"vLLM's server did not start:\n{self._log.read_text(errors='replace')[-2000:]}")


def _own_logprobs(answer: dict[str, Any], ids: np.ndarray) -> np.ndarray:
    """The log-probability of each token of a sequence, out of the candidates listed at its place."""
    places = answer["choices"][0]["prompt_logprobs"]
    return np.array(
        [np.nan if p is None else p[str(i)]["logprob"] for p, i in zip(places, ids.tolist(), strict=True)], np.float32
    )


def _peak(process: psutil.Process) -> int:
    try:
        return status_bytes("VmHWM", process.pid)
    except (OSError, KeyError):
        return 0
