"""A tokenizer file is untrusted: it loads, or it is one clear line."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_cases import judge, root, tokenizer
from helpers_trace import VECTORS, build, valid

import memopd_trace.pieces
from memopd_trace import validate
from memopd_trace.errors import InputError, MissingExtraError
from memopd_trace.pieces import load_pieces
from memopd_trace.record.fingerprint import vocabulary_fingerprint

TOY = VECTORS / "toy-tokenizer"


def test_a_folder_and_its_file_are_alike_and_can_be_pickled() -> None:
    folder, file = load_pieces(TOY), load_pieces(TOY / "tokenizer.json")
    assert folder.fingerprint == file.fingerprint == vocabulary_fingerprint(folder.vocabulary)
    again = pickle.loads(pickle.dumps(folder))
    assert again.fingerprint == folder.fingerprint and again.text([41, 2]) == "yes<|end|>"
    assert folder.controls.tolist() == [0, 1, 2, 3, 4] and folder.text([41, 2], controls=False) == "yes"
    assert (folder.piece(41), folder.piece(64), folder.piece(-1)) == ("yes", None, None)


def test_marks_are_controls_even_if_they_are_not_flagged(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, {1: "a", 2: "<|call|>", 3: "<table>", 4: "<eos>"}, (2, 3, 4))
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text())
    for token in document["added_tokens"]:
        token["special"] = token["content"] == "<eos>"
    file.write_text(json.dumps(document))
    assert load_pieces(folder).controls.tolist() == [2, 4], "a tag of a text format is text"


def test_the_toy_tokenizer_is_what_its_script_writes() -> None:
    made = subprocess.run([sys.executable, TOY / "make.py"], capture_output=True, text=True, check=True)
    assert made.stdout == (TOY / "tokenizer.json").read_text(encoding="utf-8")


def test_how_text_is_cut_does_not_matter(tmp_path: Path) -> None:
    """Merges, normaliser and pre-tokenizer are not even read, so their expressions are never compiled."""
    plain = load_pieces(tokenizer(tmp_path, {1: "a", 2: "b"}))
    evil = {"type": "Split", "pattern": {"Regex": "((((("}, "behavior": "Isolated", "invert": False}
    other = load_pieces(tokenizer(tmp_path, {1: "a", 2: "b"}, pre_tokenizer=evil, normalizer={"type": "Nonsense"}))
    assert other.fingerprint == plain.fingerprint


def model(**changes: Any) -> str:
    base = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    return json.dumps({"added_tokens": [], "decoder": None, "model": {**base, **changes}})


HOSTILE = {
    "empty": b"",
    "no JSON": b"\x93NUMPY",
    "a list": b"[1, 2]",
    "no model": b'{"added_tokens": []}',
    "nothing in the model": b'{"model": {}}',
    "deep": b"[" * 200_000,
    "deep model": b'{"model": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "a huge id": model(vocab={"a": 2**40}).encode(),
    "a negative id": model(vocab={"a": -1}).encode(),
    "a true id": model(vocab={"a": True}).encode(),
    "a text for an id": model(vocab={"a": "0"}).encode(),
    "an unknown model": model(type="Nonsense").encode(),
    "added tokens that are none": json.dumps({**json.loads(model()), "added_tokens": [1]}).encode(),
    "a regular expression": json.dumps(
        {**json.loads(model()), "decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}}
    ).encode(),
    "a lone surrogate": b'{"model": {"type": "WordLevel", "vocab": {"\\ud800": 0}, "unk_token": "a"}}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_tokenizer_is_one_clear_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(HOSTILE[name])
    with pytest.raises(InputError) as error:
        load_pieces(tmp_path)
    assert str(file) in error.value.message and "\n" not in str(error.value) and len(str(error.value)) < 600


def test_what_is_not_there_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="no such file"):
            load_pieces(path)
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match="no such file"):
        load_pieces(tmp_path)
    monkeypatch.setattr(memopd_trace.pieces, "MAX_BYTES", 100)
    with pytest.raises(InputError, match="more than 100 bytes"):
        load_pieces(TOY)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"memopd-trace\[tokenizer\]"):
        validate(build(valid("text"), tmp_path), tokenizer=TOY)
    report = validate(build(valid("text"), tmp_path))
    assert report.clean and {r.reason for r in report.rules if r.code == "W-TEXT-MIRROR"} == {"needs --tokenizer"}


def test_the_command_takes_a_tokenizer(tmp_path: Path) -> None:
    vector = valid("text")
    vector["rows"][1]["output_text"] = "12 is it."
    path = build(vector, tmp_path)

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        program = "from memopd_trace.cli import main; main()"
        command = [sys.executable, "-c", program, "validate", str(path), "--fail-on", "warning", *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run().returncode == 0
    found = run("--tokenizer", str(TOY))
    assert found.returncode == 1 and "W-TEXT-MIRROR" in found.stdout
    missing = run("--tokenizer", str(tmp_path))
    assert missing.returncode == 3 and "Traceback" not in missing.stderr and "tokenizer.json" in missing.stderr


MIRRORS = [
    ("yes", set()),
    ("yes<|end|>", set()),
    (" yes", set()),  # decoders of one family drop the space in front, others keep it
    ("ye", {"W-IDS-PAST-TEXT"}),
    ("", {"W-IDS-PAST-TEXT"}),
    ("yes.", {"W-TEXT-MIRROR"}),
    ("no", {"W-TEXT-MIRROR"}),
    (None, set()),
]


@pytest.mark.parametrize(("text", "codes"), MIRRORS)
def test_an_output_s_text_is_that_of_its_ids(text: str | None, codes: set[str], tmp_path: Path) -> None:
    assert judge(tmp_path, root([9], [41, 2], output_text=text), given=TOY).codes == codes


def test_an_empty_output_has_an_empty_text(tmp_path: Path) -> None:
    aborted = root([9], [], finish_reason="abort", output_text="")
    assert judge(tmp_path, aborted, given=TOY).clean
    assert judge(tmp_path, {**aborted, "output_text": "yes"}, given=TOY).codes == {"W-TEXT-MIRROR"}


def test_only_rows_of_the_given_tokenizer_are_read(tmp_path: Path) -> None:
    """The second model has another tokenizer: its texts are not judged, and its being there is no mismatch."""
    vector = valid("text")
    other = {"name": "other", "tokenizer": vector["metadata"]["models"]["m"]["tokenizer"] | {"fingerprint": "other"}}
    vector["metadata"]["models"]["o"] = other
    vector["rows"] = [vector["rows"][0] | {"model_id": m, "output_text": "no"} for m in ("m", "o")]
    vector["rows"][1]["episode_id"] = "f"
    report = validate(build(vector, tmp_path), tokenizer=TOY)
    assert [(f.code, f.row) for f in report.findings] == [("W-TEXT-MIRROR", 0)]
