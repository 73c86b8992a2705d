"""`export`: rows as other trainers take them, what is lost on the way, and what is refused."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from memopd_trace import Invocation, Media, Sampling, Segment, TraceMetadata, write
from memopd_trace.cli import export as cli_export
from memopd_trace.cli import run
from memopd_trace.errors import CheckFailed, InputError, UsageError
from memopd_trace.export import FEATURES, Export, export, sinks
from memopd_trace.export.formats import FORMATS, find
from memopd_trace.export.formats.__main__ import rendered
from memopd_trace.export.losses import IMPLIED, IMPLIED_SCORES, WHY, WHY_SCORES, says
from memopd_trace.schema import COLUMN, SCORES_COLUMNS

ROOT = Path(__file__).parents[2]
TOKENIZER = {"fingerprint": "t", "size": 100, "vocab_size": 128, "stop_ids": [2]}
PLAIN = ("verl", "trl", "nemo-rl")  # need no scores, and lose something
SUFFIX = {f.name: f.suffix for f in FORMATS}


def metadata(*features: str) -> TraceMetadata:
    return TraceMetadata(
        producer={"name": "tests"},
        models={"m": {"name": "m", "tokenizer": TOKENIZER}},
        required_features=list(features),
    )


def call(index: int = 0, episode: str = "e", **more: Any) -> Invocation:
    values = {
        "episode_id": episode,
        "invocation_index": index,
        "model_id": "m",
        "prompt_ids": [10, 11, 12],
        "output_ids": [20, 21, 2],
        "output_logprobs": [-0.5, -1.0, -0.25],
        "logprob_kind": "raw",
        "token_source": "engine",
        **more,
    }
    return Invocation(**values)


def trace(tmp_path: Path, *rows: Invocation, features: tuple[str, ...] = ()) -> Path:
    write(tmp_path / "trace.parquet", metadata(*features), list(rows), overwrite=True)
    return tmp_path / "trace.parquet"


def exported(tmp_path: Path, name: str, *rows: Invocation, **options: Any) -> tuple[Export, list[dict[str, Any]]]:
    """The outcome, and the rows that were written."""
    out = tmp_path / f"out{SUFFIX[name]}"
    made = export(name, trace(tmp_path, *rows, features=options.pop("features", ())), out, overwrite=True, **options)
    return made, pq.read_table(out).to_pylist()


# what a row becomes


def test_a_row_of_verl_has_its_tensors_and_is_ragged(tmp_path: Path) -> None:
    rows = [call(0, group_id="g", reward=0.0, policy_version=3), call(1, prompt_ids=[9], group_id="g", reward=2.0)]
    _, (first, second) = exported(tmp_path, "verl", *rows)
    assert first["prompts"] == [10, 11, 12] and first["responses"] == [20, 21, 2]
    assert first["input_ids"] == [10, 11, 12, 20, 21, 2] and first["attention_mask"] == [1] * 6
    assert first["position_ids"] == [0, 1, 2, 3, 4, 5] and first["response_mask"] == [1, 1, 1]
    assert first["rollout_log_probs"] == [-0.5, -1.0, -0.25] and first["temperature"] == 1.0
    assert first["token_level_scores"] == [0, 0, 0] and second["token_level_scores"] == [0, 0, 2]
    assert (first["uid"], first["min_global_steps"], first["max_global_steps"]) == ("g", 3, 3)
    assert second["input_ids"] == [9, 20, 21, 2], "a call is a row of its own, never put together with another"
    assert [r["episode_return"] for r in (first, second)] == [2.0, 2.0]
    assert [(r["episode_id"], r["invocation_index"]) for r in (first, second)] == [("e", 0), ("e", 1)]


def test_a_reward_that_is_null_is_not_zero(tmp_path: Path) -> None:
    for name, column in (("verl", "token_level_scores"), ("trl", "reward"), ("nemo-rl", "total_reward")):
        _, (row,) = exported(tmp_path, name, call())
        assert row[column] is None and row["episode_return"] is None


def test_versions_of_one_call_are_a_range_for_verl(tmp_path: Path) -> None:
    _, (row,) = exported(tmp_path, "verl", call(policy_version=6, output_policy_versions=[4, 4, 6]))
    assert (row["min_global_steps"], row["max_global_steps"]) == (4, 6)


def test_a_row_of_trl_masks_what_is_not_trained(tmp_path: Path) -> None:
    row = call(output_loss_mask=[True, False, True], rewards={"exact": 1.0, "form": 0.5})
    _, (found,) = exported(tmp_path, "trl", row)
    assert found["labels"] == [-100, -100, -100, 20, -100, 2]
    assert found["completion_mask"] == [0, 0, 0, 1, 0, 1] and found["env_mask"] == [1, 0, 1]
    assert found["logprobs"] == [-0.5, 0.0, -0.25] and found["old_log_probs"] == [0, 0, 0, -0.5, 0.0, -0.25]
    assert found["rewards"] == [{"name": "exact", "value": 1.0}, {"name": "form", "value": 0.5}]


def test_nemo_rl_gets_an_output_in_stretches_of_one_mask(tmp_path: Path) -> None:
    """It trains every message that is the assistant's and has log-probabilities, whole."""
    row = call(
        output_ids=[20, 21, 22, 2], output_logprobs=[-1, -2, None, -4], output_loss_mask=[True, True, False, True]
    )
    _, (found,) = exported(tmp_path, "nemo-rl", row)
    said = [(m["role"], m["token_ids"], m["token_loss_mask"], m["generation_logprobs"]) for m in found["message_log"]]
    assert said == [
        ("user", [10, 11, 12], [0, 0, 0], None),
        ("assistant", [20, 21], [1, 1], [-1, -2]),
        ("environment", [22], [0], None),
        ("assistant", [2], [1], [-4]),
    ]
    assert found["length"] == 7


