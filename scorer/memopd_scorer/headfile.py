"""The teacher's output head as a safetensors file, written and read without holding it twice."""

from __future__ import annotations

import json
from typing import IO

import torch
from safetensors.torch import load_file
from torch import Tensor

from memopd_scorer.head import Head
from memopd_trace.metadata import ScoresMetadata
from memopd_trace.places import Place, local_copy

_CELLS = 2**22  # written at a time
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_head(out: IO[bytes], head: Head) -> None:
    """Write `weight` and, if there is one, `bias`, some rows at a time: the library's own writers copy the tensors, or
    replace the file that is open for them."""
    tensors = {"weight": head.weight_VD} | ({} if head.bias_V is None else {"bias": head.bias_V})
    entries, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    out.write(len(header).to_bytes(8, "little") + header)
    for tensor in tensors.values():
        _write_rows(out, tensor.detach())


def _write_rows(out: IO[bytes], tensor: Tensor) -> None:
    step = max(1, _CELLS // max(1, tensor[:1].numel()))
    for rows in tensor.split(step):
        out.write(rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def load_head(file: Place, metadata: ScoresMetadata) -> Head:
    """The head in a file, unchecked; a remote file is fetched."""
    with local_copy(file) as local:
        tensors, info = load_file(local), metadata.teacher.head
    return Head(tensors["weight"], tensors.get("bias"), info.logit_scale, info.softcap, info.size)


def head_is_whole(file: Place, metadata: ScoresMetadata) -> bool:
    """Whether a file holds the very head of the metadata."""
    try:
        return file.is_file() and load_head(file, metadata).digest() == metadata.teacher.head.digest
    except Exception:  # whatever is wrong with the file, it is not the head
        return False
