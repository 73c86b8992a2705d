"""The exactness contract on toy models: a packed tree gives what each invocation gives alone.

Oracle: each invocation alone, unpadded, through the plain model. Every test proves that it saw a shared prefix, a
fork and a boundary between states inside a pack.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_scorer import (
    PACKABLE,
    PADDED,
    SIZE,
    growing_episode,
    memory_episode,
    oracle,
    sibling,
    tiny_model,
)
from transformers import DynamicCache, PreTrainedModel

from memopd_scorer.attention import states_at_rows
from memopd_scorer.plan import Pack, plan
from memopd_scorer.signals import head_of
from memopd_trace.invocation import Episode, Invocation

RELATIVE_STATES = {torch.float64: 1e-10, torch.float32: 1e-5}
NATS = {torch.float64: 1e-10, torch.float32: 1e-5}
BACKENDS = ("sdpa", "eager")


def episodes(seed: int = 0) -> list[Episode]:
    rng = np.random.default_rng(seed)
    rollouts = [memory_episode(rng, f"m{i}", group="g") for i in range(3)]
    return [*rollouts, sibling(rollouts[0], "sibling"), growing_episode(rng, "grow")]


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


def rows_by_state(packs: list[Pack], states: list[torch.Tensor]) -> dict[tuple[str, int], torch.Tensor]:
    """hidden_MD of every invocation, in the order of its targets."""
    found = {}
    for pack, hidden_RD in zip(packs, states, strict=True):
        for number, state in enumerate(pack.states):
            rows = torch.from_numpy(pack.target_row_M[pack.target_state_M == number].astype(np.int64))
            found[state.episode_id, state.invocation_index] = hidden_RD[rows]
    return found


@torch.no_grad()
def packed(
    model: PreTrainedModel, data: list[Episode], layout: str, backend: str, max_tokens: int = 400
) -> tuple[list[Pack], dict[tuple[str, int], torch.Tensor]]:
    packs = list(plan(data, layout=layout, max_tokens=max_tokens))  # type: ignore[arg-type]
    return packs, rows_by_state(packs, [states_at_rows(model, p, backend=backend) for p in packs])  # type: ignore[arg-type]


def alone(model: PreTrainedModel, data: list[Episode]) -> dict[tuple[str, int], torch.Tensor]:
    pairs = list(oracle(model, data))
    return rows_by_state([p for p, _ in pairs], [h for _, h in pairs])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", PACKABLE)
def test_packed_states_and_logprobs_equal_each_invocation_alone(kind: str, dtype: torch.dtype) -> None:
    model, data = tiny_model(kind, dtype), episodes()
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
    model, data = tiny_model(kind), episodes()
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
    model, data = tiny_model(kind, torch.float64), episodes()
    _, one = packed(model, data, "tree", "sdpa")
    for max_tokens in (60, 150, 5000):
        packs, other = packed(model, data[::-1], "tree", "sdpa", max_tokens)
        assert len(packs) > 1 or max_tokens == 5000
        for key, hidden in other.items():
            assert (hidden - one[key]).abs().max() / one[key].abs().max() <= 1e-10


@pytest.mark.parametrize("kind", PACKABLE)
def test_gradients_of_the_tree_equal_those_of_each_invocation_alone(kind: str) -> None:
    data = episodes()

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


def test_recorded_eviction_reproduces_a_decoder_with_a_cut_cache() -> None:
    """A KV cache from which tokens are dropped while decoding = one forward with recorded positions and visibility."""
    model = tiny_model("llama", torch.float64)
    rng = np.random.default_rng(3)
    prompt, output = rng.integers(3, SIZE, 20), rng.integers(3, SIZE, 12)
    n = len(prompt) + len(output)
    until = np.full(n, n)
    head, logprobs, cache = head_of(model, SIZE), [], DynamicCache(config=model.config)
    kept = list(range(len(prompt)))
    with torch.no_grad():
        last = model.model(torch.from_numpy(prompt)[None], cache=cache, use_cache=True).last_hidden_state
        for step, token in enumerate(output):
            logprobs.append(float(head.logits(last[:, -1])[0].log_softmax(-1)[token]))
            index = len(prompt) + step
            if step in (3, 7):  # evict four tokens; this query and all later ones no longer see them
                dropped = [kept.pop(2) for _ in range(4)]
                until[dropped] = index
                keep = torch.tensor(list(range(2)) + list(range(6, len(kept) + 4)))
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
            kept.append(index)
            last = model.model(
                torch.tensor([[token]]),
                cache=cache,
                position_ids=torch.tensor([[index]]),
                use_cache=True,
            ).last_hidden_state
    row = Invocation(
        episode_id="e",
        invocation_index=0,
        model_id="m",
        prompt_ids=prompt,
        output_ids=output,
        visible_until=until,
    )

    def replayed(invocation: Invocation, backend: str) -> np.ndarray:
        (pack,) = plan([Episode("e", (invocation,))])
        with torch.no_grad():
            hidden = states_at_rows(model, pack, backend=backend)[torch.from_numpy(pack.target_row_M).long()]
        ids = torch.from_numpy(pack.target_ids_M).long()
        return head.logits(hidden).log_softmax(-1).gather(1, ids[:, None])[:, 0].detach().numpy()

    for backend in BACKENDS:
        np.testing.assert_allclose(replayed(row, backend), logprobs, atol=1e-10)
    forgotten = np.abs(replayed(row.replace(visible_until=None), "sdpa") - logprobs)
    assert forgotten.max() > 1e-2, "the eviction made no difference, so nothing was tested"


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