def test_processed_log_probabilities_get_their_kept_mass_back(tmp_path: Path) -> None:
    sampling = Sampling(temperature=0.5, top_k=5)
    row = call(logprob_kind="processed", output_kept_logmass=[-0.125, -0.25, 0.0], sampling=sampling)
    made, (found,) = exported(tmp_path, "verl", row)
    assert found["rollout_log_probs"] == [-0.625, -1.25, -0.25] and found["temperature"] == 0.5
    assert "sampling" in made.losses.lost and "output_kept_logmass" not in made.losses.lost


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"logprob_kind": "unknown"}, "the kind of its log-probabilities is unknown"),
        (
            {"logprob_kind": "tempered", "sampling": Sampling(temperature=1.0, repetition_penalty=1.1)},
            "are those of no softmax",
        ),
    ],
)
def test_log_probabilities_that_mean_nothing_to_a_trainer_are_null_and_counted(
    cells: dict[str, Any], why: str, tmp_path: Path
) -> None:
    for name, column in (("verl", "rollout_log_probs"), ("trl", "logprobs")):
        made, (row,) = exported(tmp_path, name, call(**cells))
        assert row[column] is None
        assert why in made.losses.lost["output_logprobs"].why


# what is lost


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda f: f.name)
def test_every_column_is_carried_or_has_a_reason(chosen: Any) -> None:
    for name in COLUMN:
        assert chosen.carries(name) or name in WHY or name in IMPLIED or name == "state_digest", name
    for column in SCORES_COLUMNS[6:]:
        assert column.name in WHY_SCORES or column.name in IMPLIED_SCORES, column.name
    assert not set(IMPLIED) & set(WHY)


def test_what_is_lost_is_counted_in_the_rows_that_have_it(tmp_path: Path) -> None:
    rows = [
        call(0, relation="root", attempt=0),
        call(1, parent_index=0, relation="rewrite", rewrite_kind="memory", rewrite_evidence="explicit"),
        call(2, parent_index=1, relation="fork", attempt=1, segments=[Segment(0, 1, "task")], extra={"a": "b"}),
    ]
    made, found = exported(tmp_path, "verl", *rows)
    counts = {name: lost.rows for name, lost in made.losses.lost.items()}
    assert counts == {
        "parent_index": 2,
        "relation": 2,
        "rewrite_kind": 1,
        "rewrite_evidence": 1,
        "attempt": 1,
        "segments": 1,
        "extra": 1,
    }
    assert made.exit_code() == 0 and len(found) == 3
    assert "2  parent_index      which call a row follows is not told" in made.to_text()
    notes = json.loads(pq.read_metadata(tmp_path / "out.parquet").metadata[sinks.KEY])
    assert notes["lost"]["segments"]["example"] == "episode 'e', invocation 2"


def test_defaults_that_are_written_out_are_no_loss(tmp_path: Path) -> None:
    row = call(position_ids=range(6), visible_from=range(6), visible_until=[6] * 6, output_sampled=[True] * 3, media=[])
    made, _ = exported(tmp_path, "verl", row, features=("visibility", "media"))
    assert not made.losses.any


