"""A rollout that a trainer keeps as one sequence: `verl`, `slime` and SkyRL store a prompt, a response in which tool
results stand between what was sampled, and a mask that is 1 on the latter.

Each run of 1s is a call, and its prompt is all that stands in front of it: these loops hand the engine just that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memopd_trace.convert.assemble import MAX_TOKENS
from memopd_trace.convert.draft import Call
from memopd_trace.convert.losses import BrokenRecord, Losses
from memopd_trace.invocation import IDS, MaskedFloats


def split(
    prompt: IDS,
    response: IDS,
    mask: NDArray[np.bool_] | None,
    logprobs: MaskedFloats | None,
    losses: Losses,
    prefix: str = "",
) -> list[Call]:
    """The calls of a sequence of int32 ids, each following the one before; their keys begin with `prefix`.

    mask: bool[len(response)], which ids count for the loss; `None` where all were sampled in one call.
    logprobs: float32[len(response)], nats; what stands outside the mask is filler.

    Raises:
        BrokenRecord: the prompts of the calls add up to more than an episode may hold.
    """
    if mask is not None and len(mask) != len(response):
        losses.degrade("a mask left out: not as many as the ids", f"{len(mask)} for {len(response)} ids")
        mask = None
    if logprobs is not None and len(logprobs) != len(response):
        losses.degrade("log-probabilities left out: they are not as many as the ids",
                       f"{len(logprobs)} for {len(response)} ids")  # fmt: skip
        logprobs = None
    if mask is None or not mask.any():
        return [_one_call(prompt, response, mask, logprobs, losses, prefix)]
    _count_untrained(mask, logprobs, losses)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))).tolist()
    starts, stops = edges[::2], edges[1::2]
    check_size((len(prompt) + stop for stop in stops), losses)
    calls = []
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        calls.append(
            Call(
                place=losses.place,
                key=f"{prefix}{number}",
                parent=f"{prefix}{number - 1}" if number else None,
                prompt_ids=np.concatenate([prompt, response[:start]]),
                output_ids=response[start:stop],
                logprobs=None if logprobs is None else logprobs[start:stop],
            )
        )
    if stops[-1] < len(response):
        calls[-1].extra["ids_after_the_last_call"] = response[stops[-1] :].tolist()
    return calls


def are_finite(values: list[Any]) -> bool:
    """Whether all of a log's values are numbers, and so is any sum of some of them."""
    try:
        return all(type(v) in (int, float) for v in values) and math.isfinite(sum(map(abs, values)))
    except OverflowError:  # a whole number of some hundred digits
        return False


def spread(values: list[float], mask: NDArray[np.bool_] | None, calls: list[Call]) -> None:
    """Give each call the sum of the per-token rewards from its first id up to the next call's."""
    edges = [0]
    if mask is not None and len(mask) == len(values) and len(calls) > 1:
        starts = np.flatnonzero(np.diff(np.concatenate([[False], mask]).astype(np.int8)) == 1).tolist()
        edges += starts[1:]
    for call, start, stop in zip(calls, edges, [*edges[1:], len(values)], strict=True):
        call.reward = float(sum(values[start:stop]))


def check_size(lengths: Iterable[int], losses: Losses) -> None:
    """See that sequences of so many ids each can be in memory at once.

    Raises:
        BrokenRecord: they cannot; a few bytes of a log may stand for very many ids.
    """
    total = 0
    for length in lengths:
        total += length
        if total > MAX_TOKENS:
            raise BrokenRecord(f"calls of more than {MAX_TOKENS} tokens in all")


def _one_call(
    prompt: IDS,
    response: IDS,
    mask: NDArray[np.bool_] | None,
    logprobs: MaskedFloats | None,
    losses: Losses,
    prefix: str,
) -> Call:
    """The whole response as one call: a mask without a 1 tells neither calls apart nor numbers from fillers."""
    if mask is not None and len(mask):
        losses.degrade("a mask without any 1: all of the response is taken for one call")
        if logprobs is not None:
            zero = np.ma.getmaskarray(logprobs) | (np.ma.getdata(logprobs) == 0)
            logprobs = np.ma.masked_array(np.ma.getdata(logprobs), mask=zero, dtype=np.float32)
    return Call(
        place=losses.place,
        key=f"{prefix}0",
        prompt_ids=prompt,
        output_ids=response,
        logprobs=logprobs,
        trained=mask,
    )


def _count_untrained(mask: NDArray[np.bool_], logprobs: MaskedFloats | None, losses: Losses) -> None:
    """Ids outside the mask that have a log-probability were sampled too; where their calls began is not told."""
    if logprobs is None:
        return
    other = int((np.ma.filled(logprobs, 0)[~mask] != 0).sum())
    if other:
        losses.degrade("sampled ids that are not trained are taken for a part of the prompt", number=other)
        losses.gap("lost_calls", "calls that are not trained")
