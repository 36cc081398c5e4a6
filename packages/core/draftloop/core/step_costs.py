"""What a speculative step costs: a small model of its seconds, fitted to measured steps.

    seconds(batch, nodes, depth) = base + per_request*batch + per_node*batch*nodes + per_level*depth
                                   + per_draft*batch*depth

`base` is what reading the weights takes, whatever the batch; `per_node` is a verified token's share; `per_level` and
`per_draft` are a draft level's fixed and per-request cost. A plain decoding step has nodes 1 (the token itself) and
depth 0. No term may be negative, so the model extrapolates without nonsense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from draftloop.core.errors import DraftloopError


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured setting. batch: requests in the step.  nodes: tokens verified a request (1: plain decoding).
    depth: draft levels (0: plain).  seconds: of one step."""

    batch: int
    nodes: int
    depth: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds; see the module's formula."""

    base: float
    per_request: float
    per_node: float
    per_level: float
    per_draft: float

    @classmethod
    def fit(cls, steps: Sequence[MeasuredStep]) -> StepCosts:
        """Least squares of the relative errors, no coefficient negative. Raises DraftloopError for unusable rows.

        Five coefficients: the optimum is the best of the 31 unconstrained fits over subsets of the terms that come
        out nonnegative (the terms left out are zero), smaller subsets first where several fit alike.
        """
        if not steps or any(step.seconds <= 0 or step.batch < 1 or step.nodes < 1 or step.depth < 0 for step in steps):
            raise DraftloopError("a cost model needs measured steps with positive batch, nodes and seconds")
        seconds = np.array([step.seconds for step in steps])
        rows = np.array([_terms(step.batch, step.nodes, step.depth) for step in steps]) / seconds[:, None]
        best, best_error = np.zeros(rows.shape[1]), np.inf
        for size in range(1, rows.shape[1] + 1):
            for columns in combinations(range(rows.shape[1]), size):
                found = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
                error = float(np.square(rows[:, columns] @ found - 1.0).sum())
                if (found >= 0).all() and error < best_error - 1e-12:
                    best, best_error = np.zeros(rows.shape[1]), error
                    best[list(columns)] = found
        return cls(*map(float, best))

    def seconds(self, batch: float, nodes: int, depth: int) -> float:
        """Of one step."""
        coefficients = np.array([self.base, self.per_request, self.per_node, self.per_level, self.per_draft])
        return float(_terms(batch, nodes, depth) @ coefficients)

    def tokens_per_s(self, batch: float, nodes: int, depth: int, accept_length: float) -> float:
        """Of the whole batch, when each request's step emits `accept_length` tokens on average."""
        return batch * accept_length / self.seconds(batch, nodes, depth)

    def plain_tokens_per_s(self, batch: float) -> float:
        """Without speculation: one token a step."""
        return self.tokens_per_s(batch, 1, 0, 1.0)


def _terms(batch: float, nodes: int, depth: int) -> NDArray[np.float64]:
    return np.array([1.0, batch, batch * nodes, depth, batch * depth], dtype=np.float64)
