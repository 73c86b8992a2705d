"""What the targets' own code reads of exported files; each test runs where that code can be imported.

TRL is among the development dependencies (marker `slow`: it trains). The others are not: put DistillKit, verl (with
tensordict) or NeMo-RL on `PYTHONPATH` to run theirs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers_resume import make_toy
from helpers_scorer import SIZE

from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_trace import Invocation, read, write
from memopd_trace.export import export
from memopd_trace.export.formats.distillkit import CONFIG

PAGE = Path(__file__).parents[2] / "docs" / "exporters.md"
Toy = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """(teacher folder, trace, scores); every other row has a token that is not trained."""
    folder = tmp_path_factory.mktemp("toy")
    teacher, plain = make_toy(folder, count=2)
    rows = []
    for number, row in enumerate(read(plain).iter_invocations()):
        mask = np.arange(len(row.output_ids)) != 2
        rows.append(row.replace(output_loss_mask=mask) if number % 2 else row)
    write(folder / "masked.parquet", read(plain).metadata, rows)
    score(folder / "masked.parquet", teacher, folder / "scores", signals=("sampled", "topk"), topk=4)
    return teacher, folder / "masked.parquet", folder / "scores"


def rows_of(toy: Toy) -> list[Invocation]:
    return list(read(toy[1]).iter_invocations())


def shown(heading: str) -> dict[str, Any]:
    """What the page's lines under a heading define."""
    part = PAGE.read_text(encoding="utf-8").split(f"### {heading}\n")[-1]
    (code, *_) = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope


def test_verl_makes_a_data_proto_and_its_own_slices_are_the_rows(toy: Toy, tmp_path: Path) -> None:
    padding = pytest.importorskip("verl.workers.utils.padding")
    export("verl", toy[1], tmp_path / "out.parquet", scores=toy[2])
    data = shown("verl")["data_proto"](tmp_path / "out.parquet")
    batch, reader = padding.left_right_2_no_padding(data.batch.clone()), ScoresReader(toy[2])
    sliced = padding.no_padding_2_padding(batch["teacher_logprobs"], batch)
    for number, row in enumerate(rows_of(toy)):
        m, teacher = len(row.output_ids), reader.get(*row.key)
        assert teacher is not None
        assert batch["input_ids"][number].tolist() == row.sequence_ids.tolist()
        assert batch["position_ids"][number].tolist() == list(range(len(row)))
        assert data.batch["response_mask"][number, :m].bool().tolist() == row.loss_mask().tolist()
        assert not data.batch["response_mask"][number, m:].any()
        assert np.array_equal(sliced[number, :m].numpy(), teacher.topk_logprobs), "of the token that each predicts"


def test_nemo_rl_flattens_its_message_logs_to_the_rows(toy: Toy, tmp_path: Path) -> None:
    utils = pytest.importorskip("nemo_rl.data.llm_message_utils")
    export("nemo-rl", toy[1], tmp_path / "out.parquet", scores=toy[2])
    as_tensors = shown("NeMo-RL")["message_log"]
    logs = [as_tensors(m) for m in pq.read_table(tmp_path / "out.parquet").column("message_log").to_pylist()]
    flat, lengths = utils.batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": 0})
    for number, row in enumerate(rows_of(toy)):
        p, n = len(row.prompt_ids), len(row)
        assert int(lengths[number]) == n and flat["token_ids"][number, :n].tolist() == row.sequence_ids.tolist()
        assert flat["token_loss_mask"][number, p:n].bool().tolist() == row.loss_mask().tolist()
        assert not flat["token_loss_mask"][number, :p].any()
    for log in logs:  # what its GRPO trains: the assistant's messages with log-probabilities, whole
        marked = [m["role"] == "assistant" and "generation_logprobs" in m for m in log]
        assert marked == [bool(m["token_loss_mask"].all()) for m in log]


def test_distillkit_decompresses_every_bit(toy: Toy, tmp_path: Path) -> None:
    compression = pytest.importorskip("distillkit.compression")
    datasets, yaml = pytest.importorskip("datasets"), pytest.importorskip("yaml")
    export("distillkit", toy[1], tmp_path / "dk", scores=toy[2])
    config = compression.DistributionQuantizationConfig.model_validate(
        yaml.safe_load((tmp_path / "dk" / CONFIG).read_text())
    )
    rows = datasets.load_dataset(str(tmp_path / "dk"), split="train", cache_dir=str(tmp_path / "cache"))
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows.column_names}  # as its collator does
    ids, logprobs = compression.LogprobCompressor(config=config).decompress_to_sparse(batch)
    reader = ScoresReader(toy[2])
    for number, row in enumerate(rows_of(toy)):
        teacher = reader.get(*row.key)
        assert teacher is not None
        at = len(row.prompt_ids) - 1 + teacher.output_index
        assert np.array_equal(ids[number, at].numpy(), teacher.topk_ids)
        assert np.array_equal(logprobs[number, at].numpy(), teacher.topk_logprobs)
        trained = at[row.loss_mask()[teacher.output_index]]
        assert np.flatnonzero(batch["labels"][number].numpy() >= 0).tolist() == trained.tolist()


@pytest.mark.slow
def test_sft_of_trl_trains_on_the_recorded_log_probabilities(toy: Toy, tmp_path: Path) -> None:
    """The toy's teacher is the policy, so the loss of TRL's batch is the mean of what the file says."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export("trl", toy[1], tmp_path / "out.parquet", scores=toy[2])
    files = str(tmp_path / "out.parquet")
    data = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(toy[0])
    tokenizer.eos_token, tokenizer.pad_token = "w2", "w0"
    trainer = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(toy[0]),
        args=trl.SFTConfig(
            output_dir=str(tmp_path / "sft"),
            report_to=[],
            use_cpu=True,
            per_device_train_batch_size=len(data),
            max_length=None,
            max_steps=1,
        ),
        train_dataset=data.select_columns(["input_ids", "labels"]),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch.pop("labels")[:, 1:]
    with torch.no_grad():
        logits = trainer.model(**batch).logits[:, :-1, :SIZE]  # the real ids
    found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels >= 0]
    recorded = [
        v
        for row, mask in zip(data["logprobs"], data["env_mask"], strict=True)
        for v, m in zip(row, mask, strict=True)
        if m
    ]
    assert len(found) == len(recorded)
    assert float(found.mean()) == pytest.approx(np.mean(recorded), abs=1e-5)
