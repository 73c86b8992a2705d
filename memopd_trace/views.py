"""Other prompts under which an invocation's sampled tokens may be scored.

A view never changes what was sampled; it changes what the scorer conditions on. `persistent_history` is the one
that training on a flattened transcript implies, and so measures what misaligned scoring costs.
"""

from __future__ import annotations

import os

import numpy as np

from memopd_trace import __version__
from memopd_trace.errors import UsageError
from memopd_trace.invocation import IDS, Episode, Invocation
from memopd_trace.lineage import common_prefix
from memopd_trace.metadata import Producer, ViewInfo, ViewsMetadata
from memopd_trace.schema import PERSISTENT_HISTORY as PERSISTENT_HISTORY
from memopd_trace.storage import TraceReader
from memopd_trace.viewfile import View, ViewsWriter


def persistent_history(episode: Episode) -> list[IDS]:
    """For each invocation of an episode, the prompt it would have had if nothing had ever been forgotten.

    The history starts as the first prompt. Each later invocation appends what its prompt holds that is new: the part
    after the longest prefix it has in common with the history or with an earlier invocation's sequence, without the
    segments that copy earlier tokens; then its own output. For an episode that only ever extends, the history is the
    recorded prompt.

    Example: prompts [1 2 | a] -> output [x], then [1 2 | x b] (x copied) -> output [y]: the second view is [1 2 a x b].

    Returns one int32 array an invocation, in order. Rejected attempts stay out of the history of later invocations, so
    what a later prompt copies from one is new to it.

    Raises:
        UsageError: a row of in-place generation, whose slots have no place in another prompt.
    """
    history = np.empty(0, np.int32)
    known: list[IDS] = [history]
    rejected: set[int] = set()
    views: list[IDS] = []
    for invocation in episode:
        if invocation.output_slots is not None:
            raise UsageError(f"{invocation.name}: generated in place, so it has no flattened history")
        view = np.concatenate([history, _new_tokens(invocation, known, rejected)])
        views.append(view)
        if invocation.accepted is False:
            rejected.add(invocation.invocation_index)
            continue
        history = np.concatenate([view, invocation.output_ids])
        known[0] = history
        known.append(invocation.sequence_ids)
    return views


def _new_tokens(invocation: Invocation, known: list[IDS], rejected: set[int]) -> IDS:
    """The prompt's tokens that a flattened history does not hold already."""
    prompt = invocation.prompt_ids
    new = np.ones(len(prompt), bool)
    new[: max(common_prefix(prompt, ids) for ids in known)] = False
    for segment in invocation.segments or ():
        if segment.source_index is not None and segment.source_index not in rejected:
            new[segment.start : segment.stop] = False
    return prompt[new]


def write_persistent_history(
    trace: str | os.PathLike[str], path: str | os.PathLike[str], *, overwrite: bool = False
) -> int:
    """Write the view `persistent-history` of every row of a valid trace as a views file; returns the number of rows.

    One episode is in memory at a time.

    Raises:
        InputError: an unreadable trace.
        UsageError: models of several tokenizers, a row of in-place generation, or a target that `ViewsWriter` refuses.
    """
    reader = TraceReader(trace)
    fingerprints = {m.tokenizer.fingerprint for m in reader.metadata.models.values()}
    if len(fingerprints) != 1:
        raise UsageError(f"{trace}: {len(fingerprints)} tokenizers, and a views file has one", hint="split the trace")
    metadata = ViewsMetadata(
        producer=Producer(name="memopd-trace", version=__version__),
        tokenizer_fingerprint=fingerprints.pop(),
        views={PERSISTENT_HISTORY: ViewInfo(description="the prompt as if nothing had ever been forgotten")},
    )
    rows = 0
    with ViewsWriter(path, metadata, overwrite=overwrite) as writer:
        for episode in reader.iter_episodes():
            for invocation, prompt_ids in zip(episode, persistent_history(episode), strict=True):
                writer.write(View.of(invocation, under_prompt(invocation, prompt_ids), PERSISTENT_HISTORY))
                rows += 1
    return rows


def under_prompt(invocation: Invocation, prompt_ids: IDS) -> Invocation:
    """The same sampled tokens after another prompt, with default positions and plain visibility.

    Recorded expert routes go with the prompt that they were recorded under.
    """
    return invocation.replace(
        prompt_ids=prompt_ids,
        segments=None,
        position_ids=None,
        visible_from=None,
        visible_until=None,
        media=None,
        routed_experts=None,
        parent_index=None,
        relation=None,
        rewrite_kind=None,
        rewrite_evidence=None,
    )
