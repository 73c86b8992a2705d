"""OpenAI's chat, completions and Responses, from whichever server: requests and answers as text, in JSON or as VCR.py
keeps them."""

from __future__ import annotations

from memopd_trace.convert import cassettes, chains
from memopd_trace.convert.format import Format
from memopd_trace.convert.records import SUFFIXES
from memopd_trace.convert.sessions import read

FORMAT = Format(
    name="openai",
    title="OpenAI chat, completions and Responses: requests and answers, VCR's cassettes too",
    exactness="text",
    read=read,
    records=chains.linked(cassettes.records),
    suffixes=(*SUFFIXES, *cassettes.SUFFIXES),
    unsaid=(
        "no_token_ids", "no_logprobs", "no_policy_version", "no_reward", "no_end", "no_parent", "no_rewrite_kind",
        "lossy_text",
    ),
    note="The tokenizer is that of the model that answered; for a model whose tokenizer is not public there is none. "
    "Calls that go on by `previous_response_id` are put together where the log holds the earlier ones; behind a "
    "compaction, which is encrypted, calls have no prompt.",
)  # fmt: skip
