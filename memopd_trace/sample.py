"""A sample of a trace: some whole episodes, the same ones each time, without reading the rows of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from memopd_trace.arrowfile import iter_column
from memopd_trace.conform import MisfitError, conform
from memopd_trace.places import Place
from memopd_trace.rules.batch import Bools

SEED = 20
NOT_SHOWN = "a sample does not show all rows"
NEEDS_ALL_ROWS = (
    "E-KEY-DUPLICATE",
    "E-EPISODE-SPLIT",
    "E-MANIFEST-ROWS",
    "E-MANIFEST-EPISODES",
    "E-MANIFEST-SHA256",
    "W-NO-ROWS",
)  # what they find in a sample is true, but finding nothing there says nothing of the trace


@dataclass(frozen=True, slots=True)
class Sample:
    """`rows[f]` is bool[rows of file f]: the row is looked at; `of_rows` and `of_episodes` count the whole trace."""

    rows: list[Bools]
    of_rows: int
    of_episodes: int


def pick(files: Sequence[Place], episodes: int) -> Sample:
    """Choose as many episodes of a trace (all, where it has no more); rows without a readable id are left out."""
    numbers: dict[str, int] = {}
    of_row = [_episode_numbers(file, numbers) for file in files]
    random = np.random.default_rng(SEED)
    chosen = np.zeros(len(numbers) + 1, bool)  # the last one is for rows without an id, numbered -1
    chosen[random.permutation(len(numbers))[:episodes]] = True
    return Sample([chosen[each] for each in of_row], sum(map(len, of_row)), len(numbers))


def _episode_numbers(file: Place, numbers: dict[str, int]) -> np.ndarray:
    """int64[rows]: a number for each row's episode, -1 where it has none; new ids are added to `numbers`."""
    found = [np.empty(0, np.int64)]
    for column in iter_column(file, "episode_id"):
        try:
            ids = conform(column, pa.string()).dictionary_encode()
        except MisfitError:
            found.append(np.full(len(column), -1))
            continue
        words = [numbers.setdefault(word, len(numbers)) for word in ids.dictionary.to_pylist()]
        table = np.array([*words, -1], np.int64)
        found.append(table[np.asarray(ids.indices.fill_null(len(words)))])
    return np.concatenate(found)
