"""The gap codes that converters use: what a source could not tell. `spec/registry.md` lists them with these words."""

from __future__ import annotations

GAPS: dict[str, str] = {
    "no_token_ids": "ids were made from text (`token_source` is `retokenized`)",
    "no_tokenizer": "whose ids they are is not told: `size` and `vocab_size` are the largest id seen + 1",
    "tokenizer_assumed": "one tokenizer was given for several models",
    "no_model": "which model was called is not told",
    "no_logprobs": "there are no log-probabilities",
    "no_logprob_kind": "under which distribution log-probabilities were taken is not told",
    "no_sampling": "the temperature is not told",
    "no_policy_version": "which weights were sampled from is not told",
    "no_finish_reason": "why outputs ended is not told",
    "no_reward": "episodes without a reward",
    "no_end": "whether an episode ended by itself or was cut is not told",
    "no_group": "which task an episode is of, or which others it is compared with, is not told",
    "no_episode": "which calls belong together is not told: each is an episode of its own",
    "no_parent": "parents were found by comparing ids",
    "no_rewrite_kind": "rewrites were found by comparing ids",
    "lost_calls": "calls took place that the log does not hold",
    "server_state": "a part of the prompt was kept by the server and is not in the log",
    "opaque_content": "a part of the prompt or output is encrypted or left out",
    "lossy_text": "the log's text is not what the model read or wrote",
}
