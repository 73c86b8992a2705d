"""What scoring takes of memory: traces of any number of rows, and the peak of a process that works through them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from memopd_scorer.plan import plan
from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_scorer.states import STATE_COLUMNS
from memopd_scorer.teacher import LoadedModel, load
from memopd_trace import arrowfile
from memopd_trace.invocation import Invocation
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata
from memopd_trace.record.fingerprint import tokenizer_fingerprint
from memopd_trace.storage import TraceWriter, read

MIB = 2**20


def make_teacher(folder: Path, *, vocabulary: int, width: int) -> Path:
    """A random Llama of two layers, `width` wide, and a tokenizer of `vocabulary` words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2**15,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    raw = RawTokenizer(WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    return folder


def make_trace(path: Path, teacher: Path, *, rows: int, prompt: int, output: int) -> Path:
    """A trace of `rows` calls, two an episode, four episodes a group, each of `prompt` + `output` tokens; without a
    suffix in parts of 128 rows."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(teacher)
    size = len(tokenizer)
    described = Tokenizer(fingerprint=tokenizer_fingerprint(tokenizer), size=size, vocab_size=size)
    metadata = TraceMetadata(producer=Producer(name="tests"), models={"m": Model(name="toy", tokenizer=described)})
    with TraceWriter(path, metadata, rows_per_part=128) as writer:
        for invocation in _rows(rows, prompt, output, size):
            writer.write(invocation)
    return path


def _rows(rows: int, prompt: int, output: int, size: int) -> Iterator[Invocation]:
    rng = np.random.default_rng(0)
    for number in range(rows):
        task = np.random.default_rng(number // 8).integers(0, size, prompt // 2)
        yield Invocation(
            episode_id=f"e{number // 2}",
            invocation_index=number % 2,
            model_id="m",
            prompt_ids=np.r_[task, rng.integers(0, size, prompt - prompt // 2)],
            output_ids=rng.integers(0, size, output),
            group_id=f"g{number // 8}",
            token_source="engine",
        )


def status(field: str) -> int:
    """A size in `/proc/self/status`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_of(work: Callable[[], Any]) -> dict[str, int]:
    """Bytes of memory that work took at most: `peak` of the process, and how much that is `above` where it began."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew at what is in use now
    before = status("VmRSS")
    result = work()
    peak = status("VmHWM")
    return {"peak": peak, "above": peak - before, "result": result}


# what a forked process does (`helpers_forks`)


class Warm(NamedTuple):
    """A teacher, and a small trace to run it over before anyone measures: a fork has to map the libraries anew."""

    teacher: LoadedModel
    trace: str

    def up(self, batch_rows: int) -> LoadedModel:
        """The teacher, warm; from now on a trace is read in batches of so many rows, that short ones fill several."""
        arrowfile.MAX_ROWS = batch_rows
        with TemporaryDirectory() as folder:
            score(self.trace, self.teacher, folder + "/s", signals=("topk", "hidden"))
            ScoresReader(folder + "/s")
        return self.teacher


def load_teacher(teacher: str, warming: str) -> Warm:
    warm = Warm(load(teacher), warming)
    warm.up(arrowfile.MAX_ROWS)
    return warm


def peak_of_scoring(warm: Warm, trace: str, out: str, batch_rows: int = 2048, **options: Any) -> dict[str, int]:
    teacher = warm.up(batch_rows)
    return peak_of(lambda: score(trace, teacher, out, **options).plan.targets)


def peak_of_planning(warm: Warm, trace: str, max_tokens: int, batch_rows: int = 2048) -> dict[str, int]:
    warm.up(batch_rows)
    return peak_of(lambda: sum(len(p) for p in plan(read(trace).iter_episodes(STATE_COLUMNS), max_tokens=max_tokens)))


def peak_of_reading(warm: Warm, trace: str, scores: str, batch_rows: int = 2048) -> dict[str, int]:
    """Every row of a folder, in the trace's order, with its states."""

    def work() -> int:
        reader, targets = ScoresReader(scores), 0
        for invocation in read(trace).iter_invocations():
            row = reader.get(*invocation.key)
            assert row is not None and row.hidden is not None
            targets += len(row.hidden)
        return targets

    warm.up(batch_rows)
    return peak_of(work)


def peak_of_rebuilding(warm: Warm, scores: str, episode: str, chunks: int) -> dict[str, int]:
    """The first chunks of the whole vocabulary of one long row."""

    def work() -> int:
        reader = ScoresReader(scores)
        row = reader.get(episode, 0)
        assert row is not None
        return sum(part.numel() for part in islice(reader.logprobs(row), chunks))

    warm.up(2048)
    return peak_of(work)
