"""Small logs of the trainers' formats and of MEM1, for the tests of converters."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

PROMPT = list(range(100, 130))


def verifiers_episode() -> dict[str, Any]:
    """Three calls: a turn, the next one, and one on a branch that the harness says is a compaction of the second."""

    def node(parent: int | None, role: str, text: str, ids: list[int], **fields: Any) -> dict[str, Any]:
        message = {"role": role, "content": text}
        return {"parent": parent, "message": message, "sampled": False, "timestamp": 1756498939.0, "token_ids": ids,
                "mask": [False] * len(ids), "logprobs": [], **fields}  # fmt: skip

    def made(parent: int, ids: list[int], **fields: Any) -> dict[str, Any]:
        own = {"sampled": True, "mask": [False, *[True] * (len(ids) - 1)], "logprobs": [-0.5] * (len(ids) - 1)}
        return node(parent, "assistant", "x", ids, **own, **fields)

    def asked(number: int | None, why: str | None = "stop", **fields: Any) -> dict[str, Any]:
        usage = {"prompt_tokens": 11, "completion_tokens": 2, "cached_input_tokens": 20}
        time = {"start": 1756498939.0, "end": 0.0}
        return {"node": number, "model": "m", "finish_reason": why, "sampling": {"temperature": 1.0},
                "usage": usage if number == 1 else None, "time": time, **fields}  # fmt: skip

    tool = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "name": "add", "arguments": "{}"}]}
    nodes = [
        node(None, "user", "1 + 2?", PROMPT),
        made(0, [50, 7, 2], message=tool),
        node(1, "tool", "3", [60, 61], message={"role": "tool", "tool_call_id": "c", "content": "3"}),
        made(2, [50, 8, 2]),
        node(None, "user", "in short", [*PROMPT[:20], 70]),
        made(4, [50, 9, 2], semantic_parents=[{"node": 3, "type": "compaction"}, {"node": 1, "type": "vendor:x"}]),
    ]
    task = {"type": "T", "data": {"question": "1 + 2?"}, "key": "k", "hash": "h"}
    trace = {"version": 1, "id": "t", "task": task, "agent": {"config": {}, "name": "solver", "trainable": True},
             "tools": [{"name": "add", "description": "", "parameters": {}}], "nodes": nodes,
             "calls": [asked(1, "tool_calls"), asked(None, None, error={"type": "E"}), asked(3), asked(5)],
             "rewards": {"right": {"score": 1.0, "weight": 0.5}, "late": None}, "metrics": {"turns": 3.0},
             "is_completed": True, "ok": True, "stop_condition": None, "errors": []}  # fmt: skip
    run = {"type": "train", "id": "r", "work": {"type": "train", "step": 4, "policy": {"start": 3, "end": 3}}}
    return {"id": "e", "env": {"id": "adder"}, "task": task, "group": {"id": "g"}, "run": run, "ok": True, "errors": [],
            "traces": [trace]}  # fmt: skip


def verifiers_result() -> dict[str, Any]:
    """A result of the older form, with ids."""
    asked = [{"role": "user", "content": "hi"}]
    said = [{"role": "assistant", "content": "yo"}]
    tokens = {"prompt_ids": PROMPT, "prompt_mask": [0] * 30, "completion_ids": [7, 2], "completion_mask": [1, 1],
              "completion_logprobs": [-0.5, -0.25]}  # fmt: skip
    response = {"id": "a", "model": "m"}
    step = {"prompt": asked, "completion": said, "response": response, "tokens": tokens, "reward": None,
            "advantage": None, "is_truncated": False, "trajectory_id": "t1", "extras": {}}  # fmt: skip
    return {"example_id": 3, "prompt": asked, "completion": said, "reward": 0.5, "is_completed": True,
            "is_truncated": False, "metrics": {"right": 1.0}, "error": None, "trajectory": [step]}  # fmt: skip


def rllm_episode() -> dict[str, Any]:
    """A trajectory of two steps, and the judge's of one."""

    def step(prompt: list[int], output: list[int], reward: float = 0.0, **fields: Any) -> dict[str, Any]:
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x", "reasoning": "hm"}]
        engine = {"content": "x", "finish_reason": "stop", "prompt_length": len(prompt)}
        return {"prompt_ids": prompt, "response_ids": output, "logprobs": [-0.5] * len(output), "info": {},
                "chat_completions": chat, "observation": None, "thought": "hm", "action": None, "model_response": "x",
                "model_output": engine, "reward": reward, "done": False, "mc_return": 0.0, "advantage": None,
                "weight_version": 2, **fields}  # fmt: skip

    solver = {"uid": "u1", "name": "solver", "task": {"q": "hi"}, "reward": 1.0, "info": {},
              "steps": [step(PROMPT, [7, 2]), step([*PROMPT, 7, 2, 60], [8, 2])]}  # fmt: skip
    judge = {"uid": "u2", "name": "judge", "task": {"q": "hi"}, "reward": None, "info": {},
             "steps": [step(PROMPT[::-1], [9, 2], 0.25)]}  # fmt: skip
    return {"id": "task7:0", "task": {"q": "hi"}, "termination_reason": "env_done", "is_correct": True,
            "trajectories": [solver, judge], "metrics": {"acc": 1.0}, "info": {}}  # fmt: skip


