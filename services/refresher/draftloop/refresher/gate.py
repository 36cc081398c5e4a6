"""The gate: may this candidate replace the serving drafter?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftloop.drafters.metrics import GateScore


@dataclass(frozen=True, slots=True)
class Decision:
    """promote, and in one line why or why not."""

    promote: bool
    reason: str


def decide(before: GateScore, after: GateScore, min_gain: float) -> Decision:
    """Promote when the candidate's expected accepted length beats the serving drafter's by `min_gain` or more.

    Both scores come from the same held-out records. A score that is not a number is a refusal.
    """
    gain = after.accept_length - before.accept_length
    if not math.isfinite(gain):
        return Decision(False, "the serving drafter's score or the candidate's is not a number")
    change = f"expected accepted length {before.accept_length:.2f} -> {after.accept_length:.2f}"
    if gain < min_gain:
        return Decision(False, f"{change}: less than the {min_gain:g} that a swap must gain")
    return Decision(True, f"{change} on {after.positions} held-out positions")
