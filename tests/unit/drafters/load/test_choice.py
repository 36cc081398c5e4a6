"""Calibration, expected gains and the choice of a shape, against slow, obvious oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from draftloop.drafters.load.calibration import Reliability, increasing
from draftloop.drafters.load.chooser import PATIENCE, TRIALS, Chooser, Load
from draftloop.drafters.load.cost_model import CostModel, RowCost, StartUp
from draftloop.drafters.load.gains import BlockGains, TreeGains, accepted_by_budget
from draftloop.drafters.load.shapes import PLAIN, Shape, block_shapes, tree_shapes

SHAPES = tree_shapes(3, 4, 8)
shares = st.floats(0.0, 1.0)


# --- calibration


@given(hnp.arrays(float, st.integers(1, 12), elements=shares), st.integers(0, 2**32 - 1))
def test_increasing_is_the_min_max_of_averages(values: np.ndarray, seed: int) -> None:
    """The textbook form of isotonic regression: max over starts of the min over ends of the weighted average."""
    weights = np.random.default_rng(seed).uniform(0.5, 3.0, len(values))

    def average(first: int, last: int) -> float:
        return float(np.average(values[first : last + 1], weights=weights[first : last + 1]))

    size = len(values)
    expected = [max(min(average(i, j) for j in range(k, size)) for i in range(k + 1)) for k in range(size)]
    np.testing.assert_allclose(increasing(values, weights), expected, atol=1e-9)


@settings(deadline=None, max_examples=30)
@given(st.floats(0.3, 1.5), st.integers(0, 2**32 - 1))
def test_an_overconfident_drafter_is_calibrated(power: float, seed: int) -> None:
    """Accepted with chance confidence^power-ish; the curve finds it, and is monotone from 0 to 1."""
    rng = np.random.default_rng(seed)
    curve = Reliability()
    for _ in range(100):
        confidence = rng.uniform(0, 1, 80)
        curve.observe(confidence, rng.uniform(0, 1, 80) < 0.8 * confidence**power)
    at = np.linspace(0, 1, 41)
    found = curve.calibrated(at)
    assert found[0] == 0.0
    assert (np.diff(found) >= 0).all()
    assert found[-1] <= 1.0
    assert np.abs(found[4:-2] - 0.8 * at[4:-2] ** power).mean() < 0.06
    points = curve.points()
    assert all(abs(accepted - 0.8 * conf**power) < 0.25 for conf, accepted, drafts in points if drafts > 100)


def test_a_new_drafter_shows_within_some_thousand_drafts() -> None:
    rng, curve = np.random.default_rng(0), Reliability()
    sure = np.full(100, 0.92)
    for _ in range(100):
        curve.observe(sure, rng.uniform(0, 1, 100) < 0.2)
    for _ in range(100):
        curve.observe(sure, rng.uniform(0, 1, 100) < 0.9)
    assert curve.calibrated(np.array([0.92]))[0] > 0.8
    assert Reliability().error() == 0.0


# --- gains


def by_loops(levels: list[np.ndarray], row: int, width: int, budget: int) -> float:
    """The budget - 1 best nodes of one request's tree, one by one."""
    nodes = []
    for level in levels:
        for parent in level[row][:width]:
            nodes += list(parent[:width])
    return sum(sorted(nodes, reverse=True)[: budget - 1])


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_accepted_by_budget_is_the_sum_of_the_best(depth: int, width: int, batch: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    levels = [rng.uniform(0, 1, (batch, 1, 4))] + [rng.uniform(0, 1, (batch, 4, 4)) for _ in range(depth - 1)]
    budgets = [2, 3, 5, 9, 64]
    for budget, gain in zip(budgets, accepted_by_budget(levels, width, budgets), strict=True):
        np.testing.assert_allclose(gain, [by_loops(levels, row, width, budget) for row in range(batch)])


def steady_levels(batch: int, first: float) -> list[np.ndarray]:
    """Trees whose first level is accepted with chance `first`, each child of an accepted node with 0.5."""
    level = np.zeros((batch, 1, 4))
    level[:, 0, 0] = first
    deeper = []
    for depth in (1, 2):
        grown = np.zeros((batch, 4, 4))
        grown[:, 0, 0] = first * 0.5**depth
        deeper.append(grown)
    return [level, *deeper]


def test_gains_follow_what_was_drawn_and_scale_with_the_first_level() -> None:
    gains = TreeGains(SHAPES)
    for _ in range(400):
        gains.see(steady_levels(3, 0.6), 4)
    assert gains.expected([PLAIN], None) == [1.0]
    assert gains.expected([Shape(1, 4, 2)], None)[0] == pytest.approx(1.6, abs=0.01)
    assert gains.expected([Shape(3, 4, 8)], None)[0] == pytest.approx(1 + 0.6 * 1.75, abs=0.02)
    assert gains.expected([Shape(3, 4, 4)], None)[0] == pytest.approx(1 + 0.6 * 1.75, abs=0.02)
    half = np.array([[0.3, 0.0, 0.0, 0.0]])
    ratio = gains.expected([Shape(3, 4, 8)], half)[0] - 1
    assert ratio == pytest.approx(float(gains.first_level(half)[0]) * 1.75, rel=0.02)


def test_a_block_counts_each_slot_given_the_ones_before() -> None:
    shapes = block_shapes(8)
    gains = BlockGains(shapes)
    rng = np.random.default_rng(0)
    keeps = np.array([0.8, 0.6, 0.5, 0.9, 0.2, 0.5, 0.5])
    for step in range(600):
        slots = shapes[1 + step % (len(shapes) - 1)].nodes - 1
        hits = rng.uniform(0, 1, (64, slots)) < keeps[:slots]
        gains.observe(slots, np.cumprod(hits, axis=1).sum(axis=1))
    expected = [1 + np.cumprod(keeps)[: shape.nodes - 1].sum() for shape in shapes]
    assert gains.expected(shapes, None) == pytest.approx(expected, rel=0.04)


# --- choice


def machine(slope: float) -> CostModel:
    """Cheap rows up to 8, then `slope` seconds a row: plain decoding wins at large batches."""
    target = RowCost((1, 8, 72), (0.020, 0.022, 0.022 + 64 * slope))
    return CostModel(StartUp(target, RowCost((1, 64), (0.001, 0.004)), call_seconds=0.002))


def settled(chooser: Chooser, load: Load, steps: int = 150) -> list[Shape]:
    """Choices once every shape's cost has been tried, on a machine that takes exactly what the model says."""
    shapes = []
    for _ in range(steps):
        shape = chooser.choose(load)
        chooser.cost.observe(shape, load.batch, load.context, chooser.cost.seconds(shape, load.batch, load.context))
        shapes.append(shape)
    return shapes[len(SHAPES) * TRIALS + 10 :]


def taught(first: float) -> TreeGains:
    gains = TreeGains(SHAPES)
    for _ in range(400):
        gains.see(steady_levels(2, first), 4)
    return gains


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 24), st.floats(0.05, 0.95), st.floats(0.0005, 0.01))
def test_it_settles_within_a_margin_of_the_best_rate(batch: int, first: float, slope: float) -> None:
    chooser = Chooser(SHAPES, machine(slope), taught(first), margin=0.03)
    load = Load(batch, 100.0, None)
    last = settled(chooser, load)
    rates = chooser.rates(load, None, chooser.seconds(load))
    assert len(set(last)) == 1, "it flaps"
    assert rates[last[-1]] >= max(rates.values()) / 1.03 / 1.03


