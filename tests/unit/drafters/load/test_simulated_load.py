"""The whole controller on a simulated machine: known step times with noise, an overconfident drafter, real choices.

Time is counted, not measured, so the figures are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from draftloop.drafters.load.chooser import Chooser, Load
from draftloop.drafters.load.cost_model import CostModel, RowCost, StartUp
from draftloop.drafters.load.gains import TreeGains
from draftloop.drafters.load.shapes import PLAIN, Shape, tree_shapes

WIDTH = 4
SHAPES = tree_shapes(3, WIDTH, 8)
FIXED = (PLAIN, Shape(1, 4, 2), Shape(2, 4, 4), Shape(3, 4, 8))
# A small model on two cores: products are bound by memory up to 8 rows, by arithmetic from there on.
TARGET = RowCost((1, 8, 16, 32, 64, 128), (0.025, 0.027, 0.038, 0.066, 0.125, 0.245))
DRAFT = RowCost((1, 8, 64, 128), (0.0015, 0.0016, 0.006, 0.012))
CONTEXT = 200.0


def true_seconds(shape: Shape, batch: int) -> float:
    """What start-up does not know: a slower target, calls of 3 ms, and a host side."""
    drafting = (shape.depth - 1) * DRAFT(batch * shape.width) + DRAFT(batch * shape.nodes) if shape.drafts else 0.0
    return 1.1 * TARGET(batch * shape.nodes) + 0.003 * shape.depth + drafting + 0.004 + 4e-6 * batch * CONTEXT


@dataclass
class Trees:
    """One step's drawn trees. levels: path confidences.  path: [B, depth] index of the child that the target wants at
    each level of the path it goes, -1 once it goes where nothing was drafted."""

    levels: list[np.ndarray]
    path: np.ndarray


@dataclass
class Traffic:
    """skill: how often the target wants a token as sure as the drafter is of it."""

    skill: float
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def draw(self, batch: int, depth: int) -> Trees:
        """Chains of the best child with its siblings; nothing is drawn below the others."""
        sure = self.rng.beta(0.8, 0.9, (batch, depth, 1)) * np.array([0.9, 0.35, 0.15, 0.05])
        sure /= np.maximum(sure.sum(2, keepdims=True), 1.0)
        levels, above = [], np.ones((batch, 1))
        path = np.zeros((batch, depth), dtype=np.int64)
        going = np.ones(batch, dtype=bool)
        for d in range(depth):
            grown = np.zeros((batch, 1 if d == 0 else WIDTH, WIDTH))
            grown[:, 0] = above * sure[:, d]
            levels.append(grown)
            above = grown[:, 0, :1]
            chance = np.cumsum(self.skill * sure[:, d] ** 1.2, axis=1)
            child = (self.rng.uniform(0, 1, (batch, 1)) > chance).sum(axis=1)
            path[:, d] = np.where(going & (child < WIDTH), child, -1)
            going &= child == 0
        return Trees(levels, path)


def verify(trees: Trees, shape: Shape) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """[B] accepted drafts, and a level's (confidences, verdicts) of the nodes verified."""
    levels = [level[:, : shape.width, : shape.width] for level in trees.levels[: shape.depth]]
    everything = np.concatenate([level.reshape(len(level), -1) for level in levels], axis=1)
    kept = np.argsort(-everything, axis=1, kind="stable")[:, : shape.nodes - 1]
    accepted = np.zeros(len(kept), dtype=np.int64)
    verdicts, start = [], 0
    for d, level in enumerate(levels):
        size = level[0].size
        wanted = np.where((accepted == d) & (trees.path[:, d] >= 0), trees.path[:, d] + start, -1)
        accepted += (kept == wanted[:, None]).any(axis=1)
        mine = (kept >= start) & (kept < start + size)
        confidence = np.take_along_axis(everything, kept, axis=1)
        verdicts.append((confidence[mine], (kept == wanted[:, None])[mine]))
        start += size
    return accepted, verdicts


@dataclass
class Machine:
    """Runs steps and counts the time. fixed: always this shape."""

    traffic: Traffic
    fixed: Shape | None = None
    seconds: float = 0.0
    tokens: int = 0
    first: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.noise = np.random.default_rng(1)
        self.gains = TreeGains(SHAPES)
        self.chooser = Chooser(SHAPES, CostModel(StartUp(TARGET, DRAFT)), self.gains, margin=0.03)

    def step(self, batch: int) -> None:
        trees = self.traffic.draw(batch, 3)
        first = trees.levels[0][:, 0] if self.first is not None else None
        load = Load(batch, CONTEXT, first)
        shape = self.fixed or self.chooser.choose(load)
        if shape.drafts and self.fixed is None:
            levels = self.gains.calibrated(trees.levels[: shape.depth])
            self.gains.see(levels, shape.width)
            shape = self.chooser.prune(shape, levels, load)
        accepted = np.zeros(batch, dtype=np.int64)
        if shape.drafts:
            accepted, verdicts = verify(trees, shape)
            for level, (confidence, verdict) in enumerate(verdicts, start=1):
                self.gains.observe(level, confidence, verdict)
        seconds = true_seconds(shape, batch) * float(self.noise.lognormal(0.0, 0.1))
        self.chooser.cost.observe(shape, batch, CONTEXT, seconds)
        self.first = trees.levels[0] if shape.drafts else None
        self.seconds += seconds
        self.tokens += int(batch + accepted.sum())

    def rate(self, batches: Sequence[int], tokens: int) -> float:
        """Tokens/s of decoding so many tokens of each request of each batch in turn."""
        self.seconds, self.tokens, wanted = 0.0, 0, 0
        for batch in batches:
            wanted += batch * tokens
            while self.tokens < wanted:
                self.step(batch)
        return self.tokens / self.seconds


@pytest.mark.parametrize("skill", [0.25, 0.6, 0.95])
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
def test_at_every_batch_it_is_about_the_best_fixed_shape(batch: int, skill: float) -> None:
    follows = Machine(Traffic(skill))
    follows.rate([batch], 200)
    rate = follows.rate([batch], 400)
    fixed = {shape: Machine(Traffic(skill), shape).rate([batch], 400) for shape in FIXED}
    assert rate > 0.93 * max(fixed.values()), {str(shape): rate / value for shape, value in fixed.items()}


def test_over_a_mixed_load_it_beats_every_fixed_shape() -> None:
    trace = (1, 16, 2, 8, 1, 4, 16, 1, 2, 8) * 3
    follows = Machine(Traffic(0.8))
    follows.rate(trace, 24)
    rate = follows.rate(trace, 24)
    fixed = {shape: Machine(Traffic(0.8), shape).rate(trace, 24) for shape in FIXED}
    assert rate > 1.03 * max(fixed.values()), {str(shape): rate / value for shape, value in fixed.items()}
