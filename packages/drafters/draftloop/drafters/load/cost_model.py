"""Seconds of one decoding step, by shape, batch and context: measured at start-up, refined by every step.

    step = host + B * host per request
         + target's matrix products for B * nodes rows             (rows table, timed at start-up)
         + drafter's calls and their matrix products               (the same)
         + reading the keys and values of B * context tokens
         + reading the experts that B * nodes tokens are routed to (mixture-of-experts targets)

The weights of these terms start at what start-up measured and are then tracked by a Kalman filter over the steps'
wall time. What they cannot express stays in one ratio for each (shape, batch) that was seen.

One model serves all who ask what a step costs: the chooser inside a server, the gate and the fleet simulation outside
it, which read the server's (`served.ServedCosts`) or build one from estimates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from draftloop.drafters.load.shapes import Shape

# Relative error of one step's wall time, and how far a term's weight may drift between steps (share of its prior).
STEP_NOISE = 0.1
DRIFT = 0.002
# Place of the term that grows with every token.
CONTEXT = 4
# How wrong start-up's weights may be, as a share of them, in the order of `terms`: products were timed, host sides not.
UNSURE = np.array([5.0, 0.5, 5.0, 1.0, 3.0, 5.0, 2.0])
# Steps of one shape and batch that are averaged, and how many the terms' own prediction counts for among them.
SEEN_STEPS = 30.0
TERMS_COUNT = 2.0
# A step that took more than this many times what was expected was disturbed: a collection, a neighbour, a swap.
DISTURBED = 3.0


@dataclass(frozen=True, slots=True)
class RowCost:
    """Seconds of a model's matrix products by the rows of its input: measured points, joined by straight lines."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def line(cls, base: float, per_row: float) -> RowCost:
        """`base` for reading the weights, and so much more for each row."""
        return cls((1, 2), (base + per_row, base + 2.0 * per_row))

    def __call__(self, rows: float) -> float:
        """Beyond the last point the last slope goes on: from there on arithmetic is the bound."""
        if rows <= self.rows[-1]:
            return float(np.interp(rows, self.rows, self.seconds))
        (r0, r1), (s0, s1) = self.rows[-2:], self.seconds[-2:]
        return s1 + (rows - r1) * max(0.0, (s1 - s0) / (r1 - r0))


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts target. shares: [layers][experts], the chance that a token is routed to each expert, so a
    layer's shares add up to the experts a token uses."""

    shares: tuple[tuple[float, ...], ...]

    @classmethod
    def balanced(cls, layers: int, experts: int, used: int) -> Experts:
        """Every expert equally likely, as load-balancing losses aim at."""
        return cls(((used / experts,) * experts,) * layers)

    def touched(self, tokens: float) -> float:
        """Expected experts read by one forward of `tokens` tokens, over all layers: sum of 1 - (1 - share)^tokens.

        Mixtral (8 experts, 2 used): 2 of 8 for one token, 7.2 for eight: a verification reads nearly all of them.
        """
        shares = np.asarray(self.shares)
        return float((1.0 - (1.0 - shares) ** tokens).sum())


@dataclass(frozen=True, slots=True)
class StartUp:
    """What is known before the first step. call_seconds: host side of one model call.  token_seconds: keys and values
    of one token of context."""

    target: RowCost
    draft: RowCost
    call_seconds: float = 2e-3
    token_seconds: float = 2e-6
    request_seconds: float = 2e-4
    experts: Experts | None = None
    expert_seconds: float = 0.0


_START_UP = TypeAdapter(StartUp)


def bucket(batch: int) -> int:
    """Batch sizes that are remembered together: 1, 2, 3, 4, 5-6, 7-9, 10-13, 14-19, ..."""
    return round(2.0 * float(np.log2(batch)))


@dataclass(slots=True)
class _Seen:
    """Steps of one shape at one batch: how many, and the recent mean of log seconds and of the terms then."""

    count: int
    log_seconds: float
    terms: NDArray[np.float64]


