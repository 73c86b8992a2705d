"""What a plan will cost on a given model: FLOPs and bytes, estimated from its config.json alone (no torch).

linear     2 * weights touched by a token, for each executed token
attention  2 * heads * (key size + value size) * layers, for each visible pair
head       2 * width * vocabulary, for each prediction row
kept       key/value heads * (key size + value size) * layers, numbers for each token whose keys and values are kept
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopd_trace.errors import InputError, UsageError, first_line

SAMPLED_BYTES = 16  # of a target without its state: output index, logprob, logsumexp, entropy
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class ModelCost:
    """FLOPs of a forward for each executed token, each visible (query, key) pair and each prediction row, the
    `width` of a state, and `kept`, the numbers that a token's keys and values are in all layers."""

    per_token: int
    per_pair: int
    per_row: int
    width: int
    kept: int = 0

    @classmethod
    def read(cls, model: Path) -> ModelCost:
        """The cost of a model folder's decoder.

        Raises:
            InputError: `E-MODEL-LOAD` when it is no folder here, or holds no config of a decoder.
        """
        try:
            there = (model / "config.json").is_file()
        except OSError:  # a folder that may not be looked into
            there = False
        if not there:
            raise InputError(
                f"{model}: no local folder with a config.json",
                code="E-MODEL-LOAD",
                hint="a plan fetches nothing: give the folder of a model, not a hub name or a .gguf file",
            )
        try:
            return cls.of(json.loads((model / "config.json").read_text()))
        except (OSError, ArithmeticError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            message = f"{model}: no usable config.json: {first_line(error)}"
            raise InputError(message, code="E-MODEL-LOAD") from None

    @classmethod
    def of(cls, config: dict[str, Any]) -> ModelCost:
        """The cost of the decoder that a config's plain data describes.

        Raises:
            LookupError, ValueError, TypeError, ArithmeticError, AttributeError: it describes none.
        """
        config = config.get("text_config") or config
        width = int(config.get("hidden_size") or config["n_embd"])
        layers = int(config.get("num_hidden_layers") or config["n_layer"])
        heads = int(config.get("num_attention_heads") or config["n_head"])
        head_dim = int(config.get("head_dim") or width // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        key_and_value = 2 * head_dim
        if config.get("qk_nope_head_dim"):  # compressed keys and values are widened before they meet the queries
            kv_heads = heads
            key_and_value = sum(int(config[n]) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        gated = 2 if "n_embd" in config else 3  # GPT-2's block has two matrices, a gated one three
        inner = config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * width
        inner = max(inner) if isinstance(inner, list) else int(inner)  # some configs give one width a layer
        inner *= int(config.get("num_experts_per_tok") or 1)
        weights = layers * (width * head_dim * (2 * heads + 2 * kv_heads) + gated * width * inner)
        return cls(
            per_token=2 * weights,
            per_pair=2 * heads * key_and_value * layers,
            per_row=2 * width * int(config["vocab_size"]),
            width=width,
            kept=kv_heads * key_and_value * layers,
        )

    @property
    def head(self) -> int:
        """Numbers in the output head, without a bias."""
        return self.per_row // 2

    def flops(self, tokens: int, pairs: int, rows: int) -> int:
        """FLOPs of one forward over a pack, or of all over a plan."""
        return self.per_token * tokens + self.per_pair * pairs + self.per_row * rows


def topk_bytes(topk: int, size: int) -> int:
    """Of a target's signal `topk`: ids, log-probabilities and the tail."""
    return 8 * min(topk, size) + 4


def full_bytes(size: int) -> int:
    """Of a target's signal `full`: a float32 logit of each of `size` ids."""
    return 4 * size


def bytes_of(dtype: str) -> int:
    """Of one number.

    Raises:
        UsageError: an unknown dtype.
    """
    if dtype not in VALUE_BYTES:
        raise UsageError(f"unknown dtype '{dtype}'", hint=f"one of {', '.join(VALUE_BYTES)}")
    return VALUE_BYTES[dtype]
