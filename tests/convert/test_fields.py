"""Reading an object field by field: null, empty and zero are three things, and what nobody asks for is left over."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from memopd_trace.convert.fields import Fields, as_score
from memopd_trace.convert.losses import BrokenRecord, Losses


def fields(**values: Any) -> Fields:
    return Fields(values, Losses())


def test_null_and_missing_are_none_and_zero_is_not() -> None:
    f = fields(a=None, zero=0, empty="")
    assert f.number("a") is f.number("b") is None
    assert f.number("zero") == 0.0 and f.whole("zero") == 0 and f.text("empty") == ""


def test_an_empty_list_of_ids_is_null_and_counted() -> None:
    f = fields(ids=[], kept=[])
    assert f.ids("ids") is None and f.logprobs("kept") is None
    assert f.losses.degraded["an empty list of ids is null"].number == 1
    assert f.ids("kept", empty=True) is not None


def test_fillers_among_logprobs_are_null_and_counted() -> None:
    f = fields(p=[-0.5, -9999.0, None, 0.0, math.nan, -math.inf, 10**400])
    found = f.logprobs("p")
    assert found is not None and found.tolist() == [-0.5, None, None, 0.0, None, None, None]
    assert f.losses.degraded["a log-probability that is a filler is null"].number == 1
    assert f.losses.degraded["a log-probability that is not finite is null"].number == 3


@pytest.mark.parametrize("wrong", [-1, 2**31, 1.0, "1", None, True, False, [1], 1e30])
def test_what_is_no_token_id_names_its_place(wrong: Any) -> None:
    with pytest.raises(BrokenRecord, match=r"ids\[2\]: expected a token id, got "):
        fields(ids=[1, 0, wrong, 5]).ids("ids")


def test_ids_are_int32() -> None:
    found = fields(ids=[0, 1, 2**31 - 1]).ids("ids")
    assert found is not None and found.dtype == np.int32 and found.tolist() == [0, 1, 2**31 - 1]


@pytest.mark.parametrize(
    ("kind", "value"),
    [("text", 1), ("whole", 1.5), ("whole", 2**70), ("whole", True), ("number", "1"), ("number", True), ("flag", 1),
     ("items", {}), ("fields", []), ("each", [1]), ("ids", "12"), ("flags", [2]), ("flags", [0.0]), ("name", 1.5)],
)  # fmt: skip
def test_another_kind_than_asked_for_is_a_broken_record(kind: str, value: Any) -> None:
    with pytest.raises(BrokenRecord, match=r"x(\[0\])?: expected .* got "):
        getattr(fields(x=value), kind)("x")


def test_a_path_leads_to_the_fault() -> None:
    f = fields(response={"output": [{}, {"ids": [1, "x"]}]})
    inner = f.fields("response")
    assert inner is not None
    with pytest.raises(BrokenRecord, match=r"^response\.output\[1\]\.ids\[1\]: expected a token id, got 'x'$"):
        inner.each("output")[1].ids("ids")


def test_what_is_never_asked_for_is_left_over() -> None:
    f = fields(a=1, b=2, nothing=None, inner={"c": 3, "d": 4}, many=[{"e": 5}, {"e": 6, "f": 7}])
    assert f.whole("a") == 1
    inner = f.fields("inner")
    assert inner is not None and inner.whole("c") == 3 and [m.whole("e") for m in f.each("many")] == [5, 6]
    assert f.rest() == {"b": 2, "inner": {"d": 4}, "many": [{}, {"f": 7}]}
    inner.any("d")
    assert "inner" not in f.rest() and f.peek("b") == 2 and "b" in f.rest()


SECOND = datetime(2025, 8, 29, 20, 22, 19, tzinfo=UTC)


TIMES = ["2025-08-29T20:22:19Z", "2025-08-29T22:22:19+02:00", "2025-08-29T20:22:19", 1756498939.0]


@pytest.mark.parametrize("value", [*TIMES, *(1756498939 * unit for unit in (1, 10**3, 10**6, 10**9))])
def test_a_time_in_each_way_of_writing(value: Any) -> None:
    assert fields(t=value).time("t") == SECOND


@pytest.mark.parametrize("value", ["soon", "", -1, math.nan, 10**400, True, [], "9999-12-31T23:59:59-10:00"])
def test_what_is_no_time_is_null_and_counted(value: Any) -> None:
    f = fields(t=value)
    assert f.time("t") is None and f.losses.degraded["a time that cannot be read is null"].number == 1


def test_numbers_that_are_not_finite_are_null_and_counted() -> None:
    f = fields(a=math.nan, b=math.inf, c=10**400)
    assert [f.number(n) for n in "abc"] == [None] * 3
    assert f.losses.degraded["a number that is not finite is null"].number == 3


def test_what_may_be_something_else_is_left_over_then() -> None:
    f = fields(told={"a": 1}, text="x", version=3, words="7", name="step-7", large=2**63)
    assert f.maybe_fields("text") is f.maybe_fields("none") is None
    told = f.maybe_fields("told")
    assert told is not None and told.whole("a") == 1
    assert [f.version(n) for n in ("version", "words", "name", "large", "none")] == [3, 7, None, None, None]
    assert f.rest() == {"text": "x", "name": "step-7", "large": 2**63}


def test_a_score_is_a_number_that_is_none_of_the_largest() -> None:
    assert [as_score(v) for v in (1, -0.5, 0)] == [1.0, -0.5, 0.0]
    assert [as_score(v) for v in (True, "1", None, math.nan, math.inf, 2**53, 10**400)] == [None] * 7
