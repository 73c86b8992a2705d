"""Tiers of states: what is rebuilt, what is measured of the loss, and that nothing else is taken for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_signals import HEADS, a_head, a_pack, reference_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from memopd_scorer.head import Head
from memopd_scorer.plan import Pack
from memopd_scorer.signals import bytes_per_target, compute_signals
from memopd_scorer.tiers import encode, kl_divergence
from memopd_scorer.tiers import rebuild as rebuild_on_device
from memopd_trace.errors import InputError, UsageError
from memopd_trace.tiers import INT8_BLOCK, block_of, least_kl, rebuild, scales_of, state_bytes

LOSSY = ("float16", "int8")
ROWS = arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.sampled_from([1, 5, 31, 32, 33, 70])),
    elements=st.floats(-(2.0**60), 2.0**60, width=32),
)


def encoded(values: np.ndarray, tier: str) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = encode(torch.from_numpy(values), tier)
    assert torch.equal(
        rebuild_on_device(codes, scales, tier), torch.from_numpy(rebuild(codes.numpy(), scales.numpy(), tier))
    )
    return codes.numpy(), scales.numpy()


@given(ROWS)
@settings(max_examples=150, deadline=None)
def test_int8_rebuilds_to_half_a_scale_of_each_block(values: np.ndarray) -> None:
    codes, scales = encoded(values, "int8")
    assert codes.dtype == np.int8 and scales.shape == (len(values), -(-values.shape[1] // INT8_BLOCK))
    assert (np.abs(codes.astype(int)) <= 127).all() and (scales > 0).all()
    wide = np.repeat(scales, INT8_BLOCK, axis=1)[:, : values.shape[1]].astype(np.float64)
    assert (np.abs(rebuild(codes, scales, "int8") - values.astype(np.float64)) <= 0.5001 * wide).all()
    for block in range(scales.shape[1]):
        part = np.s_[:, block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        largest = np.abs(values[part]).max(1)
        assert (np.abs(codes[part].astype(int)).max(1)[largest > 1e-30] == 127).all(), (
            "the scale is wider than it must be"
        )


@given(ROWS)
@settings(max_examples=150, deadline=None)
def test_float16_keeps_eleven_bits_of_what_is_not_tiny_beside_the_largest(values: np.ndarray) -> None:
    codes, scales = encoded(values, "float16")
    assert codes.dtype == np.float16 and scales.shape == (len(values), 1)
    assert (np.frexp(scales)[0] == 0.5).all(), "a scale is a power of two"
    exact, found = values.astype(np.float64), rebuild(codes, scales, "float16").astype(np.float64)
    tiny = np.abs(exact) < 2.0**-29 * np.abs(exact).max(1, keepdims=True)
    assert (np.abs(found - exact)[~tiny] <= 2.0**-11 * np.abs(exact)[~tiny]).all()
    assert (np.abs(found - exact) <= np.maximum(2.0**-11 * np.abs(exact), 2.0**-25 * scales)).all()


def test_float16_gives_bfloat16_states_back_bit_by_bit() -> None:
    hidden = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    hidden[:, 3] *= 2**12
    codes, scales = encode(hidden, "float16")
    assert torch.equal(rebuild_on_device(codes, scales, "float16"), hidden.float())
    assert not torch.equal(hidden.half().float(), hidden.float()) or bool((scales != 1).any())


@pytest.mark.parametrize("tier", LOSSY)
@pytest.mark.parametrize("value", [0.0, 1e-44, 3e38])
def test_states_at_the_ends_of_float32_are_rebuilt_finite(tier: str, value: float) -> None:
    hidden = torch.full((1, 40), value)
    codes, scales = encode(hidden, tier)
    found = rebuild_on_device(codes, scales, tier)
    assert bool(torch.isfinite(found).all()) and bool((scales > 0).all())
    torch.testing.assert_close(found, hidden, rtol=1e-3, atol=1e-38)


# A divergence is a square of differences of logits, which float32 knows to 1e-6: much of float16's, little of int8's.
FLOAT32_LOGITS = {"float16": 2e-2, "int8": 1e-3}


def independent_kl(hidden: np.ndarray, rebuilt: np.ndarray, head: Head) -> np.ndarray:
    """KL(scored || rebuilt) over the real ids, in float64 numpy throughout."""
    z, y = (reference_logits(torch.from_numpy(h.astype(np.float64)), head).numpy() for h in (hidden, rebuilt))
    z, y = (a - a.max(1, keepdims=True) for a in (z, y))
    q, r = (np.exp(a) / np.exp(a).sum(1, keepdims=True) for a in (z, y))
    return np.asarray((q * np.log(q / r)).sum(1))


@pytest.mark.parametrize("tier", LOSSY)
@pytest.mark.parametrize("options", HEADS)
def test_the_measured_divergence_is_that_of_an_independent_float64_computation(
    options: dict[str, float], tier: str
) -> None:
    pack, head = a_pack(), a_head(width=40, **options)  # type: ignore[arg-type]
    hidden = 2 * torch.randn(len(pack.rows_R), 40, generator=torch.Generator().manual_seed(1))
    found = compute_signals(hidden, head, pack, ("hidden",), tier=tier)
    assert found.hidden_MD is not None and found.hidden_scale_MB is not None
    assert found.hidden_kl_M is not None and found.hidden_logsumexp_M is not None
    rebuilt = rebuild(found.hidden_MD.numpy(), found.hidden_scale_MB, tier)
    scored = hidden[torch.from_numpy(pack.target_row_M).long()].numpy()
    expected = independent_kl(scored, rebuilt, head)
    assert expected.max() > (1e-9 if tier == "float16" else 1e-5), "the tier lost nothing, so nothing was measured"
    np.testing.assert_allclose(found.hidden_kl_M, expected, rtol=FLOAT32_LOGITS[tier], atol=1e-11)
    logsumexp = reference_logits(torch.from_numpy(rebuilt).double(), head).logsumexp(-1)
    np.testing.assert_allclose(found.hidden_logsumexp_M, logsumexp, rtol=1e-6)
    exact = compute_signals(hidden, head, pack, ("hidden",))
    np.testing.assert_array_equal(found.logprob_M, exact.logprob_M)  # of the state that was scored
    np.testing.assert_array_equal(found.logsumexp_M, exact.logsumexp_M)
    assert exact.hidden_kl_M is None and exact.hidden_scale_MB is None


def test_a_float64_teachers_states_are_measured_as_a_reader_rebuilds_them() -> None:
    pack = a_pack()
    head = a_head(width=40)
    wide = Head(head.weight_VD.double(), None, 1.0, None, head.size)
    hidden = torch.randn(len(pack.rows_R), 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = compute_signals(hidden, wide, pack, ("hidden",), tier="float16")
    assert found.hidden_MD is not None and found.hidden_scale_MB is not None
    rebuilt = rebuild(found.hidden_MD.numpy(), found.hidden_scale_MB, "float16")
    scored = hidden[torch.from_numpy(pack.target_row_M).long()].numpy()
    np.testing.assert_allclose(
        found.hidden_kl_M, independent_kl(scored, rebuilt, wide), rtol=FLOAT32_LOGITS["float16"], atol=1e-11
    )


def test_an_id_of_probability_zero_costs_nothing() -> None:
    exact = torch.tensor([[1.0, 0.0, -torch.inf]])
    assert float(kl_divergence(exact, exact)) == 0.0
    assert float(kl_divergence(exact, exact + 5)) == pytest.approx(0, abs=1e-15), "a shift of all logits loses nothing"


def test_a_state_that_a_tier_cannot_hold_names_the_row() -> None:
    pack: Pack = a_pack()
    head = Head(torch.zeros(104, 16, dtype=torch.float64), None, 1.0, None, 97)
    hidden = torch.zeros(len(pack.rows_R), 16, dtype=torch.float64)
    hidden[3, 0] = 1e200  # no float32 is that large
    with pytest.raises(InputError, match=r"E-NONFINITE.*episode '[mng]', invocation \d: a state cannot be held"):
        compute_signals(hidden, head, pack, ("hidden",), tier="int8")


DISTRIBUTIONS = arrays(np.float64, st.tuples(st.just(2), st.integers(2, 6)), elements=st.floats(-5, 5))


@given(DISTRIBUTIONS, st.integers(0, 5), st.floats(-1e-3, 1e-3))
@settings(max_examples=300, deadline=None)
def test_no_two_distributions_are_closer_than_one_id_says(logits: np.ndarray, place: int, noise: float) -> None:
    q, r = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    divergence = (np.exp(q) * (q - r)).sum()
    token = place % len(q)
    read = np.array([r[token] + noise])  # as a reader recomputes it, within the tolerance
    assert least_kl(q[[token]], read, 1e-3)[0] <= divergence * (1 + 1e-9) + 1e-14
    if len(q) == 2:  # then the two events are all there is
        assert least_kl(q[[token]], r[[token]], 0.0)[0] == pytest.approx(divergence, rel=1e-6, abs=1e-12)


def test_the_least_divergence_rises_with_the_distance_and_is_none_within_the_tolerance() -> None:
    own, other = np.full(5, -1.0), np.array([-1.0005, -1.002, -1.1, -2.0, -9.0])
    found = least_kl(own, other, 1e-3)
    assert found[0] == 0 and (np.diff(found) > 0).all()
    assert least_kl(np.array([-0.5]), np.array([0.0]), 1e-3)[0] > 1, "certainty of what was not certain"


def test_the_bytes_of_a_tier_are_those_of_its_columns() -> None:
    assert [state_bytes(tier, 576, 4) for tier in ("exact", "float16", "int8")] == [2304, 1164, 656]
    assert (scales_of("int8", 33), block_of("int8", 33)) == (2, 32)
    assert bytes_per_target(("hidden",), width=576, hidden_bytes=4, topk=1, size=9, tier="int8") == 16 + 656


def test_an_unknown_tier_is_a_usage_error() -> None:
    pack = a_pack()
    with pytest.raises(UsageError, match="unknown tier of states 'fp8'"):
        compute_signals(torch.zeros(len(pack.rows_R), 16), a_head(), pack, ("hidden",), tier="fp8")