class CostModel:
    """Predict a step's seconds, and learn from the ones that were run."""

    def __init__(self, start: StartUp) -> None:
        self._start = start
        prior = [start.call_seconds, 1.0, start.call_seconds, 1.0, start.token_seconds, start.request_seconds]
        if start.experts is not None:
            prior.append(start.expert_seconds)
        self._weights = np.array(prior)
        self._spread = np.diag((self._weights * UNSURE[: len(prior)]) ** 2)
        self._drift = DRIFT**2 * np.diag(self._weights**2)
        self.usual_context = 1.0
        self._fixed: dict[tuple[Shape, int], NDArray[np.float64]] = {}
        self._seen: dict[tuple[Shape, int], _Seen] = {}  # by shape and `bucket`

    def dump(self) -> dict[str, Any]:
        """Plain JSON: all that `load` needs to predict, and to learn on."""
        return {
            "start": asdict(self._start),
            "weights": self._weights.tolist(),
            "spread": self._spread.tolist(),
            "usual_context": self.usual_context,
            "seen": [
                [shape.depth, shape.width, shape.nodes, place, seen.count, seen.log_seconds, seen.terms.tolist()]
                for (shape, place), seen in self._seen.items()
            ],
        }

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> CostModel:
        """The inverse of `dump`. Raises KeyError, TypeError or ValueError for anything else."""
        model = cls(_START_UP.validate_python(data["start"]))
        model._weights, model._spread = np.array(data["weights"]), np.array(data["spread"])
        model.usual_context = float(data["usual_context"])
        for depth, width, nodes, place, count, log_seconds, terms in data["seen"]:
            model._seen[Shape(depth, width, nodes), place] = _Seen(count, log_seconds, np.array(terms))
        return model

    def terms(self, shape: Shape, batch: int, context: float) -> NDArray[np.float64]:
        """What each weight multiplies. context: mean tokens of a request."""
        if (shape, batch) not in self._fixed:
            self._fixed[shape, batch] = self._without_context(shape, batch)
        terms = self._fixed[shape, batch].copy()
        terms[CONTEXT] = batch * context
        return terms

    def _without_context(self, shape: Shape, batch: int) -> NDArray[np.float64]:
        rows = batch * shape.nodes
        calls = float(shape.depth)  # depth - 1 decoding steps, and the drafter's own pass over what was verified
        drafting = (shape.depth - 1) * self._start.draft(batch * shape.width) if shape.drafts else 0.0
        drafting += self._start.draft(rows) if shape.drafts else 0.0
        terms = [1.0, self._start.target(rows), calls, drafting, 0.0, float(batch)]
        if self._start.experts is not None:
            terms.append(self._start.experts.touched(rows))
        return np.array(terms)

    def seconds(self, shape: Shape, batch: int, context: float) -> float:
        expected = self._expected(self.terms(shape, batch, context))
        seen = self._seen.get((shape, bucket(batch)))
        if seen is None:
            return expected
        # Against today's weights, or the same error would be corrected twice once the weights have learnt it.
        ratio = seen.log_seconds - math.log(self._expected(seen.terms))
        return expected * math.exp(ratio * seen.count / (seen.count + TERMS_COUNT))

    def _expected(self, terms: NDArray[np.float64]) -> float:
        return max(float(self._weights @ terms), 1e-6)

    def times_seen(self, shape: Shape, batch: int) -> int:
        seen = self._seen.get((shape, bucket(batch)))
        return 0 if seen is None else seen.count

    def observe(self, shape: Shape, batch: int, context: float, seconds: float) -> None:
        """One step took `seconds`. A disturbed step teaches nothing."""
        if self.times_seen(shape, batch) > 2 and seconds > DISTURBED * self.seconds(shape, batch, context):
            return
        self.usual_context += (context - self.usual_context) / SEEN_STEPS
        terms = self.terms(shape, batch, context)
        self._track(terms / seconds)
        seen = self._seen.setdefault((shape, bucket(batch)), _Seen(0, 0.0, np.zeros_like(terms)))
        seen.count += 1
        weight = max(1.0 / SEEN_STEPS, 1.0 / seen.count)
        seen.log_seconds += weight * (math.log(seconds) - seen.log_seconds)
        seen.terms += weight * (terms - seen.terms)

    def _track(self, terms: NDArray[np.float64]) -> None:
        """Kalman filter with a random walk; terms are divided by the step's seconds, so that the target is 1."""
        spread = self._spread + self._drift
        gain = spread @ terms / (terms @ spread @ terms + STEP_NOISE**2)
        self._weights = np.maximum(self._weights + gain * (1.0 - terms @ self._weights), 0.0)
        self._spread = spread - np.outer(gain, terms @ spread)
