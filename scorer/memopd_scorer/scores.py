"""Reading scores: rows by invocation, the teacher's head, the whole vocabulary from states and head or from logits.

Nothing is believed: shards are checked against the hash in their name, the head against its digest, a few rows against
(state, head) or their logits on opening, and every row whose vocabulary is read while it is.

Shape legend: M targets of a row, K chosen ids, D model width, V vocabulary (real ids), B scales of a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from memopd_scorer.head import Head
from memopd_scorer.headfile import head_is_whole, load_head
from memopd_scorer.signals import iter_chunks
from memopd_trace.conform import iter_list_values
from memopd_trace.errors import InputError, UsageError, printable
from memopd_trace.metadata import ScoresMetadata
from memopd_trace.places import PathLike, Place, place
from memopd_trace.scorefolder import HEAD, STATE_VALUES, conform_scores, open_scores, open_shard, shard_fault
from memopd_trace.tiers import TIERS, least_kl, rebuild

SELF_CHECK_ROWS = 8
KEY = ("episode_id", "invocation_index")


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRow:
    """One teacher's signals for one invocation; arrays over its M scored tokens, absent signals `None`."""

    episode_id: str
    invocation_index: int
    state_digest: bytes
    output_index: np.ndarray  # int32 [M]
    logprob: np.ndarray  # float32 [M], nats
    logsumexp: np.ndarray  # float32 [M]
    entropy: np.ndarray  # float32 [M], nats
    topk_ids: np.ndarray | None  # int32 [M, K]
    topk_logprobs: np.ndarray | None  # float32 [M, K], nats
    tail_logprob: np.ndarray | None  # float32 [M], nats
    hidden: Tensor | None  # [M, D] in the teacher's dtype; rebuilt in float32 where the tier is not `exact`
    hidden_logsumexp: np.ndarray | None  # float32 [M], of the rebuilt states; `None` where they are exact
    hidden_kl: np.ndarray | None  # float32 [M] nats, KL(scored || rebuilt); likewise
    logits: np.ndarray | None  # float32 [M, size]


ROW_ARRAYS = tuple(f.name for f in fields(ScoreRow))[3:]


