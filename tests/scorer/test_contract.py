"""docs/contract.md says what holds: every limit, every cell, every test that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sweep_contract as sweep
import torch
from contract_page import ONE_BY_ONE, TESTS, to_markdown
from sweep_contract import (
    HALF_RATIO,
    LAYOUTS,
    REAL,
    REAL_LAYOUTS,
    REAL_LIMIT,
    TOY_LIMITS,
    TOYS,
    Cell,
    Errors,
    limit_of,
    name_of,
)

from memopd_scorer.attention import sdpa
from memopd_scorer.attention.visibility import read_call

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contract.md"
ALONE = "Mamba: a recurrent state"


def rows() -> dict[tuple[str, str, str], list[str]]:
    """(model, layout, backend) -> the other columns."""
    found = {}
    for line in PAGE.read_text().splitlines():
        columns = [c.strip() for c in line.strip("|").split("|")]
        if len(columns) == 9 and columns[0] in {*TOYS, REAL}:
            found[columns[0], columns[1], columns[2]] = columns[3:]
    return found


def cells_of(model: str) -> set[tuple[str, str, str]]:
    if model == ALONE:
        return {(model, "single", "native")}
    layouts = REAL_LAYOUTS if model == REAL else LAYOUTS
    run = {(model, layout, backend) for layout, offered in layouts.items() for backend in offered}
    return run | {(model, ONE_BY_ONE, "")}


def test_the_page_has_every_model_layout_backend_and_dtype() -> None:
    found = rows()
    assert found.keys() == set().union(*(cells_of(model) for model in (*TOYS, REAL)))
    for (model, layout, _), columns in found.items():
        given = [bool(columns[i]) for i in (0, 1, 2, 4)]  # float64, float32, bfloat16, float16
        measured = [model != REAL, True, True, model != REAL]
        assert given == ([False, False, *measured[2:]] if layout == ONE_BY_ONE else measured), (model, layout)


def test_every_number_of_the_page_is_within_its_limit() -> None:
    for (model, layout, backend), (wide, single, *half) in rows().items():
        if layout == ONE_BY_ONE:
            continue
        assert model == REAL or largest(wide) <= limit_of(model, torch.float64), (model, layout, backend)
        assert largest(single) <= limit_of(model, torch.float32), (model, layout, backend)
        ratios = [float(r) for r in half[1::2] if r]
        assert ratios and max(ratios) <= HALF_RATIO, (model, layout, backend)
        for numbers in (wide, single, *half[::2]):
            if numbers:
                most, tail, mean = (float(n) for n in numbers.split("/"))
                assert most >= max(tail, mean) >= min(tail, mean) >= 0


def largest(column: str) -> float:
    return float(column.split("/")[0])


def test_the_tests_that_the_page_names_exist() -> None:
    named = dict[str, set[str]]()
    for files in TESTS.values():
        for file, tests in files.items():
            named.setdefault(file, set()).update(tests)
    for file, tests in named.items():
        there = set(re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE))
        assert tests <= there, tests - there
        assert all(f"`{name}`" in PAGE.read_text() for name in (file, *tests))


def test_the_text_of_the_page_is_what_would_be_written_now() -> None:
    def wording(text: str) -> list[str]:
        filled = ("|", *(f"*{model}*" for model in TOYS))
        lines = [line for line in text.splitlines() if line and not line.startswith(filled)]
        return [re.sub(r"\d[\d.]*", "#", line) for line in lines]

    assert wording(PAGE.read_text()) == wording(to_markdown([], 0, 0))
    limits = [f"{limit:.0e} in {name_of(dtype)}" for dtype, limit in TOY_LIMITS.items()]
    limits += [f"float32 on a CPU: {REAL_LIMIT:.0e}", f"at most {HALF_RATIO} times"]
    for said in limits:
        assert said in " ".join(PAGE.read_text().split())


@pytest.mark.parametrize("name", ["Gemma 3: windows, softcap of logits", "GPT-OSS: sinks, windows, experts"])
def test_a_toy_is_within_the_contract_in_float32(name: str) -> None:
    cells = list(sweep.measure_toy(name, [torch.float32], ("sdpa",)))
    assert {c.layout for c in cells} == set(LAYOUTS)
    assert [c for c in cells if not c.holds] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_a_toy_is_within_the_contract(name: str) -> None:
    cells = list(sweep.measure_toy(name))
    assert {(c.model, c.layout, c.backend) for c in cells} == {k for k in cells_of(name) if k[1] != ONE_BY_ONE}
    assert {c.dtype for c in cells} == set(sweep.DTYPES)
    assert [c for c in cells if not c.holds] == []


@pytest.mark.slow
def test_a_real_model_is_within_the_contract(smollm2: Path) -> None:
    cells = list(sweep.measure_real(smollm2))
    for cell in cells:
        print(cell)
    assert {(c.model, c.layout, c.backend) for c in cells} == {k for k in cells_of(REAL) if k[1] != ONE_BY_ONE}
    assert [c for c in cells if not c.holds] == []


def test_a_backend_that_is_wrong_is_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(module, query, key, value, mask, options):  # type: ignore[no-untyped-def]
        options["sliding_window"] = 12 if options.get("sliding_window") else None  # 4 more than there are
        return read_call(module, query, key, value, mask, options)

    monkeypatch.setattr(sdpa, "read_call", blind)
    monkeypatch.setattr(sweep, "probe", lambda *_: sweep.Capability("tree", "blind", 0.0, 1.0))
    cells = list(sweep.measure_toy("Gemma 3: windows, softcap of logits", [torch.float32, torch.bfloat16], ("sdpa",)))
    assert len(cells) == 2 * len(LAYOUTS) and not any(c.holds for c in cells)


def test_a_missing_or_infinite_number_is_beyond_every_limit() -> None:
    right = {("e", 0): torch.zeros(3)}
    for wrong in (torch.tensor([0.0, float("nan"), 0.0]), torch.tensor([0.0, 0.0, float("inf")])):
        assert not Cell("m", "tree", "sdpa", torch.float32, Errors.of({("e", 0): wrong}, right)).holds
        lost = Errors.of({("e", 0): torch.ones(3)}, right)
        assert not Cell("m", "tree", "sdpa", torch.bfloat16, Errors.of({("e", 0): wrong}, right), lost).holds
    with pytest.raises(AssertionError):
        Errors.of({}, right)
