"""What tests of hooks share: metadata for the toy server's ids, and recording into a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import helpers_upstream
import numpy as np

from memopd_trace import Invocation, Sampling, TraceMetadata, read
from memopd_trace.metadata import Model, Producer, Tokenizer
from memopd_trace.record import TraceRecorder
from memopd_trace.record.openai import OpenAIHook


def metadata(name: str = helpers_upstream.MODEL) -> TraceMetadata:
    size = helpers_upstream.SIZE
    tokenizer = Tokenizer(fingerprint="toy", size=size, vocab_size=size, eos_ids=[2], stop_ids=[2])
    return TraceMetadata(producer=Producer(name="test"), models={name: Model(name=name, tokenizer=tokenizer)})


@contextmanager
def hooked(path: Path, **more: Any) -> Iterator[tuple[TraceRecorder, OpenAIHook, list[str]]]:
    """A recorder, a hook on it, and what it was told."""
    told: list[str] = []
    with TraceRecorder(path, metadata(), profile="lineage") as recorder:
        settings = {"logprob_kind": "raw", "defaults": Sampling(), **more}
        yield recorder, OpenAIHook(recorder, notice=told.append, **settings), told


def rows(path: Path) -> list[Invocation]:
    return list(read(path).iter_invocations())


def agrees(row: Invocation, produced: dict[str, Any]) -> bool:
    """Whether a row holds exactly what the server says that it sampled."""
    return (
        row.prompt_ids.tolist() == produced["prompt"]
        and row.output_ids.tolist() == produced["output"]
        and row.output_logprobs is not None
        and row.output_logprobs.tolist() == np.array(produced["logprobs"], np.float32).tolist()
    )
