"""Converting logs: JSON read a second by one core, for token-exact logs, and what a large file takes in memory.

Run: python benchmarks/convert.py [--mib 256] [--large-mib 2048]
Limit: orjson parsing the same bytes, and copying its lists of ids into arrays.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson

from memopd_trace.cli.console import spare_pandas
from memopd_trace.convert import convert
from memopd_trace.convert.fields import as_ids

CALLS = 20


def rollout(number: int) -> bytes:
    """A NeMo Gym rollout of a growing history: 2000 ids, then 450 of observation and 50 of output a call."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, 150_000, 2000)
    output = []
    for call in range(CALLS):
        answer = rng.integers(0, 150_000, 50)
        output.append(
            {
                "type": "function_call",
                "name": "look",
                "call_id": f"c{call}",
                "arguments": '{"at": "here"}',
                "prompt_token_ids": prompt.tolist(),
                "generation_token_ids": answer.tolist(),
                "generation_log_probs": (-rng.exponential(1, 50)).tolist(),
            }
        )
        output.append({"type": "function_call_output", "call_id": f"c{call}", "output": "nothing to see " * 20})
        prompt = np.concatenate([prompt, answer, rng.integers(0, 150_000, 450)])
    record = {
        "responses_create_params": {"input": [{"role": "user", "content": "look around"}], "temperature": 1.0},
        "response": {"id": f"r{number}", "model": "m", "output": output},
        "reward": 1.0,
        "_ng_task_index": number,
        "_ng_rollout_index": 0,
    }
    return orjson.dumps(record) + b"\n"


def exchanges(number: int) -> bytes:
    """The same history as requests and answers of a server, a line a call."""
    record = orjson.loads(rollout(number))
    lines = []
    for item in record["response"]["output"][::2]:
        ids, logprobs = item["generation_token_ids"], item["generation_log_probs"]
        numbers = [{"token": f"token_id:{i}", "logprob": p} for i, p in zip(ids, logprobs, strict=True)]
        message = {"role": "assistant", "content": "look"}
        choice = {"message": message, "token_ids": ids, "logprobs": {"content": numbers}, "finish_reason": "stop"}
        answer = {"id": item["call_id"], "choices": [choice], "prompt_token_ids": item["prompt_token_ids"]}
        request = {"messages": [{"role": "user", "content": "look around"}], "temperature": 1.0}
        lines.append(orjson.dumps({"request": request, "response": answer, "session_id": f"s{number}"}) + b"\n")
    return b"".join(lines)


MAKERS = {"nemo-gym": rollout, "vllm": exchanges}


def write(path: Path, name: str, size: int) -> int:
    """Fill a file with so many bytes at least; parts are repeated under new names, which is quick. Returns its size."""
    base = [MAKERS[name](number) for number in range(8)]
    with path.open("wb") as sink:
        for number in range(2**31):
            line = base[number % len(base)]
            for word in (b'"_ng_task_index":', b'"session_id":"s'):
                line = line.replace(word + str(number % len(base)).encode(), word + str(number).encode())
            sink.write(line)
            if sink.tell() >= size:
                return sink.tell()
    raise AssertionError


def limit(path: Path) -> Iterator[int]:
    """What anybody has to do: parse, and copy ids into arrays."""
    with path.open("rb") as source:
        for line in source:
            for ids in _lists(orjson.loads(line)):
                yield len(as_ids(ids, ""))


def _lists(value: object) -> Iterator[list[int]]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _lists(inner)
    elif isinstance(value, list) and value and type(value[0]) is int:
        yield value
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from _lists(inner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--large-mib", type=int, default=2048, help="0 leaves the large file out")
    parser.add_argument("--measure", nargs=3, metavar=("FORMAT", "IN", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, source, out = options.measure
        spare_pandas()  # as the command line does
        start = time.process_time()
        result = convert(name, source, out)
        seconds = time.process_time() - start
        assert result.exit_code() == 0 and result.losses.balanced()
        print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, result.losses.rows)
        return
    print("MB of JSON a second of processor time; peak memory of the process")
    print(f"{'':10}{'MiB':>8}{'rows':>9}{'MB/s':>8}{'limit':>8}{'peak MiB':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for name in MAKERS:
            for mib in (options.mib, options.large_mib):
                if mib:
                    _measure(name, mib, Path(folder))


def _measure(name: str, mib: int, folder: Path) -> None:
    source, out = folder / "log.jsonl", folder / "out.parquet"
    size = write(source, name, mib * 2**20)
    arguments = [sys.executable, __file__, "--measure", name, str(source), str(out)]
    told = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.split()
    bound = ""
    if mib <= 512:
        start = time.process_time()
        sum(limit(source))
        bound = f"{size / 1e6 / (time.process_time() - start):.0f}"
    rate = size / 1e6 / float(told[0])
    print(f"{name:10}{size / 2**20:>8.0f}{told[2]:>9}{rate:>8.0f}{bound:>8}{float(told[1]):>10.0f}")
    for path in (source, *folder.glob("out.parquet*")):
        path.unlink()


if __name__ == "__main__":
    main()
