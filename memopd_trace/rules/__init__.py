"""Every rule of the validator, grouped by what it looks at.

A rule is one short function with an entry (code, title, phase, clause, columns), a page in `pages/`, and a
vector in `spec/vectors/invalid/`. `python -m memopd_trace.rules` prints `spec/codes.json`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from fnmatch import fnmatchcase

from memopd_trace.errors import UsageError
from memopd_trace.rules import (
    ancestry,
    behaviour,
    calls,
    files,
    lineage,
    outcome,
    presence,
    scorefiles,
    scores,
    segments,
    state,
    structure,
    text,
    turns,
    views,
)
from memopd_trace.rules.refusals import REFUSALS, RUN_REFUSALS
from memopd_trace.rules.registry import PROFILES, Rule
from memopd_trace.schema import SPEC_VERSION

_MODULES = (
    files,
    structure,
    lineage,
    ancestry,
    segments,
    turns,
    state,
    behaviour,
    calls,
    outcome,
    presence,
    text,
    views,
    scores,
    scorefiles,
)

RULES: dict[str, Rule] = {
    r.code: r
    for r in (*REFUSALS, *RUN_REFUSALS, *(v for m in _MODULES for v in vars(m).values() if isinstance(v, Rule)))
}


def find(code: str) -> Rule:
    """The rule of a code (any case).

    Raises:
        UsageError: there is none; the message names the nearest ones.
    """
    if code.upper() not in RULES:
        raise UsageError(f"no rule '{code}'", hint=_suggestion(code))
    return RULES[code.upper()]


def choose(profile: str, select: Iterable[str] = (), ignore: Iterable[str] = ()) -> list[Rule]:
    """The rules a profile turns on, only those that match a `select` pattern (if there is one) and none that
    matches an `ignore` pattern. A pattern is a code or a glob such as `W-*`. Refusals are always in: an input
    that cannot be read is never passed over.

    Raises:
        UsageError: an unknown profile, or a pattern that matches no code.
    """
    if profile not in PROFILES:
        raise UsageError(f"no profile '{profile}'", hint=f"one of {', '.join(PROFILES)}")
    wanted, unwanted = match(select), match(ignore)
    return [
        r
        for r in RULES.values()
        if r.phase == "open" or (profile in r.profiles and (not wanted or r.code in wanted) and r.code not in unwanted)
    ]


def codes_json(rules: Iterable[Rule] = RULES.values()) -> str:
    """The text of `spec/codes.json`, or of a part of it."""
    document = {"spec_version": SPEC_VERSION, "codes": [r.to_dict() for r in rules]}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def match(patterns: Iterable[str]) -> set[str]:
    """The codes that a pattern (a code or a glob, in any case) matches; a single string is one pattern.

    Raises:
        UsageError: a pattern matches none; the message names the nearest codes.
    """
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = {code for code in RULES if fnmatchcase(code, pattern.upper())}
        if not matches:
            raise UsageError(f"no code matches '{pattern}'", hint=_suggestion(pattern))
        found |= matches
    return found


def _suggestion(code: str) -> str:
    near = difflib.get_close_matches(code.upper(), RULES, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else "`memopd-trace codes` lists them"
