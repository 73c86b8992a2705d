"""The proxy in front of a real vLLM server on the CPU, with a real model: `sh benchmarks/setup_vllm.sh` makes its
environment, `pytest -m vllm tests/record` runs this."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers_proxy
import httpx2
import numpy as np
import pytest
from helpers_proxy import rows

from benchmarks.parts.vllm_server import FOLDER, VllmServer
from memopd_trace import Invocation, validate
from memopd_trace.pieces import load_pieces

pytestmark = pytest.mark.vllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VARYING = re.compile(rb'("(?:id|created)":)("[^"]*"|[0-9]+)')  # of each answer, with and without a proxy
LABELS = {"X-Memopd-Episode": "e", "X-Memopd-Group": "g"}


@pytest.fixture(scope="module")
def vllm(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server for SmolLM2."""
    if not FOLDER.exists():
        pytest.skip("no environment of vLLM: sh benchmarks/setup_vllm.sh")
    with VllmServer(smollm2, tmp_path_factory.mktemp("vllm") / "log") as server:
        yield server.address


@pytest.fixture
def inside(vllm: str, tmp_path: Path, smollm2: Path) -> Iterator[helpers_proxy.Proxy]:
    more = ["--tokenizer", str(smollm2), "--logprob-kind", "raw", "--policy-version", "0"]
    with helpers_proxy.proxy(tmp_path / "trace", vllm, *more) as found:
        yield found


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"model": "m", "messages": messages, "max_tokens": 24, **more}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, chat("Say hi.", temperature=0)),
        (CHAT, chat("Say hi.", temperature=0, logprobs=True, top_logprobs=1)),
        (CHAT, chat("Say hi.", temperature=0, return_token_ids=True)),
        (COMPLETIONS, {"model": "m", "prompt": ["Once", "Twice"], "max_tokens": 5, "temperature": 0}),
        (COMPLETIONS, {"model": "m", "prompt": [[5, 6]], "max_tokens": 5, "temperature": 0, "logprobs": 1}),
        (CHAT, chat("Say hi.", temperature=-1)),
        (CHAT, chat("Say hi.", top_logprobs=2)),
        (CHAT, {"model": "nobody", "messages": []}),
    ],
)
def test_a_client_sees_what_vllm_gives_it(
    vllm: str, inside: helpers_proxy.Proxy, path: str, asked: dict[str, Any], stream: bool
) -> None:
    more = {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    with httpx2.Client(trust_env=False, timeout=120) as client:
        direct = client.post(vllm + path, json=asked | more)
        through = client.post(inside.url + path, json=asked | more, headers=LABELS)
    assert direct.status_code == through.status_code
    plain, shown = (VARYING.sub(rb"\1", a.content) for a in (direct, through))
    if path == COMPLETIONS and stream and len(asked["prompt"]) > 1:  # vLLM mixes the prompts' events as they come
        assert sorted(plain.split(b"\n\n")) == sorted(shown.split(b"\n\n"))
    else:
        assert plain == shown
    summary = inside.stop()
    assert summary["rows"] == (len(asked.get("prompt", "x")) if direct.status_code == 200 else 0)


def test_an_agents_run_is_a_trace_that_the_model_agrees_with(
    inside: helpers_proxy.Proxy, smollm2: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"temperature": 0.7, "seed": 5, "stream": True}
    words = ["Name a fruit."]
    with httpx2.Client(trust_env=False, timeout=120) as client:
        for turn in ("And one more?", "Why that one?", ""):
            text = client.post(inside.url + CHAT, json=chat(*words, **asked), headers=LABELS).text
            events = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]
            words += ["".join(e["choices"][0]["delta"].get("content") or "" for e in events), turn]
        left = chat("Count to a thousand.", **asked | {"max_tokens": 900})
        with client.stream(
            "POST", inside.url + CHAT, json=left, headers=LABELS | {"X-Memopd-Episode": "left"}
        ) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number > 12:
                    break
        until = time.monotonic() + 60
        while client.get(f"{inside.url}/memopd/status").json()["rows"] < 4 and time.monotonic() < until:
            time.sleep(0.1)
        ended = client.post(f"{inside.url}/memopd/end", json={"episode": "e", "reward": 1.0})
        assert ended.status_code == 200
    summary = inside.stop()
    assert summary["rows"] == 4 and not summary["not_recorded"] and not summary["left_out_of_rows"]
    recorded = rows(tmp_path / "trace")
    run = [i for i in recorded if i.episode_id == "e"]
    assert [i.relation for i in run[:1]] == ["root"] and all(i.parent_index is not None for i in run[1:])
    attempt = next(i for i in recorded if i.episode_id == "left")
    assert attempt.accepted is False and attempt.finish_reason == "abort" and 2 <= len(attempt.output_ids) < 900
    pieces = load_pieces(smollm2)
    for row, said in zip(run, words[1::2], strict=True):
        assert pieces.text(row.output_ids, controls=False) == said, "the ids are those of the text that the client saw"
    for row in recorded:
        assert (row.sampling is not None and row.sampling.temperature == 0.7) and row.logprob_kind == "raw"
        _agree(row, smollm2)
    report = validate(tmp_path / "trace", "policy", tokenizer=smollm2)
    assert report.exit_code() == 0, report.to_text()


def _agree(row: Invocation, folder: Path) -> None:
    """The recorded log-probabilities are those of the model in float32, after exactly the recorded prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(row.sequence_ids.astype(np.int64))[None]
    with torch.no_grad():
        logprobs_TV = model(ids).logits[0].log_softmax(-1)
    start = len(row.prompt_ids)
    expected = logprobs_TV[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy()
    assert row.output_logprobs is not None
    assert np.abs(np.ma.getdata(row.output_logprobs) - expected).max() < 1e-3


def test_the_stop_id_is_recorded_and_so_is_a_stop_string(
    inside: helpers_proxy.Proxy, smollm2: Path, tmp_path: Path
) -> None:
    with httpx2.Client(trust_env=False, timeout=240) as client:
        for number, more in enumerate(({"max_tokens": 300}, {"stop": ["!"]}, {"max_tokens": 300, "stream": True})):
            asked = chat("Say hi.", temperature=0, **more)
            answer = client.post(inside.url + CHAT, json=asked, headers=LABELS | {"X-Memopd-Episode": f"e{number}"})
            assert answer.status_code == 200
    inside.stop()
    whole, cut, streamed = rows(tmp_path / "trace")
    pieces = load_pieces(smollm2)
    assert (whole.finish_reason, whole.output_ids[-1]) == ("stop", 2), "the end-of-turn id, which no text shows"
    assert streamed.output_ids.tolist() == whole.output_ids.tolist()
    assert cut.finish_reason == "stop" and (cut.extra or {})["stop_reason"] == "!"
    assert pieces.text(cut.output_ids).endswith("!"), "what was sampled, though the client's text ends in front of it"
