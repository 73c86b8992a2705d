"""AReaL: sessions as its cache holds and exports them, trajectories as padded tensors, and dumped text."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_convert import FIXTURES, converted
from helpers_trainers import changed

from memopd_trace.convert import convert

CACHED, EXPORTED, JOINED = [json.loads(line) for line in (FIXTURES / "areal_sessions.jsonl").read_text().splitlines()]
PROMPT = list(range(100, 120))
SECOND = [*PROMPT, 30, 31, 2, 60, 61]
DUMPED = {"task_id": 7, "sample_idx": 0, "seqlen": 12, "prompt_len": 5, "head_version": 4, "tail_version": 5,
          "version_rle": [[4, 2], [5, 2]], "reward": 1.0, "prompt": "hello", "completion": "yo then ok",
          "original_reward": 2.0, "segments": [
              {"role": "prompt", "len": 5, "text": "hello"}, {"role": "gen", "len": 2, "text": "yo"},
              {"role": "context", "len": 6, "text": " then "}, {"role": "gen", "len": 2, "text": "ok"}]}  # fmt: skip


def tensor(values: Any, kind: str = "int64") -> dict[str, Any]:
    """Values as AReaL serializes a tensor."""
    array = np.array(values, kind)
    return {"type": "tensor", "data": base64.b64encode(array.tobytes()).decode(), "shape": list(array.shape),
            "dtype": f"torch.{kind}"}  # fmt: skip


def trajectory() -> dict[str, Any]:
    """Two padded rows, of two turns and of one."""
    return {
        "input_ids": [[1, 2, 3, 7, 8, 4, 9], [1, 2, 3, 5, 0, 0, 0]],
        "loss_mask": [[0, 0, 0, 1, 1, 0, 1], [0, 0, 0, 1, 0, 0, 0]],
        "attention_mask": [[1] * 7, [1, 1, 1, 1, 0, 0, 0]],
        "logprobs": [[0, 0, 0, -1.0, -2.0, 0, -3.0], [0, 0, 0, -1.5, 0, 0, 0]],
        "versions": [[-1, -1, -1, 3, 4, -1, 4], [-1, -1, -1, 5, -1, -1, -1]],
        "rewards": [1.0, 0.0],
        "original_rewards": [5.0, 0.0],
    }


def test_a_cached_session_keeps_ids_versions_rewards_and_the_parents_that_it_names(tmp_path: Path) -> None:
    result, rows = converted(tmp_path, "areal", [CACHED])
    assert [r.prompt_ids.tolist() for r in rows] == [PROMPT, SECOND, PROMPT[::-1]]
    assert [r.output_ids.tolist() for r in rows] == [[30, 31, 2], [33, 2], [34, 2]]
    assert [(r.episode_id, r.relation, r.parent_index) for r in rows] == [
        ("s0", "root", None), ("s0", "extend", 0), ("s0", "root", None),
    ]  # fmt: skip
    assert rows[0].output_policy_versions is not None and rows[0].output_policy_versions.tolist() == [4, 4, 5]
    assert [r.policy_version for r in rows] == [None, 5, 5]  # one for all of a call's tokens
    assert [r.reward for r in rows] == [None, 1.0, 0.25] and {r.finish_reason for r in rows} == {"stop"}
    assert {r.model_id for r in rows} == {"m"} and {r.logprob_kind for r in rows} == {"unknown"}
    assert json.loads(rows[1].messages or "")[-1] == {"role": "assistant", "content": "3"}
    assert "no_policy_version" not in result.losses.gaps and "no_logprob_kind" in result.losses.gaps


def test_exports_hold_the_same_calls_as_the_cache(tmp_path: Path) -> None:
    _, cached = converted(tmp_path, "areal", [CACHED])
    for export in (EXPORTED, JOINED):  # call by call, and the turns of a conversation in one sequence
        _, rows = converted(tmp_path, "areal", [export])
        assert [r.relation for r in rows] == [r.relation for r in cached]
        for a, b in zip(cached, rows, strict=True):
            np.testing.assert_array_equal(a.prompt_ids, b.prompt_ids)
            np.testing.assert_array_equal(a.output_ids, b.output_ids)
            np.testing.assert_array_equal(a.output_logprobs, b.output_logprobs)
            assert a.policy_version == b.policy_version
            np.testing.assert_array_equal(a.output_policy_versions, b.output_policy_versions)


def test_an_exports_discounted_rewards_are_no_rewards_but_the_last(tmp_path: Path) -> None:
    _, rows = converted(tmp_path, "areal", [EXPORTED])
    assert [r.reward for r in rows] == [None, None, 0.25]
    assert [(r.rewards or {}).get("return") for r in rows] == [0.5625, 1.125, None]


def test_conversations_that_share_turns_have_these_once(tmp_path: Path) -> None:
    first = JOINED["interactions"]["c1"]
    other = changed(first, interaction_id="c9", reward=2.0)
    result, rows = converted(tmp_path, "areal", [{"interactions": {"c1": first, "c9": other}}])
    assert [r.relation for r in rows] == ["root", "extend", "extend"]
    assert result.losses.dropped_calls["told again"].number == 1


def test_interactions_by_themselves_are_put_together_by_their_session(tmp_path: Path) -> None:
    lines = [{"session_id": s, **i} for i in CACHED["interactions"] for s in ("a", "b")]
    result, rows = converted(tmp_path, "areal", lines)
    assert [(r.episode_id, r.relation) for r in rows] == [
        (e, relation) for e in ("a", "b") for relation in ("root", "extend", "root")
    ]  # fmt: skip
    assert "no_episode" not in result.losses.gaps
    result, rows = converted(tmp_path, "areal", CACHED["interactions"][:1])
    assert len(rows) == 1 and "no_episode" in result.losses.gaps


def test_a_parent_that_stands_inside_its_child_alone_is_a_call_too(tmp_path: Path) -> None:
    parent, child, _ = CACHED["interactions"]
    wrapped = {"type": "dataclass", "class_path": "x.Y", "data": parent}
    _, rows = converted(tmp_path, "areal", [{"session_id": "s", "interactions": [changed(child, parent=wrapped)]}])
    assert [(r.relation, r.output_ids.tolist()) for r in rows] == [("root", [30, 31, 2]), ("extend", [33, 2])]


@pytest.mark.parametrize("serialized", [False, True])
def test_rows_of_a_trajectory_lose_their_padding_and_are_no_runs_for_sure(tmp_path: Path, serialized: bool) -> None:
    record: dict[str, Any] = {"task_id": 3, **trajectory()}
    if serialized:
        kinds = {"logprobs": "float32", "rewards": "float32", "attention_mask": "bool"}
        record |= {n: tensor(v, kinds.get(n, "int64")) for n, v in trajectory().items()}
    result, rows = converted(tmp_path, "areal", [record])
    assert [(r.episode_id, r.prompt_ids.tolist(), r.output_ids.tolist()) for r in rows] == [
        ("3/0", [1, 2, 3], [7, 8]), ("3/0", [1, 2, 3, 7, 8, 4], [9]), ("3/1", [1, 2, 3], [5]),
    ]  # fmt: skip
    assert [r.output_logprobs.tolist() for r in rows if r.output_logprobs is not None] == [[-1, -2], [-3], [-1.5]]
    assert rows[0].output_policy_versions is not None and rows[0].output_policy_versions.tolist() == [3, 4]
    assert [r.policy_version for r in rows] == [None, 4, 5] and {r.group_id for r in rows} == {"3"}
    assert [r.reward for r in rows] == [None, 1.0, 0.0] and rows[1].rewards == {"original_reward": 5.0}
    assert result.losses.gaps["no_episode"].number == 2


def test_a_saved_trajectory_says_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({n: torch.tensor(v) for n, v in trajectory().items()}, tmp_path / "a.pt")
    result = convert("areal", tmp_path / "a.pt", tmp_path / "t.parquet")
    assert result.exit_code() == 0 and (result.losses.rows, result.losses.episodes) == (3, 2)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("loss_mask", None, "which ids were sampled is not told"),
        ("loss_mask", [[0, 0, 0, 1]], "expected 2 rows"),
        ("attention_mask", [[0] + [1] * 6] * 2, "does not stand at the end"),
        ("logprobs", [[0.0]] * 2, "1 for 7 ids"),
        ("rewards", [1.0], "for each of 2 rows"),
        ("input_ids", {"type": "tensor", "data": None, "shape": [2, 7], "dtype": "torch.int64"}, "without its values"),
        ("input_ids", {"type": "tensor", "data": "AAAA", "shape": [2, 7], "dtype": "torch.int64"}, "damaged"),
        ("input_ids", {"type": "tensor", "data": "AAAA", "shape": [3], "dtype": "V1"}, "damaged"),
    ],
)
def test_tensors_that_do_not_fit_are_reported(tmp_path: Path, name: str, value: Any, why: str) -> None:
    result, rows = converted(tmp_path, "areal", [changed(trajectory(), **{name: value}), trajectory()])
    assert len(rows) == 3 and result.losses.broken == 1 and why in result.losses.issues[0].reason


def test_dumped_turns_are_calls_of_text_with_their_versions(tmp_path: Path, tokenizer: Path) -> None:
    result, rows = converted(tmp_path, "areal", [DUMPED], tokenizer=tokenizer)
    assert [(r.prompt_text, r.output_text) for r in rows] == [("hello", "yo"), ("helloyo then ", "ok")]
    assert [(r.relation, r.policy_version, r.reward) for r in rows] == [("root", 4, None), ("extend", 5, 1.0)]
    assert {(r.token_source, r.group_id) for r in rows} == {("retokenized", "7")}
    assert rows[1].rewards == {"original_reward": 2.0} and "no_episode" in result.losses.gaps
    assert not result.losses.degraded  # the tokenizer makes as many ids as the dump counts


def test_a_dump_of_another_count_is_told_and_its_versions_are_left_out(tmp_path: Path, tokenizer: Path) -> None:
    line = changed(DUMPED, segments=None, version_rle=[[4, 2], [5, 1]])
    result, (row,) = converted(tmp_path, "areal", [line], tokenizer=tokenizer)
    assert row.output_text == "yo then ok" and row.policy_version is None and row.output_policy_versions is None
    assert any("versions left out" in reason for reason in result.losses.degraded)
    assert any("another length than the log counted" in reason for reason in result.losses.degraded)
    result, _ = converted(tmp_path, "areal", [changed(DUMPED, version_rle=[[1, 2**40]])], tokenizer=tokenizer)
    assert result.losses.broken == 1 and "version_rle" in result.losses.issues[0].reason


def test_an_older_dump_with_one_version_gives_it(tmp_path: Path, tokenizer: Path) -> None:
    line = changed(DUMPED, segments=None, version_rle=None, head_version=5)
    _, (row,) = converted(tmp_path, "areal", [line], tokenizer=tokenizer)
    assert row.policy_version == 5


def test_interactions_without_ids_are_text(tmp_path: Path, tokenizer: Path) -> None:
    asked = [{"role": "user", "content": "hi"}]
    plain = {"interactions": [{"request": asked, "response": "yo", "reward": 1.0}]}
    listed = {"interactions": {"a": {"messages": asked, "output_message_list": [{"role": "assistant", "content": "yo"}],
                                     "reward": 1.0, "interaction_id": "a"}}}  # fmt: skip
    for record in (plain, listed):
        _, (row,) = converted(tmp_path, "areal", [record], tokenizer=tokenizer)
        assert (row.token_source, row.reward) == ("retokenized", 1.0)
        assert [m["content"] for m in json.loads(row.messages or "")] == ["hi", "yo"]
