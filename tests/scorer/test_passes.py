"""A pack that is run in several passes: every key is there for every query that sees it, none is kept for longer, and
the states are those of one pass and of each invocation alone."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers_attention import KINDS, model_of, pack_of
from helpers_plan import call, calls, dense_mask, episode
from helpers_scorer import PACKABLE, SIZE, by_state, oracle, tiny_model, tree_episodes
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from memopd_scorer.attention import iter_states_at_rows, states_at_rows
from memopd_scorer.attention.past import Past
from memopd_scorer.cost import ModelCost
from memopd_scorer.head import head_of
from memopd_scorer.passes import Pass, passes_of
from memopd_scorer.plan import Pack, plan
from memopd_scorer.signals import compute_signals
from memopd_trace.invocation import Episode, Invocation

BACKENDS = ("sdpa", "eager")
ERROR = 1e-10


@cache
def model(kind: str) -> PreTrainedModel:
    return model_of(kind)


@torch.no_grad()
def in_passes(model: PreTrainedModel, pack: Pack, tokens: int | None, backend: str = "sdpa") -> torch.Tensor:
    return torch.cat([*iter_states_at_rows(model, pack, backend=backend, pass_tokens=tokens)])  # type: ignore[arg-type]


def packed_keys(part: Pass) -> np.ndarray:
    return np.concatenate([np.arange(a, b) for a, b in part.keys])


def mask_of(part: Pass, pack: Pack) -> np.ndarray:
    """bool [T, T]: who is seen, by a pass's spans as a backend reads them; other queries see nothing."""
    mask, rule, keys = np.zeros((len(pack), len(pack)), bool), dense_mask(pack), packed_keys(part)
    for span in part.spans(pack):
        own = keys[span.start : span.stop]
        for start, stop in span.ancestors:
            mask[np.ix_(own, keys[start:stop])] = True
        if span.causal:
            mask[np.ix_(own, own)] = np.tril(np.ones((len(own), len(own)), bool))
        else:  # its mask is made from the rule, for what it has as keys
            mask[np.ix_(own, own)] = True
            mask[own] &= rule[own]
    return mask


@settings(max_examples=300, deadline=None)
@given(calls(), st.integers(1, 12))
def test_a_pass_has_the_keys_that_its_queries_see_and_keeps_no_other(rows: list[Invocation], tokens: int) -> None:
    for pack in plan(episode(*rows), max_tokens=10**6):
        passes, seen = passes_of(pack, tokens), dense_mask(pack)
        assert (passes[0].start, passes[-1].stop) == (0, len(pack))
        assert all(a.stop == b.start for a, b in pairwise(passes))
        for part in passes:
            kept = packed_keys(part)[: part.tokens_kept]
            assert np.array_equal(kept, np.flatnonzero(seen[part.start :, : part.start].any(0)))
            assert not seen[part.start : part.stop, part.stop :].any(), "a query sees a key of a later pass"
            borders = [b for b in range(part.start + 1, part.stop) if not seen[:b, b:].any()]
            assert part.stop - part.start <= tokens or not [b for b in borders if b - part.start <= tokens]
        found = np.logical_or.reduce([mask_of(part, pack) for part in passes])
        assert np.array_equal(found, seen)


def test_passes_are_even_and_one_is_enough_for_a_small_pack() -> None:
    (pack,) = plan(episode(call([3] * 90, [4] * 10)))
    assert [p.stop - p.start for p in passes_of(pack, 30)] == [25, 25, 25, 25]
    for tokens in (100, 1000, None):
        assert passes_of(pack, tokens) == [Pass(0, 100, ())]


def test_the_example_of_the_module() -> None:
    (pack,) = plan(episode(call([7, 8, 9], [1]), call([7, 8, 9], [2, 3], 1), call([7, 8, 5], [4], 2)))
    passes = passes_of(pack, 3)
    assert [pack.token_ids_T[p.start : p.stop].tolist() for p in passes] == [[7, 8, 5], [4, 9, 1], [2, 3]]
    assert [pack.token_ids_T[packed_keys(p)[: p.tokens_kept]].tolist() for p in passes] == [[], [7, 8, 5], [7, 8, 9]]


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(rows=calls(), tokens=st.integers(1, 12), kind=st.sampled_from(KINDS), backend=st.sampled_from(BACKENDS))
def test_any_tree_in_passes_of_any_size_gives_the_states_of_one_pass(
    rows: list[Invocation], tokens: int, kind: str, backend: str
) -> None:
    for pack in plan(episode(*rows), max_tokens=10**6):
        with torch.no_grad():
            whole = states_at_rows(model(kind), pack, backend="eager")
        found = in_passes(model(kind), pack, tokens, backend)
        assert found.shape == whole.shape
        assert not len(whole) or (found - whole).abs().max() / whole.abs().max() <= ERROR


