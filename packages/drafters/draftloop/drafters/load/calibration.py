"""How often drafts of a given confidence are accepted, and the monotone curve that turns one into the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BINS = 20
# Drafts that the identity (confidence = acceptance) counts for in each bin, before any were seen.
PRIOR_DRAFTS = 2.0
# Half of the memory is this many drafts of a bin old: a swapped drafter and drifting traffic must show soon.
HALF_LIFE = 2000.0
# Steps between two fits of the curve; each would move it by less than a fit costs in a small model's step.
REFIT_AFTER = 8


class Reliability:
    """Acceptance by confidence in equal bins, old drafts fading. Confidence: product of probabilities on the path."""

    def __init__(self) -> None:
        self._drafts = np.zeros(BINS)
        self._confidence = np.zeros(BINS)
        self._accepted = np.zeros(BINS)
        self._news = 0
        self._refit()

    def observe(self, confidence: NDArray[np.floating], accepted: NDArray[np.bool_]) -> None:
        """Both of one shape: drafts that were verified, and their verdicts."""
        place = np.minimum((confidence * BINS).astype(np.int64), BINS - 1).ravel()
        drafts = np.bincount(place, minlength=BINS).astype(np.float64)
        keep = 0.5 ** (drafts / HALF_LIFE)
        self._drafts = self._drafts * keep + drafts
        self._confidence = self._confidence * keep + np.bincount(place, confidence.ravel(), BINS)
        self._accepted = self._accepted * keep + np.bincount(place, accepted.ravel().astype(np.float64), BINS)
        self._news += 1
        if self._news >= REFIT_AFTER:
            self._refit()

    def _refit(self) -> None:
        self._news = 0
        centre = (np.arange(BINS) + 0.5) / BINS
        weight = self._drafts + PRIOR_DRAFTS
        self._knots = (self._confidence + PRIOR_DRAFTS * centre) / weight
        self._curve = increasing((self._accepted + PRIOR_DRAFTS * centre) / weight, weight)

    def calibrated(self, confidence: NDArray[np.floating]) -> NDArray[np.float64]:
        """Expected acceptance; 0 stays 0, so that a draft without confidence brings nothing."""
        values: NDArray[np.float64] = np.interp(
            confidence, np.concatenate(([0.0], self._knots)), np.concatenate(([0.0], self._curve))
        )
        return values

    def points(self) -> list[tuple[float, float, float]]:
        """(mean confidence, share accepted, drafts) of each bin that saw any: the reliability curve."""
        return [
            (float(c / n), float(a / n), float(n))
            for c, a, n in zip(self._confidence, self._accepted, self._drafts, strict=True)
            if n >= 1.0
        ]

    def error(self) -> float:
        """Expected calibration error: mean distance of confidence and acceptance, weighted by drafts."""
        total = self._drafts.sum()
        return float(np.abs(self._confidence - self._accepted).sum() / total) if total else 0.0


def increasing(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (v1, w1, n1), (v2, w2, n2) = blocks[-2:]
            blocks[-2:] = [((v1 * w1 + v2 * w2) / (w1 + w2), w1 + w2, n1 + n2)]
    return np.concatenate([np.full(count, value) for value, _, count in blocks])
