"""Ways to a teacher's log-probabilities of sampled tokens: one short function each, all for the same targets.

    one by one  each invocation alone, through the model's own attention
    padded      a batch of Transformers, padded on the right; states of all tokens, the head on the targets' rows only
    packed      the project's variable-length packing, nothing shared
    tree        the project's packed prefix tree
    score       the verb `score` on the trace file, tree layout: validated, scored, states stored; read back
    trl         what TRL's DistillationTrainer runs its teacher on: prompts padded left, completions right
    vllm        prompt_logprobs of vLLM's CPU server, the environment of `benchmarks/setup_vllm.sh`

Shape legend: B sequences, L padded length, R prediction rows, M targets, D model width, C padded completion length.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopd_scorer.attention import states_at_rows
from memopd_scorer.plan import Layout, plan_states
from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score as score_trace
from memopd_scorer.signals import compute_signals, iter_chunks
from memopd_scorer.states import State, pairs_of_prefix
from memopd_scorer.teacher import LoadedModel

from .vllm_server import VllmServer
from .workloads import MAX_TOKENS, Workload


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a contender found, and what it ran for it. `logprobs` are float32 in nats, one array a state of the
    workload; `bytes` is the size of what it hands over or stores, where that is more than the log-probabilities."""

    logprobs: list[np.ndarray]
    tokens: int
    pairs: int  # visible (query, key) pairs
    rows: int  # rows of the output head
    bytes: int | None = None


@dataclass(slots=True)
class Bench:
    """What contenders run with: a teacher, its folder where there is one, a server where one runs."""

    teacher: LoadedModel
    folder: Path | None = None
    server: VllmServer | None = None
    max_tokens: int = MAX_TOKENS
    traces: dict[str, Path] = field(default_factory=dict)  # the workloads' trace files

    @property
    def device(self) -> torch.device:
        """Where the teacher is."""
        return self.teacher.head.weight_VD.device


Contender = Callable[[Bench, Workload], Outcome]


@torch.no_grad()
def oracle(bench: Bench, work: Workload) -> list[np.ndarray]:
    """Each invocation alone through the plain model, all logits, softmax in float64."""
    found = []
    for state in work.states:
        ids = torch.from_numpy(state.ids.astype(np.int64)).to(bench.device)
        rows, targets = _indices(bench.device, state.row_of_target, state.target_ids)
        logits = bench.teacher.model(ids[None], use_cache=False).logits[0, rows, : bench.teacher.head.size]
        found.append(logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu().numpy())
    return found


def one_by_one(bench: Bench, work: Workload) -> Outcome:
    """The per-invocation path of the project: no attention of ours, the head on prediction rows."""
    return _in_packs(bench, work, "single", backend="native")


def packed(bench: Bench, work: Workload) -> Outcome:
    """Variable-length packing: every invocation whole, none padded."""
    return _in_packs(bench, work, "packed")


def tree(bench: Bench, work: Workload) -> Outcome:
    """The prefix tree."""
    return _in_packs(bench, work, "tree")


@torch.no_grad()
def _in_packs(bench: Bench, work: Workload, layout: Layout, backend: Any = None) -> Outcome:
    found: dict[tuple[str, int], np.ndarray] = {}
    tokens = pairs = rows = 0
    for pack in plan_states(work.groups, layout=layout, max_tokens=bench.max_tokens):
        if backend is None:
            hidden_RD = bench.teacher.states(pack)
        else:
            hidden_RD = states_at_rows(bench.teacher.model, pack, backend=backend)
        signals = compute_signals(hidden_RD, bench.teacher.head, pack, ("sampled",))
        for number, state in enumerate(pack.states):
            found[state.episode_id, state.invocation_index] = signals.logprob_M[pack.target_state_M == number]
        tokens, pairs, rows = tokens + len(pack), pairs + pack.pairs, rows + len(pack.rows_R)
    return Outcome([found[s.episode_id, s.invocation_index] for s in work.states], tokens, pairs, rows)


@torch.no_grad()
def padded(bench: Bench, work: Workload) -> Outcome:
    """Batches of like length, at most `max_tokens` with padding."""
    states = work.states
    found: dict[int, np.ndarray] = {}
    tokens = pairs = 0
    for batch in batches(states, bench.max_tokens):
        longest = max(len(states[n]) for n in batch)
        ids_BL = torch.zeros(len(batch), longest, dtype=torch.long)
        mask_BL = torch.zeros_like(ids_BL)
        for row, n in enumerate(batch):
            ids_BL[row, : len(states[n])] = torch.from_numpy(states[n].ids)
            mask_BL[row, : len(states[n])] = 1
        arguments = {"input_ids": ids_BL.to(bench.device), "attention_mask": mask_BL.to(bench.device)}
        hidden_BLD = bench.teacher.model.base_model(**arguments, use_cache=False).last_hidden_state
        rows = np.concatenate([row * longest + states[n].row_of_target for row, n in enumerate(batch)])
        at, targets = _indices(bench.device, rows, np.concatenate([states[n].target_ids for n in batch]))
        logprobs = _sampled(bench.teacher, hidden_BLD.flatten(0, 1)[at], targets)
        ends = np.cumsum([len(states[n].target_ids) for n in batch])
        found.update(zip(batch, np.split(logprobs, ends[:-1]), strict=True))
        tokens, pairs = tokens + ids_BL.numel(), pairs + len(batch) * pairs_of_prefix(longest)
    return Outcome([found[n] for n in range(len(states))], tokens, pairs, sum(len(s.target_ids) for s in states))


