"""docs/contract.md: the scorer's promises, each with the tests that hold it, and what was measured.

Its text is `contract_page.md`, with names in braces for what is filled in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from sweep_contract import (
    EXPERTS_TIMES,
    HALF,
    HALF_RATIO,
    REAL,
    REAL_LIMIT,
    TOY_LIMITS,
    Cell,
    Errors,
    name_of,
)

_PAGE = Path(__file__).with_name("contract_page.md")

_HEADER = """| model | layout | backend | float64 | float32 | bfloat16 | | float16 | |
|---|---|---|---|---|---|---|---|---|"""
ONE_BY_ONE = "one by one"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# What each statement rests on: file -> tests.
TESTS: dict[str, dict[str, list[str]]] = {
    "tests_1": {
        "tests/scorer/test_contract.py": ["test_a_toy_is_within_the_contract"],
        "tests/scorer/test_exactness.py": [
            "test_packed_states_and_logprobs_equal_each_invocation_alone",
            "test_gradients_of_the_tree_equal_those_of_each_invocation_alone",
        ],
        "tests/scorer/test_eviction.py": ["test_any_recorded_eviction_reproduces_the_decoder"],
    },
    "tests_2": {"tests/scorer/test_contract.py": ["test_a_real_model_is_within_the_contract"]},
    "tests_3": {"tests/scorer/test_exactness.py": ["test_a_branch_never_moves_with_its_siblings"]},
    "tests_4": {"tests/scorer/test_exactness.py": ["test_the_order_of_invocations_and_the_budget_change_nothing"]},
    "tests_5": {"tests/scorer/test_contract.py": ["test_a_backend_that_is_wrong_is_beyond_its_limit"]},
    "tests_probe": {
        "tests/scorer/test_probe_half.py": [
            "test_a_leak_smaller_than_the_rounding_is_found",
            "test_every_type_is_judged_in_half_precision_as_in_float32",
        ]
    },
    "tests_flash": {
        "tests/scorer/test_flash.py": [
            "test_flash_attn_is_called_as_its_signature_wants",
            "test_torchs_kernel_is_called_as_its_signature_wants",
        ]
    },
    "tests_page": {"tests/scorer/test_contract.py": ["test_every_number_of_the_page_is_within_its_limit"]},
}


def to_markdown(cells: Sequence[Cell], tokens: int, real_tokens: int) -> str:
    """The page; `tokens` and `real_tokens` = sampled tokens of a toy and of the real model."""
    named = {key: "; ".join(_tests(files)) for key, files in TESTS.items()}
    alone = sorted({(c.model, c.reason) for c in cells if c.reason})
    return _PAGE.read_text().format(
        **named,
        **{name_of(dtype): limit for dtype, limit in TOY_LIMITS.items()},
        real=REAL,
        real_limit=REAL_LIMIT,
        ratio=HALF_RATIO,
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        tokens=tokens,
        real_tokens=real_tokens,
        table="\n".join([_HEADER, *_rows(cells)]),
        alone="\n".join(f"*{model}* is run alone: {reason}." for model, reason in alone),
        times=EXPERTS_TIMES,
    )


def _tests(files: dict[str, list[str]]) -> Iterator[str]:
    for file, tests in files.items():
        yield f"`{file}`: " + ", ".join(f"`{test}`" for test in tests)


def _rows(cells: Sequence[Cell]) -> Iterator[str]:
    for model in dict.fromkeys(c.model for c in cells):
        own = [c for c in cells if c.model == model]
        for layout, backend in dict.fromkeys((c.layout, c.backend) for c in own):
            by_dtype = {c.dtype: c for c in own if (c.layout, c.backend) == (layout, backend)}
            yield _row(model, layout, backend, {d: (c.errors, c.ratio) for d, c in by_dtype.items()})
        if not any(c.reason for c in own):
            yield _row(model, ONE_BY_ONE, "", {c.dtype: (c.alone, None) for c in own if c.alone is not None})


def _row(model: str, layout: str, backend: str, found: dict[torch.dtype, tuple[Errors | None, float | None]]) -> str:
    columns = [model, layout, backend]
    for dtype in _DTYPES:
        errors, ratio = found.get(dtype, (None, None))
        columns.append("" if errors is None else f"{errors.largest:.1e} / {errors.p999:.1e} / {errors.mean:.1e}")
        if dtype in HALF:
            columns.append("" if ratio is None else f"{ratio:.2f}")
    return f"| {' | '.join(columns)} |"
