"""What ids stand for: a `tokenizer.json` as a table of pieces and a decoder, read as untrusted input.

Only what decoding needs is loaded: the vocabulary, the added tokens and the decoder. Merges, normaliser and
pre-tokenizer say how text is cut into ids, which nothing here asks; their regular expressions are never compiled.
The library behind it (`tokenizers`) is imported when a file is loaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memopd_trace.errors import InputError, MissingExtraError, first_line, printable

FILE_NAME = "tokenizer.json"
MAX_BYTES = 128 * 2**20  # the largest in public use have about 35 MiB
MAX_ID = 2**31 - 1  # what an id column can hold
MARKER = re.compile(r"<[|｜][^\s<>]{1,60}[|｜]>")  # how templates write their marks, flagged as special or not

Ids = Sequence[int] | NDArray[Any]


class Pieces:
    """The pieces of one tokenizer. `source` is the file's text as JSON, reduced to what decoding needs.

    Two objects of one file are alike; an object can be pickled.
    """

    def __init__(self, source: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(source)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Every piece, as the tokenizer writes it, and its id."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    @cached_property
    def fingerprint(self) -> str:
        """What a trace's metadata calls `tokenizer.fingerprint`."""
        from memopd_trace.record.fingerprint import vocabulary_fingerprint

        return vocabulary_fingerprint(self.vocabulary)

    @cached_property
    def controls(self) -> NDArray[np.int32]:
        """Sorted int32[c]: ids that steer and are no text: added tokens flagged special, or that look like a mark."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return np.array(sorted(i for i, t in added if t.special or MARKER.fullmatch(t.content)), np.int32)

    def piece(self, token: int) -> str | None:
        """The piece of one id as the tokenizer writes it; `None` where it has none."""
        found: str | None = self._tokenizer.id_to_token(int(token)) if 0 <= token <= MAX_ID else None
        return found

    def text(self, ids: Ids, *, controls: bool = True) -> str:
        """The text of ids; ids without a piece give none, control pieces only with `controls`."""
        return self.texts([ids], controls=controls)[0]

    def texts(self, many: Sequence[Ids], *, controls: bool = True) -> list[str]:
        """The text of each list of ids, in one call."""
        plain = [np.asarray(ids, np.int64) for ids in many]
        lists = [ids[(ids >= 0) & (ids <= MAX_ID)].tolist() for ids in plain]
        found: list[str] = self._tokenizer.decode_batch(lists, skip_special_tokens=not controls)
        return found


def load_pieces(path: str | os.PathLike[str]) -> Pieces:
    """Load a tokenizer from a folder that holds a `tokenizer.json`, or from that file.

    Raises:
        InputError: it is not there, too large, or no tokenizer.
        MissingExtraError: the `tokenizers` package is not installed.
    """
    _require_library()
    path = Path(path)
    file = path / FILE_NAME if path.is_dir() else path
    raw = _read(file)
    try:
        document = json.loads(raw)
        return Pieces(json.dumps(_reduced(document), ensure_ascii=True))
    except InputError:
        raise
    except (Exception, RecursionError) as error:
        raise _bad(file, first_line(error)) from None
    except BaseException as error:  # the library's own crash is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise _bad(file, first_line(error)) from None


def _require_library() -> None:
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "a tokenizer needs the 'tokenizers' package",
            hint="pip install 'memopd-trace[tokenizer]', or '.[tokenizer]' in a clone",
        ) from None


def _read(file: Path) -> bytes:
    try:
        if not file.is_file():
            raise InputError(
                f"{printable(str(file))}: no such file",
                hint="a tokenizer is a folder that holds a tokenizer.json, or that file",
            )
        with file.open("rb") as source:
            raw = source.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{printable(str(file))}: {error.strerror or first_line(error)}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{printable(str(file))}: more than {MAX_BYTES} bytes, the limit for a tokenizer")
    return raw


def _reduced(document: Any) -> dict[str, Any]:
    """Model without merges, added tokens, decoder.

    Raises:
        ValueError: a part is not there, of another form, or nothing that untrusted input may bring.
    """
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise ValueError("no 'model' in it")
    model, decoder, added = document["model"], document.get("decoder"), document.get("added_tokens") or []
    if "Regex" in json.dumps(decoder):
        raise ValueError("its decoder runs a regular expression, which is not taken from a file")
    ids = [t.get("id") for t in added]
    if isinstance(model.get("vocab"), dict):
        ids += model["vocab"].values()
    if not all(type(i) is int and 0 <= i <= MAX_ID for i in ids):
        raise ValueError(f"an id that is no number from 0 to {MAX_ID}")
    if "merges" in model:
        model = {**model, "merges": []}
    return {"version": "1.0", "added_tokens": added, "decoder": decoder, "model": model}


def _bad(file: Path, reason: str) -> InputError:
    return InputError(
        f"{printable(str(file))}: no tokenizer: {printable(reason)}", hint="a tokenizer.json of the tokenizers library"
    )
