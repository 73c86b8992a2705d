"""What a rule is: one short function and the entry that names it.

A rule's code never changes its meaning. `E-` states a MUST and gives errors, `W-` a SHOULD and gives
warnings; no option changes that. Phases, in the order in which a row meets them:

    open      while opening; the input is refused and nothing else runs (exit code 3)
    file      once per file, after its rows: schema, metadata, manifest
    shape     per batch: do a row's arrays fit together; rows that do not are not shown to `batch` rules
    batch     per batch, vectorised over flat child arrays
    key       per run of rows with one `episode_id`; runs with broken keys are not shown to `episode` rules
    episode   per whole episode
    views-shape, views, views-file          rules about a views file that is given with a trace: which of its rows fit
              together and belong to a row of the trace; what those rows hold; the file as a whole
    scores-shape, scores, scores-file       the same for each scores folder that is given
    run       never by the validator: `score`, `audit` and `train` refuse with it (exit code 3)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

Phase = Literal[
    "open",
    "file",
    "shape",
    "batch",
    "key",
    "episode",
    "views-shape",
    "views",
    "views-file",
    "scores-shape",
    "scores",
    "scores-file",
    "run",
]
Want = Literal["tokenizer", "views", "scores"]
Severity = Literal["error", "warning"]
Profile = Literal["core", "lineage", "policy", "train"]
PROFILES: tuple[Profile, ...] = ("core", "lineage", "policy", "train")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the validator was given beside traces; a rule that wants what is `None` is not run, and says so."""

    tokenizer: Any = None
    views: Any = None
    scores: Any = None

    def lack(self, want: Want | None) -> str | None:
        """Why a rule that wants this cannot run."""
        return f"needs --{want}" if want is not None and getattr(self, want) is None else None


@dataclass(frozen=True, slots=True)
class Hit:
    """One violation as a rule sees it. `row` counts in what the rule was given: the batch's rows or the
    episode's invocations; `None` = the whole file."""

    row: int | None
    message: str
    column: str | None = None
    expected: str | None = None
    actual: str | None = None
    hint: str | None = None


Check = Callable[..., Iterable[Hit]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule's entry.

    `clause` is the sentence of the standard that it enforces. `columns` are all columns it reads: where one
    of them does not fit the schema it is not run (nor, but for `file` rules, where a required one does not).
    `needs`: it has nothing to look at, and is not run, while none of these columns holds a value (default:
    `columns`). `unless` gives a reason not to run from the file's context. `wants` names what it must be given
    beside the trace.
    """

    code: str
    title: str
    phase: Phase
    clause: str
    check: Check | None
    columns: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    profiles: tuple[Profile, ...] = PROFILES
    hint: str | None = None
    unless: Callable[[Any], str | None] | None = None
    wants: Want | None = None

    @property
    def severity(self) -> Severity:
        """Fixed by the code's first letter."""
        return "error" if self.code.startswith("E-") else "warning"

    @property
    def page(self) -> str:
        """The rule's documentation, Markdown."""
        return _page(self.code)

    @property
    def clause_url(self) -> str | None:
        """Where the specification states the clause, e.g. `spec/trace.md#rows-order`; `None` where it does not."""
        return _clauses().get(self.code)

    def to_dict(self) -> dict[str, Any]:
        """The entry as `spec/codes.json` holds it."""
        return {
            "code": self.code,
            "severity": self.severity,
            "title": self.title,
            "phase": self.phase,
            "profiles": list(self.profiles),
            "columns": list(self.columns),
            "wants": self.wants,
            "clause": self.clause,
            "clause_url": self.clause_url,
        }


def rule(
    code: str,
    title: str,
    *,
    phase: Phase,
    clause: str,
    columns: tuple[str, ...] = (),
    needs: tuple[str, ...] | None = None,
    profiles: tuple[Profile, ...] = PROFILES,
    hint: str | None = None,
    unless: Callable[[Any], str | None] | None = None,
    wants: Want | None = None,
) -> Callable[[Check], Rule]:
    """Turn a function into a `Rule`. What the function is given depends on the phase:

    file: `FileContext`; shape and batch: `Batch`; key: `Run, EpisodesSeen`; episode: `Run`; views-shape and views:
    `ViewBatch`; views-file: `ViewsContext`; scores-shape and scores: `ScoreBatch`; scores-file: `ScoresContext`.
    """

    def make(check: Check) -> Rule:
        return Rule(
            code,
            title,
            phase,
            clause,
            check,
            columns,
            columns if needs is None else needs,
            profiles,
            hint,
            unless,
            wants,
        )

    return make


@cache
def _clauses() -> dict[str, str]:
    """Code -> clause, as `make spec` reads it from the texts of the specification."""
    clauses: dict[str, str] = json.loads(Path(__file__).with_name("clauses.json").read_text(encoding="utf-8"))
    return clauses


@cache
def _page(code: str) -> str:
    return (resources.files("memopd_trace.rules") / "pages" / f"{code}.md").read_text(encoding="utf-8")
