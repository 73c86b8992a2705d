"""What a plan will cost on a given model: FLOPs and bytes, estimated from its config.json alone (no torch).

linear     2 * weights touched by a token * executed tokens
attention  4 * visible pairs * heads * head size * layers
head       2 * width * vocabulary * prediction rows
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memopd_scorer.plan import PlanSummary
from memopd_trace.errors import InputError, first_line


def estimate(summary: PlanSummary, model: Path) -> dict[str, Any]:
    """`estimated_flops` of a forward over the plan, and the bytes of its states by dtype.

    Raises:
        InputError: `E-MODEL-LOAD` when the folder holds no config of a decoder.
    """
    try:
        config = json.loads((model / "config.json").read_text())
        config = config.get("text_config", config)
        width = int(config.get("hidden_size") or config["n_embd"])
        layers = int(config.get("num_hidden_layers") or config["n_layer"])
        heads = int(config.get("num_attention_heads") or config["n_head"])
        vocabulary = int(config["vocab_size"])
        head_dim = int(config.get("head_dim") or width // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        gated = 2 if "n_embd" in config else 3  # GPT-2's block has two matrices, a gated one three
        inner = config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * width
        inner = max(inner) if isinstance(inner, list) else int(inner)  # some configs give one width a layer
        inner *= int(config.get("num_experts_per_tok") or 1)
        per_token = layers * (width * head_dim * (2 * heads + 2 * kv_heads) + gated * width * inner)
    except (OSError, ArithmeticError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{model}: no usable config.json: {first_line(error)}", code="E-MODEL-LOAD") from None
    linear = 2 * per_token * summary.executed_tokens
    attention = 4 * summary.pairs * heads * head_dim * layers
    head = 2 * width * vocabulary * summary.prediction_rows
    return {
        "estimated_flops": float(linear + attention + head),
        "hidden_bytes_bfloat16": 2 * width * summary.targets,
        "hidden_bytes_float32": 4 * width * summary.targets,
    }
