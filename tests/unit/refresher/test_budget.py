"""When training pauses and resumes, and when speculation pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.core.step_costs import StepCosts
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


def test_speculation_is_switched_off_where_it_loses_and_not_to_and_fro() -> None:
    # Weights read once, then every verified token costs: at batch 32 a tree of 8 costs 2.5 times a plain step.
    costs = StepCosts(base=0.02, per_request=0.0, per_node=0.0003, per_level=0.001, per_draft=0.0)
    policies = {batch: SpeculationPolicy(costs, batch, nodes=8, depth=3) for batch in (1, 8, 32)}
    assert policies[1].wanted(False, 1.8)
    assert policies[1].tokens_per_s(1.8) == pytest.approx(1.8 / 0.0254)
    assert not policies[32].wanted(True, 1.8)
    even = costs.seconds(8, 8, 3) / costs.seconds(8, 1, 0)
    for speculating in (True, False):
        assert policies[8].wanted(speculating, even) is speculating
        assert policies[8].wanted(speculating, 1.1 * even)
        assert not policies[8].wanted(speculating, 0.9 * even)
