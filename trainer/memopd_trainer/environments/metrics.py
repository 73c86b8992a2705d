"""How near an answer is to a reference, as SQuAD 1.1 defines it: exact match and token F1 of normalised text."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and the articles a, an, the; words separated by one space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, references: Iterable[str]) -> float:
    """1 if the normalised answer is one of the normalised references, else 0."""
    return float(normalise(answer) in {normalise(r) for r in references})


def token_f1(answer: str, references: Iterable[str]) -> float:
    """The best F1, over the references, of the words that answer and reference share (as multisets), in [0, 1].

    If either has no word left after normalisation, 1 when both have none, else 0.
    """
    return max((_f1(normalise(answer).split(), normalise(r).split()) for r in references), default=0.0)


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    shared = sum((Counter(answer) & Counter(reference)).values())
    return 2 * shared / (len(answer) + len(reference))
