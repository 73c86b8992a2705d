"""What the recording proxy costs: processor time a call, and calls a second, beside the same calls without it.

Run: python benchmarks/record.py [--clients 200] [--calls 5] [--tokens 20]

The upstream is the tests' toy server, which samples by a function and costs next to nothing: what is measured is the
proxy. Each client streams its calls one after the other, each prompt built on the answer before; ten clients share an
episode. Times of the processor are those of the proxy's process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import httpx2
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers_proxy import chat, proxy, upstream

PATH = "/v1/chat/completions"


async def client(http: httpx2.AsyncClient, url: str, number: int, calls: int, tokens: int) -> None:
    words, labels = [f"w{900 + number} task"], {"X-Memopd-Episode": f"e{number // 10}"}
    for turn in range(calls):
        asked = chat(*words, stream=True, seed=number, max_tokens=tokens, ignore_eos=True)
        async with http.stream("POST", url + PATH, json=asked, headers=labels) as answer:
            text = (await answer.aread()).decode()
        events = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]
        words += ["".join(e["choices"][0]["delta"]["content"] for e in events), f"w{100 + turn} next"]


async def crowd(url: str, clients: int, calls: int, tokens: int) -> float:
    """Seconds until all clients are done."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=600, trust_env=False, limits=limits) as http:
        started = time.perf_counter()
        await asyncio.gather(*(client(http, url, n, calls, tokens) for n in range(clients)))
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=20)
    given = parser.parse_args()
    total = given.clients * given.calls
    print(f"{given.clients} clients at once, {total} streamed calls of {given.tokens} tokens")
    print(f"{'':<10} {'calls/s':>8} {'proxy, ms of processor a call':>32}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with upstream(folder) as server, proxy(folder / "trace", server.url, "--logprob-kind", "raw") as recorder:
            seconds = asyncio.run(crowd(server.url, given.clients, given.calls, given.tokens))
            print(f"{'without':<10} {total / seconds:>8.0f} {'':>32}")
            process = psutil.Process(recorder.process.pid)
            before = sum(process.cpu_times()[:2])
            seconds = asyncio.run(crowd(recorder.url, given.clients, given.calls, given.tokens))
            spent = sum(process.cpu_times()[:2]) - before
            print(f"{'recorded':<10} {total / seconds:>8.0f} {1000 * spent / total:>32.1f}")
            summary = recorder.stop()
    assert summary["rows"] == total, summary


if __name__ == "__main__":
    main()
