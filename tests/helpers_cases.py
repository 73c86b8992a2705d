"""Traces of a few small rows, and tokenizers of a few pieces, for tests that state a case by its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers_trace import build, valid

from memopd_trace import Report, validate
from memopd_trace.pieces import load_pieces

Row = dict[str, Any]


def call(
    prompt: list[int], output: list[int], parent: int | None = None, relation: str | None = None, **more: Any
) -> Row:
    """One call; a relation without a parent is a root's."""
    row = {"prompt_ids": prompt, "output_ids": output, "parent_index": parent, "relation": relation, **more}
    if relation == "rewrite":
        row.setdefault("rewrite_evidence", "explicit")
    return row


def root(prompt: list[int], output: list[int], **more: Any) -> Row:
    return call(prompt, output, None, "root", **more)


def extend(prompt: list[int], output: list[int], parent: int = 0, **more: Any) -> Row:
    return call(prompt, output, parent, "extend", **more)


def rewrite(kind: str, prompt: list[int], output: list[int], parent: int = 0, **more: Any) -> Row:
    return call(prompt, output, parent, "rewrite", rewrite_kind=kind, **more)


def tokenizer(folder: Path, pieces: dict[int, str], controls: tuple[int, ...] = (), **more: Any) -> Path:
    """A folder with a tokenizer of these pieces, joined without anything between."""
    added = [
        {"id": i, "content": pieces[i], "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for i in controls
    ]
    vocab = {piece: i for i, piece in pieces.items()}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": next(iter(vocab))}
    document = {"version": "1.0", "added_tokens": added, "decoder": {"type": "Fuse"}, "model": model, **more}
    folder = folder / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def judge(
    folder: Path,
    *rows: Row,
    profile: str = "core",
    given: Path | None = None,
    features: tuple[str, ...] = (),
    model: dict[str, Any] | None = None,
    **ids: Any,
) -> Report:
    """The report on one episode of these rows; `ids` are fields of the metadata's tokenizer, `given` is a tokenizer."""
    vector = valid("plain")
    vector["metadata"]["required_features"] = list(features)
    described = vector["metadata"]["models"]["m"]
    described |= model or {}
    described["tokenizer"] |= {"size": 1000, "vocab_size": 1000, "eos_ids": [], "stop_ids": []} | ids
    if given is not None:
        described["tokenizer"]["fingerprint"] = load_pieces(given).fingerprint
    common = {"episode_id": "e", "model_id": "m"}
    vector["rows"] = [{**common, "invocation_index": i, **row} for i, row in enumerate(rows)]
    return validate(build(vector, folder), profile, tokenizer=given)


def cause(report: Report) -> str:
    """The cause that the one discontinuity names."""
    (finding,) = [f for f in report.findings if f.code == "E-DISCONTINUITY"]
    return finding.message.split("likely ")[1].split(":")[0]
