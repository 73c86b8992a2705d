"""State coverage: which share of the states of a full run the tokens trained so far have reached.

As in "Rethinking On-Policy Distillation II" (arXiv 2609.04172): a state is the teacher's final hidden state where a
token is predicted; those of a run over many tasks are reduced by PCA and cut into K clusters by k-means; a cluster is
reached once a trained token's state is nearest to its centre.

Shape legend: N states, D teacher width, P components, K clusters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memopd_scorer.scores import ScoreRow, ScoresReader
from memopd_trace.errors import InputError, UsageError, printable
from memopd_trace.invocation import Invocation
from memopd_trainer.advantages import trained_mask
from memopd_trainer.recipes.sections import OneShotConfig

FITTED_STATES = 50_000  # of a reference with more, so many drawn at random
LLOYD_STEPS = 100
CHUNK = 8192  # states whose distances to all centres are held at once


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """Centres in the space of the principal components; float64."""

    mean_D: Tensor
    basis_DP: Tensor
    centres_KP: Tensor

    def of(self, hidden_ND: Tensor) -> Tensor:
        """int64[N]: the nearest centre of each state."""
        return nearest((hidden_ND.double() - self.mean_D) @ self.basis_DP, self.centres_KP)


def fit_clusters(hidden_ND: Tensor, clusters: int, components: int, seed: int) -> Clusters:
    """PCA and k-means (k-means++ starts, Lloyd's steps until nothing moves).

    Raises:
        UsageError: fewer distinct states than clusters.
    """
    hidden_ND = hidden_ND.double()
    distinct = len(torch.unique(hidden_ND, dim=0))
    if distinct < clusters:
        raise UsageError(f"{clusters} clusters of {distinct} distinct states", hint="lower one_shot.clusters")
    mean_D = hidden_ND.mean(0)
    _, vectors_DD = torch.linalg.eigh((hidden_ND - mean_D).T @ (hidden_ND - mean_D))  # ascending
    basis_DP = vectors_DD.flip(1)[:, :components]
    return Clusters(mean_D, basis_DP, k_means((hidden_ND - mean_D) @ basis_DP, clusters, seed))


def k_means(points_NP: Tensor, clusters: int, seed: int) -> Tensor:
    """[K, P] centres; one that loses its last point stays where it is."""
    rng = np.random.default_rng(seed)
    centres = [points_NP[int(rng.integers(len(points_NP)))]]
    away_N = torch.full((len(points_NP),), torch.inf, dtype=points_NP.dtype)
    while len(centres) < clusters:
        away_N = torch.minimum(away_N, (points_NP - centres[-1]).square().sum(1))
        total = float(away_N.sum())
        # rounding may leave fewer distinct points than there were distinct states
        share_N = (away_N / total).numpy() if total > 0 else np.full(len(points_NP), 1 / len(points_NP))
        centres.append(points_NP[int(rng.choice(len(points_NP), p=share_N / share_N.sum()))])
    centres_KP = torch.stack(centres)
    for _ in range(LLOYD_STEPS):
        own_N = nearest(points_NP, centres_KP)
        count_K = torch.bincount(own_N, minlength=clusters)
        sum_KP = torch.zeros_like(centres_KP).index_add_(0, own_N, points_NP)
        moved_KP = torch.where(count_K[:, None] > 0, sum_KP / count_K.clamp(min=1)[:, None], centres_KP)
        if torch.equal(moved_KP, centres_KP):
            break
        centres_KP = moved_KP
    return centres_KP


def nearest(points_NP: Tensor, centres_KP: Tensor) -> Tensor:
    """int64[N]: the index of the centre that is nearest to each point."""
    parts = [torch.cdist(part, centres_KP).argmin(1) for part in points_NP.split(CHUNK)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


class Coverage:
    """The clusters of a reference, and those that were reached."""

    def __init__(self, config: OneShotConfig, scores: ScoresReader, seed: int) -> None:
        """Fit the clusters.

        Raises:
            InputError: the reference or the scores hold no states, or are not of one teacher.
            UsageError: as `fit_clusters`.
        """
        assert config.reference is not None
        reference = ScoresReader(config.reference)
        if reference.metadata.teacher.weights_digest != scores.metadata.teacher.weights_digest:
            raise InputError(
                f"{reference.folder}: scored by '{printable(reference.metadata.teacher_id)}', {scores.folder} by "
                "another teacher: their states cannot be compared",
                code="E-SCORES-STATE",
            )
        rows = (_states(reference, row) for row in iter_rows(reference))
        self.clusters = fit_clusters(sample(rows, FITTED_STATES, seed), config.clusters, config.components, seed)
        self.scores, self.count = scores, config.clusters
        self.reached: set[int] = set()

    def add(self, invocations: Iterable[Invocation]) -> float:
        """Note the states of the trained tokens of these invocations; the share of clusters reached so far."""
        for invocation in invocations:
            mask = trained_mask(invocation)
            row = self.scores.get(*invocation.key) if mask.any() else None
            if row is not None:
                hidden_ND = _states(self.scores, row)[torch.from_numpy(mask[row.output_index])]
                self.reached.update(self.clusters.of(hidden_ND).tolist())
        return len(self.reached) / self.count


def sample(rows: Iterable[Tensor], most: int, seed: int) -> Tensor:
    """At most `most` of the states of all rows, each as likely as any other; twice as many are held."""
    rng = np.random.default_rng(seed)
    kept, keys = [], np.empty(0)
    for row_ND in rows:
        kept.append(row_ND)
        keys = np.concatenate([keys, rng.random(len(row_ND))])
        if len(keys) > 2 * most:
            kept, keys = _smallest(kept, keys, most)
    kept, _ = _smallest(kept, keys, most)
    return kept[0]


def iter_rows(scores: ScoresReader) -> Iterator[ScoreRow]:
    """Every row, as stored."""
    for key in scores.keys():  # noqa: SIM118 - no mapping
        row = scores.get(*key)
        assert row is not None
        yield row


def _smallest(kept: Sequence[Tensor], keys: np.ndarray, most: int) -> tuple[list[Tensor], np.ndarray]:
    chosen = np.sort(np.argsort(keys)[:most])
    return [torch.cat(list(kept))[torch.from_numpy(chosen)]], keys[chosen]


def _states(scores: ScoresReader, row: ScoreRow) -> Tensor:
    if row.hidden is None:
        raise InputError(
            f"{scores.folder}: holds no states, which coverage is measured on",
            code="E-SCORES-MISSING",
            hint="score with --signal sampled,hidden",
        )
    return row.hidden
