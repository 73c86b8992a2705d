"""Headers: the `X-Memopd-*` labels of a call, and which headers go on to the other side.

Labels are for the proxy alone and never go on. Authorization and cookies go to the upstream, which they are meant for,
and nowhere else: no header's value is ever stored but a label's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from memopd_trace.errors import UsageError, printable
from memopd_trace.record.call import DeclaredSegment, Labels
from memopd_trace.schema import TRACE_COLUMNS

RawHeaders = list[tuple[bytes, bytes]]

PREFIX = b"x-memopd-"
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"trailers", b"transfer-encoding", b"upgrade")
)  # fmt: skip
KEYS = (b"authorization", b"api-key", b"x-api-key")  # whose value may end in #EPISODE
WORDS = {c.name: c.values for c in TRACE_COLUMNS if c.values}
MAX_LABEL = 1024  # characters
MAX_SEGMENTS = 65_536


def read_labels(headers: Iterable[tuple[bytes, bytes]]) -> Labels:
    """The labels among a request's headers; the episode is the header's, else what follows `#` in the API key.

    Raises:
        UsageError: an unknown, repeated or malformed label.
    """
    texts: dict[str, str] = {}
    suffix, retry = None, 0
    for name, value in headers:
        name = name.lower()
        if name.startswith(PREFIX):
            label = name[len(PREFIX) :].decode("latin-1")
            if label in texts:
                raise UsageError(f"{_name(label)}: given twice")
            texts[label] = _text(label, value)
        elif name in KEYS and b"#" in value:
            suffix = _text("Episode", value.partition(b"#")[2])
        elif name == b"x-stainless-retry-count" and value.isdigit():
            retry = min(int(value[:9]), 2**15)
    texts.setdefault("episode", suffix or "")
    return Labels(**{k: v for k, v in _values(texts).items() if v is not None}, retry=retry)


def to_upstream(headers: Iterable[tuple[bytes, bytes]], *, identity: bool) -> RawHeaders:
    """A request's headers as they go on: no labels, no episode behind the key, nothing of this connection. With
    `identity` (the answer will be read here) no encoded answer is asked for, and the length and encoding of the body
    are left for the sender to set."""
    headers = [(name.lower(), value) for name, value in headers]
    dropped = HOP_BY_HOP | _named_by_connection(headers) | {b"host", b"expect"}
    if identity:
        dropped |= {b"accept-encoding", b"content-length", b"content-encoding"}
    kept: RawHeaders = []
    for name, value in headers:
        if name in dropped or name.startswith(PREFIX):
            continue
        if name in KEYS and b"#" in value:
            value = value.partition(b"#")[0].rstrip()
            if value.lower() in (b"", b"bearer"):
                continue
        kept.append((name, value))
    return [*kept, (b"accept-encoding", b"identity")] if identity else kept


def to_client(headers: Iterable[tuple[bytes, bytes]], *, changed: bool) -> RawHeaders:
    """An answer's headers as they go on; with `changed` (the body may be another) without its length, digest and
    encoding."""
    headers = list(headers)
    dropped = HOP_BY_HOP | _named_by_connection(headers)
    if changed:
        dropped |= {b"content-length", b"content-encoding", b"content-md5", b"digest", b"content-digest", b"etag"}
    return [(n, v) for n, v in headers if n.lower() not in dropped and not n.lower().startswith(PREFIX)]


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    named = b",".join(value for name, value in headers if name.lower() == b"connection")
    return frozenset(part.strip().lower() for part in named.split(b","))


def _name(label: str) -> str:
    return f"X-Memopd-{printable(label).title()}"


def _text(label: str, value: bytes) -> str:
    try:
        text = value.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise UsageError(f"{_name(label)}: no UTF-8") from None
    limit = 64 * MAX_LABEL if label == "segments" else MAX_LABEL
    if len(text) > limit or not text.isprintable():
        raise UsageError(f"{_name(label)}: longer than {limit} characters, or not printable")
    return text


def _values(texts: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for label, text in texts.items():
        name = label.replace("-", "_")
        if name == "retry" or name not in Labels.__dataclass_fields__:
            known = ", ".join(n.replace("_", "-") for n in Labels.__dataclass_fields__ if n != "retry")
            raise UsageError(f"{_name(label)}: no such header", hint=f"there are {known}")
        if text:
            values[name] = _PARSERS[name](text) if name in _PARSERS else text
    return values


def _reward(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"X-Memopd-Reward: '{printable(text)}' is no number")
    return value


def _version(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise UsageError(f"X-Memopd-Policy-Version: '{printable(text)}' is no version")
    return int(text)


def _end(text: str) -> str | None:
    ends = {"true": "terminated", "1": "terminated", "terminated": "terminated", "truncated": "truncated"}
    if text.lower() in ("false", "0"):
        return None
    if text.lower() not in ends:
        raise UsageError(f"X-Memopd-End: '{printable(text)}'", hint="terminated or truncated")
    return ends[text.lower()]


def _relation(text: str) -> str:
    if text not in WORDS["relation"]:
        raise UsageError(f"X-Memopd-Relation: '{printable(text)}'", hint=f"one of {', '.join(WORDS['relation'])}")
    return text


def _rewrite(text: str) -> str:
    if text not in WORDS["rewrite_kind"] and not text.startswith("x_"):
        raise UsageError(f"X-Memopd-Rewrite: '{printable(text)}'", hint=f"one of {', '.join(WORDS['rewrite_kind'])}")
    return text


def _segments(text: str) -> tuple[DeclaredSegment, ...]:
    try:
        parts = json.loads(text)
        found = tuple(DeclaredSegment(**part) for part in parts)
        whole = all(_is_segment(s) for s in found)
    except (ValueError, TypeError, RecursionError):
        whole = False
    if not whole or len(found) > MAX_SEGMENTS:
        raise UsageError(
            "X-Memopd-Segments: no list of segments", hint='for example [{"start": 0, "stop": 12, "kind": "task"}]'
        )
    return found


def _is_segment(s: DeclaredSegment) -> bool:
    numbers = [s.start, s.stop, *([] if s.source_start is None else [s.source_start])]
    spans = all(type(n) is int and 0 <= n < 2**31 for n in numbers)
    return spans and isinstance(s.kind, str) and (s.source is None or isinstance(s.source, str))


_PARSERS: dict[str, Any] = {
    "reward": _reward,
    "policy_version": _version,
    "end": _end,
    "relation": _relation,
    "rewrite": _rewrite,
    "segments": _segments,
}
