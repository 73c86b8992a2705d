"""Calls that forget while they write: what is recorded gives the log-probabilities that were sampled with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_models import STOP, tiny_tokenizer
from helpers_scorer import tiny_model

from memopd_scorer.auditing import audit
from memopd_trace import Sampling, read, validate, write
from memopd_trace.errors import UsageError
from memopd_trace.record.transformers import generate
from memopd_trainer.environments.reading import ReadingEnvironment, ReadingTask
from memopd_trainer.eviction import Window, generate_evicting
from memopd_trainer.rollout import collect

TOKENIZER = tiny_tokenizer()
TASKS = [ReadingTask("q", "Who rang?", ("the goat",), ("A goat came.", "It rang the bell."))]
EXACT = 1e-4  # nats, in float32


def saved(folder: Path) -> Path:
    model = tiny_model(vocab_size=len(TOKENIZER) + 7)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def test_recorded_evictions_audit_to_rounding_and_only_with_their_visibility(tmp_path: Path) -> None:
    folder, path = saved(tmp_path / "model"), tmp_path / "t.parquet"
    collect(
        tiny_model(vocab_size=len(TOKENIZER) + 7),
        TOKENIZER,
        lambda: ReadingEnvironment(TOKENIZER),
        TASKS,
        out_path=path,
        rollouts_per_task=2,
        sampling=Sampling(temperature=1.0),
        max_new_tokens=24,
        eviction=Window(first=4, latest=12),
    )
    report = validate(path, "train")
    assert report.clean, report.to_text()
    reader = read(path)
    assert reader.metadata.required_features == ["visibility"]
    rows = list(reader.iter_invocations())
    for row in rows:
        n, start = len(row), len(row.prompt_ids)
        assert row.visible_until is not None and row.position_ids is not None
        for place in range(start, n - 1):  # the last token was never fed
            seen = [k for k in range(place) if row.visible_until[k] > place]
            assert seen == [*range(4), *range(place - 12, place)], "the first four and the twelve before it"
    assert audit(path, folder).recorded.max_abs <= EXACT

    plain = reader.metadata.model_copy(update={"required_features": []})
    write(tmp_path / "blind.parquet", plain, [r.replace(visible_until=None) for r in rows])
    assert audit(tmp_path / "blind.parquet", folder).recorded.max_abs > 100 * EXACT, "forgetting mattered"


class Odd:
    """Forgets what it likes: every third place, once it is five steps old."""

    def forget(self, kept: Sequence[int]) -> Collection[int]:
        return [place for place in kept[1:-5] if place % 3 == 0]


def test_a_policy_of_ones_own_is_recorded_and_its_call_can_be_repeated() -> None:
    model = tiny_model(vocab_size=len(TOKENIZER), dtype=torch.float64)
    how = {"sampling": Sampling(temperature=1.0), "max_new_tokens": 20, "stop_ids": [STOP], "seed": 3}
    first, again = (generate_evicting(model, range(5, 30), Odd(), **how) for _ in range(2))  # type: ignore[arg-type]
    assert first.generated.output_ids.tolist() == again.generated.output_ids.tolist()
    gone = np.flatnonzero(first.visible_until < len(first.visible_until))
    assert len(gone) > 5 and all(place % 3 == 0 for place in gone)


class Nothing:
    """Keeps all."""

    def forget(self, kept: Sequence[int]) -> Collection[int]:
        return ()


def test_forgetting_nothing_samples_what_an_ordinary_call_does() -> None:
    model = tiny_model(vocab_size=len(TOKENIZER), dtype=torch.float64)
    sampling = Sampling(temperature=0.9, top_k=30)
    (plain,) = generate(model, [range(5, 30)], sampling=sampling, max_new_tokens=20, stop_ids=[STOP], seeds=[7])
    call = generate_evicting(
        model, range(5, 30), Nothing(), sampling=sampling, max_new_tokens=20, stop_ids=[STOP], seed=7
    )
    assert call.generated.output_ids.tolist() == plain.output_ids.tolist()
    np.testing.assert_allclose(call.generated.logprobs, plain.logprobs, rtol=0, atol=1e-12)
    assert set(call.visible_until) == {len(call.visible_until)}


class Everything:
    def forget(self, kept: Sequence[int]) -> Collection[int]:
        return kept


class Foreign:
    def forget(self, kept: Sequence[int]) -> Collection[int]:
        return [10**6]


def test_evictions_that_cannot_be_are_refused() -> None:
    how = {"sampling": Sampling(temperature=1.0), "max_new_tokens": 5, "stop_ids": [], "seed": 0}
    for policy in (Everything(), Foreign()):
        with pytest.raises(UsageError, match="forget what is kept, not all"):
            generate_evicting(tiny_model(), range(5, 30), policy, **how)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="see a window"):
        generate_evicting(tiny_model("gemma3"), range(5, 30), Window(1, 3), **how)  # type: ignore[arg-type]
    for first, latest in ((-1, 3), (2, 0)):
        with pytest.raises(UsageError, match="a window of"):
            Window(first, latest)
