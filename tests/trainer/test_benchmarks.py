"""The trainer's benchmarks measure what they say: layouts have one gradient, policies keep what their names say."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers_models import tiny_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.parts.policies import POLICIES, WINDOW, environment
from memopd_scorer.teacher import load
from memopd_trace import read
from memopd_trace.invocation import Sampling
from memopd_trace.validate import validate
from memopd_trainer.environments.reading import reading_tasks
from memopd_trainer.rollout import collect

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer that reads text."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    shape: dict[str, int] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=8192,
        initializer_range=0.2,  # so that what is read matters
        eos_token_id=tokenizer.eos_token_id,
        **shape,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run_script(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / name, *arguments]
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_keeps_what_it_is_named_after(policy: str, tiny: Path, tmp_path: Path) -> None:
    model, tokenizer = load(tiny), AutoTokenizer.from_pretrained(tiny)
    collect(
        model.model,
        tokenizer,
        environment(policy, tokenizer),
        reading_tasks("train")[:1],
        out_path=tmp_path / "t.parquet",
        rollouts_per_task=1,
        sampling=Sampling(temperature=1.0),
        max_new_tokens=8,
    )
    assert validate(tmp_path / "t.parquet", "train").clean
    rows = list(read(tmp_path / "t.parquet").iter_invocations())
    assert len(rows) >= 3
    kinds = {
        "append": ("extend", None),
        "memory": ("rewrite", "memory"),
        "truncate": ("rewrite", "truncate_left"),
        "strip": ("rewrite", "strip_thinking"),
    }
    for before, row in itertools.pairwise(rows):
        assert (row.relation, row.rewrite_kind) == kinds[policy]
        whole, prompt = before.sequence_ids.tolist(), row.prompt_ids.tolist()
        assert (prompt[: len(whole)] == whole) == (policy == "append")
        if policy == "strip":
            kept = (len(before.prompt_ids) + len(before)) // 2
            assert prompt[: len(before.prompt_ids)] == before.prompt_ids.tolist()
            assert prompt[len(before.prompt_ids) :][: len(before) - kept] == whole[kept:]
        if policy == "truncate":
            assert row.segments is not None
            assert [s.stop - s.start for s in row.segments][1] == min(WINDOW, len(whole) - row.segments[0].stop)
    assert policy != "truncate" or any(len(row) > 2 * WINDOW for row in rows), "something was cut"


@pytest.mark.slow
def test_the_layouts_of_the_actor_have_one_gradient(tiny: Path, tmp_path: Path) -> None:
    kept = tmp_path / "actor.json"
    done = run_script("actor_speed.py", "--model", tiny, "--only", "memory", "--repeats", "1", "--json", kept)
    assert done.returncode == 0, done.stderr
    work = json.loads(kept.read_text())["workloads"]["memory"]
    rows = work["layouts"]
    assert list(rows) == ["tree", "packed", "padded"]
    assert rows["tree"]["executed"] * work["sharing"] == pytest.approx(work["logical"])
    assert rows["packed"]["executed"] == work["logical"] <= rows["padded"]["executed"]
    assert rows["tree"]["gradient_error"] == 0 and all(0 <= row["gradient_error"] <= 1e-3 for row in rows.values())
    assert rows["padded"]["gradient_error"] > 0, "it was computed in another way"


@pytest.mark.slow
def test_the_mismatch_is_nothing_where_nothing_is_rewritten(tiny: Path, tmp_path: Path) -> None:
    kept = tmp_path / "mismatch.json"
    options = ("--policies", "append", "strip", "--tasks", "1", "--tokens", "6")
    done = run_script("mismatch.py", "--model", tiny, *options, "--json", kept)
    assert done.returncode == 0, done.stderr
    found = SimpleNamespace(**json.loads(kept.read_text())["policies"])
    assert found.append["difference"]["max_abs"] <= 1e-4 and found.append["top1_flips"] == 0
    assert found.strip["difference"]["max_abs"] > 1e-3
    assert all(policy["recorded"]["max_abs"] <= 1e-4 for policy in (found.append, found.strip))
    assert np.isfinite(found.strip["difference"]["p99_abs"])
