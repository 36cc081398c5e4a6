"""When training is worth its cost, and when speculation is. Two small policies without clock or process."""

from __future__ import annotations

from dataclasses import dataclass

from draftloop.core.step_costs import StepCosts


class TrainingBudget:
    """Training pauses after `patience` candidates in a row gained less than `min_gain`; drift starts it again."""

    def __init__(self, patience: int, min_gain: float) -> None:
        self._patience = patience
        self._min_gain = min_gain
        self._idle = 0

    @property
    def spending(self) -> bool:
        """Whether to train now."""
        return self._idle < self._patience

    def candidate(self, gain: float) -> bool:
        """A candidate's gain over the serving drafter in accepted length; True when training pauses for it."""
        was = self.spending
        self._idle = 0 if gain >= self._min_gain else self._idle + 1
        return was and not self.spending

    def drift(self) -> bool:
        """The traffic has changed, so there is something to gain; True when training resumes for it."""
        was = self.spending
        self._idle = 0
        return not was


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """Whether speculation pays, by a measured cost model.

    batch: running requests it is judged at.  nodes, depth: of the served tree.  margin: the share by which the other
    way must win to be taken, so that noise does not switch to and fro.
    """

    costs: StepCosts
    batch: float
    nodes: int
    depth: int
    margin: float = 0.05

    def tokens_per_s(self, accept_length: float) -> float:
        """Predicted, of the whole batch, with speculation."""
        return self.costs.tokens_per_s(self.batch, self.nodes, self.depth, accept_length)

    @property
    def plain_tokens_per_s(self) -> float:
        """Predicted, of the whole batch, without speculation."""
        return self.costs.plain_tokens_per_s(self.batch)

    def wanted(self, speculating: bool, accept_length: float) -> bool:
        """Whether to speculate from now on."""
        speedup = self.tokens_per_s(accept_length) / self.plain_tokens_per_s
        return speedup >= 1.0 - self.margin if speculating else speedup > 1.0 + self.margin