class ScoresReader:
    """A finished scores folder: look rows up by (episode_id, invocation_index), rebuild the whole vocabulary.

    Opening recomputes `logsumexp` of a few rows from (state, head) or from logits, where the folder has either.

    Raises:
        InputError: as `memopd_trace.scorefolder.open_scores`, or `E-SCORES-META`, `E-SCORES-DAMAGED`,
            `E-SCORES-DUPLICATE`, `E-SCORES-CHECK`.
    """

    def __init__(self, folder: PathLike | Place) -> None:
        found = open_scores(place(folder))
        self.folder, self.metadata, self.files = found.path, found.metadata, found.files
        if self.metadata.hidden_tier not in TIERS:
            raise InputError(
                f"{self.folder}: states in the tier '{printable(self.metadata.hidden_tier)}', this reader knows "
                + ", ".join(TIERS),
                code="E-SCORES-META",
            )
        if self.metadata.hidden_dtype not in (STATE_VALUES if "hidden" in self.metadata.signals else (None,)):
            raise InputError(f"{self.folder}: 'hidden_dtype' does not fit 'signals'", code="E-SCORES-META")
        self._where: dict[tuple[str, int], tuple[int, int]] = {}
        self._groups: list[np.ndarray] = []  # of each file, the first row of every row group
        for number, file in enumerate(self.files):
            fault = shard_fault(file, self.metadata)
            if fault is not None:
                raise InputError(
                    f"{file}: {fault}",
                    code="E-SCORES-DAMAGED",
                    hint="run the same `memopd-trace score` with --repair",
                )
            with open_shard(file) as shard:
                table = shard.read(columns=list(KEY))
                rows = [shard.metadata.row_group(n).num_rows for n in range(shard.num_row_groups)]
            self._groups.append(np.cumsum([0, *rows]))
            keys = [table.column(name).to_pylist() for name in KEY if table.schema.names.count(name) == 1]
            if len(keys) < len(KEY):
                raise _damaged(file, "no key in its rows")
            for row, key in enumerate(zip(*keys, strict=True)):
                if key in self._where:
                    raise InputError(
                        f"{file}: episode '{key[0]}', invocation {key[1]}: is scored twice",
                        code="E-SCORES-DUPLICATE",
                        hint="which of the two is right cannot be told; score the trace again into a new folder",
                    )
                self._where[key] = (number, row)
        self._head: Head | None = None
        self._loaded: tuple[tuple[int, int], _RowGroup] | None = None
        self._self_check()

    def __len__(self) -> int:
        return len(self._where)

    def keys(self) -> Iterator[tuple[str, int]]:
        """(episode_id, invocation_index) of every row, as they are stored."""
        yield from self._where

    def get(self, episode_id: str, invocation_index: int) -> ScoreRow | None:
        """The row of an invocation, or `None`. Neighbouring rows come from one read."""
        place = self._where.get((episode_id, invocation_index))
        if place is None:
            return None
        number, row = place
        group = int(np.searchsorted(self._groups[number], row, "right")) - 1
        if self._loaded is None or self._loaded[0] != (number, group):
            self._loaded = None  # one row group is held, not two
            self._loaded = (number, group), _RowGroup(self.files[number], group, self.metadata)
        return self._loaded[1].row(row - int(self._groups[number][group]))

    def head(self) -> Head:
        """The teacher's output head, checked against its digest.

        Raises:
            InputError: `E-SCORES-DAMAGED` when the head is missing or is another one.
        """
        if self._head is None:
            if not head_is_whole(self.folder / HEAD, self.metadata):
                raise InputError(
                    f"{self.folder / HEAD}: missing, or not the head the scores were made with",
                    code="E-SCORES-DAMAGED",
                    hint="run the same `memopd-trace score` again",
                )
            self._head = load_head(self.folder / HEAD, self.metadata)
        return self._head

    def logprobs(
        self, row: ScoreRow, target_ids: np.ndarray | None = None, *, chunk: int | None = None
    ) -> Iterator[Tensor]:
        """Full-vocabulary log-probabilities of a row, [<= chunk, size] at a time, in target order; float32 (float64
        where the states are), at the run's temperature; from the stored states, or where there are none from the
        stored logits. `chunk` counts targets; `None` takes as many as `memopd_scorer.signals.iter_chunks` does.
        Each chunk is held against the stored values, and against `logprob` where `target_ids` (int32 [M], the row's
        sampled ids in the trace) say whose it is.

        Raises:
            InputError: `E-SCORES-CHECK` before a chunk of which any target does not fit.
            UsageError: neither states nor logits are stored, or a chunk below 1.
        """
        if not _has_vocabulary(row):
            hint = "score with --signal hidden or full"
            raise UsageError(f"{self.folder}: neither states nor logits are stored", hint=hint)
        if chunk is not None and chunk < 1:
            raise UsageError(f"a chunk of {chunk} targets", hint="at least 1")
        size = self.metadata.teacher.head.size
        for start, stop in iter_chunks(len(row.logprob), size, rows=chunk):
            yield self._rebuild(row, slice(start, stop), target_ids)

    def verify(self, row: ScoreRow, target_ids: np.ndarray | None = None) -> None:
        """Rebuild the first scored token of a row, as `logprobs` does, if there is what to rebuild it from. With
        `target_ids`, the logit of the sampled id of every other token is held against the stored values as well: that
        takes no vocabulary.

        Raises:
            InputError: `E-SCORES-CHECK` with the difference in nats.
        """
        if not _has_vocabulary(row) or not len(row.logprob):
            return
        self._rebuild(row, slice(0, 1), target_ids)
        if target_ids is not None:
            logit_M = self._logit_of(row, target_ids.astype(np.int64)) / self.metadata.temperature
            stored = row.logsumexp if row.hidden_logsumexp is None else row.hidden_logsumexp
            self._check_sampled(row, slice(None), logit_M - stored)

    def _logits(self, row: ScoreRow, part: slice) -> Tensor:
        """[m, V] of targets [m] of a row, from its states, or as they are stored."""
        if row.hidden is not None:
            return self.head().logits(row.hidden[part])
        assert row.logits is not None
        return torch.tensor(row.logits[part])

    def _logit_of(self, row: ScoreRow, ids_M: np.ndarray) -> np.ndarray:
        """[M] float64: the logit of one id of each target of a row."""
        if row.hidden is not None:
            return _float64(self.head().logit_of(row.hidden, torch.from_numpy(ids_M)))
        assert row.logits is not None
        return row.logits[np.arange(len(ids_M)), ids_M].astype(np.float64)

    def _rebuild(self, row: ScoreRow, part: slice, target_ids: np.ndarray | None) -> Tensor:
        """The log-probabilities [m, V] of targets [m] of a row, checked."""
        logits_MV = self._logits(row, part) / self.metadata.temperature
        logsumexp_M1 = logits_MV.logsumexp(-1, keepdim=True)
        logprobs_MV = logits_MV - logsumexp_M1
        exact = row.hidden_logsumexp is None or row.hidden_kl is None
        name, stored = ("logsumexp", row.logsumexp) if exact else ("hidden_logsumexp", row.hidden_logsumexp)
        assert stored is not None
        tolerance = np.full(len(logits_MV), self.metadata.tolerance)
        self._refuse_beyond(row, part, name, np.abs(_float64(logsumexp_M1[:, 0]) - stored[part]), tolerance)
        if target_ids is not None:
            ids_M1 = torch.from_numpy(target_ids[part].astype(np.int64)).to(logprobs_MV.device)[:, None]
            self._check_sampled(row, part, _float64(logprobs_MV.gather(1, ids_M1)[:, 0]))
        return logprobs_MV

    def _check_sampled(self, row: ScoreRow, part: slice, rebuilt_M: np.ndarray) -> None:
        """Hold the log-probabilities of sampled ids, rebuilt, against those that were scored."""
        scored_M, tolerance = row.logprob[part], self.metadata.tolerance
        if row.hidden_kl is None:
            limit = np.full(len(scored_M), tolerance)
            self._refuse_beyond(row, part, "logprob", np.abs(rebuilt_M - scored_M), limit)
        else:
            least = least_kl(scored_M, rebuilt_M, tolerance)
            self._refuse_beyond(row, part, "the divergence of logprob", least, row.hidden_kl[part])

    def _refuse_beyond(self, row: ScoreRow, part: slice, name: str, off: np.ndarray, limit: np.ndarray) -> None:
        bad = np.flatnonzero(~(off <= limit))
        if not len(bad):
            return
        first, source = bad[0], "logits" if row.hidden is None else "state and head"
        raise InputError(
            f"{self.folder}: episode '{row.episode_id}', invocation {row.invocation_index}, output "
            f"{row.output_index[part][first]}: {name} recomputed from {source} is off by "
            f"{off[first]:.2e} nats (limit {limit[first]:.2g})",
            code="E-SCORES-CHECK",
            hint="these numbers are not of these states and this head, or of these logits; score again",
        )

    def _self_check(self) -> None:
        if not {"hidden", "full"} & set(self.metadata.signals):
            return
        keys = list(self._where)
        for key in keys[:: max(1, len(keys) // SELF_CHECK_ROWS)][:SELF_CHECK_ROWS]:
            row = self.get(*key)
            assert row is not None
            self.verify(row)


def _has_vocabulary(row: ScoreRow) -> bool:
    return row.hidden is not None or row.logits is not None


def _float64(values: Tensor) -> np.ndarray:
    return np.asarray(values.detach().double().cpu().numpy())


def _damaged(file: Place, fault: str) -> InputError:
    return InputError(f"{file}: {fault}", code="E-SCORES-DAMAGED", hint="score again")


class _RowGroup:
    """The columns of one row group of a shard; rows are views of them, but for the states, which are rebuilt a row at a
    time."""

    def __init__(self, file: Place, group: int, metadata: ScoresMetadata) -> None:
        self.metadata = metadata
        with open_shard(file) as shard:
            table = shard.read_row_group(group).combine_chunks()
        columns = self._columns(table, file)
        self._keys = [columns[n].to_pylist() for n in (*KEY, "state_digest")]
        self._offsets, output_index = iter_list_values(columns["output_index"])
        self._flat: dict[str, np.ndarray] = {"output_index": output_index.to_numpy()}
        row_M = np.repeat(np.arange(len(self._offsets) - 1), np.diff(self._offsets))
        rises = (np.diff(self._flat["output_index"]) > 0) | (np.diff(row_M) > 0)  # or another row begins
        if not rises.all():
            raise _damaged(file, "the scored outputs of a row do not rise")
        for name in metadata.signal_columns:
            offsets, values = iter_list_values(columns[name])
            if not np.array_equal(offsets, self._offsets):
                raise _damaged(file, f"a list of '{name}' is not as long as its targets")
            width = metadata.width_of(name)
            if width is None:
                self._flat[name] = values.to_numpy()
                continue
            inner, flat = iter_list_values(values)
            if not np.array_equal(inner, width * np.arange(len(values) + 1)):
                raise _damaged(file, f"lists of '{name}' are not {width} wide")
            self._flat[name] = flat.to_numpy(zero_copy_only=False).reshape(len(values), width)

    def _columns(self, table: pa.Table, file: Place) -> dict[str, pa.Array]:
        """The columns of the run, in their types and without a null."""
        (raw,) = table.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
        batch, misfits = conform_scores(raw, self.metadata)
        if misfits:
            m = misfits[0]
            raise _damaged(file, f"column '{m.column}': expected {m.expected}, got {m.actual}")
        return dict(zip(batch.schema.names, batch.columns, strict=True))

    def __len__(self) -> int:
        return len(self._keys[0])

    def row(self, number: int) -> ScoreRow:
        """One row, its states as the head takes them."""
        part = slice(int(self._offsets[number]), int(self._offsets[number + 1]))
        found: dict[str, Any] = dict.fromkeys(ROW_ARRAYS)
        found |= {name: values[part] for name, values in self._flat.items() if name != "hidden_scale"}
        if found["hidden"] is not None:
            found["hidden"] = self._states(found["hidden"], part)
        episode_id, index, digest = (keys[number] for keys in self._keys)
        return ScoreRow(episode_id, index, digest, **found)

    def _states(self, stored_MD: np.ndarray, part: slice) -> Tensor:
        if self.metadata.hidden_tier != "exact":
            return torch.from_numpy(rebuild(stored_MD, self._flat["hidden_scale"][part], self.metadata.hidden_tier))
        hidden_MD = torch.from_numpy(stored_MD.copy())
        return hidden_MD.view(torch.bfloat16) if self.metadata.hidden_dtype == "bfloat16" else hidden_MD