def test_rows_that_no_trainer_should_see_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        call(0),
        call(1, accepted=False),
        call(2, output_ids=[], output_logprobs=[], finish_reason="abort"),
        call(3, prompt_ids=[], output_sampled=[False, True, True], output_logprobs=[None, -1.0, -1.0]),
    ]
    for name in PLAIN:
        made, found = exported(tmp_path, name, *rows)
        assert [r["invocation_index"] for r in found] == [0]
        assert (made.losses.rows, made.losses.written) == (4, 1)
        assert [reason.split(":")[0] for reason in made.losses.left_out] == [
            "a rejected attempt",
            "an empty output",
            "an empty prompt",
        ]


def test_strict_writes_nothing_where_anything_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = trace(tmp_path, call(extra={"a": "b"})), tmp_path / "out.parquet"
    assert run(["export", "verl", str(path), "-o", str(out), "--strict"]) == 1
    assert "extra" in capsys.readouterr().out and {f.name for f in tmp_path.iterdir()} == {"trace.parquet"}
    assert run(["export", "verl", str(trace(tmp_path, call())), "-o", str(out), "--strict"]) == 0
    assert run(["export", "jsonl", str(path), "-o", str(tmp_path / "out.jsonl"), "--strict"]) == 0


# what is refused

EVICTED = [6, 4, 6, 6, 6, 6]
STATES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "positions": ({"position_ids": [0, 1, 5, 6, 7, 8]}, ()),
    "visibility": ({"visible_until": EVICTED}, ("visibility",)),
    "media": ({"media": [Media(1, 2, bytes(32))]}, ("media",)),
    "slots": (
        {"prompt_ids": [10, 11, 12, 13], "output_slots": [1, 2, 3], "output_logprobs": None, "logprob_kind": None},
        ("output_slots",),
    ),
}


def test_every_feature_of_a_state_is_tried_here() -> None:
    assert {*STATES, "temperature"} == set(FEATURES) == set(cli_export.FEATURES)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("feature", STATES)
def test_a_state_that_would_be_judged_as_another_one_is_refused_unless_it_is_dropped(
    feature: str, name: str, tmp_path: Path
) -> None:
    cells, features = STATES[feature]
    path = trace(tmp_path, call(0), call(1, **cells), features=features)
    out = tmp_path / "out.parquet"
    with pytest.raises(InputError, match=f"invocation 1: .*--drop {feature}"):
        export(name, path, out)
    assert not out.exists() and len(list(tmp_path.iterdir())) == 1
    others = [f for f in FEATURES if f != feature]
    with pytest.raises(InputError, match=f"--drop {feature}"):
        export(name, path, out, drop=others)
    made = export(name, path, out, drop=[feature])
    assert made.losses.written == (1 if feature == "slots" else 2)
    assert made.losses.left_out if feature == "slots" else made.losses.lost, "it is listed all the same"


def test_what_cannot_be_meant_is_a_usage_error(tmp_path: Path) -> None:
    path, out = trace(tmp_path, call()), tmp_path / "out.parquet"
    for options, message in (
        (("ver", path, out), "did you mean 'verl'"),
        (("verl", path, tmp_path / "out.json"), "ends in .parquet"),
        (("distillkit", path, tmp_path / "out"), "give --scores"),
    ):
        with pytest.raises(UsageError, match=message):
            export(*options)
    with pytest.raises(UsageError, match="no feature 'position'"):
        export("verl", path, out, drop=["position"])
    with pytest.raises(UsageError, match="no place for scores"):
        export("jsonl", path, tmp_path / "out.jsonl", scores=tmp_path)


def test_what_is_there_is_replaced_only_when_told_to(tmp_path: Path) -> None:
    path, out = trace(tmp_path, call()), tmp_path / "out.parquet"
    out.write_text("mine")
    assert run(["export", "verl", str(path), "-o", str(out)]) == 2
    assert out.read_text() == "mine"
    assert run(["export", "verl", str(path), "-o", str(out), "--overwrite"]) == 0
    assert pq.read_table(out).num_rows == 1
    before = path.read_bytes()
    assert run(["export", "verl", str(path), "-o", str(path), "--overwrite"]) == 2
    assert path.read_bytes() == before, "least of all the trace"


