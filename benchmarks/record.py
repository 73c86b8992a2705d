"""What the recording proxy costs: what it adds to a call's latency, and its processor time a call.

Run: python benchmarks/record.py [--calls 200] [--clients 200] [--turns 5] [--tokens 20] [--rounds 5]

The upstream is the tests' toy server, which samples by a function and costs next to nothing: what is measured is the
proxy. Latency: one client asks the upstream directly and through the proxy in turn, so that whatever else the machine
does meets both alike; what is added is the difference of the two calls of a pair. Load: many clients at once stream
calls, each prompt built on the answer before, ten clients to an episode; processor time is that of the proxy's process
alone, from one round to the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers_proxy import Proxy, chat, proxy, upstream

PATH = "/v1/chat/completions"
WARM_UP = 20  # calls
LIMITS = httpx2.Limits(max_connections=None)


async def client(http: httpx2.AsyncClient, url: str, number: int, turns: int, tokens: int, names: str) -> None:
    words, labels = [f"w{900 + number} task"], {"X-Memopd-Episode": f"{names}/{number // 10}"}
    for turn in range(turns):
        asked = chat(*words, stream=True, seed=number, max_tokens=tokens, ignore_eos=True)
        async with http.stream("POST", url + PATH, json=asked, headers=labels) as answer:
            text = (await answer.aread()).decode()
        events = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]
        words += ["".join(e["choices"][0]["delta"]["content"] for e in events), f"w{100 + turn} next"]


async def crowd(url: str, given: argparse.Namespace, names: str) -> float:
    """Seconds until all clients are done."""
    async with httpx2.AsyncClient(timeout=600, trust_env=False, limits=LIMITS) as http:
        started = time.perf_counter()
        await asyncio.gather(*(client(http, url, n, given.turns, given.tokens, names) for n in range(given.clients)))
        return time.perf_counter() - started


def latencies(urls: tuple[str, str], calls: int, tokens: int, stream: bool) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Milliseconds [calls, 2] of each call, asked of both addresses in turn; every tenth call begins an episode."""
    found = []
    with httpx2.Client(timeout=60, trust_env=False) as http:
        for number in range(calls + WARM_UP):
            asked = chat(f"w{number % 900} task", seed=number, stream=stream, max_tokens=tokens, ignore_eos=True)
            labels = {"X-Memopd-Episode": f"latency/{stream}/{number // 10}"}
            pair = []
            for url in urls if number % 2 else urls[::-1]:
                started = time.perf_counter()
                http.post(url + PATH, json=asked, headers=labels).raise_for_status()
                pair.append(1000 * (time.perf_counter() - started))
            found.append(pair if number % 2 else pair[::-1])
    return np.array(found[WARM_UP:])


def _show_latency(urls: tuple[str, str], given: argparse.Namespace) -> None:
    print(f"latency of a call of {given.tokens} tokens, ms: median (5 % to 95 %) of {given.calls}, one at a time")
    print(f"{'':<10} {'without':>22} {'recorded':>22} {'added':>22}")
    for stream in (False, True):
        pairs = latencies(urls, given.calls, given.tokens, stream)
        columns = [pairs[:, 0], pairs[:, 1], pairs[:, 1] - pairs[:, 0]]
        shown = [f"{np.median(c):.2f} ({np.quantile(c, 0.05):.2f} to {np.quantile(c, 0.95):.2f})" for c in columns]
        print(f"{'streamed' if stream else 'whole':<10} " + " ".join(f"{text:>22}" for text in shown))


def _show_load(server: str, recorder: Proxy, given: argparse.Namespace) -> None:
    total = given.clients * given.turns
    process = psutil.Process(recorder.process.pid)
    rates: list[list[float]] = [[], []]
    spent = []
    for number in range(given.rounds):
        rates[0].append(total / asyncio.run(crowd(server, given, "direct")))
        before = sum(process.cpu_times()[:2])
        rates[1].append(total / asyncio.run(crowd(recorder.url, given, f"round/{number}")))
        spent.append(1000 * (sum(process.cpu_times()[:2]) - before) / total)
    print(f"{given.clients} clients at once, {total} streamed calls a round: median (least to most) of {given.rounds}")
    names = ("calls a second without", "calls a second recorded", "proxy, ms of processor a call")
    for name, values in zip(names, [*rates, spent], strict=True):
        print(f"{name:<30} {np.median(values):>8.1f} ({min(values):.1f} to {max(values):.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with upstream(folder) as server, proxy(folder / "trace", server.url, "--logprob-kind", "raw") as recorder:
            _show_latency((server.url, recorder.url), given)
            _show_load(server.url, recorder, given)
            summary = recorder.stop()
    expected = 2 * (given.calls + WARM_UP) + given.rounds * given.clients * given.turns
    assert summary["rows"] == expected, (summary, expected)


if __name__ == "__main__":
    main()