def test_large_batches_rest_and_small_ones_wake() -> None:
    chooser = Chooser(SHAPES, machine(0.005), taught(0.6), margin=0.03)
    assert settled(chooser, Load(16, 100.0, None))[-1] == PLAIN
    assert settled(chooser, Load(1, 100.0, None))[-1].drafts


@given(st.floats(0.001, 0.1), st.floats(0.005, 0.1))
def test_rest_needs_as_many_steps_as_the_gain_is_small(gain: float, margin: float) -> None:
    """Two shapes on a machine where plain decoding is better by `gain`."""
    assume(abs(gain - margin) > 1e-6)
    tree = Shape(1, 1, 2)
    gains = TreeGains([tree])
    promised = gains.expected([tree], None)[0]
    cost = CostModel(
        StartUp(RowCost((1, 2), (1.0, promised * (1.0 + gain))), RowCost((1, 2), (0.0, 0.0)), 0.0, 0.0, 0.0)
    )
    chooser = Chooser([PLAIN, tree], cost, gains, margin)
    steps = 0
    while chooser.choose(Load(1, 0.0, None)).drafts and steps < 50:
        steps += 1
    expected = math.ceil(PATIENCE * margin / gain - 1e-6) - 1 if gain > margin else 50
    assert abs(steps - expected) <= 1 or steps == expected == 50


def test_a_new_drafter_is_asked_although_the_old_one_rested() -> None:
    chooser = Chooser(SHAPES, machine(0.005), taught(0.6), margin=0.03)
    load = Load(16, 100.0, None)
    assert settled(chooser, load)[-1] == PLAIN
    chooser.forget()
    assert any(chooser.choose(load).drafts for _ in range(4))


@given(st.integers(1, 16), st.integers(0, 2**32 - 1))
def test_pruning_takes_the_budget_with_the_best_rate(batch: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    levels = [rng.uniform(0, 0.9, (batch, 1, 4))] + [rng.uniform(0, 0.3, (batch, 4, 4)) for _ in range(2)]
    cost = machine(float(rng.uniform(0.0002, 0.005)))
    chooser = Chooser(SHAPES, cost, TreeGains(SHAPES), margin=0.03)
    load = Load(batch, 100.0, None)
    rates = {
        shape: sum(1 + by_loops(levels, row, 4, shape.nodes) for row in range(batch))
        / cost.seconds(shape, batch, 100.0)
        for shape in SHAPES
        if (shape.depth, shape.width) == (3, 4)
    }
    pruned = chooser.prune(Shape(3, 4, 8), levels, load)
    assert rates[pruned] == pytest.approx(max(rates.values()))
