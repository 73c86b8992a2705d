"""The configuration of `validate`: where it is found, what it may say, and that the command line wins."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path

import pytest
from helpers_trace import build, changed

from memopd_trace.cli import run, validate
from memopd_trace.errors import UsageError
from memopd_trace.report import FORMATS
from memopd_trace.settings import Settings, find_config, load_config
from memopd_trace.validate import validate as check

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a doubtful trace (one warning, no reward) in `runs/deep`, which is the current folder."""
    (tmp_path / ".git").mkdir()
    folder = tmp_path / "runs" / "deep"
    folder.mkdir(parents=True)
    build(changed("train", (0, {"kv_policy_version": 1}), (2, {"reward": None})), folder, "t")
    monkeypatch.chdir(folder)
    return tmp_path


def report_of(capsys: Capture, *arguments: str) -> tuple[int, dict[str, object]]:
    code = run(["validate", "t.parquet", "--format", "json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_it_is_found_upward_and_named_on_stderr(project: Path, capsys: Capture) -> None:
    (project / "pyproject.toml").write_text('[tool.memopd-trace.validate]\nprofile = "train"\n')
    assert run(["validate", "t.parquet"]) == 1
    out, err = capsys.readouterr()
    assert err == f"configured by {project}/pyproject.toml\n"
    assert "profile train" in out
    for arguments in (["-q", "validate", "t.parquet"], ["validate", "t.parquet", "-q"]):
        assert run(arguments) == 1
        assert capsys.readouterr().err == ""


def test_the_command_line_wins_and_no_config_means_none(project: Path, capsys: Capture) -> None:
    keys = 'profile = "train"', 'fail-on = "warning"', 'format = "github"', "max-findings = 0", 'ignore = ["E-NEEDS-*"]'
    (project / "memopd-trace.toml").write_text("\n".join(["[validate]", *keys]))
    assert run(["validate", "t.parquet"]) == 1
    assert capsys.readouterr().out.startswith("W-KV-STALE: 1 findings, 0 shown\n")
    code, report = report_of(capsys, "--profile", "lineage", "--fail-on", "error", "--max-findings", "1")
    assert (code, report["profile"], report["warnings"]) == (0, "lineage", 1)
    code, report = report_of(capsys, "--ignore", "W-*")
    assert (code, report["errors"], report["warnings"]) == (1, 1, 0), "its `ignore` took the file's place"
    code, report = report_of(capsys, "--no-config")
    assert (code, report["profile"]) == (0, "core")


def test_the_nearest_file_wins_and_its_own_goes_before_pyproject(project: Path) -> None:
    far, near = project / "memopd-trace.toml", project / "runs" / "pyproject.toml"
    far.write_text("[validate]\n")
    assert (config := find_config(Path.cwd())) is not None and config.path == far
    near.write_text("[project]\nname = 'x'\n")
    assert (config := find_config(Path.cwd())) is not None and config.path == far, "one without the table is passed by"
    near.write_text("[tool.memopd-trace.validate]\n")
    assert (config := find_config(Path.cwd())) is not None and config.path == near
    (own := project / "runs" / "memopd-trace.toml").write_text("[validate]\n")
    assert (config := find_config(Path.cwd())) is not None and config.path == own


def test_it_is_not_looked_for_above_a_repository_or_outside_of_one(project: Path) -> None:
    (project / "memopd-trace.toml").write_text("[validate]\n")
    (project / "runs" / ".git").write_text("gitdir: elsewhere\n")  # as in a work tree or a submodule
    assert find_config(Path.cwd()) is None
    (project / "runs" / ".git").unlink()
    assert find_config(Path.cwd()) is not None
    (project / ".git").rmdir()
    assert find_config(Path.cwd()) is None, "another user's folder above is none of ours"
    assert find_config(project) is not None


def test_paths_count_from_the_files_folder(project: Path) -> None:
    (project / "memopd-trace.toml").write_text('[validate]\nscores = ["s/x", "/s"]\nviews = "/v"\n')
    config = find_config(Path.cwd())
    assert config is not None
    assert config.options == {"scores": [project / "s" / "x", Path("/s")], "views": Path("/v")}


def test_codes_may_be_ignored_in_some_files(project: Path, capsys: Capture) -> None:
    (Path.cwd() / "t.parquet").rename("[old].parquet")
    build(changed("train", (0, {"kv_policy_version": 1})), Path.cwd(), "new")
    config = project / "memopd-trace.toml"
    config.write_text('[validate]\n[validate.per-file-ignores]\n"runs/*old*" = ["W-*", "E-NO-INPUT"]\n')
    assert run(["validate", "[old].parquet", "new.parquet", "gone-old", "--format", "json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert [t["counts"] for t in report["traces"]] == [{}, {"W-KV-STALE": 1}, {"E-NO-INPUT": 1}]
    assert [r["status"] for r in report["rules"] if r["code"] == "W-KV-STALE"] == ["warn"]
    alone = check("[old].parquet", per_file_ignores={"*": ["W-KV-*"]})
    assert [(r.status, r.reason) for r in alone.rules if r.code == "W-KV-STALE"] == [
        ("not run", "ignored in this file")
    ]


WRONG = [
    ("profil = 'train'", "no key validate.profil (did you mean profile?)"),
    ("fail_on = 'warning'", "no key validate.fail_on (did you mean fail-on?)"),
    ("zzz = 1", "no key validate.zzz (known: profile, select,"),
    ("profile = 'trian'", "profile: Input should be 'core', 'lineage', 'policy' or 'train'"),
    ("max-findings = -1", "max-findings: Input should be greater than or equal to 0"),
    ("max-findings = '3'", "max-findings: Input should be a valid integer"),
    ("ignore = 'W-KV-STALE'", "ignore: Input should be a valid list"),
    ("ignore = ['W-KV-STAL']", "no code matches 'W-KV-STAL' (did you mean W-KV-STALE"),
    ("per-file-ignores = {'x' = ['E-NOTHING']}", "no code matches 'E-NOTHING'"),
    ("max-memory = inf", "max-memory: Input should be less than or equal to"),
    ("max-findings = " + "9" * 5000, "is not TOML: "),
    ("profile = ", "is not TOML: "),
    ("profile = 'train'\n[validat]", "no key validat (did you mean validate?)"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[w[0][:40] for w in WRONG])
def test_a_wrong_one_exits_2_with_one_line(text: str, message: str, project: Path, capsys: Capture) -> None:
    (project / "memopd-trace.toml").write_text(f"[validate]\n{text}\n")
    assert run(["validate", "t.parquet"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert f"error: {project}/memopd-trace.toml: {message}" in err
    assert run(["validate", "t.parquet", "--no-config"]) == 0


def test_other_wrong_files(project: Path, capsys: Capture) -> None:
    file = project / "pyproject.toml"
    for content, message in (
        (b'[tool.memopd-trace]\nprofile = "train"\n', "no key tool.memopd-trace.profile"),
        (b"[tool]\nmemopd-trace = 1\n", "tool.memopd-trace is no table"),
        (b"[tool.memopd-trace]\nvalidate = 1\n", "tool.memopd-trace.validate is no table"),
        (b"\xff\xfe", "is not TOML"),
        (b"a = " + b"[" * 100_000, "is not TOML"),
        (b"#" * (2**20 + 1), "more than 1048576 bytes"),
    ):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=message.replace(".", r"\.")):
            find_config(Path.cwd())


def test_a_named_file_must_be_there_and_have_the_table(project: Path, capsys: Capture) -> None:
    assert run(["validate", "t.parquet", "--config", "gone.toml"]) == 2
    message = "error: gone.toml: No such file or directory (give another --config, or --no-config)\n"
    assert capsys.readouterr().err == message
    (project / "other.toml").write_text("")
    with pytest.raises(UsageError, match=r"has no table \[validate\]"):
        load_config(project / "other.toml")
    (project / "other.toml").write_text('[validate]\nprofile = "policy"\n')
    code, report = report_of(capsys, "--config", str(project / "other.toml"))
    assert (code, report["profile"]) == (0, "policy")
    assert run(["validate", "t.parquet", "--no-config", "--config", str(project / "other.toml")]) == 2
    assert run(["validate", "t.parquet", "--config", str(project / "other.toml"), "--no-config"]) == 2


def test_what_never_ends_is_no_configuration(project: Path, capsys: Capture) -> None:
    os.mkfifo(project / "fifo")
    for path in (project / "fifo", Path("/dev/zero")):
        assert run(["validate", "t.parquet", "--config", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {path}: is no regular file")


@pytest.mark.parametrize("size", ["inf", "1e308", "nan", "-1"])
def test_memory_is_a_number_that_a_system_can_take(size: str, project: Path, capsys: Capture) -> None:
    assert run(["validate", "t.parquet", "--max-memory", size]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_folder_that_was_removed_has_no_configuration(project: Path, capsys: Capture) -> None:
    trace = (Path.cwd() / "t.parquet").rename(project / "t.parquet")
    Path.cwd().rmdir()
    for format in FORMATS:
        assert run(["validate", str(trace), "--format", format]) == 0
        assert "W-KV-STALE" in capsys.readouterr().out


def test_every_key_is_an_option_of_the_command_with_the_same_default_and_the_other_way_round() -> None:
    options = inspect.signature(validate.check).parameters
    of_one_call = {"ctx", "paths", "output", "exit_zero", "config", "no_config", "quiet"}
    assert set(options) - of_one_call == set(Settings.model_fields) - {"per_file_ignores"}
    for name in set(options) - of_one_call:
        assert options[name].default.default == Settings.model_fields[name].default, name
