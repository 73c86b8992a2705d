"""The view `successful-peer`: each prompt, with what a successful rollout of the same task did put into it.

As SDPO (arXiv 2601.20802) builds its teacher's prompt, but on token ids: nothing that was recorded is rendered again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from memopd_trace import __version__
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import IDS, Episode, Invocation
from memopd_trace.metadata import Producer, ViewInfo, ViewsMetadata
from memopd_trace.record.fingerprint import tokenizer_fingerprint
from memopd_trace.storage import TraceReader
from memopd_trace.viewfile import View, ViewsWriter
from memopd_trace.views import under_prompt

SUCCESSFUL_PEER = "successful-peer"
BEFORE, AFTER = "Correct solution:\n", "\n\n"
Solutions = dict[tuple[str, str], list[tuple[str, IDS]]]  # by group: (episode_id, ids) of its first two successes


def write_peer_view(
    trace: str | os.PathLike[str],
    path: str | os.PathLike[str],
    tokenizer: Any,
    *,
    threshold: float = 1.0,
    overwrite: bool = False,
) -> tuple[int, int]:
    """Write the view of every accepted call of a valid trace that has a successful peer, as a views file.

    The peer is the first episode of the same group, other than the call's own, whose return is at least `threshold`;
    its solution, the outputs of its accepted calls, stands between `BEFORE` and `AFTER` behind the prompt's first
    `task` segment, or at the prompt's start where it has none.

    Returns (calls with the view, calls without a peer).

    Raises:
        InputError: `E-TOKENIZER-MISMATCH`, an unreadable trace, or not one call that has a peer.
        UsageError: a call of in-place generation, or a target that `ViewsWriter` refuses.
    """
    reader = TraceReader(trace)
    fingerprint = tokenizer_fingerprint(tokenizer)
    for model in reader.metadata.models.values():
        if model.tokenizer.fingerprint != fingerprint:
            raise InputError(
                f"{trace}: its ids are of tokenizer {model.tokenizer.fingerprint[:16]}, not {fingerprint[:16]}",
                code="E-TOKENIZER-MISMATCH",
            )
    before, after = (np.array(tokenizer.encode(t, add_special_tokens=False), np.int32) for t in (BEFORE, AFTER))
    solutions = _solutions(reader, threshold)
    metadata = ViewsMetadata(
        producer=Producer(name="memopd-trace", version=__version__),
        tokenizer_fingerprint=fingerprint,
        views={SUCCESSFUL_PEER: ViewInfo(description="the prompt with a successful rollout's solution")},
    )
    written = alone = 0
    with ViewsWriter(path, metadata, overwrite=overwrite) as writer:
        for episode in reader.iter_episodes():
            peer = peer_of(episode, solutions)
            for invocation in _accepted(episode):
                if peer is None:
                    alone += 1
                    continue
                at = _place(invocation)
                prompt = [invocation.prompt_ids[:at], before, peer, after, invocation.prompt_ids[at:]]
                writer.write(View.of(invocation, under_prompt(invocation, np.concatenate(prompt)), SUCCESSFUL_PEER))
                written += 1
        if not written:
            raise InputError(
                f"{trace}: no call has a peer with a return of at least {threshold:g}",
                hint="several rollouts of a task share its group_id; lower the threshold, or sample more of them",
            )
    return written, alone


def peer_of(episode: Episode, solutions: Solutions) -> IDS | None:
    """The solution of the first successful rollout of its task but itself."""
    there = solutions.get(episode.group_key, [])
    return next((ids for name, ids in there if name != episode.episode_id), None)


def _solutions(reader: TraceReader, threshold: float) -> Solutions:
    found: Solutions = {}
    for episode in reader.iter_episodes():
        first_two = found.setdefault(episode.group_key, [])
        if len(first_two) < 2 and episode.episode_return is not None and episode.episode_return >= threshold:
            first_two.append((episode.episode_id, np.concatenate([i.output_ids for i in _accepted(episode)])))
    return found


def _accepted(episode: Episode) -> Iterator[Invocation]:
    for invocation in episode:
        if invocation.output_slots is not None:
            raise UsageError(f"{invocation.name}: generated in place, its slots have no place in another prompt")
        if invocation.accepted is not False:
            yield invocation


def _place(invocation: Invocation) -> int:
    """Where the solution goes in a prompt."""
    return next((s.stop for s in invocation.segments or () if s.kind == "task"), 0)
