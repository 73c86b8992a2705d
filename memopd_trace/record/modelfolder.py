"""What a model's folder says of it, without torch: its tokenizer's metadata, and how its engine samples by default."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from memopd_trace.errors import InputError
from memopd_trace.invocation import Sampling
from memopd_trace.metadata import Model, Tokenizer, first_error
from memopd_trace.pieces import Pieces, load_pieces
from memopd_trace.record.fingerprint import json_digest

MAX_BYTES = 16 * 2**20  # of one configuration file
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_model(folder: Path, name: str) -> tuple[Model, Pieces]:
    """The metadata of the model in `folder` (tokenizer.json, and what is there of config.json, generation_config.json
    and the chat template) under the name by which the engine calls it, and its tokenizer's pieces.

    Raises:
        InputError: a file that is no tokenizer or no JSON object, or values that the metadata cannot hold.
        MissingExtraError: `tokenizers` is not installed.
    """
    pieces = load_pieces(folder)
    config, generation = _json(folder / "config.json"), _json(folder / "generation_config.json")
    text = config.get("text_config")
    width = (text if isinstance(text, dict) else config).get("vocab_size")
    size = max(pieces.vocabulary.values(), default=0) + 1
    eos = _ids(config.get("eos_token_id"))
    try:
        tokenizer = Tokenizer(
            fingerprint=pieces.fingerprint,
            size=size,
            vocab_size=max(size, width if isinstance(width, int) else 0),
            bos_id=next(iter(_ids(config.get("bos_token_id"))), None),
            eos_ids=eos,
            pad_id=next(iter(_ids(config.get("pad_token_id"))), None),
            stop_ids=_ids(generation.get("eos_token_id")) or eos,
            chat_template_digest=_template(folder),
        )
    except ValueError as error:
        raise InputError(f"{folder}: {first_error(error)}") from None
    return Model(name=name, tokenizer=tokenizer, **_experts(text if isinstance(text, dict) else config)), pieces


def _experts(config: dict[str, Any]) -> dict[str, int]:
    """The counts that expert routes are read by, where every layer routes; else it is not told which ones do."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[n] for n in names if isinstance(config.get(n), int)), 0)
    layers, chosen = config.get("num_hidden_layers"), config.get("num_experts_per_tok")
    dense = config.get("first_k_dense_replace") or config.get("mlp_only_layers")
    steps = ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step")
    dense = dense or any(config.get(n, 1) != 1 for n in steps)
    if not experts or not isinstance(layers, int) or not isinstance(chosen, int) or dense:
        return {}
    return {"num_moe_layers": layers, "experts_per_token": chosen, "num_experts": experts}


def unknown_model(name: str) -> Model:
    """The metadata of a model whose tokenizer is not known: a fingerprint like no other, and any id."""
    largest = 2**31 - 1
    fingerprint = f"unknown:{secrets.token_hex(32)}"
    return Model(name=name, tokenizer=Tokenizer(fingerprint=fingerprint, size=largest, vocab_size=largest))


def sampling_defaults(folder: Path) -> Sampling:
    """What an engine that follows `generation_config.json` (vLLM's default) does where a request is silent.

    Raises:
        InputError: the file is no JSON object.
    """
    return sampling_of(_json(folder / "generation_config.json"))


def sampling_of(settings: dict[str, Any], default: Sampling | None = None) -> Sampling:
    """The sampling settings among `settings` (an engine's words: a negative `top_k` cuts nothing), the `default`'s
    where one is absent or null. What is no number is taken for absent."""
    found: dict[str, Any] = {}
    for name in (*SETTINGS, "seed"):
        value = _number(settings.get(name), whole=name in ("top_k", "seed"))
        if name == "top_k" and value is not None:
            value = max(value, 0)
        found[name] = getattr(default, name, None) if value is None else value
    return Sampling(**found)


def _number(value: Any, *, whole: bool) -> Any:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 2**63:
        return None
    if not whole:
        return float(value)
    return int(value) if value == int(value) else None


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where the file is not there."""
    try:
        with path.open("rb") as source:
            document = json.loads(source.read(MAX_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: holds no JSON object")
    return document


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return json_digest(file.read_text("utf-8"))
    template = _json(folder / "tokenizer_config.json").get("chat_template")
    return None if template is None else json_digest(template)
