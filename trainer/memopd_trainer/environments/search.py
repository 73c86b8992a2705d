"""A search over a fixed set of texts, by BM25 (the library `bm25s`; extra `environments`)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import numpy as np

from memopd_trace.errors import MissingExtraError


class Search:
    """An index of `documents`; the same query always gives the same texts.

    Raises:
        MissingExtraError: `bm25s` is not installed.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        try:
            self._bm25s = importlib.import_module("bm25s")
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"the search needs '{error.name}'", hint="pip install 'memopd-trace[environments]'"
            ) from None
        self.documents = tuple(documents)
        self._index = self._bm25s.BM25()
        self._index.index(self._words(self.documents), show_progress=False)

    def best(self, query: str, count: int) -> list[str]:
        """At most `count` texts that share a word with the query, the best first; of equals, the earlier first."""
        (words,) = self._words([query])
        if not words:
            return []
        scores = np.asarray(self._index.get_scores(words))
        order = np.argsort(-scores, kind="stable")[:count]
        return [self.documents[n] for n in order if scores[n] > 0]

    def _words(self, texts: Sequence[str]) -> list[list[str]]:
        words: list[list[str]] = self._bm25s.tokenize(
            list(texts), stopwords=None, return_ids=False, show_progress=False
        )
        return words
