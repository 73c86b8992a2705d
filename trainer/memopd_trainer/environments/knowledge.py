"""A knowledge base that nobody can know: invented names, one short text each, and questions of several hops.

Everything follows from a seed. Ships have captains, captains home towns, towns rivers, rivers bridges; beside the one
relation that leads on, each text states others, and for each ship there is a thing of nearly the same name. So a text
found by a careless query is a wrong one, and a text found by the right one still holds more than what is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from memopd_trace.errors import UsageError

Split = Literal["train", "held_out"]

SYLLABLES = [
    "bal",
    "cor",
    "dun",
    "el",
    "fen",
    "gor",
    "hal",
    "il",
    "jor",
    "kel",
    "lum",
    "mar",
    "nor",
    "os",
    "pel",
    "quin",
    "ras",
    "sol",
    "tam",
    "ul",
    "ven",
    "wil",
    "yar",
    "zed",
]
# kind of thing -> (relation that leads on, kind of its value)
CHAIN: Mapping[str, tuple[str, str]] = {
    "ship": ("captain", "captain"),
    "captain": ("home town", "town"),
    "town": ("river", "river"),
    "river": ("bridge", "bridge"),
}
# kind of thing -> what else its text states, each with a value of no consequence
ASIDE: Mapping[str, Sequence[tuple[str, Sequence[str]]]] = {
    "ship": [("cargo", ("salt", "tin", "wool", "cork", "amber")), ("colour", ("red", "green", "white", "black"))],
    "captain": [("instrument", ("lute", "drum", "fiddle", "horn")), ("dish", ("eel", "leek soup", "rye cake"))],
    "town": [("fair day", ("Monday", "Friday", "Sunday")), ("trade", ("rope", "glass", "paper", "bells"))],
    "river": [("fish", ("trout", "pike", "perch")), ("colour in spring", ("brown", "grey", "green"))],
}
HELD_OUT = 4  # of as many ships, one is asked about in the held-out split


@dataclass(frozen=True, slots=True)
class Chain:
    """One question: from `subject` along `relations`, through `values`; the last of them is the answer."""

    subject: str
    relations: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def question(self) -> str:
        """The question in words, the last relation first."""
        asked = " of the ".join(reversed(self.relations))
        return f"What is the {asked} of the ship {self.subject}?"

    @property
    def answer(self) -> str:
        """The name that is asked for."""
        return self.values[-1]


@dataclass(frozen=True, slots=True)
class Knowledge:
    """`documents`: the texts, shuffled. `chains`: the longest chain of each ship, four hops."""

    documents: tuple[str, ...]
    chains: tuple[Chain, ...]

    def questions(self, split: Split, hops: int) -> list[Chain]:
        """One question a ship of the split, of so many hops.

        Raises:
            UsageError: hops that the chains do not have, or an unknown split.
        """
        if not 1 <= hops <= len(CHAIN):
            raise UsageError(f"{hops} hops", hint=f"1 to {len(CHAIN)}")
        if split not in get_args(Split):
            raise UsageError(f"no split '{split}'", hint=f"one of {', '.join(get_args(Split))}")
        chosen = [c for n, c in enumerate(self.chains) if (n % HELD_OUT == 0) == (split == "held_out")]
        return [Chain(c.subject, c.relations[:hops], c.values[:hops]) for c in chosen]


def make_knowledge(seed: int = 0, ships: int = 64) -> Knowledge:
    """The knowledge base of a seed: a text for each of five kinds of things, `ships` of each, but bridges.

    Raises:
        UsageError: too few ships for two splits, or more than there are names for.
    """
    most = len(SYLLABLES) ** 2 // (len(CHAIN) + 1)
    if not HELD_OUT <= ships <= most:
        raise UsageError(f"{ships} ships", hint=f"{HELD_OUT} to {most}")
    rng = np.random.default_rng(seed)
    names = [f"{a}{b}".capitalize() for a in SYLLABLES for b in SYLLABLES]
    kinds = [*CHAIN, "bridge"]
    drawn = rng.permutation(names)[: ships * len(kinds)].reshape(len(kinds), ships).tolist()
    named = dict(zip(kinds, drawn, strict=True))
    documents = [
        _text(kind, name, value, rng)
        for kind in CHAIN
        for name, value in zip(named[kind], named[CHAIN[kind][1]], strict=True)
    ]
    documents += [f"{name} House is an inn. It stands in {name} Street, at {name} Gate." for name in named["ship"]]
    relations = tuple(relation for relation, _ in CHAIN.values())
    chains = tuple(Chain(subject, relations, tuple(values)) for subject, *values in zip(*drawn, strict=True))
    return Knowledge(tuple(rng.permutation(documents).tolist()), chains)


def _text(kind: str, name: str, value: str, rng: np.random.Generator) -> str:
    """What is written about one thing; which of its sentences leads on differs from text to text."""
    sentences = [f"The {CHAIN[kind][0]} of {name} is {value}."]
    sentences += [f"The {aside} of {name} is {rng.choice(list(values))}." for aside, values in ASIDE[kind]]
    return " ".join([f"{name} is a {kind}.", *(sentences[n] for n in rng.permutation(len(sentences)))])
