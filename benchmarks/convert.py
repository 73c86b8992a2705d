"""Converting logs: JSON read a second by one core, for token-exact logs, and what a large file takes in memory.

Run: python benchmarks/convert.py [--mib 256] [--large-mib 2048] [--repeat 5] [--formats nemo-gym vllm]
Ratio: processor time against that of parsing the same bytes with orjson (of a `.pt` file: with PyTorch) and copying its
lists of ids into arrays, which anybody has to do; each run is measured beside its own. A verifiers trace tells each id
once and each row tells all of its prompt's: rows then hold more bytes than the log.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def events(number: int) -> bytes:
    """The same exchanges as Agent Lightning's store has them."""
    lines = []
    for line in exchanges(number).splitlines():
        pair = orjson.loads(line)
        data = {"request": pair["request"], "response": pair["response"], "model": "m"}
        event = {"event_type": "model_request", "timestamp": 1.7e9, "data": data}
        lines.append(orjson.dumps({**event, "rollout_id": pair["session_id"], "attempt_id": "a"}) + b"\n")
    return b"".join(lines)


def graph(number: int) -> bytes:
    """The same history as a trace of verifiers: each node has the ids that it adds."""
    nodes: list[dict[str, object]] = []
    known = 0
    for item in orjson.loads(rollout(number))["response"]["output"][::2]:
        answer = item["generation_token_ids"]
        asked = {"message": {"role": "user", "content": "look"}, "token_ids": item["prompt_token_ids"][known:]}
        given = {"message": {"role": "assistant", "content": "look"}, "token_ids": answer, "sampled": True}
        given |= {"mask": [True] * len(answer), "logprobs": item["generation_log_probs"]}
        for node in (asked, given):
            nodes.append({**node, "parent": len(nodes) - 1 if nodes else None})
        known = len(item["prompt_token_ids"]) + len(answer)
    trace = {"version": 1, "id": f"s{number}", "nodes": nodes, "is_completed": True, "ok": True}
    return orjson.dumps(trace | {"rewards": {"solved": {"score": 1.0, "weight": 1.0}}}) + b"\n"


def steps(number: int) -> bytes:
    """The same history as an episode of rLLM."""
    record = orjson.loads(rollout(number))
    made = [
        {
            "prompt_ids": item["prompt_token_ids"],
            "response_ids": item["generation_token_ids"],
            "logprobs": item["generation_log_probs"],
            "reward": 0.0,
        }
        for item in record["response"]["output"][::2]
    ]
    trajectory = {"uid": f"s{number}", "name": "agent", "steps": made, "reward": 1.0}
    return orjson.dumps({"id": f"s{number}:0", "trajectories": [trajectory], "termination_reason": "env_done"}) + b"\n"


def sample(number: int) -> dict[str, Any]:
    """The same history as slime keeps it: one sequence, and a mask."""
    items = orjson.loads(rollout(number))["response"]["output"][::2]
    tokens = items[-1]["prompt_token_ids"] + items[-1]["generation_token_ids"]
    start = len(items[0]["prompt_token_ids"])
    mask, logprobs = np.zeros(len(tokens), int), np.zeros(len(tokens))
    for item in items:
        place = slice(len(item["prompt_token_ids"]), len(item["prompt_token_ids"]) + 50)
        mask[place], logprobs[place] = 1, item["generation_log_probs"]
    told = {"loss_mask": mask[start:].tolist(), "rollout_log_probs": logprobs[start:].tolist()}
    return {"index": number, "tokens": tokens, "response_length": len(tokens) - start, "reward": 1.0, **told}


MAKERS = {"nemo-gym": rollout, "vllm": exchanges, "agent-lightning": events, "rllm": steps, "verifiers": graph}
NAMES = (b'"_ng_task_index":', b'"session_id":"s', b'"rollout_id":"s', b'"uid":"s', b'"id":"s')


def write(folder: Path, name: str, size: int) -> Path:
    """A log of so many bytes at least; parts are repeated under new names, which is quick."""
    if name == "slime":
        import torch

        base = [orjson.dumps(sample(number)) for number in range(8)]
        samples = [{**orjson.loads(base[n % 8]), "index": n} for n in range(size // len(base[0]))]
        torch.save({"rollout_id": 0, "samples": samples}, folder / "log.pt")
        return folder / "log.pt"
    parts = [MAKERS[name](number) for number in range(8)]
    with (folder / "log.jsonl").open("wb") as sink:
        for number in range(2**31):
            line = parts[number % len(parts)]
            for word in NAMES:
                line = line.replace(word + str(number % len(parts)).encode(), word + str(number).encode())
            sink.write(line)
            if sink.tell() >= size:
                break
    return folder / "log.jsonl"


def read(path: Path) -> Iterator[int]:
    """What anybody has to do: parse, and copy ids into arrays."""
    if path.suffix == ".pt":
        import torch

        for each in torch.load(path, weights_only=True)["samples"]:
            yield len(as_ids(each["tokens"], ""))
        return
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


def measure(name: str, source: Path, folder: Path) -> tuple[float, float, float, int]:
    """In this process: (seconds of converting, of reading, peak MiB of converting, rows)."""
    spare_pandas()  # as the command line does
    start = time.process_time()
    result = convert(name, source, folder / "out.parquet")
    seconds = time.process_time() - start
    assert result.exit_code() == 0 and result.losses.balanced()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.process_time()
    assert sum(read(source)) > 0
    return seconds, time.process_time() - start, peak, result.losses.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=[*MAKERS, "slime"], choices=[*MAKERS, "slime"])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--large-mib", type=int, default=2048, help="of JSON Lines, once; 0 leaves the large file out")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--measure", nargs=3, metavar=("FORMAT", "IN", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(*measure(options.measure[0], *map(Path, options.measure[1:])))
        return
    print("processor time; median, and from the slowest to the fastest run")
    print(f"{'':16}{'MiB':>6}{'rows':>8}{'MB/s':>7}{'spread':>10}{'ratio':>7}{'peak MiB':>10}")
    for name in options.formats:
        _table_row(name, options.mib, options.repeat)
        if options.large_mib and name in ("nemo-gym", "vllm"):
            _table_row(name, options.large_mib, 1)


def _table_row(name: str, mib: int, repeat: int) -> None:
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder), name, mib * 2**20)
        size = source.stat().st_size
        for number in range(repeat):
            out = Path(folder, str(number))
            out.mkdir()
            arguments = [sys.executable, __file__, "--measure", name, str(source), str(out)]
            told = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.split()
            runs.append([float(word) for word in told])
            shutil.rmtree(out)
    rates = [size / 1e6 / run[0] for run in runs]
    ratio = statistics.median(run[0] / run[1] for run in runs)
    spread = f"{min(rates):.0f}-{max(rates):.0f}"
    print(
        f"{name:16}{size / 2**20:>6.0f}{runs[0][3]:>8.0f}{statistics.median(rates):>7.0f}{spread:>10}{ratio:>7.1f}"
        f"{max(run[2] for run in runs):>10.0f}"
    )


if __name__ == "__main__":
    main()
