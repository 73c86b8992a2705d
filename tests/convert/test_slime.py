"""slime: samples of its debugging files become calls, and a pickle runs nothing."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_convert import converted
from helpers_trainers import PROMPT, slime_sample

from memopd_trace import read
from memopd_trace.convert import convert
from memopd_trace.errors import MissingExtraError


def test_a_sample_becomes_its_calls_with_the_weights_of_each(tmp_path: Path) -> None:
    result, (first, second) = converted(tmp_path, "slime", [{"step": 3, "sample": slime_sample()}])
    assert first.prompt_ids.tolist() == PROMPT and second.prompt_ids.tolist() == [*PROMPT, 7, 2, 60]
    assert [first.policy_version, second.policy_version] == [3, 4] and second.relation == "extend"
    np.testing.assert_array_equal(first.output_logprobs, np.float32([-0.5, 0.0]))
    assert (first.episode_id, first.group_id, second.reward, second.terminated) == ("3/7", "3/2", 1.0, True)
    assert result.exit_code() == 0 and (second.extra or {})["response"] == "xy"


def test_samples_of_one_rollout_are_one_episode(tmp_path: Path) -> None:
    sibling = slime_sample(index=8, rollout_id=5, tokens=[*PROMPT[:25], 71, 9, 2], response_length=2, loss_mask=None,
                           rollout_log_probs=[-0.5, -0.5], weight_versions=["4"])  # fmt: skip
    records = [{"step": 3, "sample": s} for s in (slime_sample(rollout_id=5), sibling)]
    _, rows = converted(tmp_path, "slime", records)
    assert [(r.episode_id, r.relation) for r in rows] == [("3/5", "root"), ("3/5", "extend"), ("3/5", "rewrite")]
    assert [r.reward for r in rows] == [None, None, 1.0]


def test_versions_that_cannot_be_told_apart_are_kept_as_extra(tmp_path: Path) -> None:
    _, rows = converted(tmp_path, "slime", [slime_sample(weight_versions=["3", "3", "4"])])
    assert {r.policy_version for r in rows} == {None} and "weight_versions" in (rows[1].extra or {})
    _, rows = converted(tmp_path, "slime", [slime_sample(weight_versions=["3", "3", "3"])])
    assert {r.policy_version for r in rows} == {3}


def test_rewards_by_name_stay_named_and_a_removed_sample_is_not_trained(tmp_path: Path) -> None:
    _, rows = converted(tmp_path, "slime", [slime_sample(reward={"acc": 1.0, "len": 0.5}, remove_sample=True)])
    assert rows[1].reward is None and rows[1].rewards == {"acc": 1.0, "len": 0.5}
    assert all(r.output_loss_mask is not None and not r.output_loss_mask.any() for r in rows)


def save(path: Path, value: Any) -> Path:
    pytest.importorskip("torch").save(value, path)
    return path


def test_a_file_of_torch_is_read_as_plain_data(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sample = slime_sample(tokens=torch.tensor([*PROMPT, 7, 2, 60, 8, 2]))
    file = save(tmp_path / "rollout_3.pt", {"rollout_id": 3, "samples": [sample, slime_sample(index=8)]})
    result = convert("slime", file, tmp_path / "t.parquet")
    rows = list(read(tmp_path / "t.parquet").iter_invocations())
    assert [r.episode_id for r in rows] == ["rollout_3/7"] * 2 + ["rollout_3/8"] * 2 and result.exit_code() == 0
    assert rows[1].prompt_ids.tolist() == [*PROMPT, 7, 2, 60]


class Runs:
    """A pickle of it makes a folder when it is loaded by Python's own loader."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (self.path,)


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    sample = slime_sample(metadata={"x": Runs(tmp_path / "made")})
    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "a.pt", {"rollout_id": 3, "samples": [sample]})
    (tmp_path / "in" / "b.pt").write_bytes(pickle.dumps({"samples": [sample]}))
    (tmp_path / "in" / "c.pt").write_bytes(b"PK\3\4 torn")
    save(tmp_path / "in" / "d.pt", {"rollout_id": 4, "samples": [slime_sample()]})
    result = convert("slime", tmp_path / "in", tmp_path / "t.parquet")
    assert not (tmp_path / "made").exists() and result.exit_code() == 1 and result.losses.rows == 2
    reasons = [issue.reason for issue in result.losses.issues]
    assert len(reasons) == 3 and "refused: it holds 'posix.mkdir'" in reasons[0]
    assert all("no file of torch.save" in reason for reason in reasons[1:])
    assert not any("weights_only" in reason for reason in reasons)  # PyTorch's advice to run it all the same
    pickle.loads((tmp_path / "in" / "b.pt").read_bytes())
    assert (tmp_path / "made").exists()  # it would have


def test_a_tensor_that_says_it_is_huge_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    huge = torch.zeros(1).expand(2**40)
    file = save(tmp_path / "a.pt", {"samples": [slime_sample(tokens=huge)]})
    result = convert("slime", file, tmp_path / "t.parquet")
    assert result.exit_code() == 3 and "values" in result.losses.issues[0].reason


def test_without_torch_such_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.pt"
    file.write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match="torch"):
        convert("slime", file, tmp_path / "t.parquet")
