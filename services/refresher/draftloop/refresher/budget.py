"""When training is worth its cost, and when speculation is. Two small policies without clock or process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftloop.drafters.load.served import ServedCosts


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
    """Whether speculation pays, by what the servers measured about their steps at the batches they run.

    servers: at least one; tokens/s are of all together.  margin: the share by which the other way must win to be
    taken, so that noise does not switch to and fro.
    """

    servers: Sequence[ServedCosts]
    margin: float = 0.05

    def tokens_per_s(self, accept_length: float) -> float:
        """Predicted with speculation."""
        return sum(server.tokens_per_s(accept_length) for server in self.servers)

    @property
    def plain_tokens_per_s(self) -> float:
        """Predicted without speculation."""
        return sum(server.plain_tokens_per_s for server in self.servers)

    @property
    def follows(self) -> bool:
        """Whether the servers go to plain decoding by themselves."""
        return all(server.follows for server in self.servers)

    def wanted(self, speculating: bool, accept_length: float) -> bool:
        """Whether to speculate from now on. Servers that follow their load have decided it, each step anew."""
        if self.follows:
            return sum(server.resting for server in self.servers) < len(self.servers) / 2
        speedup = self.tokens_per_s(accept_length) / self.plain_tokens_per_s
        return speedup >= 1.0 - self.margin if speculating else speedup > 1.0 + self.margin
