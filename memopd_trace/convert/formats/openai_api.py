"""OpenAI's chat, completions and Responses, from whichever server: requests and answers as text."""

from __future__ import annotations

from memopd_trace.convert.format import Format
from memopd_trace.convert.sessions import read

FORMAT = Format(
    name="openai",
    title="OpenAI chat, completions and Responses: requests and answers",
    exactness="text",
    read=read,
    unsaid=(
        "no_token_ids", "no_logprobs", "no_policy_version", "no_reward", "no_end", "no_parent", "no_rewrite_kind",
        "lossy_text",
    ),
    note="The tokenizer is that of the model that answered; for a model whose tokenizer is not public there is none.",
)  # fmt: skip
