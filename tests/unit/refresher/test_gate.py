"""The gate promotes a measured gain and nothing else."""

from __future__ import annotations

import math

import pytest

from draftloop.drafters.metrics import GateScore
from draftloop.refresher.gate import decide


def score(accept_length: float, positions: int = 500) -> GateScore:
    return GateScore(accept_length, (0.5, 0.3), (0.5, 0.2), {"chat": (accept_length, positions)}, positions)


@pytest.mark.parametrize(
    ("before", "after", "min_gain", "promote"),
    [
        (1.0, 1.5, 0.01, True),
        (1.5, 1.75, 0.25, True),
        (1.5, 1.7499, 0.25, False),
        (1.5, 1.5, 0.01, False),
        (1.8, 1.2, 0.01, False),
        # A negative gain lets everything through but what cannot be measured.
        (1.8, 1.2, -1.0, True),
        (1.2, math.nan, -1.0, False),
        (1.2, math.inf, 0.01, False),
        (math.nan, 1.9, 0.01, False),
    ],
)
def test_decisions(before: float, after: float, min_gain: float, promote: bool) -> None:
    decision = decide(score(before), score(after), min_gain)
    assert decision.promote is promote
    assert decision.reason
    assert "\n" not in decision.reason


def test_reasons_carry_the_figures() -> None:
    refused = decide(score(1.5), score(1.504), 0.01).reason
    assert "1.50 -> 1.50" in refused
    assert "0.01" in refused
    promoted = decide(score(1.1), score(1.62, positions=321), 0.01).reason
    assert "1.10 -> 1.62" in promoted
    assert "321 held-out positions" in promoted
