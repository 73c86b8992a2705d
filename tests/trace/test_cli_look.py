"""`stats`, `show`, `diff` and `schema` on the command line: what goes where, and the exit codes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_look import METADATA, row, save
from helpers_trace import VECTORS, build, builder, changed, valid
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel

from memopd_trace import read
from memopd_trace.cli import app, run
from memopd_trace.errors import InputError
from memopd_trace.pieces import load_pieces

Capture = pytest.CaptureFixture[str]
COMMAND = f"{sys.executable} -c 'from memopd_trace.cli import main; main()'"
HOSTILE = "[bold]e\x1b[2J\r\x9b\u202e0"
SHOWN = "[bold]e\\x1b[2J\\r\\x9b\\u202e0"
EVERY = sorted([*(VECTORS / "valid").glob("*.json"), *(VECTORS / "invalid").glob("*.json")])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(build(valid("train"), tmp_path, "good"))


@pytest.mark.parametrize("command", ["stats", "show", "diff", "schema"])
def test_the_help_has_an_example(command: str, capsys: Capture) -> None:
    assert run([command, "--help"]) == 0
    assert f"Example: memopd-trace {command} " in capsys.readouterr().out
    assert command in {c.name or c.callback.__name__ for c in app.registered_commands if c.callback is not None}


def test_the_help_of_validate_names_the_tables_of_its_configuration(capsys: Capture) -> None:
    assert run(["validate", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "[validate] of memopd-trace.toml" in words and "[tool.memopd-trace.validate] of pyproject.toml" in words
    assert "2: a wrong call" in words


def test_stats_prints_a_table_or_one_json_document(trace: str, capsys: Capture) -> None:
    assert run(["stats", trace]) == 0
    out, err = capsys.readouterr()
    lines = {" ".join(line.split()) for line in out.splitlines()}
    assert "rows 4 rows, 2 episodes, 1 group" in lines
    assert "total prompt 19, output 10, sampled 10, trained 10" in lines
    assert "shared within groups 29 -> 18 distinct (1.61x)" in lines
    assert "relations root: 2, extend: 1, rewrite: 1" in lines
    assert "log-probabilities 100% of output tokens, 100% of trained ones; mean -0.8100 nats" in lines
    assert err == "" and "\x1b" not in out
    assert run(["stats", trace, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["stats_version"], found["rows"], found["path"]) == ("1", 4, trace)


def test_stats_of_unsound_rows_point_to_the_validator(tmp_path: Path, capsys: Capture) -> None:
    path = build(changed("train", (0, {"output_logprobs": [-0.7]})), tmp_path)
    assert run(["stats", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "rows unsound        1\n" in out
    assert err.startswith("arrays of 1 rows do not fit together") and "validate" in err


def test_show_draws_the_first_episodes_and_counts_the_others(tmp_path: Path, capsys: Capture) -> None:
    path = str(save(tmp_path / "t.parquet", [row(f"e{i}", k, [5]) for i in range(8) for k in range(2)]))
    assert run(["show", path]) == 0
    out = capsys.readouterr().out
    assert out.count("episode 'e") == 5 and out.endswith("and 3 more episodes; --episode ID names one\n")
    assert run(["show", path, "--full"]) == 0
    assert capsys.readouterr().out.count("episode 'e") == 8
    assert run(["show", path, "--episode", "e7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("episode 'e7'  2 invocations\n") and out.count("episode") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--episode", "e9"], "no episode 'e9' (did you mean 'e0', 'e1'?)"),
        (["--invocation", "0"], "holds several episodes"),
        (["--episode", "e0", "--invocation", "3"], "no invocation 3 (it has 0 to 2)"),
        (["--episode", "e0", "--invocation", "-1"], "no invocation -1"),
        (["--tokenizer", "somewhere"], "text is shown of one invocation"),
        (["--episode", HOSTILE], f"no episode '{SHOWN}'"),
    ],
)
def test_a_wrong_choice_exits_2_with_the_way_out(
    arguments: list[str], message: str, trace: str, capsys: Capture
) -> None:
    assert run(["show", trace, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 1


def test_an_invocation_is_shown_with_the_traces_own_tokenizer_only(tmp_path: Path, capsys: Capture) -> None:
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        words = {f"{name}{i}": i for i in range(100)}
        RawTokenizer(WordLevel(words, f"{name}0")).save(str(tmp_path / name / "tokenizer.json"))
    mine = load_pieces(tmp_path / "mine").fingerprint
    tokenizer = METADATA.models["m"].tokenizer.model_copy(update={"fingerprint": mine})
    model = METADATA.models["m"].model_copy(update={"tokenizer": tokenizer})
    metadata = METADATA.model_copy(update={"models": {"m": model}})
    path = str(save(tmp_path / "t.parquet", [row("e", 0, [5, 6], [7, 2])], metadata))
    assert run(["show", path, "--invocation", "0", "--tokenizer", str(tmp_path / "mine")]) == 0
    assert "  │ mine5 mine6\n" in capsys.readouterr().out
    assert run(["show", path, "--invocation", "0", "--tokenizer", str(tmp_path / "other")]) == 3
    out, err = capsys.readouterr()
    assert out == "" and "E-TOKENIZER-MISMATCH" in err
    assert run(["show", path, "--invocation", "0", "--tokenizer", str(tmp_path / "gone")]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_diff_exits_0_1_and_3(trace: str, tmp_path: Path, capsys: Capture) -> None:
    other = str(build(changed("train", (1, {"reward": 2.0})), tmp_path, "other"))
    assert run(["diff", trace, trace]) == 0
    assert capsys.readouterr().out.endswith("equal: 4 rows\n")
    assert run(["diff", trace, other]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "different: 1 row in the same state with other columns; 3 rows equal; columns: reward 1"
    assert lines[3:] == ["episode 'e0', invocation 1: same state, other columns", "    reward: null -> 2.0"]
    assert run(["diff", trace, other, "--ignore-column", "reward"]) == 0
    assert run(["diff", trace, other, "--column", "prompt_ids"]) == 0
    assert run(["diff", trace, other + ".gone"]) == 3
    assert run(["diff", trace, other, "--column", "rewrd"]) == 2
    assert "did you mean reward" in capsys.readouterr().err


def test_diff_in_json(trace: str, tmp_path: Path, capsys: Capture) -> None:
    vector = changed("train", (1, {"output_ids": [9, 9]}))
    vector["metadata"]["producer"]["name"] = HOSTILE
    other = str(build(vector, tmp_path, "other"))
    assert run(["diff", trace, other, "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["diff_version"], found["equal"], found["other_state"]) == ("1", False, 1)
    assert found["metadata"][0]["key"] == "producer.name" and found["metadata"][0]["b"] == HOSTILE
    assert run(["diff", trace, other]) == 1
    out = capsys.readouterr().out
    assert 'metadata producer.name: "test vectors" -> "[bold]e\\u001b[2J\\r\\x9b\\u202e0"\n' in out
    assert run(["diff", trace, other, "--rows-only", "--column", "reward"]) == 0


def readable(path: str) -> bool:
    try:
        return sum(batch.num_rows for batch in read(path).iter_batches()) >= 0
    except InputError:
        return False


@pytest.mark.parametrize("part", range(4))
def test_any_trace_is_shown_or_refused_in_one_line(part: int, tmp_path: Path, capsys: Capture) -> None:
    one_of_each_code = [v for v in EVERY if not re.search(r"-[2-9]$", v.stem)]
    codes = set()
    for vector in one_of_each_code[part::4]:
        path = str(builder.build(builder.load(vector), tmp_path, vector.stem))
        expected = 0 if readable(path) else 3
        codes.add(expected)
        for arguments in (["stats", path], ["show", path], ["diff", path, path]):
            assert run(arguments) == expected, (vector.stem, arguments)
            out, err = capsys.readouterr()
            assert out if expected == 0 else len(err.splitlines()) == 1 and err.startswith("error: [E-")
    assert 0 in codes


def test_what_is_no_trace_exits_3(tmp_path: Path, trace: str, capsys: Capture) -> None:
    (tmp_path / "text.parquet").write_text("hello there")
    (tmp_path / "folder").mkdir()
    whole = Path(trace).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    for name, code in (
        ("gone", "E-NO-INPUT"),
        ("text.parquet", "E-UNREADABLE"),
        ("cut.parquet", "E-UNREADABLE"),
        ("folder", "E-INCOMPLETE"),
    ):
        path = str(tmp_path / name)
        for arguments in (["stats", path], ["show", path], ["diff", path, trace], ["diff", trace, path]):
            assert run(arguments) == 3
            out, err = capsys.readouterr()
            assert out == "" and err.startswith(f"error: [{code}] {path}") and len(err.splitlines()) == 1


def test_every_invocation_of_every_sound_vector_is_shown(tmp_path: Path, capsys: Capture) -> None:
    shown = 0
    for vector in (v for v in EVERY if v.parent.name == "valid"):
        loaded = builder.load(vector)
        path = str(builder.build(loaded, tmp_path, vector.stem))
        for cells in loaded["rows"]:
            name = ["--episode", cells["episode_id"], "--invocation", str(cells["invocation_index"])]
            assert run(["show", path, *name]) == 0
            shown += "sampled tokens" in capsys.readouterr().out
    assert shown > 20


def test_an_empty_trace_is_no_error(tmp_path: Path, capsys: Capture) -> None:
    path = str(save(tmp_path / "t.parquet", []))
    assert run(["stats", path]) == run(["show", path]) == run(["diff", path, path]) == 0
    out, err = capsys.readouterr()
    assert "no episodes\n" in out and "equal: 0 rows" in out and err == ""
    assert run(["show", path, "--episode", "e"]) == 2
    assert "the trace holds no rows" in capsys.readouterr().err


def test_a_traces_strings_reach_the_terminal_escaped(tmp_path: Path, capsys: Capture) -> None:
    cells = {"episode_id": HOSTILE, "finish_reason": HOSTILE, "rewards": {HOSTILE: 1.0}, "group_id": HOSTILE}
    vector = changed("train", (0, cells), (1, cells))
    vector["metadata"]["producer"]["name"] = HOSTILE
    vector["metadata"]["source"] = {"format": HOSTILE, "gaps": [{"code": HOSTILE, "detail": HOSTILE}]}
    path = str(build(vector, tmp_path))
    empty = str(save(tmp_path / "empty.parquet", []))
    one = ["--episode", HOSTILE, "--invocation", "0"]
    for arguments in (["stats", path], ["show", path], ["show", path, *one], ["diff", path, empty]):
        run(arguments)
        out, err = capsys.readouterr()
        assert SHOWN in out, arguments
        assert not {c for c in out + err if not c.isprintable() and c != "\n"}, arguments


def test_a_pipe_that_is_cut_is_no_error(tmp_path: Path) -> None:
    path = str(save(tmp_path / "t.parquet", [row("e", k, [5], parent_index=0 if k else None) for k in range(2000)]))
    for arguments, reader, lines in ((f"show {path}", "head -1", 1), (f"diff {path} {path} --format json", "true", 0)):
        line = f"set -o pipefail; {COMMAND} {arguments} | {reader}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, b""), arguments
        assert len(done.stdout.splitlines()) == lines


def test_colour_is_for_terminals_that_want_it(trace: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    run(["show", trace])
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    run(["show", trace])
    coloured = capsys.readouterr().out
    assert re.search("\x1b\\[3[0-7]m", coloured) and re.sub("\x1b\\[[0-9;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    run(["show", trace])
    assert not re.search("\x1b\\[[0-9;]*3[0-7]m", capsys.readouterr().out)


def test_a_drawing_is_one_in_any_encoding(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert run(["show", trace, "--episode", "e0"]) == 0
    drawn = narrow.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "\n  o 0  root" in drawn and "\n  * 2  rewrite:memory" in drawn
