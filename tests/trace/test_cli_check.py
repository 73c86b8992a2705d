"""`validate`, `explain` and `codes` on the command line: what goes where, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_trace import build, changed, valid

from memopd_trace.cli import run
from memopd_trace.cli.console import notice, require
from memopd_trace.errors import InputError, MissingExtraError, first_line
from memopd_trace.report import FORMATS
from memopd_trace.rules import RULES, codes_json
from memopd_trace.validate import require_valid

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def good(tmp_path: Path) -> str:
    return str(build(valid("train"), tmp_path, "good"))


@pytest.fixture
def bad(tmp_path: Path) -> str:
    return str(build(changed("train", (0, {"output_logprobs": [-0.7, "NaN", -1.6]})), tmp_path, "bad"))


@pytest.fixture
def doubtful(tmp_path: Path) -> str:
    return str(build(changed("train", (0, {"kv_policy_version": 1})), tmp_path, "doubtful"))


def test_a_clean_trace_exits_0_and_ends_in_totals(good: str, capsys: Capture) -> None:
    assert run(["validate", good, "--profile", "train"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("0 errors, 0 warnings; 4 rows, 2 episodes; profile train: ")
    assert err == ""


def test_a_finding_exits_1_and_is_one_line_with_its_place(bad: str, capsys: Capture) -> None:
    assert run(["validate", bad]) == 1
    first, expected, actual, hint, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{bad}:0: error[E-LOGPROB-NAN] output_logprobs[1] is NaN (episode 'e0', invocation 0)"
    assert expected.split() == ["expected:", "a", "number", "or", "null"]
    assert actual.split() == ["actual:", "nan"]
    assert hint.strip().startswith("hint:")


def test_warnings_fail_only_when_asked_to(doubtful: str, capsys: Capture) -> None:
    assert run(["validate", doubtful]) == 0
    assert "warning[W-KV-STALE]" in capsys.readouterr().out
    assert run(["validate", doubtful, "--fail-on", "warning"]) == 1
    assert run(["validate", doubtful, "--fail-on", "warning", "--ignore", "W-*"]) == 0


@pytest.mark.parametrize("format", FORMATS)
def test_the_exit_code_does_not_depend_on_the_format(format: str, good: str, bad: str, capsys: Capture) -> None:
    assert run(["validate", good, "--format", format]) == 0
    assert run(["validate", good, bad, "--format", format]) == 1
    assert run(["validate", good, bad, "--format", format, "--exit-zero"]) == 0
    assert run(["validate", good, bad + ".gone", "--format", format, "--exit-zero"]) == 3
    out, err = capsys.readouterr()
    assert "E-NO-INPUT" in out and err == ""


def test_json_is_one_document_on_stdout_or_in_a_file(bad: str, tmp_path: Path, capsys: Capture) -> None:
    assert run(["validate", bad, "--format", "json", "--profile", "policy"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["report_version"], printed["profile"], printed["errors"]) == ("1", "policy", 1)
    file = tmp_path / "new" / "report.json"
    assert run(["validate", bad, "--format", "json", "--profile", "policy", "-o", str(file)]) == 1
    assert json.loads(file.read_text()) == printed
    assert capsys.readouterr().out == ""


def test_options_that_may_be_repeated(bad: str, capsys: Capture) -> None:
    assert run(["validate", bad, "--select", "E-LOGPROB-INF", "--select", "E-INDEX"]) == 0
    assert "2 rules run" in capsys.readouterr().out
    assert run(["validate", bad, "--ignore", "W-*", "--ignore", "E-LOGPROB-NAN"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate"],
        ["validate", "x", "--profile", "strict"],
        ["validate", "x", "--ignore", "E-NOTHING"],
        ["validate", "x", "--max-findings", "-1"],
        ["explain", "E-DISCONTINUTY"],
        ["schema", "score"],
    ],
)
def test_a_wrong_call_exits_2_with_one_line(arguments: list[str], capsys: Capture) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1


def test_explain_prints_the_page_and_suggests_the_nearest_code(capsys: Capture) -> None:
    assert run(["explain", "e-discontinuity"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(RULES["E-DISCONTINUITY"].page)
    assert "Profiles: core, lineage, policy, train. Severity: error." in out
    assert f"({RULES['E-DISCONTINUITY'].clause_url})" in out
    assert run(["explain", "E-DISCONTINUTY"]) == 2
    assert "did you mean E-DISCONTINUITY" in capsys.readouterr().err


def test_explain_is_set_as_text_on_a_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert run(["explain", "E-INDEX"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[1mWhy.\x1b[0m" in out and "**" not in out and "```" not in out
    assert "\x1b]8" not in out, "no hyperlinks"


def test_a_wrong_choice_is_told_in_plain_words(capsys: Capture) -> None:
    for arguments, message in (
        (["schema", "score"], "no table 'score' (did you mean scores?)"),
        (["schema", "zzz"], "no table 'zzz' (one of trace, views, scores)"),
        (["validate", "x", "--profile", "zzz"], "Invalid value for '--profile': 'zzz' is not one of 'core', "),
    ):
        assert run(arguments) == 2
        assert capsys.readouterr().err.startswith(f"error: {message}")


def test_codes_lists_what_a_profile_turns_on(capsys: Capture) -> None:
    assert run(["codes"]) == 0
    everything = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in everything] == list(RULES)
    assert run(["codes", "--profile", "core"]) == 0
    core = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in everything} - {line.split()[0] for line in core} == {
        c for c, rule in RULES.items() if c.startswith("E-NEEDS-") or rule.phase == "run"
    }
    assert run(["codes", "--format", "json"]) == 0
    assert capsys.readouterr().out == codes_json()


HOSTILE = "[bold]e\x1b[2J\r\x9b\u202e0"
SHOWN = "[bold]e\\x1b[2J\\r\\x9b\\u202e0"


def raw(out: str) -> set[str]:
    return {c for c in out if not c.isprintable() and c != "\n"}


def test_a_traces_strings_reach_the_terminal_escaped_and_are_no_markup(tmp_path: Path, capsys: Capture) -> None:
    changes = {"episode_id": HOSTILE, "logprob_kind": HOSTILE}
    vector = changed("train", (0, changes), (1, changes))
    vector["metadata"]["source"] = {"format": HOSTILE, "gaps": [{"code": HOSTILE, "detail": HOSTILE}]}
    vector["metadata"]["producer"]["name"] = HOSTILE
    path = build(vector, tmp_path)
    assert run(["validate", str(path)]) == 1
    out = capsys.readouterr().out
    assert not raw(out)
    assert f"(episode '{SHOWN}', invocation 0)" in out
    assert f"actual:   '{SHOWN}'\n" in out
    assert f"producer {SHOWN}" in out and f"could not tell: {SHOWN} ({SHOWN})\n" in out
    with pytest.raises(InputError) as error:
        require_valid(path)
    assert f"episode '{SHOWN}', invocation 0" in str(error.value)
    assert not raw(str(error.value))


def test_errors_and_notices_print_no_control_character(capsys: Capture) -> None:
    assert run(["validate", "x", "--profile", HOSTILE]) == 2
    err = capsys.readouterr().err
    assert not raw(err) and len(err.splitlines()) == 1 and "\\x1b[2J" in err
    notice(f"segment {HOSTILE}")
    assert capsys.readouterr().err == f"segment {SHOWN}\n"


def test_a_very_long_value_is_cut_and_its_place_is_still_told(tmp_path: Path, capsys: Capture) -> None:
    changes = {"episode_id": "e" * 10_000, "finish_reason": "y" * 10_000}
    path = build(changed("train", (0, changes), (1, changes)), tmp_path)
    assert run(["validate", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"(episode '{'e' * 199}…', invocation 0)\n" in out
    assert f"actual:   '{'y' * 198}…\n" in out
    assert max(map(len, out.splitlines())) < 1000
    with pytest.raises(InputError) as error:
        require_valid(path)
    assert len(str(error.value)) < 1000


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere.at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError) as error:
        require("needs_more", "score", "this command")
    assert str(error.value).startswith("this command needs 'not_installed_anywhere' (pip install 'memopd-trace[score]'")
    assert require("json", "score", "this command") is json


def test_recording_names_the_extra_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "memopd_trace.record.proxy.server", raising=False)
    assert run(["record", "--upstream", "http://127.0.0.1:1", "-o", str(tmp_path / "out")]) == 2
    assert "recording needs 'uvicorn' (pip install 'memopd-trace[record]'" in capsys.readouterr().err


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("\n  what\nwhere")) == "what"
    assert first_line(EOFError()) == "EOFError"


def test_a_report_that_cannot_be_written_is_one_line(good: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    assert run(["validate", good, "-o", str(tmp_path / "file" / "report.txt")]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_installed_command_works_and_needs_no_torch(bad: str) -> None:
    script = (
        "import sys; from memopd_trace.cli import run; code = run(sys.argv[1:]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, "validate", bad], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "error[E-LOGPROB-NAN]" in done.stdout and done.stderr == ""
