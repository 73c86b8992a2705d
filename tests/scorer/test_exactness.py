"""The exactness contract on toy models: a packed tree gives what each invocation gives alone.

Oracle: each invocation alone, unpadded, through the plain model. Every test proves that it saw a shared prefix, a
fork and a boundary between states inside a pack.
"""

from __future__ import annotations

from collections import ChainMap

import numpy as np
import pytest
import torch
from helpers_scorer import (
    PACKABLE,
    PADDED,
    SIZE,
    by_state,
    oracle,
    tiny_model,
    tree_episodes,
)
from transformers import PreTrainedModel

from memopd_scorer.attention import states_at_rows
from memopd_scorer.head import head_of
from memopd_scorer.plan import Pack, plan
from memopd_trace.invocation import Episode, Invocation

RELATIVE_STATES = {torch.float64: 1e-10, torch.float32: 1e-5}
NATS = {torch.float64: 1e-10, torch.float32: 1e-5}
BACKENDS = ("sdpa", "eager")


def assert_saw_a_tree(packs: list[Pack], layout: str) -> None:
    """A pack with several states; under `tree` also shared tokens and a row that serves two branches or a fork."""
    assert any(len(p.states) > 1 for p in packs), "no boundary between states was seen"
    if layout == "tree":
        assert sum(len(p) for p in packs) < sum(p.logical_tokens for p in packs), "nothing was shared"
        parents = [span.ancestors for p in packs for span in p.spans if span.ancestors]
        assert any(len(a) > 1 for a in parents), "no branch of a branch was seen"
        forks = [ranges[-1] for ranges in parents]
        assert len(set(forks)) < len(forks), "no two branches left one token"
        assert any(len(p.rows_R) < len(p.target_ids_M) for p in packs), "no row served two targets"


@torch.no_grad()
def packed(
    model: PreTrainedModel, data: list[Episode], layout: str, backend: str, max_tokens: int = 400
) -> tuple[list[Pack], dict[tuple[str, int], torch.Tensor]]:
    packs = list(plan(data, layout=layout, max_tokens=max_tokens))  # type: ignore[arg-type]
    states = [by_state(p, states_at_rows(model, p, backend=backend)) for p in packs]  # type: ignore[arg-type]
    return packs, dict(ChainMap(*states))


def alone(model: PreTrainedModel, data: list[Episode]) -> dict[tuple[str, int], torch.Tensor]:
    return dict(ChainMap(*(by_state(pack, hidden) for pack, hidden in oracle(model, data))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", PACKABLE)
def test_packed_states_and_logprobs_equal_each_invocation_alone(kind: str, dtype: torch.dtype) -> None:
    model, data = tiny_model(kind, dtype), tree_episodes()
    head = head_of(model, SIZE)
    expected = alone(model, data)
    for backend in BACKENDS:
        for layout in ("tree", "packed"):
            packs, found = packed(model, data, layout, backend)
            assert_saw_a_tree(packs, layout)
            assert found.keys() == expected.keys()
            for key, hidden in found.items():
                scale = expected[key].abs().max()
                assert (hidden - expected[key]).abs().max() / scale <= RELATIVE_STATES[dtype], (
                    backend,
                    layout,
                    key,
                )
                delta = head.logits(hidden).log_softmax(-1) - head.logits(expected[key]).log_softmax(-1)
                assert delta.detach().abs().max() <= NATS[dtype], (backend, layout, key)


@pytest.mark.parametrize("kind", PACKABLE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_branch_never_moves_with_its_siblings(kind: str, backend: str) -> None:
    model, data = tiny_model(kind), tree_episodes()
    packs, before = packed(model, data, "tree", backend)
    assert_saw_a_tree(packs, "tree")
    chosen = data[1].invocations[-1]  # the last call of a rollout in the middle of the group
    changed_prompt = chosen.prompt_ids.copy()
    changed_prompt[-3] = (changed_prompt[-3] - 3 + 1) % (SIZE - 3) + 3
    other = chosen.replace(prompt_ids=changed_prompt)
    rows = [*data[1].invocations[:-1], other]
    _, after = packed(model, [data[0], Episode("m1", tuple(rows)), *data[2:]], "tree", backend)
    assert not torch.equal(after[chosen.key], before[chosen.key]), "the change itself was not seen"
    for key in before.keys() - {chosen.key}:
        assert torch.equal(after[key], before[key]), key


@pytest.mark.parametrize("kind", PACKABLE)
def test_the_order_of_invocations_and_the_budget_change_nothing(kind: str) -> None:
    model, data = tiny_model(kind, torch.float64), tree_episodes()
    _, one = packed(model, data, "tree", "sdpa")
    for max_tokens in (60, 150, 5000):
        packs, other = packed(model, data[::-1], "tree", "sdpa", max_tokens)
        assert len(packs) > 1 or max_tokens == 5000
        for key, hidden in other.items():
            assert (hidden - one[key]).abs().max() / one[key].abs().max() <= 1e-10


@pytest.mark.parametrize("kind", PACKABLE)
def test_gradients_of_the_tree_equal_those_of_each_invocation_alone(kind: str) -> None:
    data = tree_episodes()

    def gradients(layout: str) -> list[torch.Tensor]:
        model = tiny_model(kind, torch.float64)
        head = head_of(model, SIZE)
        for pack in plan(data, layout=layout, max_tokens=400):  # type: ignore[arg-type]
            hidden_RD = states_at_rows(model, pack, backend="sdpa" if layout == "tree" else "native")
            rows, ids = (torch.from_numpy(a.astype(np.int64)) for a in (pack.target_row_M, pack.target_ids_M))
            head.logits(hidden_RD).log_softmax(-1)[rows, ids].sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    tree, single = gradients("tree"), gradients("single")
    assert len(tree) == len(single) > 10
    largest = max(float(g.abs().max()) for g in single)
    for a, b in zip(tree, single, strict=True):
        assert float((a - b).abs().max()) / largest <= 1e-8


def test_explicit_positions_are_run_as_recorded() -> None:
    model = tiny_model("llama", torch.float64)
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(3, SIZE, 10), rng.integers(3, SIZE, 4)
    positions = np.r_[np.arange(6), np.arange(6, 14) + 9]
    fields = {
        "episode_id": "e",
        "invocation_index": 0,
        "model_id": "m",
        "prompt_ids": prompt,
        "output_ids": output,
    }
    row = Invocation(**fields, position_ids=positions)
    (pack,) = plan([Episode("e", (row,))])
    ids = torch.from_numpy(row.sequence_ids.astype(np.int64))[None]
    causal = torch.ones(14, 14, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():  # an explicit mask, or Transformers takes the gap for a packed boundary
        expected = model.model(ids, attention_mask=causal, position_ids=torch.from_numpy(positions)[None])
        found = states_at_rows(model, pack)
        default = states_at_rows(model, next(plan([Episode("e", (Invocation(**fields),))])))
    assert (found - expected.last_hidden_state[0, 9:13]).abs().max() <= 1e-10
    assert (found - default).abs().max() > 1e-3


def test_the_toys_have_a_padded_vocabulary() -> None:
    assert tiny_model("llama").get_output_embeddings().weight.shape[0] == PADDED > SIZE
