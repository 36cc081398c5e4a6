"""When training pauses and resumes, and when speculation pays."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.drafters.load.cost_model import CostModel, RowCost, StartUp
from draftloop.drafters.load.served import ServedCosts
from draftloop.drafters.load.shapes import Shape
from draftloop.refresher.budget import SpeculationPolicy, TrainingBudget


def test_training_pauses_after_idle_candidates_and_resumes_on_drift() -> None:
    budget = TrainingBudget(patience=3, min_gain=0.01)
    assert [budget.candidate(gain) for gain in (0.0, -0.2, 0.3, 0.0, 0.005)] == [False] * 5
    assert budget.spending
    assert budget.candidate(0.0)
    assert not budget.spending
    assert budget.drift()
    assert budget.spending
    assert not budget.drift()


@given(st.integers(1, 5), st.lists(st.one_of(st.floats(-1, 1), st.none()), max_size=40))
def test_the_budget_is_the_obvious_rule(patience: int, happened: list[float | None]) -> None:
    """None is drift. Paused exactly when the last `patience` things that happened were candidates without gain."""
    budget = TrainingBudget(patience, min_gain=0.1)
    for number, one in enumerate(happened, start=1):
        before = budget.spending
        turned = budget.drift() if one is None else budget.candidate(one)
        last = happened[max(0, number - patience) : number]
        idle = len(last) == patience and all(gain is not None and gain < 0.1 for gain in last)
        assert budget.spending == (not idle)
        assert turned == ((not before) if one is None else before and idle)


TREE = Shape(3, 4, 8)
# Weights read once, then every verified token costs: at batch 32 a tree of 8 costs 2.5 times a plain step.
COSTS = CostModel(StartUp(RowCost.line(0.02, 0.0003), RowCost.line(0.001, 0.0), 0.0, 0.0, 0.0))


def server(batch: int, follows: bool = False, resting: float = 0.0) -> ServedCosts:
    return ServedCosts(TREE, follows, {batch: 1.0}, resting, COSTS)


def test_speculation_is_switched_off_where_it_loses_and_not_to_and_fro() -> None:
    policies = {batch: SpeculationPolicy([server(batch)]) for batch in (1, 8, 32)}
    assert policies[1].wanted(False, 1.8)
    assert policies[1].tokens_per_s(1.8) == pytest.approx(1.8 / 0.0254)
    assert policies[1].plain_tokens_per_s == pytest.approx(1 / 0.0203)
    assert not policies[32].wanted(True, 1.8)
    even = (0.02 + 8 * 8 * 0.0003 + 3 * 0.001) / (0.02 + 8 * 0.0003)
    for speculating in (True, False):
        assert policies[8].wanted(speculating, even) is speculating
        assert policies[8].wanted(speculating, 1.1 * even)
        assert not policies[8].wanted(speculating, 0.9 * even)


def test_servers_are_judged_together() -> None:
    """One at a light load, one at a heavy one: the sum of both decides."""
    both = SpeculationPolicy([server(1), server(32)])
    assert both.tokens_per_s(2.0) == pytest.approx(2.0 / 0.0254 + 64.0 / (0.02 + 256 * 0.0003 + 0.003))
    assert both.plain_tokens_per_s == pytest.approx(1 / 0.0203 + 32 / (0.02 + 32 * 0.0003))


def test_servers_that_follow_their_load_have_decided_already() -> None:
    awake, asleep = server(32, follows=True, resting=0.2), server(32, follows=True, resting=0.9)
    for speculating in (True, False):
        assert SpeculationPolicy([awake]).wanted(speculating, 1.0)
        assert not SpeculationPolicy([asleep]).wanted(speculating, 3.0)
    assert not SpeculationPolicy([awake, dataclasses.replace(awake, follows=False)]).follows
