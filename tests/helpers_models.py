"""Tiny random causal LMs of several types, and a tiny real tokenizer with a chat template."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

VOCAB = 96
STOP = 2
MODEL_TYPES = ("llama", "gpt2", "qwen3", "gemma3")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tiny_model(
    kind: str = "llama", *, vocab_size: int = VOCAB, layers: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """A model of a given type at width 32, in eval mode; its weights are large enough for a peaked distribution."""
    common = {"vocab_size": vocab_size, "bos_token_id": 1, "eos_token_id": STOP, "pad_token_id": 0}
    llama_like = {
        **common,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "head_dim": 8,
    }
    config = {
        "llama": lambda: LlamaConfig(**llama_like),
        "qwen3": lambda: Qwen3Config(**llama_like),
        "gemma3": lambda: Gemma3TextConfig(**llama_like, sliding_window=8),
        "gpt2": lambda: GPT2Config(**common, n_embd=32, n_layer=layers, n_head=4, n_positions=512),
    }[kind]()
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.2)
    return model.to(dtype).eval()


def tiny_tokenizer(texts: Iterator[str] | None = None, size: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE with control tokens <|pad|>, <|start|>, <|end|> (ids 0, 1, 2) and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts or itertools.repeat("the memory of the part of the document", 4), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|start|>", eos_token="<|end|>"
    )
    fast.chat_template = TEMPLATE
    return fast
