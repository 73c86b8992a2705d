"""A teacher's scores beside the trace: joined by key, held against the state and the tokens that they are of."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from memopd_trace.errors import InputError, MissingExtraError, printable
from memopd_trace.export.format import Format, Teacher
from memopd_trace.export.losses import WHY_SCORES
from memopd_trace.invocation import Invocation
from memopd_trace.metadata import ScoresMetadata
from memopd_trace.places import PathLike
from memopd_trace.schema import RECORDED


class Scores:
    """A scores folder, open for an export.

    Its reader holds shards against their hashes, and every row against its states or logits, where it has them; that
    needs torch.

    Raises:
        InputError: as `memopd_scorer.scores.ScoresReader`.
        MissingExtraError: without the extra `score`.
    """

    def __init__(self, folder: PathLike) -> None:
        try:
            reader: Any = importlib.import_module("memopd_scorer.scores")
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"scores need '{error.name}'", hint="pip install 'memopd-trace[score]', or '.[score]' in a clone"
            ) from None
        self._reader = reader.ScoresReader(folder)
        self.metadata: ScoresMetadata = self._reader.metadata
        self.used = 0

    def __len__(self) -> int:
        return len(self._reader)

    def teacher_of(self, invocation: Invocation) -> Teacher | None:
        """What the teacher says of a row's output tokens; `None` where it was not scored.

        Raises:
            InputError: `E-SCORES-STATE`, scores of another state; `E-SCORES-INDEX`; `E-SCORES-CHECK`.
        """
        row = self._reader.get(*invocation.key)
        if row is None:
            return None
        self.used += 1
        if row.state_digest != invocation.compute_digest():
            raise InputError(
                f"{invocation.name}: its scores are of another state", code="E-SCORES-STATE", hint="score this trace"
            )
        m, at = len(invocation.output_ids), row.output_index
        if len(at) and not 0 <= int(at[0]) <= int(at[-1]) < m:
            raise InputError(f"{invocation.name}: scores of outputs that it does not have", code="E-SCORES-INDEX")
        target_ids = invocation.output_ids[at]
        self._reader.verify(row, target_ids)
        return Teacher(
            scored=_spread(np.ones(len(at), bool), at, m),
            logprob=_spread(row.logprob, at, m),
            ids=None if row.topk_ids is None else _spread(row.topk_ids, at, m),
            logprobs=None if row.topk_logprobs is None else _spread(row.topk_logprobs, at, m),
        )

    def lacking(self, chosen: Format) -> Iterator[tuple[str, str]]:
        """What of this run a format does not carry, and why."""
        run = self.metadata
        stands_in = ("logprob",) if chosen.sampled_only and "topk" not in run.signals else ()
        for name in run.signal_columns:
            if name in WHY_SCORES and name not in stands_in and not chosen.carries_score(name):
                yield name, WHY_SCORES[name]
        if run.view != RECORDED:
            yield "view", f"that the teacher read another prompt (view '{printable(run.view)}') is not told"
        if run.temperature != 1:
            yield "temperature", f"{run.temperature:g} is taken for 1"
        if run.topk_source == "student" and chosen.carries_score("topk_ids"):
            yield "topk_source", "the student's best ids are taken for the teacher's"

    def check(self, chosen: Format, dropped: Collection[str]) -> None:
        """Raises:
        InputError: a teacher of a temperature that the target takes for 1; no top-k where the target needs it.
        """
        temperature = self.metadata.temperature
        if temperature != 1 and "temperature" not in dropped:
            raise InputError(
                f"{self._reader.folder}: scored at temperature {temperature:g}, and {chosen.name} takes it for 1",
                hint="score at temperature 1, or --drop temperature",
            )
        if chosen.needs_scores and "topk" not in self.metadata.signals:
            raise InputError(
                f"{self._reader.folder}: holds {', '.join(self.metadata.signals)}, and {chosen.name} takes top-k",
                hint="score with --signal topk",
            )


def _spread(values: np.ndarray, at: np.ndarray, m: int) -> np.ndarray:
    """[m, …]: the values at their outputs, 0 elsewhere."""
    found = np.zeros((m, *values.shape[1:]), values.dtype)
    found[at] = values
    return found