def score(bench: Bench, work: Workload) -> Outcome:
    """The verb, with states stored, from the trace file to the folder of scores."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "scores"
        result = score_trace(bench.traces[work.name], bench.teacher, folder, max_tokens=bench.max_tokens)
        reader = ScoresReader(folder)
        rows = [reader.get(s.episode_id, s.invocation_index) for s in work.states]
        size = sum(file.stat().st_size for file in reader.files)
        logprobs = [row.logprob for row in rows if row is not None]
    plan = result.plan
    return Outcome(logprobs, plan.executed_tokens, plan.pairs, plan.prediction_rows, size)


@torch.no_grad()
def trl(bench: Bench, work: Workload) -> Outcome:
    """TRL's own functions: its trainer's method for the teacher's states, its log-softmax for the sampled tokens."""
    from trl.trainer.distillation_trainer import DistillationTrainer
    from trl.trainer.utils import selective_log_softmax

    trainer: Any = SimpleNamespace(model_kwarg_keys=(), _is_vlm=False)  # what that method looks at
    states = work.states
    prompts = [int(s.row_of_target[0]) + 1 for s in states]
    before, after = max(prompts), max(len(s) - p for s, p in zip(states, prompts, strict=True))
    ids_BL = torch.zeros(len(states), before + after, dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    for row, (state, prompt) in enumerate(zip(states, prompts, strict=True)):
        ids_BL[row, before - prompt : before - prompt + len(state)] = torch.from_numpy(state.ids)
        mask_BL[row, before - prompt : before - prompt + len(state)] = 1
    ids_BL, mask_BL = ids_BL.to(bench.device), mask_BL.to(bench.device)
    hidden_BCD = DistillationTrainer._get_last_hidden_state(trainer, bench.teacher.model, ids_BL, mask_BL, after)
    logits_BCV = bench.teacher.model.get_output_embeddings()(hidden_BCD)
    logprobs_BC = selective_log_softmax(logits_BCV, ids_BL[:, before:]).float().cpu().numpy()
    found = [
        logprobs_BC[row, state.row_of_target - prompt + 1]
        for row, (state, prompt) in enumerate(zip(states, prompts, strict=True))
    ]
    pairs = len(states) * pairs_of_prefix(before + after)
    return Outcome(found, ids_BL.numel(), pairs, logprobs_BC.size, logits_BCV.numel() * logits_BCV.element_size())


def vllm(bench: Bench, work: Workload) -> Outcome:
    """The server computes and sends the log-probabilities of all tokens of a sequence."""
    assert bench.server is not None
    states = work.states
    answers, size = bench.server.prompt_logprobs([s.ids for s in states])
    found = [answer[s.row_of_target + 1] for answer, s in zip(answers, states, strict=True)]
    tokens = sum(len(s) for s in states)
    return Outcome(found, tokens, sum(s.pairs for s in states), tokens, size)


CONTENDERS: dict[str, Contender] = {
    "one by one": one_by_one,
    "padded": padded,
    "packed": packed,
    "tree": tree,
    "score": score,
    "trl": trl,
    "vllm": vllm,
}


def absent(name: str, bench: Bench) -> str | None:
    """Why a contender cannot run here; `None` when it can."""
    if name == "trl" and importlib.util.find_spec("trl") is None:
        return "the package trl is not installed"
    if name == "vllm" and bench.server is None:
        return "no server runs"
    if name == "score" and bench.folder is None:
        return "needs a model folder"
    return None


def _sampled(teacher: LoadedModel, hidden_RD: Tensor, targets_R: Tensor) -> np.ndarray:
    """float32 [R]: log-probability of one target a row, in chunks of rows."""
    parts = []
    for start, stop in iter_chunks(len(hidden_RD), teacher.head.size):
        logits = teacher.head.logits(hidden_RD[start:stop])
        chosen = logits.gather(1, targets_R[start:stop, None])[:, 0]
        parts.append(chosen - logits.logsumexp(-1))
    return torch.cat(parts).cpu().numpy()


def batches(states: Sequence[State], limit: int) -> Iterator[list[int]]:
    """Indices of states, longest first, whose padded batch keeps to `limit` tokens."""
    batch: list[int] = []
    for n in sorted(range(len(states)), key=lambda n: -len(states[n])):
        if batch and (len(batch) + 1) * len(states[batch[0]]) > limit:
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch


def _indices(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    return [torch.from_numpy(a.astype(np.int64)).to(device) for a in arrays]
