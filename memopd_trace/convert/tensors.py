"""Tensors of trainers' batches as rows: nested lists, or values in base64 with a shape and a type beside them
(`{"type": "tensor", "data": "…", "shape": […], "dtype": "torch.int64"}`)."""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any

import numpy as np

from memopd_trace.convert.fields import Fields
from memopd_trace.convert.losses import BrokenRecord

DTYPES = {
    "float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<f4", "int64": "<i8", "int32": "<i4",
    "int16": "<i2", "int8": "i1", "uint8": "u1", "bool": "?",
}  # of the values in base64; bfloat16 is written as float32  # fmt: skip
MAX_DIMENSIONS = 8


def matrix(record: Fields, name: str, rows: int | None = None) -> list[list[Any]] | None:
    """A tensor as its rows; one of a single dimension is one row. `None` where it is missing.

    Raises:
        BrokenRecord: it is no tensor, is damaged, or has another number of `rows`.
    """
    value = _plain(record.any(name), name)
    if value is None:
        return None
    if not isinstance(value, list):
        raise BrokenRecord(f"{name}: expected a tensor")
    if value and not all(isinstance(v, list) for v in value):
        value = [value]
    if rows is not None and len(value) != rows:
        raise BrokenRecord(f"{name}: expected {rows} rows, got {len(value)}")
    return value


def vector(record: Fields, name: str, rows: int) -> list[Any]:
    """One value for each row, `None` for each where the tensor is missing; a bare number is a vector of one.

    Raises:
        BrokenRecord: it is no tensor, is damaged, or has another number of rows.
    """
    value = _plain(record.any(name), name)
    if value is None:
        return [None] * rows
    value = value if isinstance(value, list) else [value]
    if len(value) != rows or any(isinstance(v, list) for v in value):
        raise BrokenRecord(f"{name}: expected a value for each of {rows} rows")
    return value


def bits(values: list[Any], name: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """A row of 0 and 1, or of true and false, as a mask.

    Raises:
        BrokenRecord: a value is neither.
    """
    if not all(isinstance(v, int | float) and v in (0, 1) for v in values):
        raise BrokenRecord(f"{name}: expected 0 and 1")
    return np.array(values, bool)


def _plain(value: Any, name: str) -> Any:
    """A tensor's values as nested lists; lists and numbers as they are."""
    if not isinstance(value, dict):
        return value
    data, shape, kind = value.get("data"), value.get("shape"), str(value.get("dtype")).removeprefix("torch.")
    if value.get("type") not in ("tensor", "ndarray") or not isinstance(data, str) or not isinstance(shape, list):
        raise BrokenRecord(f"{name}: a tensor without its values")
    try:
        array = np.frombuffer(base64.b64decode(data, validate=True), DTYPES.get(kind, kind))
        sizes = [size for size in shape if type(size) is int and size >= 0]
        whole = len(sizes) == len(shape) <= MAX_DIMENSIONS and math.prod(sizes) == array.size
        if array.dtype.kind not in "fiub" or not whole:
            raise ValueError
        return array.reshape(sizes).tolist()
    except (ValueError, TypeError, SyntaxError, binascii.Error):
        raise BrokenRecord(f"{name}: a damaged tensor") from None
