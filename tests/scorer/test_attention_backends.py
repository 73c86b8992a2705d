"""`sdpa` computes what the dense reference computes, and `auto` chooses by device and dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_attention import CPU, ERROR, KINDS, assert_equal_gradients, assert_equal_states, model_of, pack_of, state
from helpers_scorer import SIZE

from memopd_scorer.attention import Visibility, choose, sdpa, states_at_rows
from memopd_scorer.attention.visibility import grouped
from memopd_scorer.plan import plan_states
from memopd_scorer.probing import Capability
from memopd_scorer.states import State
from memopd_scorer.teacher import LoadedModel
from memopd_trace.errors import UsageError


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_sdpa_equals_the_dense_reference_under_any_visibility(kind: str, dtype: torch.dtype) -> None:
    for pack in (pack_of(visibility=True, positions=True), pack_of(visibility=False)):
        assert_equal_states(model_of(kind, dtype), pack, "sdpa", ERROR[dtype])


@pytest.mark.parametrize("kind", ["llama", "gemma3", "softcap", "sinks"])
def test_gradients_of_sdpa_equal_the_dense_reference(kind: str) -> None:
    assert_equal_gradients(kind, pack_of(visibility=True), "sdpa")


def test_a_growing_history_is_one_causal_span_without_a_mask() -> None:
    ids = np.random.default_rng(0).integers(3, SIZE, 60)
    (pack,) = plan_states([[state(i, ids[:n]) for i, n in enumerate((20, 33, 60))]])
    assert len(pack.states) == 3
    (span,) = pack.spans
    assert [b.mask_QJ for b in sdpa._blocks(span, Visibility.of(pack, CPU), None)] == [None]
    assert_equal_states(model_of("llama"), pack, "sdpa", 1e-10)


def test_keys_are_repeated_without_a_copy_and_no_mask_is_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.zeros(1, 6, 10, 4), torch.zeros(1, 2, 10, 4)
    _, wide, _ = grouped(query, key, key)
    assert wide.shape == (2, 3, 10, 4) and wide.data_ptr() == key.data_ptr() and wide.stride(1) == 0
    monkeypatch.setattr(sdpa, "MASK_CELLS", 100)
    seen = Visibility.of(pack_of(visibility=True), CPU)
    blocks = [b for span in seen.spans for b in sdpa._blocks(span, seen, None) if b.mask_QJ is not None]
    assert len(blocks) > len(seen.spans)
    assert max(b.mask_QJ.numel() for b in blocks) <= 100
    assert_equal_states(model_of("llama"), pack_of(visibility=True), "sdpa", 1e-10)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["sdpa", "eager", "flex"])
def test_a_slot_is_predicted_by_its_own_row(backend: str) -> None:
    model, rng = model_of("llama"), np.random.default_rng(0)
    trunk = rng.integers(3, SIZE, 14)
    slots = {0: [15, 17, 16], 1: [14, 20, 19]}  # where the outputs are put, in the order of generation
    states = []
    for index, rows in slots.items():
        ids = np.r_[trunk, rng.integers(3, SIZE, 8)].astype(np.int32)
        targets = rng.integers(3, SIZE, 3).astype(np.int32)
        states.append(State("e", index, b"", ids, None, None, None, np.array(rows, np.int32), np.arange(3), targets))
    (pack,) = plan_states([states])
    assert len(pack) < pack.logical_tokens, "nothing was shared"
    with torch.no_grad():
        found = states_at_rows(model, pack, backend=backend)[torch.from_numpy(pack.target_row_M).long()]
        for number, state_ in enumerate(pack.states):
            alone = model.model(torch.from_numpy(state_.ids.astype(np.int64))[None]).last_hidden_state[0]
            mine = found[torch.from_numpy(pack.target_state_M == number)]
            torch.testing.assert_close(mine, alone[slots[state_.invocation_index]], rtol=0, atol=1e-10)


def test_the_metadata_names_every_backend_that_ran() -> None:
    capability = Capability("tree", "packed equals alone", 0.0, 1e-4)
    for (wanted, device, dtype), plain, recorded in (
        (("auto", "cuda:0", torch.bfloat16), "flash", "flash+sdpa"),
        (("auto", "cpu", torch.float32), "sdpa", "sdpa"),
        (("flex", "cpu", torch.float32), "flex", "flex"),
    ):
        choice = choose(wanted, torch.device(device), dtype)[0]
        model = LoadedModel("m", None, None, None, choice, capability)  # type: ignore[arg-type]
        assert model.backends(with_visibility=False) == plain
        assert model.backends(with_visibility=True) == recorded
        assert model.describe_attention().startswith(f"{recorded} ({choice.reason}")
    alone = LoadedModel("m", None, None, None, choice, Capability("single", "recurrent", None, 1e-4))  # type: ignore[arg-type]
    assert alone.backends(with_visibility=True) == "native"


def test_auto_chooses_by_device_and_dtype_and_says_why() -> None:
    (cpu,) = choose("auto", CPU, torch.float32)
    assert (cpu.backend, cpu.for_pack(is_causal=False)) == ("sdpa", "sdpa") and "the device is 'cpu'" in cpu.reason
    flash, then = choose("auto", torch.device("cuda:0"), torch.bfloat16)
    assert (flash.backend, flash.for_pack(is_causal=False), then.backend) == ("flash", "sdpa", "sdpa")
    assert "bfloat16 on a CUDA device" in flash.reason
    (wide,) = choose("auto", torch.device("cuda:0"), torch.float32)
    assert wide.backend == "sdpa" and "float32" in wide.reason
    for device in ("cpu", "cuda:0", "mps"):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            chosen = choose("auto", torch.device(device), dtype)
            assert {c.for_pack(k) for c in chosen for k in (True, False)} <= {"sdpa", "flash"}, "flex: not measured"
    (asked,) = choose("flash", torch.device("cuda:0"), torch.float16)
    assert asked.for_pack(is_causal=False) == "flash", "what was asked for refuses by name; it is not replaced"
    for wanted, device, dtype, named in (
        ("flash", "cpu", torch.bfloat16, "cannot run bfloat16 on 'cpu'"),
        ("flash", "cuda:0", torch.float32, "cannot run float32 on 'cuda:0'"),
        ("native", "cpu", torch.float32, "unknown attention backend 'native'"),
    ):
        with pytest.raises(UsageError, match=named):
            choose(wanted, torch.device(device), dtype)
