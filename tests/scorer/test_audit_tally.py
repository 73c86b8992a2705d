"""What an audit counts is what a brute-force computation over all tokens gives, in memory that does not grow."""

from __future__ import annotations

import numpy as np
import pytest

from memopd_scorer.audit_tally import MOST_LABELS, OTHER_LABELS, RESOLUTION, Differences, Evidence, Table, Tally, Worst


def differences(tokens: int, seed: int = 0) -> np.ndarray:
    """Nats over eight decades, of both signs."""
    rng = np.random.default_rng(seed)
    return rng.choice([-1, 1], tokens) * 10.0 ** rng.uniform(-7, 1, tokens)


def of(delta: list[float] | np.ndarray) -> Differences:
    return Differences.of(np.asarray(delta, np.float64), epsilon=0.2)


@pytest.mark.parametrize("tokens", [1, 2, 99, 5000])
def test_a_tally_agrees_with_brute_force_over_all_tokens(tokens: int) -> None:
    delta = differences(tokens)
    tally = Tally()
    for part in np.array_split(delta, 7):
        tally.add(of(part))
    found = tally.comparison()
    assert found is not None
    size = np.abs(delta)
    assert found.tokens == tokens
    assert found.max_abs == size.max()
    assert found.mean_abs == pytest.approx(size.mean(), rel=1e-12)
    assert found.mean_signed == pytest.approx(delta.mean(), rel=1e-9)
    assert found.kl == pytest.approx(np.mean(np.exp(delta) - 1 - delta), rel=1e-9)
    assert found.false_clip_rate == np.mean(np.abs(np.exp(delta) - 1) > 0.2)
    for share, value in ((0.5, found.p50_abs), (0.99, found.p99_abs), (0.999, found.p999_abs)):
        exact = np.quantile(size, share, method="inverted_cdf")
        assert exact * (1 - 1e-12) <= value <= exact * (1 + RESOLUTION) * (1 + 1e-12)


def test_no_difference_and_an_absurd_one_have_percentiles_too() -> None:
    none = Tally()
    none.add(of(np.zeros(5)))
    found = none.comparison()
    assert found is not None
    assert (found.max_abs, found.p50_abs, found.p999_abs, found.kl) == (0, 0, 0, 0)
    absurd = Tally()
    absurd.add(of([1e6, -1e6]))
    found = absurd.comparison()
    assert found is not None
    assert (found.max_abs, found.p50_abs, found.false_clip_rate) == (1e6, 1e6, 1.0)
    assert np.isfinite(found.kl)
    assert Tally().comparison() is None


def test_a_table_keeps_a_bounded_number_of_labels_and_loses_no_token() -> None:
    table = Table()
    for version in range(MOST_LABELS + 50):
        table.add(str(version), of([0.1]))
    table.add("7", of([0.1]))
    found = table.comparisons()
    assert len(found) == MOST_LABELS + 1
    assert found[OTHER_LABELS].tokens == 50
    assert found["7"].tokens == 2
    assert sum(c.tokens for c in found.values()) == MOST_LABELS + 51


def test_labels_come_numbers_first_in_their_order_then_words() -> None:
    table = Table()
    for label in ("none", "10", "8-15", "2", "after x", "²"):
        table.add(label, of([0.1]))
    assert list(table.comparisons()) == ["2", "8-15", "10", "after x", "none", "²"]


def test_a_reading_that_is_no_better_does_not_convince_by_chance() -> None:
    rng = np.random.default_rng(0)
    convinced = 0
    for _ in range(2000):
        tokens = int(rng.integers(1, 30))
        evidence = Evidence()
        evidence.add(rng.exponential(1, tokens), rng.exponential(1, tokens))
        convinced += evidence.convinces(2.0)
    assert convinced <= 4  # 4 sigmas, with heavy tails, in 2,000 tries


def test_a_reading_that_fits_exactly_convinces_on_a_few_tokens_and_an_outlier_does_not_hide_it() -> None:
    evidence = Evidence()
    evidence.add(np.array([1e-6, 2e-6]), np.array([1.0, 0.8]))
    assert not evidence.convinces(2.0), "two tokens are too few"
    evidence.add(np.array([1e-6, 500.0, np.nan]), np.array([0.5, 0.1, 3.0]))
    assert evidence.pairs == 4, "a NaN is no pair"
    evidence.add(np.array([1e-6, 1e-6]), np.array([0.7, 0.9]))
    assert evidence.convinces(2.0)
    assert evidence.times_closer > 100


def test_a_rounding_error_is_no_evidence() -> None:
    evidence = Evidence()
    evidence.add(np.full(100, 1e-8), np.full(100, 1e-6))
    assert evidence.times_closer < 1.1


@pytest.mark.parametrize("size", [0, 1, 10, 1000])
def test_the_worst_tokens_are_those_that_sorting_all_would_give(size: int) -> None:
    rng = np.random.default_rng(3)
    worst, everything = Worst(size), []
    for index in range(20):
        tokens = int(rng.integers(0, 12))
        recorded, recomputed = np.zeros(tokens), np.round(rng.normal(size=tokens), 1)  # rounded, so that some tie
        output, ids = np.arange(tokens), rng.integers(0, 90, tokens)
        worst.add(("e", index), output, ids, recorded, recomputed)
        everything += [(-abs(b), index, m, i) for m, (b, i) in enumerate(zip(recomputed, ids, strict=True))]
    expected = sorted(everything)[:size]
    assert [(-t.abs_delta, t.invocation_index, t.output_index, t.token_id) for t in worst.tokens] == expected
