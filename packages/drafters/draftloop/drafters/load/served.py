"""What a server measured about its own steps: gate, speculation policy and simulation predict by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftloop.drafters.load.cost_model import CostModel
from draftloop.drafters.load.shapes import PLAIN, Shape


@dataclass(frozen=True)
class ServedCosts:
    """shape: the largest one that the server drafts.  follows: it chooses among smaller ones, and plain decoding, each
    step.  batches: weight of each batch size among its steps of late.  resting: share of those steps in which the
    drafter rested.  costs: learnt from all of its steps."""

    shape: Shape
    follows: bool
    batches: Mapping[int, float]
    resting: float
    costs: CostModel

    def tokens_per_s(self, accept_length: float) -> float:
        """Predicted for these batches, when each request's step of `shape` emits so many tokens on average."""
        return accept_length * self._steps_per_s(self.shape)

    @property
    def plain_tokens_per_s(self) -> float:
        """Predicted for these batches without speculation: a token a step."""
        return self._steps_per_s(PLAIN)

    def _steps_per_s(self, shape: Shape) -> float:
        """Requests' steps a second: a mix of batches takes the sum of their times."""
        context = self.costs.usual_context
        requests = sum(weight * batch for batch, weight in self.batches.items())
        return requests / sum(
            weight * self.costs.seconds(shape, batch, context) for batch, weight in self.batches.items()
        )

    def dump(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "shape": [self.shape.depth, self.shape.width, self.shape.nodes],
            "follows": self.follows,
            "batches": dict(self.batches),
            "resting": self.resting,
            "costs": self.costs.dump(),
        }

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> ServedCosts:
        """The inverse of `dump`, also after JSON. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            Shape(*data["shape"]),
            bool(data["follows"]),
            {int(batch): float(weight) for batch, weight in data["batches"].items()},
            float(data["resting"]),
            CostModel.load(data["costs"]),
        )
