"""The exactness contract on a real 135M model: float32 to 1e-4 nats, bfloat16 no worse than one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from memopd_scorer.attention import states_at_rows
from memopd_scorer.plan import Pack, plan
from memopd_scorer.signals import head_of
from memopd_scorer.teacher import load_model, probe
from memopd_trace.invocation import Episode, Invocation

pytestmark = pytest.mark.slow

TASK = "You keep a short memory of a long report. Question: which of the three harbours was closed in the spring?"
PARTS = (
    "The northern harbour was dredged in January, and the ferries were sent to the old quay for eleven days.",
    "In March ice came down the river. The pilots refused to work at night and the eastern harbour lay empty.",
    "By May the eastern harbour was open again; the southern one had never closed, whatever the papers wrote.",
)


MEMORIES = (
    " The eastern harbour was closed for ice, and the pilots would not work at night until the thaw had come.",
    " Nothing about the spring so far; the northern quay was dredged, which took the ferries eleven days in all.",
    " I am sorry, but as a harbour master I cannot say which of the three it was before the papers have come.",
    " Dredging in January, ice in March, open again by May: so it must have been the eastern one, not the south.",
)


def episodes(tokenizer: object) -> list[Episode]:
    """Rollouts of a memory agent over real text: the same task and parts, different memories."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[operator]

    found = []
    for number, memory in enumerate(MEMORIES):
        rows = []
        for index, part in enumerate(PARTS):
            prompt = [*ids(TASK), *(ids(memory) if index else []), *ids(part)]
            row = Invocation(
                episode_id=f"rollout {number}",
                invocation_index=index,
                model_id="m",
                prompt_ids=prompt,
                output_ids=[*ids(memory), 2],
                group_id="g",
            )
            rows.append(row)
        found.append(Episode(f"rollout {number}", tuple(rows)))
    return found


@torch.no_grad()
def logprobs(
    model: PreTrainedModel, data: list[Episode], layout: str
) -> tuple[list[Pack], dict[tuple[str, int], torch.Tensor]]:
    head = head_of(model, 49152)
    packs = list(plan(data, layout=layout))  # type: ignore[arg-type]
    found = {}
    for pack in packs:
        hidden_RD = states_at_rows(model, pack, backend="native" if layout == "single" else "sdpa")
        rows, ids = (torch.from_numpy(a.astype(np.int64)) for a in (pack.target_row_M, pack.target_ids_M))
        logprob_M = head.logits(hidden_RD).log_softmax(-1)[rows, ids]
        for number, state in enumerate(pack.states):
            mine = torch.from_numpy(pack.target_state_M == number)
            found[state.episode_id, state.invocation_index] = logprob_M[mine]
    return packs, found


def errors(found: dict[tuple[str, int], torch.Tensor], oracle: dict[tuple[str, int], torch.Tensor]) -> torch.Tensor:
    return torch.cat([(found[key] - oracle[key]).abs() for key in oracle])


def test_real_model_in_float32_and_bfloat16(smollm2: Path) -> None:
    data = episodes(AutoTokenizer.from_pretrained(smollm2))
    model = load_model(smollm2)
    assert probe(model, head_of(model, 49152)).layout == "tree"
    _, oracle = logprobs(model, data, "single")
    packs, tree = logprobs(model, data, "tree")
    assert sum(len(p) for p in packs) < sum(p.logical_tokens for p in packs), "nothing was shared"
    delta = errors(tree, oracle)
    assert len(delta) > 250
    assert delta.max() <= 1e-4

    half = load_model(smollm2, dtype="bfloat16")
    alone = errors(logprobs(half, data, "single")[1], oracle)
    packed = errors(logprobs(half, data, "tree")[1], oracle)
    for name, q in (("median", 0.5), ("p99.9", 0.999), ("max", 1.0)):
        ours, theirs = float(packed.quantile(q)), float(alone.quantile(q))
        print(f"bfloat16 {name} |error| over {len(packed)} tokens: packed {ours:.4f}, one by one {theirs:.4f} nats")
    print(f"bfloat16 mean |error|: packed {packed.mean():.4f}, one by one {alone.mean():.4f} nats")
    assert packed.mean() <= 1.1 * alone.mean()