@pytest.mark.parametrize("name", ["part-00000.parquet", "part-00099.parquet", "below/o.parquet", "link.parquet"])
def test_nothing_is_written_into_the_folder_that_is_read(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    write(folder, metadata(), [call(), call(episode="f")])
    out = tmp_path / name if name.startswith("link") else folder / name
    if name.startswith("link"):
        out.symlink_to(folder / "part-00000.parquet")
    before = {f: f.read_bytes() for f in folder.iterdir()}
    assert run(["export", "verl", str(folder), "-o", str(out), "--overwrite"]) == 2
    assert {f: f.read_bytes() for f in folder.iterdir()} == before
    assert run(["export", "verl", str(folder), "-o", str(tmp_path / "trace.parquet")]) == 0


def test_a_reward_that_is_infinite_in_the_targets_type_is_null_and_counted(tmp_path: Path) -> None:
    for name, column in (("verl", "token_level_scores"), ("nemo-rl", "total_reward"), ("trl", "reward")):
        made, (large, small) = exported(tmp_path, name, call(reward=1e39), call(1, reward=-3.0e38))
        assert ("reward" in made.losses.lost) == (large[column] is None) == (name != "trl")
        assert small[column] is not None and np.isfinite(np.array(small[column])).all()


def test_damaged_missing_and_invalid_traces_have_their_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.parquet")
    assert run(["export", "verl", str(tmp_path / "none.parquet"), "-o", out]) == 3
    damaged = trace(tmp_path, *(call(n, prompt_ids=range(3, 90)) for n in range(50)))
    data = bytearray(damaged.read_bytes())
    data[100:400] = bytes(300)
    damaged.write_bytes(data)
    assert run(["export", "verl", str(damaged), "-o", out]) == 3
    assert (
        run(
            [
                "export",
                "verl",
                str(
                    trace(tmp_path, call(output_logprobs=[-1.0])),
                ),
                "-o",
                out,
            ]
        )
        == 1
    )
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and "E-NO-INPUT" in errors[0] and "Traceback" not in "".join(errors)
    assert not Path(out).exists()
    with pytest.raises(CheckFailed):
        export("verl", trace(tmp_path, call(output_logprobs=[-1.0])), out)


# how it is written


def test_many_rows_go_out_in_several_row_groups_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [call(n, prompt_ids=range(3, 5 + n)) for n in range(40)]
    _, whole = exported(tmp_path, "nemo-rl", *rows)
    monkeypatch.setattr(sinks, "ROWS_PER_BATCH", 7)
    _, parts = exported(tmp_path, "nemo-rl", *rows)
    assert parts == whole and pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == 6


def test_lists_of_lists_are_written_as_plain_arrow_would() -> None:
    kind = find("verl").fields[8].type
    cells = [np.array([[1, 2], [3, 4]], np.int32), None, np.zeros((0, 2), np.int32), np.array([[5, 6]], np.int32)]
    assert sinks.column(cells, kind).to_pylist() == [[[1, 2], [3, 4]], None, [], [[5, 6]]]
    assert sinks.column([None, None], kind).null_count == 2


KILLED = """
import os, signal, sys
from memopd_trace.export import run
inner = run.samples
def samples(*args):
    for number, sample in enumerate(inner(*args)):
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        yield sample
run.samples = samples
run.export(*sys.argv[1:], overwrite=True)
"""


@pytest.mark.parametrize("name", ["verl", "jsonl"])
def test_killed_in_the_middle_nothing_half_is_there(name: str, tmp_path: Path) -> None:
    path, out = trace(tmp_path, *(call(n) for n in range(10))), tmp_path / f"out{SUFFIX[name]}"
    command = [sys.executable, "-c", KILLED, name, str(path), str(out)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not out.exists() and list(tmp_path.glob(".out*.tmp"))
    export(name, path, out)
    before = out.read_bytes()
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert out.read_bytes() == before


# what is said about it


def test_the_page_has_the_tables_of_the_code() -> None:
    page = (ROOT / "docs" / "exporters.md").read_text(encoding="utf-8")
    assert rendered(page) == page, "make exporters"
    assert all(re.search(rf"^\| `{feature}` \|", page, re.MULTILINE) for feature in FEATURES)
    assert all(f"`{f.name}`" in page or f.name in (ROOT / "README.md").read_text() for f in FORMATS)


def test_the_formats_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["exports"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [f.name for f in FORMATS]
    assert run(["exports", "--format", "json"]) == 0
    assert [f["scores"] for f in json.loads(capsys.readouterr().out)] == ["optional"] * 3 + ["needed", "none"]


def test_says_is_false_of_every_default() -> None:
    assert not [name for name in WHY if says(call(output_logprobs=None, logprob_kind=None), name)]
