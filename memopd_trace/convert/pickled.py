"""Files of `torch.save` as plain values. A `.pt` file is a pickle: PyTorch reads it with `weights_only`, which builds
plain data and tensors and runs nothing, and what holds more is refused."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memopd_trace.convert.losses import BrokenRecord, Issue
from memopd_trace.convert.records import Record, json_records
from memopd_trace.errors import MissingExtraError

PICKLED = ".pt"
MAX_BYTES = 2**34  # of one file, unpacked; all of it is in memory
MAX_VALUES = 2**32  # of one file; a pickle may name one value any number of times, a tensor be one number over and over
VALUES_A_BYTE = 256  # of them; plain data has fewer than 64
GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def whole_or_json(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """All of a `.pt` file as one record; other files as JSON."""
    for file in files:
        if file.suffix != PICKLED:
            yield from json_records([file])
            continue
        try:
            yield Record(str(file), load(file))
        except BrokenRecord as error:
            yield Issue(str(file), str(error))


def load(file: Path) -> Any:
    """What a `.pt` file holds, as plain values.

    Raises:
        BrokenRecord: it is none, is too large, or holds more than plain data and tensors.
        MissingExtraError: PyTorch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError(
            f"{file}: a .pt file is read by the 'torch' package",
            hint="pip install 'memopd-trace[score]', or '.[score]' in a clone",
        ) from None
    try:
        size = file.stat().st_size
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                size = max(size, sum(entry.file_size for entry in archive.infolist()))
        if size > MAX_BYTES:
            raise BrokenRecord(f"is of more than {MAX_BYTES} bytes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on pickles of another kind, which are refused
            whole = torch.load(file, map_location="cpu", weights_only=True)
        return _Plain(torch.Tensor, min(MAX_VALUES, 2**20 + VALUES_A_BYTE * size)).value(whole)
    except (BrokenRecord, MemoryError):
        raise
    except RecursionError:
        raise BrokenRecord("is nested too deeply") from None
    except Exception as error:  # a damaged pickle raises whatever it likes
        named = GLOBAL.search(str(error))
        if named is not None:
            raise BrokenRecord(f"refused: it holds '{named[1]}', which is neither plain data nor a tensor") from None
        raise BrokenRecord(f"is no file of torch.save, or a damaged one ({type(error).__name__})") from None


class _Plain:
    """Makes lists of tensors, and counts values: shared ones can stand for very many."""

    def __init__(self, tensor: type, limit: int) -> None:
        self._tensor, self._left, self._limit = tensor, limit, limit

    def value(self, value: Any) -> Any:
        """The value with lists for tensors.

        Raises:
            BrokenRecord: it holds too many values.
        """
        if isinstance(value, self._tensor):
            self._count(value.numel())  # type: ignore[attr-defined]
            return value.tolist()  # type: ignore[attr-defined]
        if isinstance(value, dict):
            self._count(64 * (1 + len(value)))
            return {k if isinstance(k, str) else str(k): self.value(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            self._count(64 + len(value))
            if set(map(type, value)) <= {int, float, str, bool, type(None)}:
                return list(value)
            return [self.value(v) for v in value]
        return value

    def _count(self, number: int) -> None:
        self._left -= number
        if self._left < 0:
            raise BrokenRecord(f"holds more than {self._limit} values, the limit for its size")
