"""What a fault of the metadata says, however large the value that is at fault."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from memopd_trace.metadata import Producer, Tokenizer, first_error


def fault(value: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Producer(name=value)
    return first_error(caught.value)


def test_a_value_is_shown_as_it_was_given() -> None:
    assert fault(5) == "name: input should be a valid string, got 5"
    assert fault({"a": [1]}) == "name: input should be a valid string, got {'a': [1]}"


def test_a_value_that_holds_itself_many_times_over_costs_nothing_to_show() -> None:
    bomb: list[Any] = ["boom"]
    for _ in range(100):  # 10^100 items when written out
        bomb = [bomb] * 10
    assert len(fault(bomb)) < 200
    nested: dict[str, Any] = {}
    for _ in range(100):
        nested = {str(n): nested for n in range(10)}
    assert len(fault(nested)) < 200
    assert len(fault(["x" * 10**6] * 3)) < 300


def test_a_number_too_long_to_print_is_told_by_its_length() -> None:
    assert fault(1 << 20_000).endswith("got a number of 20001 bits")
    with pytest.raises(ValidationError) as caught:
        Tokenizer(fingerprint="f", size=1, vocab_size=2**63)
    assert first_error(caught.value) == "vocab_size: input should be less than 2147483648, got 9223372036854775808"