def rllm_record() -> dict[str, Any]:
    """A call as the gateway has it."""
    return {"trace_id": "c1", "session_id": "s1", "model": "m", "messages": [{"role": "user", "content": "hi"}],
            "prompt_token_ids": PROMPT, "response_message": {"role": "assistant", "content": "x"},
            "completion_token_ids": [7, 2], "logprobs": [-0.5, -0.5], "finish_reason": "stop", "weight_version": 3,
            "latency_ms": 5.0, "token_counts": {"prompt": 30, "completion": 2}, "timestamp": 1756498939.0,
            "metadata": {}, "raw_request": {"temperature": 1.0, "messages": []}}  # fmt: skip


def verl_output(**fields: Any) -> dict[str, Any]:
    """An output of an agent loop: two calls with a tool's answer between them, and one that nobody answered."""
    return {"prompt_ids": PROMPT, "response_ids": [7, 2, 60, 61, 8, 2, 62], "response_mask": [1, 1, 0, 0, 1, 1, 0],
            "response_logprobs": [-0.5, 0.0, 0.0, 0.0, -0.25, -0.125, 0.0], "reward_score": 1.0, "num_turns": 4,
            "metrics": {"generate_sequences": 0.5, "tool_calls": 0.1},
            "extra_fields": {"min_global_steps": 5, "max_global_steps": 5, "turn_scores": []}, **fields}  # fmt: skip


def skyrl_batch() -> dict[str, Any]:
    """Two rollouts, the first of two calls."""
    return {"prompt_token_ids": [PROMPT, PROMPT[::-1]], "response_ids": [[7, 2, 60, 8, 2], [9, 2]],
            "rewards": [1.0, 0.0], "loss_masks": [[1, 1, 0, 1, 1], [1, 1]], "stop_reasons": ["stop", "length"],
            "rollout_logprobs": [[-0.5, -0.5, 0.0, -0.5, -0.5], [-0.25, 0.0]], "rollout_metrics": {"mean": 0.5},
            "trajectory_ids": [{"instance_id": "q1", "repetition_id": i} for i in range(2)]}  # fmt: skip


def skyrl_steps() -> dict[str, Any]:
    """One rollout of two steps with rewards of tokens; the second prompt does not go on from the first."""
    rewards, names = [[0.0, 0.5], [0.0, 1.0]], [{"instance_id": "q2", "repetition_id": 0}] * 2
    return {"prompt_token_ids": [PROMPT, [*PROMPT[:25], 71]], "response_ids": [[7, 2], [8, 2]], "rewards": rewards,
            "loss_masks": [[1, 1], [1, 1]], "stop_reasons": ["stop", "stop"], "rollout_logprobs": None,
            "trajectory_ids": names, "is_last_step": [False, True]}  # fmt: skip


def slime_sample(**fields: Any) -> dict[str, Any]:
    """A sample of two calls, sampled from two versions of the weights."""
    return {"group_index": 2, "index": 7, "prompt": "hi", "tokens": [*PROMPT, 7, 2, 60, 8, 2], "response": "xy",
            "response_length": 5, "label": "3", "reward": 1.0, "loss_mask": [1, 1, 0, 1, 1],
            "weight_versions": ["3", "4"], "rollout_log_probs": [-0.5, 0.0, 0.0, -0.25, -0.5], "remove_sample": False,
            "status": "completed", "metadata": {"k": 1}, "train_metadata": None, "session_id": None,
            "spec_info": {"spec_verify_ct": 0}, **fields}  # fmt: skip


def mem1_rollout() -> dict[str, Any]:
    """Three calls; as inference writes it, a response repeats the state."""
    return {"q": "who?", "t0": "<think>a</think>", "r0": "<think>a</think><search>x</search>",
            "i0": "<information>1</information>", "t1": "<think>b</think>",
            "r1": "<think>b</think><search>y</search>", "i1": "<information>2</information>", "t2": "<think>c</think>",
            "r2": "<think>c</think><answer>z</answer>", "index": 4, "hash": "h", "Golden_answer": ["z"],
            "Exact_match": True, "Model_estimated_match": 1}  # fmt: skip


