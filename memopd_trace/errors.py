"""Errors that a caller can expect, each with the exit code the command line gives it.

A message says what is wrong, where, both values, and the way out. Findings about the *content* of a
trace are data (`memopd_trace.report.Finding`), not exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_VALUE = 200  # characters of one value of a trace in a message


class TraceError(Exception):
    """Base of all errors this project raises on purpose.

    `code` is a stable identifier from `spec/codes.json` where the fault has one; `hint` is the way out.
    """

    exit_code = 4

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.hint = message, code, hint

    def __str__(self) -> str:
        head = f"[{self.code}] {self.message}" if self.code else self.message
        return f"{head} ({self.hint})" if self.hint else head

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.code, self.hint)


class InputError(TraceError, ValueError):
    """The input is missing, unreadable, or refused (exit code 3)."""

    exit_code = 3


class UsageError(TraceError, ValueError):
    """The call itself is wrong: an option, a configuration, a combination (exit code 2)."""

    exit_code = 2


class CheckFailed(TraceError, AssertionError):
    """A check that was asked for did not hold (exit code 1)."""

    exit_code = 1


class MissingExtraError(TraceError, ImportError):
    """An optional dependency is not installed; the message names the extra (exit code 2)."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line: the first of its message, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """A hint for a name that is not known: the known one that is most like it, else `otherwise`."""
    near = difflib.get_close_matches(name.lower().replace("_", "-"), known, n=1)
    return f"did you mean '{near[0]}'?" if near else otherwise


def printable(text: str, limit: int | None = MAX_VALUE) -> str:
    """`text` on one line of printable characters (a trace's strings may hold anything), cut at `limit` of its own."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _rebuild(kind: type[TraceError], message: str, code: str | None, hint: str | None) -> TraceError:
    return kind(message, code=code, hint=hint)
