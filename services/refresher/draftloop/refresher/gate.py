"""The gate: may this candidate replace the serving drafter?

Both drafters are scored on the same held-out records, so the question is about the gain of each record, which varies
far less than the records themselves do. Resampling the records (not their positions, which are not independent) with
replacement gives the gain's distribution; the candidate passes when its lower bound exceeds `min_gain`.

The bound is the expanded percentile bootstrap (Hesterberg, "What Teachers Should Know About the Bootstrap", The
American Statistician 69(4), 2015, section 4.1): plain percentiles are too narrow by about sqrt((n-1)/n) and by z
instead of t, which matters exactly where a gate lives, at 5 to 50 records.

A domain blocks a candidate when its own estimate lost more than `domain_floor` AND that it lost at all is certain (its
upper bound is below zero, with the error shared out over the domains). So a domain of three noisy records cannot hold
a good candidate back, one of a single record never can, and a real loss blocks as soon as the records can show it.
What slips through is the canary's to see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from draftloop.core.config import GateConfig
from draftloop.drafters.metrics import GateScore, RecordScore

RESAMPLES = 4000
# Resampling 10,000 records 4,000 times at once would take 320 MB.
_CHUNK_CELLS = 1 << 22


@dataclass(frozen=True, slots=True)
class Interval:
    """A gain in expected accepted length: the estimate and one-sided bounds, each at the confidence asked for."""

    gain: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Decision:
    """promote, and in one line why or why not. gain: None when there was nothing to compare.

    by_domain: the share of its accepted length that each domain gains (+) or loses (-)."""

    promote: bool
    reason: str
    gain: Interval | None = None
    by_domain: dict[str, float] = field(default_factory=dict)


def decide(before: GateScore, after: GateScore, gate: GateConfig, seed: int) -> Decision:
    """Compare two scores of the same held-out records, in the same order. A score that is no number is a refusal.

    Raises ValueError when the records differ.
    """
    if [(r.domain, r.positions) for r in before.records] != [(r.domain, r.positions) for r in after.records]:
        raise ValueError("the gate compares drafters on the same records, and these differ")
    old, new = before.accept_length, after.accept_length
    if not (math.isfinite(old) and math.isfinite(new)):
        return Decision(False, "the serving drafter's score or the candidate's is not a number")
    positions, difference = _paired(before.records, after.records)
    if not positions.sum():
        return Decision(False, "no held-out record is long enough to score")
    rng = np.random.default_rng(seed)
    gain = bootstrap_gain(positions, difference, gate.confidence, rng)
    by_domain = {name: after.per_domain[name] / value - 1.0 for name, value in before.per_domain.items() if value > 0.0}
    change = f"expected accepted length {old:.2f} -> {new:.2f}"
    bound = f"at least {gain.low:+.3f} at {gate.confidence:.0%} on {len(positions)} records"
    if not gain.low > gate.min_gain:
        return Decision(False, f"{change}, {bound}: a swap must gain {gate.min_gain:g}", gain, by_domain)
    if losers := _losing_domains(before.records, after.records, by_domain, gate, rng):
        worst = min(losers, key=lambda name: by_domain[name])
        lost = f"{worst} loses {-by_domain[worst]:.1%}, more than the {gate.domain_floor:.1%} a domain may"
        return Decision(False, f"{change}, but {lost}", gain, by_domain)
    return Decision(True, f"{change}, {bound} ({after.positions} positions)", gain, by_domain)


def bootstrap_gain(
    positions: NDArray[np.float64], difference: NDArray[np.float64], confidence: float, rng: np.random.Generator
) -> Interval:
    """The gain sum(difference) / sum(positions) over R records, with one-sided bounds at `confidence`.

    positions: [R], > 0 in sum.  difference: [R], a record's accepted tokens with the candidate less those with the
    serving drafter.  One record has no spread to resample: its bounds are infinite.
    """
    gain = float(difference.sum() / positions.sum())
    records = len(positions)
    if records < 2:
        return Interval(gain, -math.inf, math.inf)
    tail = expanded_tail(1.0 - confidence, records)
    gains = _resampled(positions, difference, rng)
    low, high = np.quantile(gains, [tail, 1.0 - tail])
    return Interval(gain, float(low), float(high))


def expanded_tail(alpha: float, records: int) -> float:
    """The percentile that covers like a t interval: Phi(-sqrt(n / (n - 1)) * t(1 - alpha, n - 1))."""
    return float(ndtr(-math.sqrt(records / (records - 1)) * stdtrit(records - 1, 1.0 - alpha)))


def _resampled(
    positions: NDArray[np.float64], difference: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """[RESAMPLES] gains of as many records drawn with replacement, all at once but for memory."""
    records = len(positions)
    gains: list[NDArray[np.float64]] = []
    chunk = max(1, _CHUNK_CELLS // records)
    for begin in range(0, RESAMPLES, chunk):
        chosen = rng.integers(0, records, size=(min(chunk, RESAMPLES - begin), records))
        # A resample of nothing but records without a scored position says nothing: no gain.
        gains.append(difference[chosen].sum(1) / np.maximum(positions[chosen].sum(1), 1.0))
    return np.concatenate(gains)


def _paired(
    before: Sequence[RecordScore], after: Sequence[RecordScore]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[R] positions and [R] gained tokens."""
    positions = np.array([record.positions for record in before], dtype=np.float64)
    difference = [new.tokens - old.tokens for old, new in zip(before, after, strict=True)]
    return positions, np.array(difference, dtype=np.float64)


def _losing_domains(
    before: Sequence[RecordScore],
    after: Sequence[RecordScore],
    by_domain: dict[str, float],
    gate: GateConfig,
    rng: np.random.Generator,
) -> list[str]:
    """The domains that block: see the module's text."""
    losers = []
    confidence = 1.0 - (1.0 - gate.confidence) / len(by_domain)
    for name in [name for name, change in by_domain.items() if change < -gate.domain_floor]:
        pairs = [(old, new) for old, new in zip(before, after, strict=True) if old.domain == name]
        positions, difference = _paired([old for old, _ in pairs], [new for _, new in pairs])
        if bootstrap_gain(positions, difference, confidence, rng).high < 0.0:
            losers.append(name)
    return losers
