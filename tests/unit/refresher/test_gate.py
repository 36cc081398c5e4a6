"""The gate promotes a gain that the records can show, and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import stdtrit

from draftloop.core.config import GateConfig
from draftloop.drafters.metrics import GateScore, RecordScore
from draftloop.refresher.gate import RESAMPLES, bootstrap_gain, decide, expanded_tail

GATE = GateConfig(min_gain=0.01, confidence=0.9, domain_floor=0.05)


def score(lengths: list[float], domains: list[str] | None = None, positions: int = 50) -> GateScore:
    """A score whose records have these accepted lengths."""
    domains = domains or ["chat"] * len(lengths)
    records = [RecordScore(name, positions, positions * value) for name, value in zip(domains, lengths, strict=True)]
    return GateScore(tuple(records), (0.5, 0.3), (0.5, 0.2))


@pytest.mark.parametrize(
    ("before", "after", "min_gain", "promote"),
    [
        ([1.0, 1.2, 1.1], [1.5, 1.7, 1.6], 0.01, True),
        ([1.0, 1.2, 1.1], [1.25, 1.45, 1.35], 0.25, False),
        ([1.5, 1.5], [1.5, 1.5], 0.01, False),
        ([1.8, 1.8], [1.2, 1.2], 0.01, False),
        # A negative gain lets everything through but what cannot be measured.
        ([1.8, 1.9], [1.75, 1.85], -1.0, True),
        ([1.2, 1.2], [math.nan, 1.2], -1.0, False),
        ([1.2, 1.2], [math.inf, 1.2], 0.01, False),
        ([1.2, math.nan], [1.9, 1.9], 0.01, False),
        # One record shows a gain, but not that it would come again.
        ([1.2], [1.9], 0.01, False),
        ([], [], -1.0, False),
    ],
)
def test_decisions(before: list[float], after: list[float], min_gain: float, promote: bool) -> None:
    decision = decide(score(before), score(after), GATE.model_copy(update={"min_gain": min_gain}), seed=0)
    assert decision.promote is promote
    assert decision.reason
    assert "\n" not in decision.reason


def test_reasons_carry_the_figures() -> None:
    promoted = decide(score([1.1, 1.1]), score([1.62, 1.62]), GATE, seed=0).reason
    assert "1.10 -> 1.62" in promoted
    assert "+0.520 at 90% on 2 records (100 positions)" in promoted
    refused = decide(score([1.5, 1.5]), score([1.504, 1.504]), GATE, seed=0).reason
    assert "must gain 0.01" in refused


def test_records_that_differ_are_a_fault() -> None:
    with pytest.raises(ValueError, match="same records"):
        decide(score([1.0, 1.0]), score([1.0, 1.0], ["chat", "code"]), GATE, seed=0)


def test_the_same_seed_decides_the_same() -> None:
    rng = np.random.default_rng(0)
    before, gain = rng.normal(1.5, 0.2, 12), rng.normal(0.05, 0.1, 12)
    pair = score(before.tolist()), score((before + gain).tolist())
    assert decide(*pair, GATE, seed=3) == decide(*pair, GATE, seed=3)
    assert decide(*pair, GATE, seed=3).gain != decide(*pair, GATE, seed=4).gain


def test_a_domain_that_surely_loses_blocks_and_a_noisy_one_does_not() -> None:
    domains = ["chat"] * 20 + ["code"] * 8
    before = score([1.5] * 28, domains)
    sure = score([2.0] * 20 + [1.38, 1.4, 1.39, 1.37, 1.4, 1.38, 1.4, 1.39], domains)
    blocked = decide(before, sure, GATE, seed=0)
    assert not blocked.promote
    assert "code loses" in blocked.reason
    assert blocked.by_domain["code"] == pytest.approx(-0.074, abs=0.002)
    # The same mean loss, but some records win: chance explains it.
    noisy = score([2.0] * 20 + [0.9, 2.1, 1.0, 1.9, 1.0, 1.9, 1.1, 1.2], domains)
    assert decide(before, noisy, GATE, seed=0).promote
    # A sure loss within the floor passes.
    small = score([2.0] * 20 + [1.46, 1.47] * 4, domains)
    assert decide(before, small, GATE, seed=0).promote
    # One record proves nothing about its domain.
    single = ["chat"] * 20 + ["code"]
    assert decide(score([1.5] * 21, single), score([2.0] * 20 + [1.0], single), GATE, seed=0).promote


def draw(rng: np.random.Generator, records: int, gain: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Records of 10 to 100 positions, gains with a spread of 0.15 and some skew; `gain` is the mean over positions."""
    positions = rng.integers(10, 101, records).astype(float)
    noise = 0.15 * (rng.gamma(16.0, 0.25, records) - 4.0)
    return positions, positions * (gain + noise)


