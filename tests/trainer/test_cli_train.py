"""`memopd-trace train`: configuration, overrides, what is printed where, and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_trainer import Setup, equal_weights, make_setup

from memopd_trace.cli import run
from memopd_trace.cli.console import settings as cli_settings
from memopd_trace.errors import InputError, UsageError
from memopd_trainer.config import load_config, parse_config

MINIMAL = {"student": "s", "trace": "t", "scores": "c", "output": "o", "steps": 1}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(tmp_path_factory.mktemp("cli"), dtype="float32")


@pytest.fixture
def config_file(setup: Setup, tmp_path: Path) -> Path:
    return write_config(setup, tmp_path)


def write_config(setup: Setup, folder: Path, **changes: Any) -> Path:
    data = {
        "student": str(setup.student),
        "trace": str(setup.trace),
        "scores": str(setup.scores),
        "output": str(folder / "run"),
        "steps": 2,
        "lr": 1e-3,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(data | changes))
    return folder / "run.yaml"


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_a_run_prints_its_summary_on_stdout_and_leaves_a_checkpoint(
    config_file: Path, setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", str(config_file)]) == 0
    out, err = capsys.readouterr()
    assert "step 1" in out and "step 2" in out and str(tmp_path / "run/step-000002") in out and err == ""
    assert not equal_weights(setup.student, tmp_path / "run/step-000002")
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2]
    assert metrics[0]["loss"] == pytest.approx(metrics[0]["ppo"] + metrics[0]["divergence"], rel=1e-5)


def test_json_overrides_and_held_out(
    config_file: Path, setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = [f"held_out.trace={setup.trace}", f"held_out.scores={setup.scores}"]
    options = [
        "--format",
        "json",
        "steps=3",
        "divergence.kind=jsd",
        "divergence.beta=0.3",
        "ppo.weight=0",
        *held_out,
    ]
    assert run(["train", str(config_file), *options]) == 0
    out, _ = capsys.readouterr()
    result = json.loads(out)
    assert result["steps"] == 3 and result["last"]["ppo"] is None and result["last"]["step"] == 3
    assert result["held_out_after"]["reverse_kl"] < result["held_out_before"]["reverse_kl"]
    assert result["checkpoint"] == str(tmp_path / "run/step-000003")

    assert run(["train", str(config_file), *options]) == 0
    again, _ = capsys.readouterr()
    assert json.loads(again)["resumed_from"] == 3 and json.loads(again)["first"] is None


def test_notices_go_to_stderr_and_quiet_silences_them(
    setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_settings, "quiet", False)  # and back, after the test
    config = write_config(setup, tmp_path, divergence={"weight": 0})
    assert run(["train", str(config)]) == 0
    assert "scores are not used" in capsys.readouterr().err
    assert run(["--quiet", "train", str(config), "steps=3"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "step 3" in out and "divergence" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["learning_rate=1e-3"], 2, "unknown key 'learning_rate'"),
        (["grop_per_step=1"], 2, "did you mean 'groups_per_step'?"),
        (["ppo.clipp=0.3"], 2, "unknown key 'ppo.clipp' (did you mean 'ppo.clip'?)"),
        (["held_out.trce=x"], 2, "unknown key 'held_out.trce' (did you mean 'held_out.trace'?)"),
        (["ppo.clip"], 2, "'ppo.clip' is not key=value"),
        (["lr.x=1"], 2, "'lr' is a value"),
        (["lr=fast"], 2, "lr: "),
        (["lr=-1"], 2, "lr: "),
        (["lr=.nan"], 2, "lr: "),
        (["divergence.kind=kl"], 2, "divergence.kind: "),
        (["groups_per_step=9"], 2, "groups_per_step is 9, the trace has 2 groups"),
        (["dtype=float16"], 2, "dtype: "),
        (["device=nonsense"], 2, "nonsense"),
        (["scores=null"], 2, "there are no scores"),
        (["ppo.weight=0", "divergence.weight=0"], 2, "nothing to train on"),
        (["lr=2024-13-45"], 2, "the value is not YAML"),
        (["lr=!!int ''"], 2, "the value is not YAML"),
        (["lr=!!float zz"], 2, "the value is not YAML"),
        (["lr=!!bool zz"], 2, "the value is not YAML"),
        (["lr=!!timestamp zz"], 2, "the value is not YAML"),
        (["steps=" + "9" * 5000], 2, "the value is not YAML"),
        (["steps=0x" + "f" * 5000], 2, "steps: "),
        (["lr=0x" + "f" * 5000], 2, "lr: "),
        (["steps=" + "[" * 5000], 2, "the value is not YAML"),
        (["steps=[&a 1, *a]"], 2, "no aliases"),
        (["seed=18446744073709551616"], 2, "seed: "),
        (["output=\"a\\0b\""], 2, "output: "),
        (["output=\"a\\ud800b\""], 2, "output: "),
        (["trace=nowhere.parquet"], 3, "E-NO-INPUT"),
        (["scores=nowhere"], 3, "E-NO-INPUT"),
        (["student=./nowhere"], 3, "E-MODEL-LOAD"),
        (["lr=1e30", "grad_clip=1e30", "dtype=float32"], 1, "step 2: the "),
    ],
)  # fmt: skip
def test_each_fault_is_one_line_with_its_exit_code(
    config_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert run(["train", str(config_file), *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and len(lines(err)) == 1 and len(err) < 800 and message in err, err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"\xff\xfe\x00", "not a YAML or JSON file"),
        (b"a: [1", "not a YAML or JSON file"),
        (b"- 1\n- 2\n", "expected keys and values, got list"),
        (b"!!python/object/apply:os.system ['true']", "not a YAML or JSON file"),
        (b"[" * 5_000, "not a YAML or JSON file"),
        (b"lr: 2024-13-45", "not a YAML or JSON file"),
        (
            b"a0: &a0 [x, x]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, 30)),
            "alias",
        ),
    ],
    ids=["missing", "binary", "broken", "list", "code", "deep", "date", "bomb"],
)
def test_a_configuration_that_cannot_be_read_exits_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "run.yaml").write_bytes(content)
    assert run(["train", str(tmp_path / "run.yaml")]) == 3
    assert message in capsys.readouterr().err


def test_without_the_extra_the_command_names_it(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "memopd_trainer", None)
    assert run(["train", str(config_file)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "memopd-trace[train]" in err and len(lines(err)) == 1


def test_an_interrupted_run_says_so_and_goes_on(
    setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["memopd_trainer.train"]  # the package's attribute of that name is the function
    config = str(write_config(setup, tmp_path, save_every=1, steps=3))
    real = module.train_step

    def interrupted(step: int, *rest: Any) -> Any:
        if step == 3:
            raise KeyboardInterrupt
        return real(step, *rest)

    monkeypatch.setattr(module, "train_step", interrupted)
    assert run(["train", config]) == 130 and "interrupted" in capsys.readouterr().err
    monkeypatch.undo()
    assert run(["train", config, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["resumed_from"] == 2


def test_json_configuration_and_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(MINIMAL))
    config = load_config(tmp_path / "run.json", ["lr=1e-6", "held_out={trace: a, scores: b}"])
    assert config.lr == 1e-6 and config.held_out is not None and config.held_out.trace == "a"
    assert (config.divergence.kind, config.divergence.weight) == ("reverse_kl", 1.0)
    assert (config.ppo.clip, config.ppo.normalise_std, config.layout) == (0.2, False, "tree")


def test_overrides_merge_into_sections(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(MINIMAL | {"ppo": {"clip": 0.1, "weight": 2.0}}))
    config = load_config(tmp_path / "c.yaml", ["ppo.clip=0.3"])
    assert (config.ppo.clip, config.ppo.weight) == (0.3, 2.0)


def test_a_missing_key_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing trace"):
        parse_config({k: v for k, v in MINIMAL.items() if k != "trace"})
    (tmp_path / "big.yaml").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(InputError, match="at most 1048576"):
        load_config(tmp_path / "big.yaml")
    with pytest.raises(InputError, match="at most 1048576"):
        load_config("/dev/zero")


def test_a_path_with_brackets_is_printed_as_it_is(
    setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", str(write_config(setup, tmp_path)), f"output={tmp_path}/[bold]run", "steps=1"]) == 0
    assert f"checkpoint: {tmp_path}/[bold]run/step-000001" in capsys.readouterr().out


def test_a_demo_folder_with_an_empty_model_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models/teacher").mkdir(parents=True)
    assert run(["demo", "-o", str(tmp_path)]) == 2
    stage, *err = lines(capsys.readouterr().err)
    assert stage.startswith("models") and len(err) == 1 and "holds no model (no config.json)" in err[0]
