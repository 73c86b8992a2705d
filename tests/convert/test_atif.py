"""ATIF: trajectories with ids and as text, with continuations and sub-agents, and Harbor's trial results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_convert import converted

from memopd_trace import Invocation, read
from memopd_trace.convert import Conversion, convert
from memopd_trace.convert.chat import Renderer

TASK = list(range(100, 140))


def step(
    source: str, message: str, prompt: list[int] | None = None, output: list[int] | None = None, **more: Any
) -> Any:
    found = {"source": source, "message": message, **more}
    if prompt is not None and output is not None:
        ids = {"prompt_token_ids": prompt, "completion_token_ids": output, "logprobs": [-0.5] * len(output)}
        found["metrics"] = {**ids, "prompt_tokens": len(prompt), "completion_tokens": len(output)}
    return found


def trajectory(*steps: Any, version: str = "ATIF-v1.7", **fields: Any) -> dict[str, Any]:
    numbered = [{"step_id": i, **s} for i, s in enumerate(steps, 1)]
    agent = {"name": "t", "version": "1", "model_name": "m"}
    return {"schema_version": version, "session_id": "s", "agent": agent, "steps": numbered, **fields}


def folder_of(folder: Path, **files: Any) -> tuple[Conversion, list[Invocation]]:
    """Files by name through the converter."""
    (folder / "in").mkdir()
    for name, value in files.items():
        (folder / "in" / f"{name}.json").write_text(json.dumps(value))
    result = convert("atif", folder / "in", folder / "t.parquet")
    assert result.losses.balanced() and result.exit_code() == 0, result.to_text()
    return result, list(read(folder / "t.parquet").iter_invocations())


def test_steps_of_an_agent_are_calls_and_keep_their_ids(tmp_path: Path) -> None:
    second = [*TASK, 7, 2, 50]
    value = trajectory(
        step("system", "be brief"), step("user", "go"), step("agent", "a", TASK, [7, 2]),
        step("agent", "b", second, [8, 2]), notes="n",
    )  # fmt: skip
    result, rows = converted(tmp_path, "atif", [value])
    assert [(r.prompt_ids.tolist(), r.output_ids.tolist()) for r in rows] == [(TASK, [7, 2]), (second, [8, 2])]
    assert [r.relation for r in rows] == ["root", "extend"] and (rows[0].extra or {})["notes"] == "n"
    assert rows[0].output_logprobs is not None and rows[0].logprob_kind == "unknown" and rows[0].reward is None
    source = read(result.trace or "").metadata.source
    assert source is not None and source.version == "ATIF-v1.7" and "no_parent" not in result.losses.gaps


def test_a_summary_in_the_same_file_is_an_explicit_rewrite_and_its_calls_are_spawned(tmp_path: Path) -> None:
    helper = trajectory(step("user", "sum up"), step("agent", "it did x", [5, 6, 7], [8, 2]), session_id="s-summary")
    refs = [{"subagent_trajectory_ref": [{"session_id": "s-summary", "trajectory_path": "sub.json"}]}]
    main = trajectory(
        step("user", "go"), step("agent", "a", TASK, [7, 2]),
        step("system", "Performed context summarization", observation={"results": refs}),
        step("user", "Here is what was done"), step("agent", "b", [*TASK[:20], 60, 61], [8, 2]),
    )  # fmt: skip
    _, rows = folder_of(tmp_path, main=main, sub=helper)
    assert [(r.relation, r.parent_index, r.rewrite_kind, r.rewrite_evidence, r.agent_id) for r in rows] == [
        ("root", None, None, None, None),
        ("spawn", 0, None, None, "s-summary"),
        ("rewrite", 0, "summary", "explicit", None),
    ]


def test_a_continuation_goes_on_and_its_copied_steps_are_no_calls(tmp_path: Path) -> None:
    first = trajectory(step("user", "go"), step("agent", "a", TASK, [7, 2]), continued_trajectory_ref="cont.json")
    more = trajectory(
        step("user", "go", is_copied_context=True), step("agent", "sum", is_copied_context=True),
        step("agent", "b", [*TASK[:20], 60], [8, 2]), step("agent", "c", [*TASK[:20], 60, 8, 2, 61], [9, 2]),
    )  # fmt: skip
    result, rows = folder_of(tmp_path, a=first, cont=more)
    assert [(r.relation, r.parent_index, r.rewrite_kind) for r in rows] == [
        ("root", None, None), ("rewrite", 0, "summary"), ("extend", 1, None),
    ]  # fmt: skip
    assert result.losses.records == result.losses.converted == 2 and {r.episode_id for r in rows} == {"s"}


def test_a_file_that_is_not_there_is_a_gap(tmp_path: Path) -> None:
    value = trajectory(
        step("user", "go"), step("agent", "a", TASK, [7, 2]), continued_trajectory_ref="../../secret.json"
    )
    result, rows = converted(tmp_path, "atif", [value])
    assert len(rows) == 1 and "not among the inputs" in result.losses.gaps["lost_calls"].example


def test_embedded_sub_agents_are_spawned_from_the_step_that_names_them(tmp_path: Path) -> None:
    inner = trajectory(step("user", "x"), step("agent", "y", [3, 4], [5, 2]), session_id=None, trajectory_id="sub-1")
    call = {"tool_call_id": "c", "function_name": "ask", "arguments": {}}
    ref = {"source_call_id": "c", "subagent_trajectory_ref": [{"trajectory_id": "sub-1"}]}
    asks = {"tool_calls": [call], "observation": {"results": [ref]}}
    value = trajectory(
        step("user", "go"), step("agent", "", TASK, [7, 2], **asks), step("agent", "b", [*TASK, 7, 2, 9], [8, 2]),
        subagent_trajectories=[inner],
    )  # fmt: skip
    _, rows = converted(tmp_path, "atif", [value])
    assert [(r.relation, r.parent_index, r.agent_id) for r in rows] == [
        ("root", None, None), ("spawn", 0, "sub-1"), ("extend", 0, None),
    ]  # fmt: skip


def test_steps_that_are_no_call_or_several(tmp_path: Path) -> None:
    value = trajectory(
        step("user", "go"), step("agent", "scripted", llm_call_count=0), step("agent", "many", llm_call_count=3),
        step("agent", "a", TASK, [7, 2], llm_call_count=1),
    )  # fmt: skip
    result, rows = converted(tmp_path, "atif", [value])
    assert len(rows) == 1 and result.losses.calls == 4
    assert result.losses.dropped_calls["several calls are one step"].number == 3


def test_text_is_rendered_up_to_a_summary_that_no_file_shows(tmp_path: Path, tokenizer: Path) -> None:
    call = {"tool_call_id": "c", "function_name": "ls", "arguments": {"at": "."}}
    result_of = {"results": [{"source_call_id": "c", "content": "a.txt"}]}
    ref = {"results": [{"subagent_trajectory_ref": [{"trajectory_path": "lost.json"}]}]}
    value = trajectory(
        step("system", "be brief"), step("user", "go"),
        step("agent", "look", tool_calls=[call], observation=result_of, metrics={"prompt_token_ids": []}),
        step("agent", "done"), step("system", "summarised", observation=ref), step("agent", "more"),
    )  # fmt: skip
    result, rows = converted(tmp_path, "atif", [value], tokenizer=tokenizer)
    text = Renderer(tokenizer).tokenizer.decode
    assert len(rows) == 2 and rows[1].relation == "extend"
    assert text(rows[1].prompt_ids).count("a.txt") == 1 and '<call>ls {"at": "."}</call>' in text(rows[1].prompt_ids)
    assert result.losses.dropped_calls["no prompt: neither ids nor text"].number == 1


def test_counts_that_disagree_with_the_ids_are_reported(tmp_path: Path) -> None:
    bad = step("agent", "a", TASK, [7, 2])
    bad["metrics"]["prompt_tokens"] = 41
    result, _ = converted(tmp_path, "atif", [trajectory(step("user", "go"), bad)])
    (count,) = result.losses.degraded.values()
    assert "40 ids, the log counted 41" in count.example


def test_a_trials_result_has_the_ids_of_each_turn_and_the_rewards(tmp_path: Path) -> None:
    details = [
        {
            "prompt_token_ids": [TASK, [*TASK, 7, 2, 9]],
            "completion_token_ids": [[7, 2], [8, 2]],
            "logprobs": [[-1, -2], []],
        },
        {"prompt_token_ids": [[3, 4]], "completion_token_ids": [[5, 2]]},
    ]
    value = {"trial_name": "t1", "task_name": "hello", "agent_result": {"rollout_details": details},
             "verifier_result": {"rewards": {"reward": 1.0, "style": 0.5}}}  # fmt: skip
    _, rows = converted(tmp_path, "atif", [value])
    assert [(r.relation, r.agent_id, r.reward) for r in rows] == [
        ("root", "main", None), ("extend", "main", None), ("root", "helper-1", 1.0),
    ]  # fmt: skip
    assert rows[2].rewards == {"reward": 1.0, "style": 0.5} and rows[0].task_id == "hello"
    assert rows[0].output_logprobs is not None and rows[1].output_logprobs is None


@pytest.mark.parametrize("version", [None, "ATIF-v2.0", "1.5", 7])
def test_what_is_no_trajectory_is_reported(version: Any, tmp_path: Path) -> None:
    value = {**trajectory(step("user", "x")), "schema_version": version}
    result, rows = converted(tmp_path, "atif", [value])
    assert rows == [] and result.losses.broken == 1


def test_a_newer_version_is_read_and_said(tmp_path: Path) -> None:
    value = trajectory(step("user", "go"), step("agent", "a", TASK, [7, 2]), version="ATIF-v1.99")
    result, rows = converted(tmp_path, "atif", [value])
    assert len(rows) == 1 and "of a newer version than is known" in result.losses.degraded


def test_files_that_name_each_other_end(tmp_path: Path) -> None:
    a = trajectory(step("user", "go"), step("agent", "a", TASK, [7, 2]), continued_trajectory_ref="b.json")
    b = trajectory(step("agent", "b", [*TASK, 7, 2, 9], [8, 2]), continued_trajectory_ref="a.json")
    _, rows = folder_of(tmp_path, a=a, b=b)
    assert rows
