"""Setting members of a JSON text to null and leaving every other byte as it is.

A client that did not ask for ids gets what it would have got: vLLM writes `null` there. Parsing and writing the text
anew would keep its meaning, not its bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]  # not in typeshed

SPACE = " \t\n\r"
_decode = json.JSONDecoder(strict=False).raw_decode


def without(text: str, top: Collection[str], in_choices: Collection[str]) -> str:
    """`text`, a valid JSON object, with the members `top` of it and the members `in_choices` of each item of its
    `choices` set to null."""
    spans: list[tuple[int, int]] = []
    for key, start, stop in _members(text, _skip(text, 0)):
        if key in top:
            spans.append((start, stop))
        elif key == "choices" and text[start] == "[":
            for at in _items(text, start):
                if text[at] == "{":
                    spans += [(a, b) for name, a, b in _members(text, at) if name in in_choices]
    for start, stop in reversed(spans):
        if text[start:stop] != "null":
            text = f"{text[:start]}null{text[stop:]}"
    return text


def _members(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """(key, start of its value, end of it) of the object that begins at `at`."""
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = scanstring(text, at + 1, False)
        start = _skip(text, _skip(text, at) + 1)
        stop = _decode(text, start)[1]
        yield key, start, stop
        at = _skip(text, stop)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _items(text: str, at: int) -> Iterator[int]:
    """Where the items of the array that begins at `at` begin."""
    at = _skip(text, at + 1)
    while text[at] != "]":
        yield at
        at = _skip(text, _decode(text, at)[1])
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    while text[at] in SPACE:
        at += 1
    return at