@pytest.mark.parametrize("records", [4, 10, 40])
def test_the_bounds_cover(records: int) -> None:
    """The true gain lies above the lower bound in about 90 % of the experiments, and under the upper one too."""
    rng = np.random.default_rng(records)
    experiments = 600
    bounds = [bootstrap_gain(*draw(rng, records, 0.1), 0.9, rng) for _ in range(experiments)]
    # Three standard errors are 0.037; the skew costs some coverage on one side and gives some on the other.
    assert np.mean([bound.low <= 0.1 for bound in bounds]) >= 0.84
    assert np.mean([bound.high >= 0.1 for bound in bounds]) >= 0.84
    assert np.mean([bound.low <= 0.1 <= bound.high for bound in bounds]) == pytest.approx(0.8, abs=0.08)


def test_a_worse_candidate_passes_less_often_than_alpha() -> None:
    rng = np.random.default_rng(7)
    promoted = 0
    for trial in range(400):
        positions, difference = draw(rng, 10, -0.02)
        before = [RecordScore("chat", int(n), 1.6 * n) for n in positions]
        after = [RecordScore("chat", int(n), 1.6 * n + d) for n, d in zip(positions, difference, strict=True)]
        promoted += decide(GateScore(tuple(before), (), ()), GateScore(tuple(after), (), ()), GATE, trial).promote
    assert promoted / 400 <= 1 - GATE.confidence


def test_pairing_sees_what_unpaired_scores_hide() -> None:
    """Records differ by 0.5 in accepted length, the gain is 0.05 with a spread of 0.05."""
    rng = np.random.default_rng(1)
    ones = np.ones(30)
    paired = unpaired = 0
    for _ in range(100):
        level, other_level = rng.normal(1.8, 0.5, (2, 30))
        gain = rng.normal(0.05, 0.05, 30)
        paired += bootstrap_gain(ones, gain, 0.9, rng).low > 0.0
        unpaired += bootstrap_gain(ones, level + gain - other_level, 0.9, rng).low > 0.0
    assert paired >= 95
    assert unpaired <= 30


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 40), st.integers(0, 2**32 - 1), st.sampled_from([0.8, 0.9, 0.95]))
def test_the_resampling_is_the_obvious_loops(records: int, seed: int, confidence: float) -> None:
    rng = np.random.default_rng(seed)
    positions, difference = draw(rng, records, 0.0)
    found = bootstrap_gain(positions, difference, confidence, np.random.default_rng(0))
    loop = np.random.default_rng(1)
    gains = []
    for _ in range(RESAMPLES):
        chosen = loop.integers(0, records, records)
        gains.append(difference[chosen].sum() / positions[chosen].sum())
    assert found.gain == pytest.approx(difference.sum() / positions.sum())
    tail = expanded_tail(1 - confidence, records)
    # Two samples of 4,000: a bound lies between the percentiles a few standard errors to each side.
    error = 4 * math.sqrt(2 * tail * (1 - tail) / RESAMPLES) + 1 / RESAMPLES
    low, high = np.quantile(gains, [max(0.0, tail - error), min(1.0, tail + error)])
    assert low - 1e-9 <= found.low <= high + 1e-9
    low, high = np.quantile(gains, [max(0.0, 1 - tail - error), min(1.0, 1 - tail + error)])
    assert low - 1e-9 <= found.high <= high + 1e-9


def test_the_tail_is_wider_than_the_plain_percentile_and_goes_back_to_it() -> None:
    assert expanded_tail(0.1, 4) < 0.04
    assert expanded_tail(0.1, 20) < 0.1
    assert expanded_tail(0.1, 100_000) == pytest.approx(0.1, abs=1e-3)
    # Its normal quantile is the t quantile, stretched.
    assert stdtrit(3, 0.9) * math.sqrt(4 / 3) == pytest.approx(1.891, abs=0.001)