@pytest.mark.parametrize("kind", KINDS)
def test_forks_of_forks_evictions_and_gaps_in_passes(kind: str) -> None:
    for visibility in (False, True):
        pack = pack_of(visibility=visibility, positions=True)
        with torch.no_grad():
            whole = states_at_rows(model(kind), pack, backend="eager")
        for tokens in (2, 9, 40):
            parts = passes_of(pack, tokens)
            assert len(parts) > 1 and any(len(p.kept) > 1 for p in parts), "no path with a gap was kept"
            slow = ("flex",) if tokens == 40 and visibility else ()
            for backend in (*BACKENDS, *slow):
                error = (in_passes(model(kind), pack, tokens, backend) - whole).abs().max() / whole.abs().max()
                assert error <= ERROR, (visibility, tokens, backend)
        evicted = [p for p in parts if any(not s.causal and s.start < p.start < s.stop for s in pack.spans)]
        assert bool(evicted) == visibility, "a border inside of a recorded span"


@pytest.mark.parametrize("kind", PACKABLE)
def test_passes_equal_each_invocation_alone(kind: str) -> None:
    model = tiny_model(kind, torch.float64)
    alone = {key: h for pack, hidden in oracle(model, tree_episodes()) for key, h in by_state(pack, hidden).items()}
    (pack,) = plan(tree_episodes(), max_tokens=10**6)
    for tokens in (5, 100):
        borders = {p.start for p in passes_of(pack, tokens)} - {span.start for span in pack.spans}
        assert borders, "no pass began inside of a branch"
        for key, hidden in by_state(pack, in_passes(model, pack, tokens)).items():
            assert (hidden - alone[key]).abs().max() / alone[key].abs().max() <= ERROR, (tokens, key)


# mixtral only in larger passes: an expert that is sent two tokens or three rounds by how many they are
@pytest.mark.parametrize(
    ("kind", "tokens"), [(k, n) for k in ("llama", "gemma3", "gpt2") for n in (2, 13)] + [("mixtral", 50)]
)
def test_a_branch_in_passes_never_moves_with_its_siblings(kind: str, tokens: int) -> None:
    model, data = tiny_model(kind), tree_episodes()
    chosen = data[1].invocations[-1]
    other_prompt = chosen.prompt_ids.copy()
    other_prompt[-3] = (other_prompt[-3] - 3 + 1) % (SIZE - 3) + 3
    rows = (*data[1].invocations[:-1], chosen.replace(prompt_ids=other_prompt))
    (pack,), (other,) = (plan(d, max_tokens=10**6) for d in (data, [data[0], Episode("m1", rows), *data[2:]]))
    assert passes_of(pack, tokens) == passes_of(other, tokens), "passes follow from lengths"
    before, after = (by_state(p, in_passes(model, p, tokens)) for p in (pack, other))
    assert not torch.equal(after[chosen.key], before[chosen.key]), "the change itself was not seen"
    for key in before.keys() - {chosen.key}:
        assert torch.equal(after[key], before[key]), key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("visibility", [False, True])
def test_what_is_held_between_passes_is_what_was_foreseen(
    kind: str, visibility: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    class Weighed(Past):
        def begin(self, keep):  # type: ignore[no-untyped-def]
            held.append(sum(t.untyped_storage().nbytes() for pair in self.pairs for t in pair))
            super().begin(keep)

    monkeypatch.setattr("memopd_scorer.attention.forward.Past", Weighed)
    pack, cost = pack_of(visibility=visibility), ModelCost.of(model(kind).config.to_dict())
    in_passes(model(kind), pack, 6)
    parts = passes_of(pack, 6)
    assert held == [8 * cost.kept * part.tokens_kept for part in parts]
    assert 0 < max(p.tokens_kept for p in parts) <= max(len(s) for s in pack.states), "no more than one path"
    assert any(b.tokens_kept < a.tokens_kept for a, b in pairwise(parts)), "nothing was let go"


def test_no_forward_is_longer_than_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    run, lengths = model("llama"), Counter[int]()
    handle = run.register_forward_pre_hook(lambda module, args: lengths.update([args[0].shape[1]]))
    try:
        pack = pack_of(visibility=False)
        in_passes(run, pack, 10)
    finally:
        handle.remove()
    assert max(lengths) <= 10 and sum(n * count for n, count in lengths.items()) == len(pack), "each token once"


@pytest.mark.parametrize("tier", ["exact", "int8"])
def test_signals_made_part_by_part_are_those_of_the_whole(tier: str) -> None:
    toy, pack = tiny_model("llama", torch.float64), pack_of(visibility=True)
    head, names = head_of(toy, SIZE), ("sampled", "topk", "hidden", "full")
    whole = compute_signals(states_at_rows(toy, pack).detach(), head, pack, names, topk=5, tier=tier)
    parts = compute_signals(iter_states_at_rows(toy, pack, pass_tokens=9), head, pack, names, topk=5, tier=tier)
    for name in whole.__dataclass_fields__:
        a, b = getattr(whole, name), getattr(parts, name)
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(np.asarray(b, np.float64), np.asarray(a, np.float64), rtol=1e-5, atol=1e-6)
