"""DistillKit: a folder of compressed teacher log-probabilities, one padded row a call, for its offline distillation.

The folder is what DistillKit's own sampler writes: `data_0.parquet` and `compression_config.yaml`, which belongs under
`teacher.logprob_compressor` of a run. Of that layout this writes the lossless corner:

    compressed_logprobs  4 K bytes a token: the K log-probabilities as little-endian float32, falling (`exact_k` = K;
                         no polynomial, no residual bins, no deltas)
    bytepacked_indices   their ids, ceil(log2 d) bits each, highest bit first, one after another; the last byte is
                         filled up with zeros

DistillKit's divergences are masked by the label at the token that predicts, so a label stands where a signal does.
Rows are filled up to the longest, because its `prepacked` batches are stacked, and nothing else keeps these columns.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memopd_trace.export.format import Context, Field, Format, Sample, ids_of
from memopd_trace.export.sinks import ParquetSink

IGNORED = -100  # a label that no loss counts
FLOOR = -10_000.0  # nats, for probability 0: with -inf, 0 times infinity would be NaN in a divergence
BYTES = pa.list_(pa.list_(pa.uint8()))
FIELDS = (
    Field("input_ids", pa.list_(pa.uint64()), "prompt and output, filled up", ("prompt_ids", "output_ids")),
    Field("attention_mask", pa.list_(pa.int64()), "0 where filled up"),
    Field(
        "labels",
        pa.list_(pa.int64()),
        f"`input_ids` where the token predicts one that is trained and scored, else {IGNORED}",
        ("output_loss_mask", "accepted"),
    ),
    Field("compressed_logprobs", BYTES, "at the token that predicts; 0 elsewhere", (), ("topk_logprobs",)),
    Field("bytepacked_indices", BYTES, "likewise", (), ("topk_ids",)),
)
DATA, CONFIG = "data_0.parquet", "compression_config.yaml"


class DistillKitSink:
    """Rows to a folder."""

    def __init__(self, folder: Path, context: Context) -> None:
        assert context.scores is not None and context.scores.topk is not None
        self._folder, self._length, self._k = folder, context.longest, context.scores.topk
        self._d = context.scores.teacher.head.size
        first = next(iter(context.metadata.models.values()))
        self._pad = first.tokenizer.pad_id or 0  # masked, so any id will do
        self._file = (folder / DATA).open("wb")
        self._rows = ParquetSink(self._file, FIELDS, self.row)

    def add(self, sample: Sample) -> None:
        """Take one row."""
        self._rows.add(sample)

    def row(self, sample: Sample) -> dict[str, Any]:
        """The columns of one row."""
        assert sample.teacher is not None and sample.teacher.ids is not None and sample.teacher.logprobs is not None
        n, fill = len(sample.invocation), self._length - len(sample.invocation)
        ids = ids_of(sample.invocation)
        signal = sample.over_queries(sample.mask & sample.teacher.scored)
        order = np.argsort(-sample.teacher.logprobs, axis=1, kind="stable")
        logprobs = np.take_along_axis(sample.teacher.logprobs, order, 1)
        top = np.take_along_axis(sample.teacher.ids, order, 1)
        exact = np.maximum(sample.over_queries(logprobs), FLOOR).astype("<f4").view(np.uint8)
        packed = pack(sample.over_queries(top), index_bits(self._d))
        return {
            "input_ids": np.pad(ids.astype(np.uint64), (0, fill), constant_values=self._pad),
            "attention_mask": np.pad(np.ones(n, np.int64), (0, fill)),
            "labels": np.pad(np.where(signal, ids, IGNORED).astype(np.int64), (0, fill), constant_values=IGNORED),
            "compressed_logprobs": np.pad(exact, ((0, fill), (0, 0))),
            "bytepacked_indices": np.pad(packed, ((0, fill), (0, 0))),
        }

    def close(self, notes: dict[str, Any]) -> None:
        """Write what is left, and the configuration that reads it."""
        self._rows.close(notes)
        self._file.close()
        lines = [f"{name}: {json.dumps(value)}" for name, value in compression(self._d, self._k).items()]
        (self._folder / CONFIG).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def abort(self) -> None:
        """Write nothing more."""
        self._rows.abort()
        self._file.close()


def compression(d: int, k: int) -> dict[str, Any]:
    """DistillKit's `DistributionQuantizationConfig` of these files: d real ids, k of them kept exactly."""
    return {
        "d": d,
        "k": k,
        "exact_k": k,
        "exact_dtype": "float32",
        "polynomial_terms": None,
        "term_dtype": "float32",
        "residual_bins": [],
        "delta_encoding": False,
        "error_diffusion": False,
        "normalize_t": False,
    }


def index_bits(d: int) -> int:
    """How many bits an id takes; DistillKit computes it in float32."""
    return math.ceil(float(np.log2(np.float32(d))))


def pack(ids: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """[n, K] ids -> [n, ceil(K * bits / 8)] bytes."""
    unpacked = (ids[:, :, None] >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(unpacked.astype(np.uint8).reshape(len(ids), -1), axis=1)


FORMAT = Format(
    name="distillkit",
    title="Arcee DistillKit (March 2026): compressed top-k log-probabilities for offline distillation",
    fields=FIELDS,
    open=DistillKitSink,
    suffix="",
    folder=True,
    marker=CONFIG,
    needs_scores=True,
    pads=True,
    note="Set `prepacked: true` and `remove_unused_columns: false`, and give `cross_entropy` no weight: its targets "
    "would be one token early.",
)
