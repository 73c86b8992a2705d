"""The page on converters says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers_convert import LOGS, converted

from memopd_trace.cli import run
from memopd_trace.convert import run as run_module
from memopd_trace.convert.formats import FORMATS, find
from memopd_trace.convert.formats.__main__ import rendered
from memopd_trace.convert.gaps import GAPS
from memopd_trace.convert.known import KEEPS_FROM

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "converters.md").read_text(encoding="utf-8")


def test_the_table_is_that_of_the_code() -> None:
    assert rendered(PAGE) == PAGE, "make converters"


def test_the_registry_lists_the_gap_codes() -> None:
    registry = (ROOT / "spec" / "registry.md").read_text(encoding="utf-8")
    table = registry.split("## Gap codes")[1]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)) == GAPS


def test_the_page_explains_every_gap_and_what_it_keeps_from() -> None:
    table = PAGE.split("## Gaps")[1].split("## Formats")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    told = {code: row[3].strip("` ") for row in rows for code in re.findall(r"\w+", row[1])}
    kept_from = {code: profile for profile, codes in KEEPS_FROM.items() for code in codes}
    assert told == {code: kept_from.get(code, "") for code in GAPS}


def test_the_commands_of_the_page_are_taken_by_the_command_line(tmp_path: Path, capsys: Any) -> None:
    commands = re.findall(r"^memopd-trace (convert .*?)(?:  +#.*)?$", PAGE, re.MULTILINE)
    assert len(commands) > 8
    for command in commands:  # an input that is not there is the first thing that each of them minds
        words = [str(tmp_path / "none") if word == "trace.parquet" else word for word in command.split()]
        assert run(words) == 3, command
        assert "E-NO-INPUT" in capsys.readouterr().err


def test_the_converter_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    monkeypatch.setattr(run_module, "find", lambda name: scope["FORMAT"])
    long = list(range(10, 40))
    records = [
        {
            "run": "a",
            "call_id": 1,
            "prompt": long,
            "sampled": [7, 2],
            "logprobs": [-1, -9999.0],
            "why": "stop",
            "note": "x",
        },
        {"run": "b", "call_id": 1, "prompt": long, "sampled": [8, 2], "logprobs": [], "why": "length"},
        {"run": "a", "call_id": 2, "previous": 1, "prompt": [*long, 7, 2, 9], "sampled": [2], "why": "odd"},
    ]
    result, rows = converted(tmp_path, "mine", records)
    assert [(r.episode_id, r.relation, r.finish_reason) for r in rows] == [
        ("a", "root", "stop"), ("a", "extend", None), ("b", "root", "length"),
    ]  # fmt: skip
    assert rows[0].extra == {"note": "x"} and result.exit_code() == 0 and "no_parent" not in result.losses.gaps


def test_every_format_is_listed_and_found(capsys: Any) -> None:
    assert run(["formats"]) == 0
    out = capsys.readouterr().out
    for f in FORMATS:
        assert find(f.name) is f and f.name in out and f.title in out
        assert set(f.unsaid) <= set(GAPS)
    assert len({f.name for f in FORMATS}) == len(FORMATS)
    assert run(["formats", "--format", "json"]) == 0 and f'"{FORMATS[0].name}"' in capsys.readouterr().out


def test_every_format_is_damaged_in_the_tests() -> None:
    assert sorted(LOGS) == sorted(f.name for f in FORMATS)
