"""Ways to damage a trace file: blind ones (flips, cuts, blocks), and ones that aim at what holds the file together.

Every mutation takes a `random.Random`, the file's bytes and another file's bytes, and returns the damaged bytes; where
it finds nothing to aim at, it flips a byte instead, so that every trial damages something.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from typing import Any

import helpers_thrift as thrift

Mutation = Callable[[random.Random, bytes, bytes], bytes]

ABSURD = (-1, -2, 1, 3, 255, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, -(2**31), -(2**63))
PARQUET_TAIL = 8  # the footer's length and the magic
FOOTER = {"row_groups": 4, "columns": 1, "meta": 3, "size": 7, "data": 9, "index": 10, "dictionary": 11}


def flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One byte becomes another one."""
    if not data:
        return bytes([rng.randrange(256)])
    return _flipped(rng, data, rng.randrange(len(data)))


def flip_many(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Two to sixteen bytes become others."""
    for _ in range(rng.randint(2, 16)):
        data = flip(rng, data, other)
    return data


def truncate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """The end is gone, and sometimes the beginning."""
    cut = data[: rng.randint(0, max(0, len(data) - 1))]
    return cut if rng.random() < 0.9 else cut[rng.randint(0, len(cut)) :]


def zero(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A stretch of zeros (a page that never reached the disk), or of ones."""
    start, size = _stretch(rng, data)
    return data[:start] + rng.choice([b"\0", b"\xff"]) * size + data[start + size :]


def duplicate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A stretch occurs twice, is left out, or is written over another place."""
    start, size = _stretch(rng, data)
    block = data[start : start + size]
    at = rng.randint(0, len(data))
    return rng.choice([data[:at] + block + data[at:], data[:start] + data[start + size :], _over(data, at, block)])


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """The front of one file and the end of another."""
    end = rng.randint(0, len(other))
    return data[: rng.randint(0, len(data))] + other[end:]


def tail(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A few flips in the footer, which both formats keep at the end."""
    reach = min(len(data), max(64, len(data) // 3))
    for _ in range(rng.randint(1, 4)):
        if reach:
            data = _flipped(rng, data, len(data) - 1 - rng.randrange(reach))
    return data


def absurd(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A 4- or 8-byte number somewhere becomes an absurd one."""
    return _over(data, rng.randint(0, max(0, len(data) - 4)), _number(rng))


def parquet_footer(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One value of the footer's tree becomes another, is left out or occurs twice; around it the file stays whole."""
    found = _footer(data)
    if found is None:
        return flip(rng, data, other)
    body, footer = found
    _bend(rng, footer)
    return _with_footer(body, footer)


def parquet_page(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One value of a page header becomes another; all offsets and sizes that follow are put right."""
    found = _footer(data)
    chunks = _chunks(found[1]) if found else []
    if not found or not chunks:
        return flip(rng, data, other)
    body, footer = found
    chunk = rng.choice(chunks)
    start = min(o for o in (thrift.get(chunk, FOOTER["data"]), thrift.get(chunk, FOOTER["dictionary"])) if o)
    try:
        header, end = thrift.decode(body, start)
    except (ValueError, IndexError):
        return flip(rng, data, other)
    _bend(rng, header)
    new = thrift.encode(header)
    grown = len(new) - (end - start)
    thrift.put(chunk, FOOTER["size"], thrift.get(chunk, FOOTER["size"]) + grown)
    for moved in _chunks(footer):
        for field in moved:
            if field[0] in (FOOTER["data"], FOOTER["index"], FOOTER["dictionary"]) and field[2] > start:
                field[2] += grown
    return _with_footer(body[:start] + new + body[end:], footer)


def parquet_values(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Bytes of a column chunk's pages become others: levels, run lengths, dictionary indices, lengths of strings."""
    found = _footer(data)
    chunks = _chunks(found[1]) if found else []
    if not chunks:
        return flip(rng, data, other)
    chunk = rng.choice(chunks)
    start = min(o for o in (thrift.get(chunk, FOOTER["data"]), thrift.get(chunk, FOOTER["dictionary"])) if o)
    at = min(start + rng.randrange(max(1, thrift.get(chunk, FOOTER["size"]))), len(data) - 1)
    return _over(data, at, _number(rng)) if rng.random() < 0.3 else _flipped(rng, data, at)


def ipc_message(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A number of a message's flatbuffer becomes an absurd one, or one of its bytes flips."""
    starts = [m.start() for m in re.finditer(rb"\xff\xff\xff\xff", data)]
    if not starts:
        return flip(rng, data, other)
    start = rng.choice(starts) + 4
    size = int.from_bytes(data[start : start + 4], "little", signed=True)
    at = start + rng.randrange(0, max(8, min(size, len(data) - start)))
    if rng.random() < 0.5:
        return _flipped(rng, data, min(at, len(data) - 1))
    return _over(data, at & ~3, _number(rng))


def manifest_number(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A word or number of a JSON text becomes something of another kind."""
    spots = list(re.finditer(rb'-?\d+|"[^"]*"|true|null|\[|\{', data))
    if not spots or not data.startswith(b"{"):
        return absurd(rng, data, other)
    spot = rng.choice(spots)
    value = rng.choice([b"-1", b"1e999", b"9" * 5000, b"null", b"true", b'""', b'"\\ud800"', b'"a\\u0000"', b'"..", "'])
    value = rng.choice([value, b"[" * rng.choice([1, 900, 60_000]), b"{}", b'"/etc"', b'"part-00000.parquet"'])
    return data[: spot.start()] + value + data[spot.end() :]


MUTATIONS: dict[str, tuple[Mutation, int]] = {  # and how often each is chosen
    "flip": (flip, 6),
    "flip_many": (flip_many, 2),
    "truncate": (truncate, 2),
    "zero": (zero, 1),
    "duplicate": (duplicate, 2),
    "splice": (splice, 1),
    "tail": (tail, 2),
    "absurd": (absurd, 2),
    "parquet_footer": (parquet_footer, 4),
    "parquet_page": (parquet_page, 4),
    "parquet_values": (parquet_values, 4),
    "ipc_message": (ipc_message, 4),
    "manifest_number": (manifest_number, 1),
}


def aims_at(name: str, data: bytes) -> bool:
    """Whether a mutation has something to aim at in a file that begins like this one."""
    kind = "parquet" if data[:4] == b"PAR1" else "ipc" if data[:6] == b"ARROW1" else "manifest"
    return name.partition("_")[0] not in ({"parquet", "ipc", "manifest"} - {kind})


def _flipped(rng: random.Random, data: bytes, at: int) -> bytes:
    return _over(data, at, bytes([data[at] ^ rng.choice([1 << rng.randrange(8), rng.randrange(1, 256)])]))


def _over(data: bytes, at: int, block: bytes) -> bytes:
    return (data[:at] + block + data[at + len(block) :])[: len(data)]


def _number(rng: random.Random) -> bytes:
    value = rng.choice(ABSURD)
    kind = "<i" if -(2**31) <= value < 2**31 and rng.random() < 0.6 else "<q"
    return struct.pack(kind, max(-(2**63), min(value, 2**63 - 1)))


def _stretch(rng: random.Random, data: bytes) -> tuple[int, int]:
    start = rng.randint(0, len(data))
    return start, min(rng.choice([1, 4, 8, 16, 64, 256, 4096]), len(data) - start)


def _footer(data: bytes) -> tuple[bytes, thrift.Struct] | None:
    """What stands before the footer, and the footer as data."""
    size = int.from_bytes(data[-PARQUET_TAIL:-4], "little")
    if data[-4:] != b"PAR1" or size + PARQUET_TAIL > len(data):
        return None
    body = data[: len(data) - PARQUET_TAIL - size]
    try:
        return body, thrift.decode(data, len(body))[0]
    except (ValueError, IndexError):
        return None


def _with_footer(body: bytes, footer: thrift.Struct) -> bytes:
    new = thrift.encode(footer)
    return body + new + len(new).to_bytes(4, "little") + b"PAR1"


def _chunks(footer: thrift.Struct) -> list[thrift.Struct]:
    groups = (thrift.get(footer, FOOTER["row_groups"]) or [0, []])[1]
    columns = [c for g in groups for c in thrift.get(g, FOOTER["columns"])[1]]
    return [thrift.get(c, FOOTER["meta"]) for c in columns]


def _bend(rng: random.Random, tree: thrift.Struct) -> None:
    """Change one place of a tree, chosen evenly among all."""
    places = list(_places(tree))
    holder, at, kind = rng.choice(places)
    if isinstance(holder[at], list) and kind is None:  # a field: [id, type, value]
        fate = rng.randrange(4)
        if fate == 0:
            del holder[at]
        elif fate == 1:
            holder.insert(rng.randint(0, len(holder)), holder[at])
        elif fate == 2:
            holder[at][0] = rng.randrange(0, 20)
        else:
            holder[at], holder[0] = holder[0], holder[at]
        return
    holder[at] = _other_value(rng, kind, holder[at])


def _other_value(rng: random.Random, kind: int | None, value: Any) -> Any:
    if kind in thrift.INTEGERS:
        return rng.choice([value + 1, value - 1, -value, rng.choice(ABSURD), rng.randrange(12)])
    if kind == thrift.BINARY:
        return rng.choice([b"", value * 2, value[::-1], b"\xff\xfe", b"x" * 5000, value + b"\0"])
    if kind == thrift.LIST:
        return [value[0], rng.choice([[], value[1] * 2, value[1][:1] * 300, value[1][::-1]])]
    return value


def _places(node: Any) -> Any:
    """(holder, index, type): each field of each struct, and each value that can be changed in place."""
    for at, field in enumerate(node):
        yield node, at, None
        kind, value = field[1], field[2]
        yield field, 2, kind
        if kind == thrift.STRUCT:
            yield from _places(value)
        elif kind == thrift.LIST and value[0] == thrift.STRUCT:
            for item in value[1]:
                yield from _places(item)
        elif kind == thrift.LIST:
            for index in range(len(value[1])):
                yield value[1], index, value[0]
