"""The cost model finds the costs it was measured from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.errors import DraftloopError
from draftloop.core.step_costs import MeasuredStep, StepCosts

COST = st.one_of(st.just(0.0), st.floats(1e-4, 1e-2))
GRID = [(batch, nodes, depth) for batch in (1, 4, 16) for nodes, depth in ((1, 0), (4, 3), (8, 3), (16, 5))]


def measured(costs: StepCosts, noise: float = 0.0) -> list[MeasuredStep]:
    rng = np.random.default_rng(0)
    return [MeasuredStep(b, n, d, costs.seconds(b, n, d) * float(np.exp(rng.normal(0.0, noise)))) for b, n, d in GRID]


@settings(deadline=None, max_examples=40)
@given(st.floats(1e-3, 1e-1), COST, COST, COST, COST)
def test_the_fit_predicts_unmeasured_settings(base: float, a: float, b: float, c: float, d: float) -> None:
    costs = StepCosts(base, a, b, c, d)
    found = StepCosts.fit(measured(costs))
    for setting in ((2, 6, 4), (8, 12, 5), (32, 8, 3)):
        assert found.seconds(*setting) == pytest.approx(costs.seconds(*setting), rel=1e-3)


def test_noise_makes_no_cost_negative() -> None:
    costs = StepCosts(0.05, 0.0, 0.001, 0.0, 0.0)
    found = StepCosts.fit(measured(costs, noise=0.1))
    assert min(found.base, found.per_request, found.per_node, found.per_level, found.per_draft) >= 0.0
    assert found.seconds(16, 8, 3) == pytest.approx(costs.seconds(16, 8, 3), rel=0.15)


def test_tokens_per_second() -> None:
    costs = StepCosts(base=0.05, per_request=0.001, per_node=0.0005, per_level=0.002, per_draft=0.0)
    step = 0.05 + 4 * 0.001 + 4 * 8 * 0.0005 + 3 * 0.002
    assert costs.tokens_per_s(4, 8, 3, 2.5) == pytest.approx(4 * 2.5 / step)
    assert costs.plain_tokens_per_s(1) == pytest.approx(1 / 0.0515)


@pytest.mark.parametrize(
    "rows", [[], [MeasuredStep(1, 1, 0, 0.0)], [MeasuredStep(0, 1, 0, 1.0)], [MeasuredStep(1, 0, 0, 1.0)]]
)
def test_rows_without_sense_are_refused(rows: list[MeasuredStep]) -> None:
    with pytest.raises(DraftloopError, match="positive batch, nodes and seconds"):
        StepCosts.fit(rows)
