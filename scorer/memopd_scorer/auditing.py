"""Is the recorded state the true one? Recompute the behaviour log-probabilities and compare.

Under the recorded state they must come out again, to rounding; where they do not, the trace does not say in which
state, or with what treatment, its tokens were sampled. `against="persistent-history"` scores the same tokens under the
flattened history as well, and so measures what misaligned scoring would cost at identical weights.

What is compared is `memopd_trace.behaviour.behaviour_of`: whole-vocabulary numbers at the temperature they include.

    false clip      |exp(recomputed - recorded) - 1| > epsilon: PPO would clip a token that nothing has changed

The report and its JSON are described in `memopd_scorer.audit_report`. Memory: the model, a pack, the rows of one group
(with another view also 24 bytes a token of it), and tallies that do not grow (`memopd_scorer.audit_tally`).

Shape legend: M targets, N output tokens of one invocation, R prediction rows, V vocabulary (real ids).
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from memopd_scorer.audit_labels import depths_of, labels_of, parts_of
from memopd_scorer.audit_report import AGAINST_TABLES, TABLES, Against, AuditReport, Limits
from memopd_scorer.audit_tally import FLOATS, Differences, Evidence, Table, Tally, Worst
from memopd_scorer.plan import Layout, Pack, iter_groups, plan_states
from memopd_scorer.signals import iter_chunks
from memopd_scorer.states import State, state_of
from memopd_scorer.teacher import DTYPES, LoadedModel, check_trace, load
from memopd_trace.behaviour import Behaviour, behaviour_of
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import IDS, Invocation, group_episodes
from memopd_trace.metadata import Model, TraceMetadata
from memopd_trace.record.fingerprint import weights_digest
from memopd_trace.schema import RECORDED
from memopd_trace.storage import TraceReader
from memopd_trace.validate import require_valid
from memopd_trace.views import PERSISTENT_HISTORY, persistent_history, under_prompt

CLIP_EPSILON = 0.2
READING_TOKENS = 256  # enough to tell; each costs a softmax for every temperature of the grid
TEMPERATURES = tuple(t / 10 for t in range(1, 21))
DIVIDED, KEPT_MASS = "log-probabilities divided by the temperature", "kept log-mass not to be added"
IN_PLACE = "in an episode with rows generated in place, which have no flattened history"
NO_LOGPROB, NO_TARGET = "a null log-probability", "an id beyond the tokenizer, or nothing before the token"
DIGEST = re.compile(r"[0-9a-f]{64}")  # what `weights_digest` makes; of another text nothing can be told
Key = tuple[str, int]


def audit(
    trace: str | os.PathLike[str],
    model: str | os.PathLike[str] | LoadedModel,
    *,
    against: str | None = None,
    model_id: str | None = None,
    epsilon: float = CLIP_EPSILON,
    limits: Limits | None = None,
    worst: int = 10,
    layout: Layout = "tree",
    attention: str = "auto",
    dtype: str = "float32",
    device: str = "cpu",
    max_tokens: int = 8192,
    on_pack: Callable[[int], None] = lambda done: None,
) -> AuditReport:
    """Recompute every recorded log-probability with the model that sampled it; `on_pack(done)` follows each pack.

    `model_id` says which rows those are, where the trace has several models. `worst` tokens are named, `limits` end up
    in the report's `failed`.

    Raises:
        InputError: a trace that is not valid, another tokenizer, media, `E-NONFINITE` or `E-AUDIT-NO-LOGPROBS`.
        UsageError: an unknown view, several models and no `model_id`, an epsilon or a number of tokens below 0.
    """
    if against not in (None, PERSISTENT_HISTORY):
        raise UsageError(f"unknown view '{against}'", hint=f"only {PERSISTENT_HISTORY}")
    if not epsilon > 0 or worst < 0:
        raise UsageError(f"epsilon {epsilon}, {worst} worst tokens", hint="above 0, and at least 0")
    require_valid(trace)
    reader = TraceReader(trace)
    model_id = _one_model(reader, model_id)
    if not isinstance(model, LoadedModel):
        model = load(model, dtype=dtype, device=device, backend=attention)
    _check_tokenizers(reader.metadata, model, model_id, against)
    account = _Account(epsilon, Worst(worst))
    plan = functools.partial(plan_states, layout=model.layout(layout), max_tokens=max_tokens)
    run = functools.partial(_run, plan, model, itertools.count(1), on_pack)
    for group in iter_groups(reader.iter_episodes()):
        _add_group(account, group, run, model_id, against)
    recorded = account.recorded.comparison()
    if recorded is None:
        raise InputError(
            f"{trace}: no token with a recorded log-probability that could be recomputed{account.why_none()}",
            code="E-AUDIT-NO-LOGPROBS",
            hint="an audit compares recorded log-probabilities; `validate --profile policy` says what is missing",
        )
    return AuditReport(
        model=model.name,
        model_id=model_id,
        weights=weights_of(model.model, reader.metadata.models[model_id]),
        probe=model.capability.reason,
        attention=model.describe_attention(),
        clip_epsilon=epsilon,
        recorded=recorded,
        tables={name: table.comparisons() for name, table in account.tables.items()},
        lags=account.lags,
        readings=account.readings,
        worst=tuple(account.worst.tokens),
        left_out=dict(+account.left_out),
        other_models=dict(+account.other_models),
        other_view=None if against is None else account.against(against),
        limits=limits or Limits(),
        histograms={RECORDED: account.recorded.counts_B, **({against: account.other.counts_B} if against else {})},
    )


def _add_group(
    account: _Account,
    group: list[Invocation],
    run: Callable[[list[Invocation], dict[str, Evidence] | None], Iterator[_Tokens]],
    model_id: str,
    against: str | None,
) -> None:
    """Count a group under its recorded states and, with a view, under that."""
    rows, depths = account.choose(group, model_id), depths_of(group)
    kept: dict[Key, _Tokens] = {}
    for tokens in run(list(rows.values()), account.readings):
        account.add_recorded(rows[tokens.key], tokens, depths)
        if against is not None:
            kept[tokens.key] = tokens
    if against is not None:
        for tokens in run(account.flattened(group, rows), None):
            account.add_other(rows[tokens.key], tokens, kept.get(tokens.key), depths)


def _run(
    plan: Callable[[list[list[State]]], Iterator[Pack]],
    model: LoadedModel,
    done: Iterator[int],
    on_pack: Callable[[int], None],
    rows: list[Invocation],
    readings: dict[str, Evidence] | None,
) -> Iterator[_Tokens]:
    """The comparable tokens of some rows, pack by pack."""
    by_key = {i.key: i for i in rows}
    for pack in plan([[state_of(i, vocabulary=model.head.size) for i in rows]]):
        yield from _recompute(pack, model, by_key, readings)
        on_pack(next(done))


def _one_model(reader: TraceReader, model_id: str | None) -> str:
    there = list(reader.metadata.models)
    if model_id is None and len(there) == 1:
        return there[0]
    if model_id not in there:
        raise UsageError(
            f"the trace has the models {', '.join(there)}, the one to audit is {model_id or 'not named'}",
            hint="name it with --model-id",
        )
    return model_id


def weights_of(model: PreTrainedModel, described: Model) -> str:
    """`same`, `other`, or `unknown`: whether a loaded model has the weights that a trace records for its model, or for
    one of its policies. A digest is of values in the recorded dtype: a model that was loaded in fewer bits cannot
    tell, nor one of which some parts stay in float32 whatever the dtype."""
    policies = described.policies.values()
    known = {d for d in (described.weights_digest, *(p.weights_digest for p in policies)) if d and DIGEST.fullmatch(d)}
    if not known:
        return "unknown"
    recorded = DTYPES.get(described.dtype or "", model.dtype)
    if recorded == model.dtype:
        return "same" if weights_digest(model) in known else "other"
    if weights_digest(model, recorded) in known:
        return "same"
    mixed = model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict
    tells = torch.promote_types(recorded, model.dtype) == model.dtype and not mixed
    return "other" if tells else "unknown"


def _check_tokenizers(metadata: TraceMetadata, model: LoadedModel, model_id: str, against: str | None) -> None:
    """Rows of other models are not run, and may have other tokenizers; but a flattened history holds their tokens."""
    if against is None:
        metadata = metadata.model_copy(update={"models": {model_id: metadata.models[model_id]}})
    check_trace(metadata, model)


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """The tokens of one invocation that can be compared; log-probabilities in nats."""

    key: Key
    output_M: IDS  # index into its output
    recorded_M: FLOATS
    recomputed_M: FLOATS
    top1_M: IDS  # most likely id


@dataclass(slots=True, eq=False)
class _Account:
    """All that is counted while the groups of a trace pass by."""

    epsilon: float
    worst: Worst
    recorded: Tally = field(default_factory=Tally)
    other: Tally = field(default_factory=Tally)
    difference: Tally = field(default_factory=Tally)
    tables: dict[str, Table] = field(default_factory=lambda: {name: Table() for name in TABLES})
    other_tables: dict[str, Table] = field(default_factory=lambda: {name: Table() for name in AGAINST_TABLES})
    lags: dict[int, Evidence] = field(default_factory=lambda: {-1: Evidence(), 1: Evidence()})
    readings: dict[str, Evidence] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    other_models: Counter[str] = field(default_factory=Counter)
    view_left_out: Counter[str] = field(default_factory=Counter)
    flips: int = 0

    def choose(self, group: list[Invocation], model_id: str) -> dict[Key, Invocation]:
        """The rows that can be compared; the sampled tokens of the rest are counted with the reason."""
        rows = {}
        for row in group:
            sampled = int(row.sampled().sum())
            if row.model_id != model_id:
                self.other_models[row.model_id] += sampled
            elif (behaviour := behaviour_of(row)).reason is not None:
                self.left_out[behaviour.reason] += sampled
            else:
                rows[row.key] = row
                nulls = int((row.sampled() & np.isnan(behaviour.logprobs)).sum())
                self.left_out[NO_LOGPROB] += nulls
                self.left_out[NO_TARGET] += sampled - nulls  # less those that are compared
        return rows

    def why_none(self) -> str:
        """The commonest reason, in brackets."""
        reasons = (+self.left_out).most_common(1)
        return f" ({reasons[0][0]})" if reasons else ""

    def add_recorded(self, row: Invocation, tokens: _Tokens, depths: dict[Key, str]) -> None:
        """Count an invocation under its recorded state."""
        self.left_out[NO_TARGET] -= len(tokens.output_M)
        self._count(self.recorded, self.tables, row, tokens, depths)
        self.worst.add(
            row.key, tokens.output_M, row.output_ids[tokens.output_M], tokens.recorded_M, tokens.recomputed_M
        )
        self._add_lags(len(row.output_ids), tokens)

    def _count(
        self, tally: Tally, tables: dict[str, Table], row: Invocation, tokens: _Tokens, depths: dict[Key, str]
    ) -> None:
        found = Differences.of(tokens.recomputed_M - tokens.recorded_M, self.epsilon)
        tally.add(found)
        for name, label, part in parts_of(labels_of(row, depths, tokens.output_M, tables)):
            tables[name].add(label, found if part is None else found[part])

    def _add_lags(self, length: int, tokens: _Tokens) -> None:
        """By the places of the tokens in the output: the neighbour of a token that was left out is not the next one."""
        recorded_N, recomputed_N = np.full(length, np.nan), np.full(length, np.nan)
        recorded_N[tokens.output_M], recomputed_N[tokens.output_M] = tokens.recorded_M, tokens.recomputed_M
        same_N = recomputed_N - recorded_N
        self.lags[1].add(recomputed_N[:-1] - recorded_N[1:], same_N[:-1])
        self.lags[-1].add(recomputed_N[1:] - recorded_N[:-1], same_N[1:])

    def flattened(self, group: list[Invocation], rows: dict[Key, Invocation]) -> list[Invocation]:
        """The chosen rows under the flattened history of their episodes."""
        found = []
        for episode in group_episodes(group):
            mine = [i for i in episode if i.key in rows]
            if any(i.output_slots is not None for i in episode):
                self.view_left_out[IN_PLACE] += sum(int(i.sampled().sum()) for i in mine)
                continue
            prompts = persistent_history(episode)
            found += [under_prompt(i, p) for i, p in zip(episode, prompts, strict=True) if i.key in rows]
        return found

    def add_other(self, row: Invocation, tokens: _Tokens, mine: _Tokens | None, depths: dict[Key, str]) -> None:
        """Count an invocation under the other view, and against the recorded state (`mine`)."""
        self._count(self.other, self.other_tables, row, tokens, depths)
        if mine is not None:
            _, here, there = np.intersect1d(tokens.output_M, mine.output_M, return_indices=True)
            delta_M = tokens.recomputed_M[here] - mine.recomputed_M[there]
            self.difference.add(Differences.of(delta_M, self.epsilon))
            self.flips += int((tokens.top1_M[here] != mine.top1_M[there]).sum())

    def against(self, view: str) -> Against:
        """What was counted under the other view."""
        compared, difference = self.other.comparison(), self.difference.comparison()
        return Against(
            view=view,
            compared=compared,
            difference=difference,
            top1_flips=None if difference is None else self.flips,
            tables={name: table.comparisons() for name, table in self.other_tables.items()},
            left_out=dict(self.view_left_out),
        )


@torch.no_grad()
def _recompute(
    pack: Pack, model: LoadedModel, by_key: dict[Key, Invocation], readings: dict[str, Evidence] | None
) -> Iterator[_Tokens]:
    """The comparable tokens of a pack's invocations, each at the temperature that its recorded numbers include.

    With `readings`, its first `READING_TOKENS` tokens are read in other ways as well.
    """
    hidden_RD = model.states(pack)
    rows_M, ids_M = (torch.from_numpy(a.astype(np.int64)) for a in (pack.target_row_M, pack.target_ids_M))
    for number, state in enumerate(pack.states):
        row = by_key[state.episode_id, state.invocation_index]
        behaviour = behaviour_of(row)
        mine = np.flatnonzero(pack.target_state_M == number)
        mine = mine[~np.isnan(behaviour.logprobs[pack.target_output_M[mine]])]
        output = pack.target_output_M[mine]
        recorded = behaviour.logprobs[output]
        logprobs, top1 = np.empty(len(mine)), np.empty(len(mine), np.int32)
        for start, stop in iter_chunks(len(mine), model.head.size):
            part = mine[start:stop]
            logits = model.head.logits(hidden_RD[rows_M[part].to(hidden_RD.device)])
            ids = ids_M[part].to(logits.device)[:, None]
            logprobs[start:stop] = _chosen(logits, ids, behaviour.temperature)
            top1[start:stop] = logits.argmax(-1).cpu().numpy()
            if readings is not None:
                _read_otherwise(readings, row, behaviour, output[start:stop], logits, ids, logprobs[start:stop])
        if not np.isfinite(logprobs).all():
            raise InputError(
                f"{row.name}: a recomputed log-probability is not finite", code="E-NONFINITE", hint="try another dtype"
            )
        yield _Tokens(row.key, output, recorded, logprobs, top1)


def _chosen(logits_MV: Tensor, ids_M1: Tensor, temperature: float) -> FLOATS:
    """[M] log softmax(z / T)[id], nats."""
    chosen = (logits_MV / temperature).log_softmax(-1).gather(1, ids_M1)[:, 0]
    found: FLOATS = chosen.double().cpu().numpy()
    return found


def _read_otherwise(
    readings: dict[str, Evidence],
    row: Invocation,
    behaviour: Behaviour,
    output_M: IDS,
    logits_MV: Tensor,
    ids_M1: Tensor,
    recomputed_M: FLOATS,
) -> None:
    """What the recorded numbers would be if they meant something else: another temperature (of a grid), a plain
    log-probability divided by the temperature, or a number that the kept mass is no part of."""
    done = max((e.pairs for e in readings.values()), default=0)
    take = slice(0, READING_TOKENS - done)
    if done >= READING_TOKENS or not len(output_M):
        return
    logits_MV, ids_M1, output_M, recomputed_M = logits_MV[take], ids_M1[take], output_M[take], recomputed_M[take]
    recorded_M = behaviour.logprobs[output_M]
    found = {f"temperature {t:g}": _chosen(logits_MV, ids_M1, t) - recorded_M for t in TEMPERATURES}
    stated = row.sampling.temperature if row.sampling is not None else None
    if stated:
        found[DIVIDED] = _chosen(logits_MV, ids_M1, 1.0) / stated - recorded_M
        # the temperature that was set is no point of the grid, perhaps
        found.setdefault(f"temperature {stated:g}", _chosen(logits_MV, ids_M1, stated) - recorded_M)
    if row.logprob_kind == "processed" and row.output_kept_logmass is not None:
        kept_M = np.ma.filled(row.output_kept_logmass.astype(np.float64), np.nan)[output_M]
        found[KEPT_MASS] = recomputed_M - (recorded_M - kept_M)
    for name, delta_M in found.items():
        readings.setdefault(name, Evidence()).add(delta_M, recomputed_M - recorded_M)
