"""vLLM: requests and answers of its OpenAI-compatible server, with `return_token_ids` (and `logprobs`)."""

from __future__ import annotations

from memopd_trace.convert.format import Format
from memopd_trace.convert.sessions import read

FORMAT = Format(
    name="vllm",
    title="vLLM: requests and answers with token ids",
    exactness="some ids",
    read=read,
    unsaid=("no_logprob_kind", "no_policy_version", "no_reward", "no_end", "no_parent", "no_rewrite_kind"),
    note="Calls belong together by `session_id`, `episode_id` or the like. Log-probabilities are those of the server's "
    "`--logprobs-mode`, which the answer does not tell: say it with `--logprob-kind` (`raw_logprobs`, the default, is "
    "`raw`).",
)
