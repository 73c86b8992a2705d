"""Thrift's compact protocol as plain data, so that a Parquet footer or page header can be read, bent and written back.

A struct is a list of `[field id, type, value]`; a list or set is `[item type, values]`; a map is `[key type, value
type, pairs]`; integers, bytes and floats stand for themselves. Booleans of a struct are told by their type alone.
"""

from __future__ import annotations

import struct
from typing import Any

TRUE, FALSE, I8, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
INTEGERS = (I16, I32, I64)
MAX_DEPTH = 64

Struct = list[list[Any]]


def decode(data: bytes, at: int = 0) -> tuple[Struct, int]:
    """The struct that begins at `at`, and where it ends.

    Raises:
        ValueError, IndexError: the bytes are no such struct.
    """
    return _struct(data, at, 0)


def encode(fields: Struct) -> bytes:
    """The bytes of a struct; field ids are written in full, so any order and any repetition will do."""
    out = bytearray()
    for number, kind, value in fields:
        out += bytes([kind]) + varint(zigzag(number)) + (b"" if kind in (TRUE, FALSE) else _encode(kind, value))
    return bytes(out + b"\0")


def get(fields: Struct, *path: int) -> Any:
    """The value at a path of field ids, `None` where a field is absent."""
    value: Any = fields
    for number in path:
        value = next((v for n, _, v in value if n == number), None)
        if value is None:
            return None
    return value


def put(fields: Struct, number: int, value: Any) -> None:
    """Replace the value of a field that is there."""
    next(f for f in fields if f[0] == number)[2] = value


def varint(value: int) -> bytes:
    """An unsigned number, seven bits a byte."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def zigzag(value: int) -> int:
    """A signed number as an unsigned one; wider than 64 bits wraps, as a writer in C would."""
    return (value << 1 ^ value >> 63) & (1 << 64) - 1


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, more, shift = at + 1, data[at] & 128, shift + 7
        if not more:
            return value, at
        if shift > 70:
            raise ValueError("a number without end")


def _struct(data: bytes, at: int, depth: int) -> tuple[Struct, int]:
    if depth > MAX_DEPTH:
        raise ValueError("structs nested too deep")
    fields: Struct = []
    number = 0
    while head := data[at]:
        kind, at = head & 15, at + 1
        if head >> 4:
            number += head >> 4
        else:
            raw, at = _read_varint(data, at)
            number = raw >> 1 ^ -(raw & 1)
        value, at = (kind == TRUE, at) if kind in (TRUE, FALSE) else _decode(data, at, kind, depth)
        fields.append([number, kind, value])
    return fields, at + 1


def _decode(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in INTEGERS:
        raw, at = _read_varint(data, at)
        return raw >> 1 ^ -(raw & 1), at
    if kind in (TRUE, FALSE, I8):
        return data[at], at + 1
    if kind == DOUBLE:
        return struct.unpack_from("<d", data, at)[0], at + 8
    if kind == BINARY:
        size, at = _read_varint(data, at)
        if at + size > len(data):
            raise ValueError("a string beyond the end")
        return data[at : at + size], at + size
    if kind in (LIST, SET):
        return _list(data, at, depth)
    if kind == STRUCT:
        return _struct(data, at, depth + 1)
    raise ValueError(f"no such type: {kind}")


def _list(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    size, item, at = data[at] >> 4, data[at] & 15, at + 1
    if size == 15:
        size, at = _read_varint(data, at)
    values = []
    for _ in range(size):
        value, at = _decode(data, at, item, depth)
        values.append(value)
    return [item, values], at


def _encode(kind: int, value: Any) -> bytes:
    if kind in INTEGERS:
        return varint(zigzag(value))
    if kind in (TRUE, FALSE, I8):
        return bytes([value & 255])
    if kind == DOUBLE:
        return struct.pack("<d", value)
    if kind == BINARY:
        return varint(len(value)) + value
    if kind in (LIST, SET):
        item, values = value
        return bytes([0xF0 | item]) + varint(len(values)) + b"".join(_encode(item, v) for v in values)
    return encode(value)
