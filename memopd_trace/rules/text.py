"""Rules that need the pieces of ids: whose tokenizer it is, and whether text mirrors are the text of their ids.

They judge rows of models whose fingerprint is the given tokenizer's, and decode each such row once.
"""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from memopd_trace.pieces import Pieces
from memopd_trace.rules.batch import Batch
from memopd_trace.rules.files import FileContext
from memopd_trace.rules.registry import Hit, rule

SHOWN = 60  # characters of a text in a finding


@rule(
    "E-TOKENIZER-MISMATCH",
    "a model has another tokenizer than the trace",
    phase="file",
    clause="A tokenizer that is used with a trace MUST be the one that the trace's ids come from.",
    hint="give the tokenizer of the recorded model, at the recorded revision",
    wants="tokenizer",
)
def tokenizer_mismatch(file: FileContext) -> Iterator[Hit]:
    given = file.inputs.tokenizer.fingerprint
    models = file.metadata.models.items()
    if any(m.tokenizer.fingerprint == given for _, m in models):  # the others' rows are not read with it
        return
    for name, model in models:
        yield Hit(None, f"model '{name}' has another tokenizer", None, model.tokenizer.fingerprint, given)


def other_tokenizer(file: FileContext) -> str | None:
    """A reason not to read ids with the tokenizer given."""
    known = {m.tokenizer.fingerprint for m in file.metadata.models.values()}
    return None if file.inputs.tokenizer.fingerprint in known else "the tokenizer is not the trace's"


@rule(
    "W-TEXT-MIRROR",
    "a text that is not what its ids say",
    phase="batch",
    clause="`prompt_text` and `output_text` SHOULD be the text of their ids, with or without control pieces.",
    columns=("prompt_text", "output_text", "model_id", "prompt_ids", "output_ids", "output_slots", "media"),
    needs=("prompt_text", "output_text"),
    hint="the ids are the state; a text that disagrees comes from another call, or was changed on its way",
    wants="tokenizer",
    unless=other_tokenizer,
)
def text_mirror(b: Batch) -> Iterator[Hit]:
    for name in ("prompt_text", "output_text"):
        for row, text, texts in _mirrors(b, name):
            past = name == "output_text" and any(t.startswith(text) for t in texts)
            if text not in texts and not past:  # W-IDS-PAST-TEXT speaks of an output's text that ends early
                yield Hit(row, f"{name} is not the text of its ids", name, _shown(texts[0]), _shown(text))


@rule(
    "W-IDS-PAST-TEXT",
    "the output has ids behind the end of its text",
    phase="batch",
    clause="`output_text` SHOULD reach to the end of `output_ids`.",
    columns=("output_text", "model_id", "output_ids", "output_slots"),
    needs=("output_text",),
    hint="text was cut at a stop word and the ids were not: the next prompt, made from the text, will not extend them",
    wants="tokenizer",
    unless=other_tokenizer,
)
def ids_past_text(b: Batch) -> Iterator[Hit]:
    ids = b.lists("output_ids")
    for row, text, texts in _mirrors(b, "output_text"):
        if text in texts or not any(t.startswith(text) for t in texts):
            continue
        own, pieces = ids.cell(row), b.inputs.tokenizer
        reach = bisect_left(range(len(own)), len(text), key=lambda n: len(pieces.text(own[:n])))
        message = f"output_text ends before the last {len(own) - reach} of {len(own)} ids"
        yield Hit(row, message, "output_text", _shown(texts[0]), _shown(text))


def _mirrors(b: Batch, name: str) -> Iterator[tuple[int, str, list[str]]]:
    """(row, its mirror, the texts that it may be) of every row that has one and can be read."""
    pieces: Pieces = b.inputs.tokenizer
    own = [n for n, m in b.metadata.models.items() if m.tokenizer.fingerprint == pieces.fingerprint]
    odd = b.given("output_slots") if name == "output_text" else b.given("media")  # not in order; expanded
    rows: list[int] = np.flatnonzero(b.given(name) & b.equals("model_id", *own) & ~odd).tolist()
    ids = b.lists(name.replace("_text", "_ids"))
    lists = [ids.cell(r) for r in rows]
    whole, plain = pieces.texts(lists), pieces.texts(lists, controls=False)
    for row, tokens, *texts in zip(rows, lists, whole, plain, strict=True):
        if name == "output_text" and len(tokens) and tokens[-1] in pieces.controls:
            texts.append(texts[0].removesuffix(pieces.piece(tokens[-1]) or ""))
        yield row, _plain(b.text(name, row) or ""), [_plain(t) for t in texts]


def _plain(text: str) -> str:
    """Without the space that some decoders drop in front, and the sign for a character cut off at the end."""
    return text.rstrip("\ufffd").removeprefix(" ")


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")
