"""Which shape to run now: the one with the most expected tokens a second, without flapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftloop.drafters.load.cost_model import CostModel
from draftloop.drafters.load.gains import Levels, accepted_by_budget
from draftloop.drafters.load.shapes import PLAIN, Shape

# A shape that promises nearly the best rate is tried this often at a batch size before its predicted cost is believed.
TRIALS = 3
WORTH_TRYING = 0.9
# Margins of gain, added up over steps in a row, before the drafter rests or wakes: a gain of one margin takes this many
# steps, a large one a single step. Waking costs a pass over all tokens it has slept through.
PATIENCE = 4.0
LEAST_MARGIN = 0.005
# A resting drafter learns nothing about traffic that changes; after so many steps it is asked again.
RECHECK_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Load:
    """One step's work. context: mean tokens of a request.  first: [B, k] confidences of the first drafted level, None
    while the drafter rests."""

    batch: int
    context: float
    first: NDArray[np.floating] | None


class Gains(Protocol):
    """`gains.TreeGains` or `gains.BlockGains`."""

    def expected(self, shapes: Sequence[Shape], first: NDArray[np.floating] | None) -> list[float]: ...


class Chooser:
    """Maximise batch * expected tokens / seconds over a fixed set of shapes.

    margin: how much better (as a share) another shape must be before it replaces the running one.
    """

    def __init__(self, shapes: Sequence[Shape], cost: CostModel, gains: Gains, margin: float) -> None:
        self.shapes = tuple(shapes)
        self.cost = cost
        self._gains = gains
        self.margin = margin
        self.current = max(shape for shape in self.shapes if shape.drafts)
        self._evidence = 0.0
        self._resting = 0

    def seconds(self, load: Load) -> list[float]:
        """Predicted time of a step of each shape."""
        return [self.cost.seconds(shape, load.batch, load.context) for shape in self.shapes]

    def rates(self, load: Load, first: NDArray[np.floating] | None, seconds: Sequence[float]) -> dict[Shape, float]:
        """Expected tokens a second of each shape."""
        tokens = self._gains.expected(self.shapes, first)
        return {s: load.batch * t / cost for s, t, cost in zip(self.shapes, tokens, seconds, strict=True)}

    def choose(self, load: Load) -> Shape:
        """The shape of this step. Rest and waking go by the average of late, as they bind many steps."""
        seconds = self.seconds(load)
        usual = self.rates(load, None, seconds)
        plain = usual.pop(PLAIN, 0.0)
        resting = not self.current.drafts
        self._resting = self._resting + 1 if resting else 0
        better, worse = (max(usual.values()), plain) if resting else (plain, max(usual.values()))
        gain = better / worse - 1.0 if worse else 0.0
        self._evidence = self._evidence + gain / max(self.margin, LEAST_MARGIN) if gain > self.margin else 0.0
        if self._evidence >= PATIENCE or self._resting > RECHECK_STEPS:
            self._evidence = 0.0
            resting = not resting
        if resting:
            self.current = PLAIN
        else:
            rates = usual if load.first is None else self.rates(load, load.first, seconds)
            rates.pop(PLAIN, None)
            self.current = self._best(rates, load.batch)
        return self.current

    def _best(self, rates: dict[Shape, float], batch: int) -> Shape:
        best = max(rates, key=lambda shape: rates[shape])
        close = [shape for shape in rates if rates[shape] > WORTH_TRYING * rates[best]]
        untried = [shape for shape in close if self.cost.times_seen(shape, batch) < TRIALS]
        if untried:
            return max(untried, key=lambda shape: rates[shape])
        if self.current in rates and rates[best] <= (1.0 + self.margin) * rates[self.current]:
            return self.current
        return best

    def prune(self, drafted: Shape, levels: Levels, load: Load) -> Shape:
        """How many nodes of the trees just drawn to verify. levels: calibrated acceptance, as for `TreeGains.see`."""
        budgets = [s for s in self.shapes if (s.depth, s.width) == (drafted.depth, drafted.width)]
        gains = accepted_by_budget(levels, drafted.width, [shape.nodes for shape in budgets])
        rates = [
            (1.0 + float(gain.mean())) / self.cost.seconds(shape, load.batch, load.context)
            for shape, gain in zip(budgets, gains, strict=True)
        ]
        return budgets[int(np.argmax(rates))]

    def forget(self) -> None:
        """The drafter was exchanged: ask it again, resting or not."""
        self._resting = RECHECK_STEPS if not self.current.drafts else 0
