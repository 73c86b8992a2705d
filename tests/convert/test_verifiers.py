"""verifiers: a graph of messages becomes calls with their exact prompts, and older results keep what they have."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers_convert import FIXTURES, converted, write_lines
from helpers_trainers import PROMPT, changed, verifiers_episode, verifiers_result

from memopd_trace import read
from memopd_trace.convert import convert

WRITTEN = json.loads((FIXTURES / "verifiers_episode.jsonl").read_text())  # by its own serializer


def test_paths_through_the_graph_are_what_the_calls_read(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "verifiers", [WRITTEN])
    asked, said = list(range(100, 120)), [30, 31, 32, 2]
    assert [r.prompt_ids.tolist() for r in rows] == [
        [*asked, 50],
        [*asked, 50, *said, 60, 61, 50],
        [*asked, 50, 32, 2, 60, 61, 50, 33, 2, 62, 50],
    ]
    assert [r.output_ids.tolist() for r in rows] == [said, [33, 2], [34, 2]]
    assert [r.relation for r in rows] == ["root", "extend", "rewrite"] and rows[2].rewrite_evidence == "inferred"
    np.testing.assert_allclose(rows[0].output_logprobs, np.float32([-0.1235] * 4))
    assert result.exit_code() == 0 and rows[0].token_source == "engine"


def test_rewards_keep_names_and_the_last_call_has_the_weighted_sum(tmp_path: Path) -> None:
    _, rows = converted(tmp_path, "verifiers", [WRITTEN])
    assert [r.reward for r in rows] == [None, None, 0.5] and rows[2].rewards == {"right": 1.0}
    assert (rows[0].group_id, rows[0].task_id, rows[2].terminated) == ("group-0", "adder-0", True)
    assert rows[0].extra is not None and json.loads(rows[0].extra["reward_weights"]) == {"right": 0.5}


def test_a_declared_compaction_is_an_explicit_rewrite_of_its_call(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "verifiers", [verifiers_episode()])
    last = rows[2]
    assert (last.relation, last.parent_index, last.rewrite_kind, last.rewrite_evidence) == (
        "rewrite", 1, "summary", "explicit",
    )  # fmt: skip
    assert "vendor:x" in (last.extra or {})["semantic_parents"]  # a link of another kind is kept
    assert result.losses.degraded["a reward that was not scored"].number == 1
    assert result.losses.dropped_calls["a call without an answer"].number == 1
    assert "counted" not in "".join(result.losses.degraded)  # prompt tokens are told without the cached ones
    assert {r.policy_version for r in rows} == {3} and rows[0].agent_id == "solver"


def test_traces_of_one_episode_are_episodes_and_the_frozen_ones_are_not_trained(tmp_path: Path) -> None:
    episode = verifiers_episode()
    judge = changed(episode["traces"][0], id="j")
    judge["agent"] |= {"name": "judge", "trainable": False}
    episode["traces"].append(judge)
    _, rows = converted(tmp_path, "verifiers", [episode])
    assert [r.episode_id for r in rows] == ["e/t"] * 3 + ["e/j"] * 3
    assert all(r.output_loss_mask is None for r in rows[:3])
    assert all(r.output_loss_mask is not None and not r.output_loss_mask.any() for r in rows[3:])
    assert [r.policy_version for r in rows[3:]] == [None] * 3 and rows[3].relation == "root"


def test_an_episode_written_twice_is_told_once(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "verifiers", [verifiers_episode(), verifiers_result()] * 2)
    assert len(rows) == 4 and result.losses.dropped_calls["told again"].number == 4


def test_nodes_without_ids_become_text_and_a_half_known_path_is_not_taken_for_exact(
    tmp_path: Path, tokenizer: Path
) -> None:
    episode = verifiers_episode()
    episode["traces"][0]["nodes"][1] |= {"token_ids": [], "mask": [], "logprobs": []}
    result, rows = converted(tmp_path, "verifiers", [episode], tokenizer=tokenizer)
    assert [r.token_source for r in rows] == ["retokenized", "retokenized", "engine"]
    assert result.losses.degraded["ids left out: an earlier answer on the path has none"].number == 1
    assert json.loads(rows[0].messages or "")[-1]["tool_calls"][0]["function"]["name"] == "add"


def test_a_parent_that_is_no_earlier_node_is_reported(tmp_path: Path) -> None:
    episode = verifiers_episode()
    episode["traces"][0]["nodes"][1]["parent"] = 3
    result, _ = converted(tmp_path, "verifiers", [verifiers_result(), episode])
    assert result.exit_code() == 1 and "earlier node" in result.losses.issues[0].reason


def test_steps_of_an_older_result_are_exact(tmp_path: Path) -> None:
    _, (row,) = converted(tmp_path, "verifiers", [verifiers_result()])
    assert row.prompt_ids.tolist() == PROMPT and row.output_ids.tolist() == [7, 2]
    assert (row.reward, row.terminated, row.task_id, row.model_id) == (0.5, True, "3", "m")


def test_the_files_beside_a_stream_of_episodes_are_counted_and_no_fault(tmp_path: Path) -> None:
    beside = [{"id": "e", "chunk": 0, "offset": 0, "kind": "train"}, {"trace_id": "t", "info": {"effective": True}}]
    result, rows = converted(tmp_path, "verifiers", [verifiers_episode(), *beside])
    assert len(rows) == 3 and result.exit_code() == 0 and result.losses.dropped_records.total == 2


def test_a_run_s_description_names_the_model_of_its_results(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "eval"
    folder.mkdir()
    (folder / "metadata.json").write_text('{"env_id": "e", "model": "m", "sampling_args": {"temperature": 0.5}}')
    messages = [{"role": "user", "content": "hi"}]
    said = [
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "!"},
    ]
    write_lines(folder / "results.jsonl", [{"example_id": 0, "prompt": messages, "completion": said, "reward": 1.0}])
    result = convert("verifiers", folder, tmp_path / "t.parquet", tokenizer=tokenizer)
    rows = list(read(tmp_path / "t.parquet").iter_invocations())
    assert len(rows) == 2 and {r.model_id for r in rows} == {"m"} and rows[0].sampling.temperature == 0.5  # type: ignore[union-attr]
    assert "lossy_text" in result.losses.gaps and result.losses.dropped_records.total == 1


SAMPLES = os.environ.get("MEMOPD_TRACE_SAMPLES")


@pytest.mark.skipif(SAMPLES is None, reason="MEMOPD_TRACE_SAMPLES names no folder of sample logs")
def test_the_samples_convert_as_text(tmp_path: Path, tokenizer: Path) -> None:
    result = convert(
        "verifiers", Path(SAMPLES or "") / "verifiers_prime_rl", tmp_path / "t.parquet", tokenizer=tokenizer
    )
    assert (result.losses.rows, result.losses.broken, result.exit_code()) == (10, 0, 0)
