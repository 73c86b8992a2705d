"""The examples of docs/record.md about hooks run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import helpers_proxy
import pytest
from helpers_hooks import rows

from benchmarks.parts.vllm_server import FOLDER, SETTINGS
from memopd_trace import validate

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "record.md"


def example(word: str) -> str:
    """The example that writes `WORD.parquet`."""
    (found,) = (e for e in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if f'"{word}.parquet"' in e)
    return str(found)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_of_the_client_of_openai(here: Path, smollm2: Path) -> None:
    with helpers_proxy.upstream(here) as upstream:
        code = example("openai").replace("http://127.0.0.1:8000", upstream.url).replace('"student"', '"toy"')
        exec(code, {"folder": smollm2})
        produced = upstream.produced()
    found = rows(here / "openai.parquet")
    assert [i.output_ids.tolist() for i in found] == [p["output"] for p in produced]
    assert [(i.relation, i.rewrite_evidence) for i in found] == [("root", None), ("rewrite", "explicit")]


def test_the_example_of_the_transformers_model(here: Path, smollm2: Path) -> None:
    exec(example("transformers"), {"folder": smollm2})
    found = rows(here / "transformers.parquet")
    assert [i.episode_id for i in found] == ["q0/0", "q1/0"] and all(len(i.output_ids) for i in found)
    assert all(i.output_kept_logmass is not None for i in found)
    assert validate(here / "transformers.parquet", "train").exit_code() == 0


@pytest.mark.vllm
def test_the_example_of_vllm_is_what_the_model_says(here: Path, smollm2: Path) -> None:
    from test_proxy_vllm import _agree

    if not FOLDER.exists():
        pytest.skip("no environment of vLLM: sh benchmarks/setup_vllm.sh")
    code = example("vllm").replace("\n", "\n    ")
    more = """
    assert answers[0].outputs[0].logprobs is None and answers[0].outputs[0].cumulative_logprob is None
    with TraceRecorder("more.parquet", metadata, profile="policy") as recorder:
        hook, said = VllmHook(llm, recorder), []
        hook._notice = said.append
        episode = recorder.episode("e", group_id="e", policy_version=0)
        asked = SamplingParams(temperature=0, max_tokens=60, logprobs=1)
        with hook.into(episode):
            shown = hook.chat([{"role": "user", "content": "Say hi."}], asked)
            assert len(shown[0].outputs[0].logprobs) == len(shown[0].outputs[0].token_ids)
            hook.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(top_k=5, temperature=1.0, max_tokens=4))
            stopped = SamplingParams(temperature=0, max_tokens=60, stop=["!"])
            hook.chat([{"role": "user", "content": "Say hi."}], stopped)
        hook.generate("outside", asked)
        episode.finish(reward=1.0)
        assert said == ["a call was not recorded: made outside of into() (told once)"], said
"""
    text = f"import sys\nfolder = sys.argv[1]\nif __name__ == '__main__':\n    {code}\n{more}"
    (here / "example.py").write_text(text)
    env = SETTINGS | {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(here), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [FOLDER / "bin" / "python", "example.py", smollm2],
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = rows(here / "vllm.parquet")
    assert [(i.episode_id, i.relation) for i in found] == [
        (f"q{e}/0", relation) for e in range(2) for relation in ("root", "fork")
    ]
    assert validate(here / "vllm.parquet", "train").exit_code() == 0
    greedy, cut, stopped = rows(here / "more.parquet")
    assert greedy.finish_reason == "stop" and greedy.output_ids[-1] == 2, "the stop id is there"
    assert cut.prompt_ids.tolist() == [5, 6, 7] and cut.sampling is not None and cut.sampling.top_k == 5
    assert (stopped.extra or {})["stop_reason"] == "!" and stopped.relation == "fork"
    for row in (*found, greedy, cut, stopped):
        assert row.logprob_kind == "raw"
        _agree(row, smollm2)


def test_the_recorder_and_what_hooks_share_import_no_framework() -> None:
    code = (
        "import sys, memopd_trace, memopd_trace.record, memopd_trace.record.hook, memopd_trace.record.vllm;"
        "print({'torch', 'transformers', 'vllm', 'openai', 'httpx2', 'uvicorn', 'starlette'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.strip() == "set()"
