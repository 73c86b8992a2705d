"""From states to signals: what the teacher says about each sampled token.

The output head runs on prediction rows only, a chunk of rows at a time with one upcast to float32, so that
[rows, vocabulary] never exists. Logits are cut to the tokenizer's real size *before* the softmax: the padded
part of the vocabulary carries no mass, and what it would have carried is reported.

    logprob[m]   = z[row(m), id(m)] - logsumexp[row(m)]         nats
    entropy[r]   = - sum_v p[r, v] log p[r, v]                   nats
    tail[r]      = log(1 - sum of the k chosen probabilities), computed from the rest, not by subtraction

States of a tier with fewer bytes are measured here as well: against the distribution that was scored, at every row.

Shape legend: R prediction rows, M targets, K chosen ids, V vocabulary (real ids), D model width, B scales of a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memopd_scorer.cost import SAMPLED_BYTES, full_bytes, topk_bytes
from memopd_scorer.head import Head
from memopd_scorer.plan import Pack
from memopd_scorer.tiers import check_tier, encode, kl_divergence, rebuild
from memopd_trace.errors import InputError, UsageError
from memopd_trace.tiers import scales_of, state_bytes

SIGNALS = ("sampled", "topk", "hidden", "full")
CHUNK_CELLS = 2**24  # float32 logits in a chunk: 64 MiB
ENCODED_CHUNKS = 4  # a chunk whose states are encoded is this much smaller: it is compared in float64


@dataclass(slots=True, eq=False)
class Signals:
    """The signals of one pack, per target, on the CPU; absent ones are `None`.

    `hidden_MD` keeps the teacher's dtype, or holds the codes of a tier; then there are scales, and what its rebuilt
    states give (`memopd_trace.tiers`). `padded_mass` is the largest mass any row had in padded ids.
    """

    logprob_M: np.ndarray
    logsumexp_M: np.ndarray
    entropy_M: np.ndarray
    topk_ids_MK: np.ndarray | None
    topk_logprobs_MK: np.ndarray | None
    tail_logprob_M: np.ndarray | None
    hidden_MD: Tensor | None
    hidden_scale_MB: np.ndarray | None
    hidden_logsumexp_M: np.ndarray | None
    hidden_kl_M: np.ndarray | None
    logits_MV: np.ndarray | None
    padded_mass: float


def check_signals(names: tuple[str, ...]) -> None:
    """Refuse unknown signal names.

    Raises:
        UsageError: naming the unknown one.
    """
    for name in names:
        if name not in SIGNALS:
            raise UsageError(f"unknown signal '{name}'", hint=f"one or more of {', '.join(SIGNALS)}")
    if not names:
        raise UsageError("no signal asked for", hint=f"one or more of {', '.join(SIGNALS)}")


@torch.no_grad()
def compute_signals(
    hidden_RD: Tensor | Iterable[Tensor],
    head: Head,
    pack: Pack,
    names: tuple[str, ...],
    *,
    topk: int = 64,
    tier: str = "exact",
    chosen_MK: Tensor | None = None,
) -> Signals:
    """The signals `names` of a pack from the states at its prediction rows, given whole or in parts, as they are made.

    `sampled` (logprob, logsumexp, entropy) is always there: it is the self-check of the others. `topk` > V gives V;
    `chosen_MK` (int64) are ids to take in place of the teacher's own best, for each target.

    Raises:
        InputError: `E-NONFINITE` when a row's logits are NaN or have no finite log-sum-exp, or its state has no finite
            ones in the `tier`.
        UsageError: an unknown signal name or tier, or a target id beyond the head's real ids.
    """
    check_signals(names)
    check_tier(tier)
    ids = pack.target_ids_M
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < head.size:
        raise UsageError(
            f"target ids from {int(ids.min())} to {int(ids.max())}, the head has {head.size} real ids",
            hint="plan with vocabulary=head.size",
        )
    encoded = "hidden" in names and tier != "exact"
    width = head.weight_VD.shape[1]
    k = min(topk, head.size) if chosen_MK is None else chosen_MK.shape[1]
    buffers = _RowSignals(pack, head.upcast(), names, k, tier if encoded else "exact", width, chosen_MK)
    done = 0
    states: list[Tensor] = []
    for part in [hidden_RD] if isinstance(hidden_RD, Tensor) else hidden_RD:
        for start, stop in iter_chunks(len(part), head.size * (ENCODED_CHUNKS if encoded else 1)):
            rows = slice(done + start, done + stop)
            buffers.add(part[start:stop], rows)
        done += len(part)
        states.extend([part.cpu()] if "hidden" in names and not encoded else [])
    return buffers.by_target(states)


class _RowSignals:
    """Buffers by prediction row, filled chunk by chunk. Those of `topk` are by target where somebody else chose its
    ids: they may be others in each of the states that share a row."""

    def __init__(
        self,
        pack: Pack,
        head: Head,
        names: tuple[str, ...],
        k: int,
        tier: str,
        width: int,
        chosen_MK: Tensor | None,
    ) -> None:
        self.pack, self.head, self.names, self.k, self.tier = pack, head, names, k, tier
        self.chosen_MK = None if "topk" not in names else chosen_MK
        self.padded_mass = 0.0
        self.order = np.argsort(pack.target_row_M, kind="stable")
        rows = len(pack.rows_R)
        self.logprob_M = np.empty(len(pack.target_ids_M), np.float32)
        self.logsumexp_R, self.entropy_R, self.rebuilt_R, self.kl_R = np.empty((4, rows), np.float32)
        wide = (rows if self.chosen_MK is None else len(self.chosen_MK)) if "topk" in names else 0
        self.topk_ids = np.empty((wide, k), np.int32)  # by row, or by target
        self.topk_logprobs = np.empty((wide, k), np.float32)
        self.tail = np.empty(wide, np.float32)
        self.logits_RV = np.empty((rows if "full" in names else 0, head.size), np.float32)
        codes = torch.int8 if tier == "int8" else torch.float16
        self.codes_RD = torch.empty((rows if tier != "exact" else 0, width), dtype=codes)
        self.scale_RB = np.empty((rows, scales_of(tier, width)), np.float32)

    def add(self, hidden: Tensor, rows: slice) -> None:
        """The signals of a chunk of rows."""
        logits = self.head.logits(hidden)
        logsumexp = logits.logsumexp(-1)
        check_finite(logsumexp, self.pack, rows.start, "a logit is not finite")
        self.logsumexp_R[rows] = logsumexp.cpu().numpy()
        if "full" in self.names:
            self.logits_RV[rows] = logits.cpu().numpy()
        # of [rows, size] two are held at a time: what is not needed again makes room in place
        logprobs = logits.sub_(logsumexp[:, None]) if self.tier == "exact" else logits - logsumexp[:, None]
        rest = logprobs.exp()
        self.padded_mass = max(self.padded_mass, float(self.head.padded_mass(hidden, logsumexp).max()))
        self._add_targets(logprobs, rest, rows)
        entropy = torch.zeros_like(logsumexp)
        if "topk" in self.names and self.chosen_MK is None:
            ids = logprobs.topk(self.k, dim=-1).indices
            best = logprobs.gather(1, ids)
            self.topk_ids[rows], self.topk_logprobs[rows] = ids.cpu().numpy(), best.cpu().numpy()
            self.tail[rows] = rest.scatter_(1, ids, 0.0).sum(-1).log().cpu().numpy()
            entropy -= (best.exp() * best).nansum(-1)
        entropy -= rest.mul_(logprobs).nansum(-1)  # NaN where a probability is 0: such a term is 0
        self.entropy_R[rows] = entropy.cpu().numpy()
        del logprobs, rest
        if self.tier != "exact":
            self._add_encoded(hidden, logits, rows)

    def by_target(self, states: list[Tensor]) -> Signals:
        """What was filled, a target at a time."""
        row_M = self.pack.target_row_M
        of_topk = row_M if self.chosen_MK is None else slice(None)
        topk, encoded = "topk" in self.names, self.tier != "exact"
        states_RD = self.codes_RD if encoded or not states else torch.cat(states)
        return Signals(
            logprob_M=self.logprob_M,
            logsumexp_M=self.logsumexp_R[row_M],
            entropy_M=self.entropy_R[row_M],
            topk_ids_MK=self.topk_ids[of_topk] if topk else None,
            topk_logprobs_MK=self.topk_logprobs[of_topk] if topk else None,
            tail_logprob_M=self.tail[of_topk] if topk else None,
            hidden_MD=states_RD[torch.from_numpy(row_M.astype(np.int64))] if "hidden" in self.names else None,
            hidden_scale_MB=self.scale_RB[row_M] if encoded else None,
            hidden_logsumexp_M=self.rebuilt_R[row_M] if encoded else None,
            hidden_kl_M=self.kl_R[row_M] if encoded else None,
            logits_MV=self.logits_RV[row_M] if "full" in self.names else None,
            padded_mass=self.padded_mass,
        )

    def _add_targets(self, logprobs: Tensor, probabilities: Tensor, rows: slice) -> None:
        low, high = np.searchsorted(self.pack.target_row_M[self.order], [rows.start, rows.stop])
        targets = self.order[low:high]
        row_M = torch.from_numpy(self.pack.target_row_M[targets].astype(np.int64) - rows.start).to(logprobs.device)
        id_M = torch.from_numpy(self.pack.target_ids_M[targets].astype(np.int64)).to(logprobs.device)
        self.logprob_M[targets] = logprobs[row_M, id_M].cpu().numpy()
        if self.chosen_MK is None:
            return
        for some in range(0, len(targets), len(logprobs)):  # copies of their rows, no more than there are
            part, row = targets[some : some + len(logprobs)], row_M[some : some + len(logprobs)]
            ids = self.chosen_MK[torch.from_numpy(part)].to(logprobs.device)
            self.topk_ids[part], self.topk_logprobs[part] = ids.cpu().numpy(), logprobs[row[:, None], ids].cpu().numpy()
            self.tail[part] = probabilities[row].scatter_(1, ids, 0.0).sum(-1).log().cpu().numpy()

    def _add_encoded(self, hidden: Tensor, logits: Tensor, rows: slice) -> None:
        codes, scales = encode(hidden, self.tier)
        rebuilt = self.head.logits(rebuild(codes, scales, self.tier))
        kl = kl_divergence(logits, rebuilt)
        check_finite(kl, self.pack, rows.start, f"a state cannot be held in the tier {self.tier}")
        self.codes_RD[rows], self.scale_RB[rows] = codes.cpu(), scales.cpu().numpy()
        self.rebuilt_R[rows], self.kl_R[rows] = rebuilt.logsumexp(-1).cpu().numpy(), kl.cpu().numpy()


def check_finite(values_R: Tensor, pack: Pack, start: int, what: str) -> None:
    """Refuse a row of a pack, `start` and those after it, that has no finite value.

    Raises:
        InputError: `E-NONFINITE`, naming the first such row's invocation.
    """
    finite = torch.isfinite(values_R)
    if bool(finite.all()):
        return
    row = start + int(torch.nonzero(~finite)[0])
    state = pack.states[int(pack.target_state_M[pack.target_row_M == row][0])]
    raise InputError(
        f"episode '{state.episode_id}', invocation {state.invocation_index}: {what}",
        code="E-NONFINITE",
        hint="try another dtype",
    )


def bytes_per_target(
    names: tuple[str, ...], *, width: int, hidden_bytes: int, topk: int, size: int, tier: str = "exact"
) -> int:
    """Uncompressed bytes that one target takes in the scores table; `hidden_bytes` is an item's in the tier `exact`."""
    total = SAMPLED_BYTES
    total += topk_bytes(topk, size) if "topk" in names else 0
    total += state_bytes(tier, width, hidden_bytes) if "hidden" in names else 0
    return total + (full_bytes(size) if "full" in names else 0)


def iter_chunks(count: int, size: int, *, rows: int | None = None) -> Iterator[tuple[int, int]]:
    """`[start, stop)` runs of `count` rows whose [rows, size] logits stay within CHUNK_CELLS cells, or of `rows`."""
    step = rows or max(1, CHUNK_CELLS // size)
    for start in range(0, count, step):
        yield start, min(start + step, count)
