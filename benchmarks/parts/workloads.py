"""The work that contenders are measured on: small traces, the same for the same seed, that differ in what is shared.

    memory     one agent rewrites its memory six times: task + memory + part -> new memory, only the task is shared
    history    six turns of a growing history: each prompt is all that came before, and a new observation
    group      eight samples of one prompt
    unrelated  four invocations of one length that share nothing: nothing to gain, nothing to pad
    rollouts   what a real model said: a memory agent over the demo's documents, recorded by the project's recorder

Lengths are in tokens and grow with `scale`. Random pieces of a text stand for prompts and outputs, so that a real model
sees text; a random model sees random ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from memopd_scorer.plan import iter_groups, plan_states
from memopd_scorer.states import State, state_of
from memopd_scorer.summary import PlanSummary
from memopd_trace.invocation import Episode, Invocation, Sampling, Segment
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata
from memopd_trace.storage import TraceReader, write

SEED = 0
MAX_TOKENS = 8192  # of a pack, and of a padded batch

Draw = Callable[[int], np.ndarray]  # tokens -> int32 ids


@dataclass(frozen=True, slots=True)
class Workload:
    """A small trace. `groups` are its states, `states` all of them in trace order."""

    name: str
    episodes: tuple[Episode, ...]

    @property
    def groups(self) -> list[list[State]]:
        """States that may share prefixes, as the planner has them."""
        return [[state_of(i) for i in group] for group in iter_groups(iter(self.episodes))]

    @property
    def states(self) -> list[State]:
        """All states, in trace order."""
        return [state for group in self.groups for state in group]

    def plan(self, max_tokens: int = MAX_TOKENS) -> PlanSummary:
        """What the tree makes of it."""
        summary = PlanSummary("tree", max_tokens)
        for pack in plan_states(self.groups, max_tokens=max_tokens):
            summary.add(pack)
        return summary

    def write(self, path: Path, tokenizer: Tokenizer) -> Path:
        """The trace file, for a model with this tokenizer."""
        described = Model(name="benchmark", tokenizer=tokenizer)
        metadata = TraceMetadata(producer=Producer(name="benchmark"), models={"m": described})
        write(path, metadata, [row.replace(model_id="m") for episode in self.episodes for row in episode])
        return path


def text_pieces(tokenizer: Any) -> Draw:
    """Pieces of the demo's documents, from random places."""
    documents = json.loads(resources.files("memopd_trainer.environments").joinpath("reading.json").read_text())
    text = " ".join(chunk for document in documents for chunk in document["chunks"])
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    rng = np.random.default_rng(SEED)

    def draw(tokens: int) -> np.ndarray:
        return np.take(ids, np.arange(tokens) + rng.integers(len(ids)), mode="wrap")

    return draw


def random_pieces(vocabulary: int) -> Draw:
    """Random ids, for a model without a tokenizer."""
    rng = np.random.default_rng(SEED)
    return lambda tokens: rng.integers(0, vocabulary, tokens, dtype=np.int32)


def synthetic(draw: Draw, scale: float = 1.0) -> Iterator[Workload]:
    """All workloads that need no model to be made."""

    def piece(tokens: int) -> np.ndarray:
        return draw(max(1, round(tokens * scale)))

    yield Workload("memory", (_memory(piece),))
    yield Workload("history", (_history(piece),))
    prompt = piece(300)
    yield Workload("group", tuple(_sample(n, prompt, piece(80), group="g") for n in range(8)))
    yield Workload("unrelated", tuple(_sample(n, piece(300), piece(80), group=f"u{n}") for n in range(4)))


def _memory(piece: Draw) -> Episode:
    """250 tokens of task, then the last output as it was (70), then a part of the document (130)."""
    task, rows = piece(250), list[Invocation]()
    memory = piece(70)
    for index in range(6):
        part, segments = piece(130), [Segment(0, len(task), "task")]
        if rows:
            source = len(rows[-1].prompt_ids)
            segments.append(Segment(len(task), len(task) + len(memory), "memory", index - 1, source))
        row = Invocation(
            episode_id="memory",
            invocation_index=index,
            model_id="m",
            prompt_ids=np.concatenate([task, memory, part]),
            output_ids=piece(70),
            parent_index=index - 1 if rows else None,
            relation="rewrite" if rows else "root",
            rewrite_kind="memory" if rows else None,
            rewrite_evidence="explicit" if rows else None,
            segments=segments,
            token_source="engine",
        )
        rows.append(row)
        memory = row.output_ids
    return Episode("memory", tuple(rows))


def _history(piece: Draw) -> Episode:
    """200 tokens of task; each turn has 70 of output and 50 of observation."""
    prompt, rows = piece(200), list[Invocation]()
    for index in range(6):
        row = Invocation(
            episode_id="history",
            invocation_index=index,
            model_id="m",
            prompt_ids=prompt,
            output_ids=piece(70),
            parent_index=index - 1 if rows else None,
            relation="extend" if rows else "root",
            token_source="engine",
        )
        rows.append(row)
        prompt = np.concatenate([row.sequence_ids, piece(50)])
    return Episode("history", tuple(rows))


def _sample(number: int, prompt: np.ndarray, output: np.ndarray, group: str) -> Episode:
    name = f"{group}/{number}"
    row = Invocation(
        episode_id=name,
        invocation_index=0,
        model_id="m",
        prompt_ids=prompt,
        output_ids=output,
        relation="root",
        group_id=group,
        token_source="engine",
    )
    return Episode(name, (row,))


def rollouts(model: Any, tokenizer: Any, path: Path, scale: float = 1.0) -> Workload:
    """Two rollouts of a few reading tasks, sampled from the model itself and recorded at `path`; the same each time."""
    from memopd_trainer.environments.reading import ReadingEnvironment, reading_tasks
    from memopd_trainer.rollout import collect

    collect(
        model,
        tokenizer,
        lambda: ReadingEnvironment(tokenizer),
        reading_tasks("train")[: max(1, round(2 * scale))],
        out_path=path,
        rollouts_per_task=2,
        sampling=Sampling(temperature=1.0),
        max_new_tokens=40,
        seed=SEED,
        model_name="m",
    )
    return Workload("rollouts", tuple(TraceReader(path).iter_episodes()))