def tinker_rows() -> list[dict[str, Any]]:
    """A trajectory of three turns, the second stored as what it adds, the third anew; and another one's only turn."""

    def row(step: int, observed: list[int], delta: bool, **fields: Any) -> dict[str, Any]:
        return {"run_id": "r", "run_attempt": 0, "writer_id": "w", "split": "train", "iteration": 2,
                "sampling_client_step": 3, "group_idx": 0, "traj_idx": 0, "step_idx": step, "tags": ["a"],
                "env_row_id": "task9", "ts": "2026-08-01T00:00:00+00:00", "source": "rollout", "ob_tokens": observed,
                "ob_is_delta": delta, "ac_tokens": [7 + step, 2], "ac_logprobs": [-0.5, -0.25], "stop_reason": "stop",
                "has_images": False, "reward": 0.0, "episode_done": False, "total_reward": 1.0, "final_reward": 1.0,
                "ob_text": None, "ac_text": "x", "metrics": {"m": 1.0}, "attrs": {}, "token_metrics": {},
                "tool_calls": None, "logs": "{}", "extra": '{"a": 1}', "filtered_reason": None, **fields}  # fmt: skip

    return [
        row(0, PROMPT, False),
        row(1, [60, 61], True),
        row(2, [*PROMPT[:20], 62, 63], False, episode_done=True),
        row(0, PROMPT[::-1], False, traj_idx=1, reward=0.5, total_reward=1.5, episode_done=True),
    ]


def memagent_batch() -> dict[str, Any]:
    """The rows of two samples, of which the second has one chunk less: memories in turn, and an answer of each."""
    begin, task, end = [1, 2], [10, 11, 12], [3, 4]
    memory = {0: [20, 21, 9], 1: [22, 23, 24, 9]}
    later = [25, 9]
    rows = [
        (0, [*begin, *task, 5, *end, 40, 41], memory[0], False),
        (1, [*begin, *task[:2], 5, *end, 42], memory[1], False),
        (0, [*begin, *task, *memory[0][:-1], *end, 43], later, False),
        (0, [*begin, *task, later[0], 6, *end], [30, 9], True),
        (1, [*begin, *task[:2], *memory[1][:-1], 6, *end], [31, 32, 9], True),
    ]
    width, height = 12, 5
    prompts = [[0] * (width - len(p)) + p for _, p, _, _ in rows]
    responses = [r + [0] * (height - len(r)) for _, _, r, _ in rows]
    masks = [[0] * (width - len(p)) + [1] * (len(p) + len(r)) + [0] * (height - len(r)) for _, p, r, _ in rows]
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": [p + r for p, r in zip(prompts, responses, strict=True)],
        "attention_mask": masks,
        "position_ids": [[max(0, sum(m[: i + 1]) - 1) for i in range(len(m))] for m in masks],
        "sample_index": [s for s, _, _, _ in rows],
        "final_mask": [f for _, _, _, f in rows],
        "uid": ["u"] * len(rows),
        "token_level_scores": [[0, 0.25 * s, 1.0, 0, 0] for s, _, _, _ in rows],
    }


def memagent_output() -> dict[str, Any]:
    """What the asynchronous agent returns for a sample: a memory, and the answer."""

    def asked(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    def said(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    conversations = [
        [asked("task: sum. memory: none. section: one"), said("saw one")],
        [asked("task: sum. memory: saw one. section: two"), said("three so far")],
        [asked("task: sum. memory: three so far. answer:"), said("3")],
    ]
    return {"conversations": conversations, "sample_index": [4] * 3, "final_mask": [False, False, True],
            "timing_raw": {"mt_async_gen": 0.5}, "metrics": {"workflow/num_conv": 3}}  # fmt: skip


def _fixture(name: str) -> list[dict[str, Any]]:
    """The records of a fixture that a framework's own serializer wrote."""
    file = Path(__file__).parent / "convert" / "fixtures" / name
    return [json.loads(line) for line in file.read_text().splitlines()]


LOGS: dict[str, list[dict[str, Any]]] = {
    "verifiers": [verifiers_episode(), verifiers_result()],
    "rllm": [rllm_episode(), rllm_record()],
    "verl": [
        verl_output(uid="u", session_id=0),
        verl_output(),
        {"uid": "v", "session_id": 1, "outputs": [verl_output()]},
    ],
    "skyrl": [skyrl_batch(), skyrl_steps()],
    "slime": [{"step": 3, "sample": slime_sample()}, slime_sample(index=8, rollout_id=8)],
    "mem1": [mem1_rollout()],
    "tinker": tinker_rows(),
    "areal": _fixture("areal_sessions.jsonl"),
    "art": [*_fixture("art_exchanges.jsonl"), _fixture("art_groups.jsonl")[1]],
    "memagent": [memagent_batch(), memagent_output()],
}


def changed(record: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A copy with other values; `None` stays one."""
    return {**copy.deepcopy(record), **fields}
