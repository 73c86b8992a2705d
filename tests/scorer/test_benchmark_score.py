"""The benchmarks measure what they say: workloads share what they claim, contenders agree, both scripts run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_models import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.parts.contenders import CONTENDERS, Bench, absent, oracle
from benchmarks.parts.tables import as_markdown, write_between_markers
from benchmarks.parts.vllm_server import FOLDER, VllmServer
from benchmarks.parts.workloads import MAX_TOKENS, Workload, random_pieces, rollouts, synthetic, text_pieces
from memopd_scorer.plan import plan_states
from memopd_scorer.teacher import load
from memopd_trace.validate import require_valid

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOLERANCE = 1e-5  # the contract for toy models in float32


def works(vocabulary: int = 300, scale: float = 0.2) -> dict[str, Workload]:
    return {work.name: work for work in synthetic(random_pieces(vocabulary), scale)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer that reads text."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_same_work_is_made_each_time() -> None:
    for once, again in zip(works().values(), works().values(), strict=True):
        assert once.plan().digest == again.plan().digest
    assert works()["memory"].plan().digest != works(scale=0.3)["memory"].plan().digest


def test_memory_moves_and_is_run_again_behind_a_fork_inside_the_prompt() -> None:
    work = works()["memory"]
    (pack,) = plan_states(work.groups, max_tokens=MAX_TOKENS)
    (episode,) = work.episodes
    task = len(pack.states[0]) - len(episode.invocations[0].output_ids) - 40  # memory 14 and part 26 follow the task
    assert task == 50
    assert sorted(pack.shared_S.tolist())[1:] == [task] * 5  # one fork with six branches, inside every prompt
    assert len(pack) == task + 6 * (40 + 14)
    for before, after in zip(episode.invocations[:-1], episode.invocations[1:], strict=True):
        at = len(before.prompt_ids)
        assert np.array_equal(after.prompt_ids[task : task + 14], before.output_ids)
        assert task < at  # it was sampled elsewhere


def test_a_history_runs_every_token_once() -> None:
    work = works()["history"]
    assert work.plan().executed_tokens == max(map(len, work.states))
    assert work.plan().logical_tokens == sum(map(len, work.states)) > 3 * work.plan().executed_tokens


def test_samples_of_a_group_share_their_prompt_and_its_last_row() -> None:
    plan = works()["group"].plan()
    assert (plan.executed_tokens, plan.logical_tokens) == (60 + 8 * 16, 8 * 76)
    assert plan.targets == plan.prediction_rows + 7


def test_unrelated_work_shares_and_pads_nothing() -> None:
    work = works()["unrelated"]
    assert work.plan().sharing == 1
    assert len({len(s) for s in work.states}) == 1


def test_all_contenders_find_what_each_invocation_alone_finds(tiny: Path, tmp_path: Path) -> None:
    teacher = load(tiny)
    bench = Bench(teacher, tiny, max_tokens=400)  # several packs and batches
    ran = set()
    for work in works(vocabulary=teacher.tokenizer.size, scale=0.2).values():
        bench.traces[work.name] = work.write(tmp_path / f"{work.name}.parquet", teacher.tokenizer)
        require_valid(bench.traces[work.name])
        truth = oracle(bench, work)
        spread = np.concatenate(truth).std()
        for name, contender in CONTENDERS.items():
            if absent(name, bench) is None:
                found = contender(bench, work)
                assert [f.shape for f in found.logprobs] == [t.shape for t in truth], name
                error = max(float(np.abs(f - t).max()) for f, t in zip(found.logprobs, truth, strict=True))
                assert error <= TOLERANCE < spread, (name, work.name)
                assert found.tokens >= work.plan().executed_tokens
                ran.add(name)
    assert ran == set(CONTENDERS) - {"vllm"}


def test_rollouts_are_recorded_by_the_model_itself(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    teacher, tokenizer = load(tiny), AutoTokenizer.from_pretrained(tiny)
    work = rollouts(teacher.model, tokenizer, tmp_path / "r.parquet", scale=0.1)
    require_valid(tmp_path / "r.parquet")
    recorded = [row.output_logprobs for episode in work.episodes for row in episode]
    error = max(float(np.abs(r - t).max()) for r, t in zip(recorded, oracle(Bench(teacher), work), strict=True))
    assert error <= 1e-4
    assert work.plan().sharing > 1  # two rollouts read the same document


def test_text_pieces_are_text(tiny: Path) -> None:
    tokenizer = tiny_tokenizer()
    assert " the " in tokenizer.decode(text_pieces(tokenizer)(600).tolist())


def run_script(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / name, *arguments]
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300, check=False)


def test_the_script_of_all_contenders_prints_and_keeps_its_table(tiny: Path, tmp_path: Path) -> None:
    kept = tmp_path / "score.json"
    options = ("--only", "group", "--contenders", "packed", "tree", "--repeats", "2", "--scale", "0.2")
    done = run_script("score.py", "--model", tiny, *options, "--json", kept)
    assert done.returncode == 0, done.stderr
    for number in (1, 2):
        assert f"group: round {number} of 2, packed\ngroup: round {number} of 2, tree\n" in done.stderr, "progress"
    result = json.loads(kept.read_text())
    rows = result["workloads"]["group"]["contenders"]
    assert list(rows) == ["packed", "tree"]
    executed = result["workloads"]["group"]["executed"]
    assert rows["tree"]["executed"] == executed <= 60 + 8 * 16 < rows["packed"]["executed"] == 8 * 76
    assert all(row["max_error"] <= TOLERANCE and row["seconds"]["median"] > 0 for row in rows.values())
    assert rows["tree"]["times_tree"] == {"median": 1.0, "least": 1.0, "largest": 1.0}
    assert [g["wanted"] for g in result["goals"]] == [0.9, 0.7, 1.63]
    assert 0 < result["goals"][0]["bound"] < 1  # rows of the head are not shared as tokens are
    assert f"group: 8 invocations, 608 logical tokens, {executed} in the tree" in done.stdout
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- score -->\nold\n<!-- /score -->\nafter\n")
    write_between_markers(page, "score", as_markdown(result))
    assert "old" not in page.read_text()
    assert f"| tree | {executed} |" in page.read_text()
    assert page.read_text().startswith("before") and page.read_text().endswith("after\n")


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    kept = tmp_path / "gpu.json"
    done = run_script("gpu.py", "--device", "cpu", "--tiny", "--only", "group", "--repeats", "1", "--json", kept)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(kept.read_text())
    said = {(c["dtype"], c["backend"], c["work"]): c["exact"] for c in result["checks"]}
    assert {key for key, exact in said.items() if exact is None} == {key for key in said if key[1] == "flash"}
    assert sum(exact is True for exact in said.values()) == 2 * 3 * 2
    assert {"tree", "tree, sdpa", "tree, flex", "tree, eager"} <= set(result["workloads"]["group"]["contenders"])


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_agrees_with_each_invocation_alone(smollm2: Path, tmp_path: Path) -> None:
    if not FOLDER.exists():
        pytest.skip("no environment of vLLM: sh benchmarks/setup_vllm.sh")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    work = next(w for w in synthetic(text_pieces(tokenizer), 0.2) if w.name == "group")
    with VllmServer(smollm2, tmp_path / "log") as server:
        bench = Bench(load(smollm2), smollm2, server)
        found, truth = CONTENDERS["vllm"](bench, work), oracle(bench, work)
    assert max(float(np.abs(f - t).max()) for f, t in zip(found.logprobs, truth, strict=True)) <= 1e-4
