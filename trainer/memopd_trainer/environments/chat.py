"""What environments share that speak through a chat template: its frame, plain text as ids, and content without stop
id."""

from __future__ import annotations

from typing import Any

from memopd_trace.errors import UsageError
from memopd_trace.invocation import Invocation

MARK = "@@USER@@"


def chat_frame(tokenizer: Any, system: str) -> tuple[list[int], list[int]]:
    """(ids up to where the user speaks, ids from there to where the assistant speaks).

    Raises:
        UsageError: there is no chat template, or it changes what the user says.
    """
    messages = [{"role": "system", "content": system}, {"role": "user", "content": MARK}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        head, tail = text.split(MARK)
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        raise UsageError(f"the tokenizer's chat template cannot be used: {error}") from None
    head_ids, tail_ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (head, tail))
    return head_ids, tail_ids


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of plain text; control tokens spelled in it stay text."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return ids


def kept_ids(invocation: Invocation) -> int:
    """How many output ids are content: all but a stop id."""
    return len(invocation.output_ids) - (invocation.finish_reason == "stop")
