"""`flex` computes what the dense reference computes, from a block mask that is the interval rule."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import CPU, ERROR, KINDS, assert_equal_states, model_of, pack_of
from helpers_scorer import tiny_model
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from memopd_scorer.attention import Visibility, flex, states_at_rows
from memopd_scorer.attention.flex import BLOCK, block_mask
from memopd_trace.errors import UsageError


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("kind", "dtype"), [*((k, torch.float64) for k in KINDS), ("llama", torch.float32)])
def test_flex_equals_the_dense_reference_under_any_visibility(kind: str, dtype: torch.dtype) -> None:
    assert_equal_states(model_of(kind, dtype), pack_of(visibility=True, positions=True), "flex", ERROR[dtype])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_in_half_precision_is_as_near_to_float64_as_the_reference() -> None:
    pack = pack_of(visibility=True, positions=True)
    with torch.no_grad():
        exact = states_at_rows(model_of("gemma3"), pack, backend="eager")
        model = model_of("gemma3", torch.float32).to(torch.bfloat16)
        error = {
            name: float((states_at_rows(model, pack, backend=name).double() - exact).abs().mean())
            for name in ("flex", "eager")
        }
    assert 0 < error["flex"] <= 1.1 * error["eager"], error


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_block_mask_is_made_once_for_all_layers_with_the_same_window(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int | None] = []

    def counted(visibility: Visibility, window: int | None) -> BlockMask:
        made.append(window)
        return block_mask(visibility, window)

    monkeypatch.setattr(flex, "block_mask", counted)
    with torch.no_grad():
        for _ in range(2):
            states_at_rows(tiny_model("gemma3", layers=5), pack_of(visibility=False), backend="flex")
    assert made == [8, None] * 2, "of five layers, three have a window; another pack has masks of its own"


def test_on_a_device_the_kernel_is_compiled_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda kernel, **options: given.append((kernel, options)) or kernel)
    flex._kernel.__wrapped__("cuda")
    flex._kernel.__wrapped__("cpu")
    assert given == [(flex_attention, {"dynamic": True})], "a length of its own for each pack would compile for each"


def test_flex_on_a_cpu_says_that_it_has_no_backward() -> None:
    with pytest.raises(UsageError, match="'flex' has no backward on a CPU"):
        states_at_rows(model_of("llama"), pack_of(visibility=False), backend="flex")


@pytest.mark.parametrize("window", [None, 8, 150])
@pytest.mark.parametrize("visibility", [True, False])
def test_the_block_mask_is_the_interval_rule(window: int | None, visibility: bool) -> None:
    pack = pack_of(visibility=visibility, scale=20)
    seen = Visibility.of(pack, CPU)
    mask = block_mask(seen, window)
    tokens, blocks = len(pack), -(-len(pack) // BLOCK)
    at = torch.arange(tokens)
    start, until, path = seen.visible_from_K, seen.visible_until_K, seen.path_K
    rule = (start[None] <= at[:, None]) & (at[:, None] < until[None])
    if window is not None:
        rule &= path[None] > path[:, None] - window
    visited = {"partial": 0, "full": 0}
    for q in range(blocks):
        partial = set(mask.kv_indices[0, 0, q, : mask.kv_num_blocks[0, 0, q]].tolist())
        full = set(mask.full_kv_indices[0, 0, q, : mask.full_kv_num_blocks[0, 0, q]].tolist())
        for k in range(blocks):
            cells = rule[q * BLOCK : (q + 1) * BLOCK, k * BLOCK : (k + 1) * BLOCK]
            assert not full & partial
            assert k not in full or bool(cells.all())
            assert k in full | partial or not bool(cells.any()), (q, k)
        visited["partial"] += len(partial)
        visited["full"] += len(full)
    assert visited["partial"] < blocks * blocks / 2, "a tree skips most blocks"
    assert visited["full"] > 0 or window is not None
