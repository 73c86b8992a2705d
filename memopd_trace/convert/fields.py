"""One JSON object of a log, read field by field: by name and kind, and what is never asked for is left over.

    record = Fields(value, losses)
    response = record.fields("response")         # a nested object, or None
    ids = response.ids("token_ids")              # int32 array; [] is null, and counted
    call.extra = record.rest()                   # what nobody asked for, so that nothing is lost

JSON null and a field that is not there are both `None`. A field of another kind than asked for raises `BrokenRecord`
with its path and what stands there.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np

from memopd_trace.convert.losses import BrokenRecord, Losses
from memopd_trace.invocation import IDS, MaskedFloats

INT64 = 2**63
LATEST = 253_402_300_799  # seconds: the end of the year 9999
FLOOR = -1000.0  # nats: at or below it a number is a filler (-9999.0, say), as the format's clause on sentinels says
LARGE = 1e30  # what float32 holds, and far above any logarithm of a probability
KINDS: dict[type, str] = {
    dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a whole number", float: "a number",
    type(None): "null",
}  # fmt: skip


class Fields:
    """A JSON object and which of its fields were asked for.

    Raises:
        BrokenRecord: it is no object.
    """

    __slots__ = ("_inside", "_seen", "losses", "path", "value")

    def __init__(self, value: Any, losses: Losses, path: str = "") -> None:
        if not isinstance(value, dict):
            raise _other(path, "an object", value)
        self.value, self.losses, self.path = value, losses, path
        self._seen: set[str] = set()
        self._inside: dict[str, list[Fields]] = {}

    def __contains__(self, name: str) -> bool:
        return self.value.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def any(self, name: str) -> Any:
        """The value, whatever it is."""
        self._seen.add(name)
        return self.value.get(name)

    def peek(self, name: str) -> Any:
        """The value, without its counting as asked for."""
        return self.value.get(name)

    def _of(self, name: str, kind: type, what: str) -> Any:
        value = self.any(name)
        if value is None or type(value) is kind:
            return value
        raise _other(self._path(name), what, value)

    def text(self, name: str) -> str | None:
        """A string."""
        found: str | None = self._of(name, str, "text")
        return found

    def name(self, name: str) -> str | None:
        """A string or a whole number, as a string: what ids are written as."""
        value = self.any(name)
        if value is None or type(value) is str:
            return value
        if type(value) is int:
            return str(value)
        raise _other(self._path(name), "text or a whole number", value)

    def flag(self, name: str) -> bool | None:
        """true or false."""
        found: bool | None = self._of(name, bool, "true or false")
        return found

    def whole(self, name: str) -> int | None:
        """A whole number that an int64 can hold; 3.0 is one too."""
        value = self.any(name)
        if value is None or (type(value) is int and -INT64 <= value < INT64):
            return value
        if type(value) is float and value.is_integer() and abs(value) < 2**53:
            return int(value)
        raise _other(self._path(name), "a whole number", value)

    def number(self, name: str) -> float | None:
        """A finite number; NaN and infinities are null, and counted."""
        value = self.any(name)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise _other(self._path(name), "a number", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.losses.degrade("a number that is not finite is null", self._path(name))
            return None
        return number

    def version(self, name: str) -> int | None:
        """A policy version; another kind of name is null, and left over."""
        found = version_of(self.value.get(name))
        if found is not None:
            self._seen.add(name)
        return found

    def time(self, name: str) -> datetime | None:
        """A moment: ISO 8601 text, or seconds, milli-, micro- or nanoseconds since 1970. One without a time zone is
        taken for UTC; what is no moment is null, and counted."""
        value = self.any(name)
        if value is None:
            return None
        found = _moment(value)
        if found is None:
            self.losses.degrade("a time that cannot be read is null", f"{self._path(name)}: {_shown(value)}")
        return found

    def items(self, name: str) -> list[Any] | None:
        """A list of anything."""
        found: list[Any] | None = self._of(name, list, "a list")
        return found

    def fields(self, name: str) -> Fields | None:
        """A nested object."""
        value = self.any(name)
        if value is None:
            return None
        if name not in self._inside:
            self._inside[name] = [Fields(value, self.losses, self._path(name))]
        return self._inside[name][0]

    def maybe_fields(self, name: str) -> Fields | None:
        """A nested object; what is none is `None` too, and left over."""
        return self.fields(name) if isinstance(self.value.get(name), dict) else None

    def each(self, name: str) -> list[Fields]:
        """A list of objects; a missing one is empty."""
        value = self.items(name)
        if name not in self._inside:
            path = self._path(name)
            self._inside[name] = [Fields(v, self.losses, f"{path}[{i}]") for i, v in enumerate(value or ())]
        return self._inside[name]

    def ids(self, name: str, *, empty: bool = False) -> IDS | None:
        """Token ids. An empty list says that there are none to be told, so it is null (and counted); with `empty` it is
        an empty array."""
        value = self.items(name)
        if value is None:
            return None
        if not value and not empty:
            self.losses.degrade("an empty list of ids is null", self._path(name))
            return None
        try:
            return as_ids(value, self._path(name))
        except BrokenRecord:
            self._seen.discard(name)  # who goes on without them leaves them over
            raise

    def logprobs(self, name: str) -> MaskedFloats | None:
        """Log-probabilities in nats, masked where null, not finite, or a filler far below any probability; an empty
        list is null."""
        value = self.items(name)
        return as_logprobs(value, self.losses, self._path(name)) if value else None

    def flags(self, name: str) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """A mask: true and false, or 1 and 0; an empty list is null."""
        value = self.items(name)
        if not value:
            return None
        for i, item in enumerate(value):
            if item not in (0, 1) or not isinstance(item, int):
                raise _other(f"{self._path(name)}[{i}]", "true or false", item)
        return np.array(value, bool)

    def drop(self) -> None:
        """Take all of it as asked for: it is kept elsewhere."""
        self._seen |= self.value.keys()
        self._inside.clear()

    def rest(self) -> dict[str, Any]:
        """What was never asked for, nested objects included; null is left out."""
        left = {name: value for name, value in self.value.items() if name not in self._seen and value is not None}
        for name, inside in self._inside.items():
            parts = [part.rest() for part in inside]
            if any(parts):
                left[name] = parts if isinstance(self.value[name], list) else parts[0]
        return left

    def _path(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def as_ids(value: list[Any], path: str) -> IDS:
    """A JSON list as int32 ids.

    Raises:
        BrokenRecord: an item is no whole number from 0 to 2^31 - 1.
    """
    try:
        ids = np.empty(len(value), np.int32)
        struct.pack_into(f"{len(value)}i", ids.data, 0, *value)
    except struct.error:
        i, item = next((i, v) for i, v in enumerate(value) if type(v) is not int or not 0 <= v < 2**31)
        raise _other(f"{path}[{i}]", "a token id", item) from None
    for i in np.flatnonzero(ids < 2).tolist():  # true and false pass for 1 and 0
        if type(value[i]) is not int or value[i] < 0:
            raise _other(f"{path}[{i}]", "a token id", value[i])
    return ids


def as_logprobs(value: list[Any], losses: Losses, path: str) -> MaskedFloats:
    """A JSON list as masked float32 log-probabilities (nats); see `Fields.logprobs`.

    Raises:
        BrokenRecord: an item is neither a number nor null.
    """
    try:
        numbers = np.array(array("d", value))
    except (TypeError, OverflowError):
        for i, item in enumerate(value):
            if item is not None and type(item) not in (int, float):
                raise _other(f"{path}[{i}]", "a number", item) from None
        numbers = np.array([math.nan if v is None or abs(v) > 1e300 else float(v) for v in value])
        nulls = sum(v is None for v in value)
    else:
        nulls = 0
    odd = ~(numbers < LARGE)  # NaN too
    odd |= numbers == -math.inf
    if odd.sum() > nulls:
        losses.degrade("a log-probability that is not finite is null", path, int(odd.sum()) - nulls)
    low = ~odd & (numbers <= FLOOR)
    if low.any():
        losses.degrade("a log-probability that is a filler is null", f"{path}: {numbers[low][0]}", int(low.sum()))
    return np.ma.masked_array(np.where(odd | low, 0, numbers), mask=odd | low, dtype=np.float32)


def version_of(value: Any) -> int | None:
    """A policy version that a log writes as a number or as text; another kind of name is none."""
    if type(value) is int and 0 <= value < INT64:
        return value
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 19 else None


def as_score(value: Any) -> float | None:
    """A score as a number; `None` for what is none, or so large that it is no score."""
    return float(value) if type(value) in (int, float) and abs(value) < 2**53 else None


def _moment(value: Any) -> datetime | None:
    try:
        if type(value) is str:
            found = datetime.fromisoformat(value)
            return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
        if type(value) in (int, float) and math.isfinite(value):
            seconds = float(value)
            while seconds > LATEST:
                seconds /= 1000
            return datetime.fromtimestamp(seconds, UTC) if seconds > 0 else None
    except (ValueError, OverflowError, OSError):
        pass
    return None


def _other(path: str, wanted: str, value: Any) -> BrokenRecord:
    return BrokenRecord(f"{path or 'the record'}: expected {wanted}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """A value in a few words, whatever its size."""
    if isinstance(value, dict | list):
        return f"{KINDS[type(value)]} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    return repr(value[:60] if isinstance(value, str) else value)
