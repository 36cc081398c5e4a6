"""The fleet model: conservation, Little's law, and queues whose answers are known."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.drafters.load.cost_model import CostModel, RowCost, StartUp
from draftloop.drafters.load.shapes import PLAIN, Shape
from draftloop.refresher.simulate import Fleet, LearningCurve, Simulation, forecast

FLAT = LearningCurve(1.0, 1.0, 1.0)
CURVE = LearningCurve(1.2, 3.0, 50_000.0)
TREE = Shape(3, 4, 8)


def costs(base: float, per_request: float = 0.0, per_node: float = 0.0, per_level: float = 0.0) -> CostModel:
    target, draft = RowCost.line(base, per_node), RowCost.line(per_level, 0.0)
    return CostModel(StartUp(target, draft, call_seconds=0.0, token_seconds=0.0, request_seconds=per_request))


COSTS = costs(base=0.01, per_node=0.0001, per_level=0.001)

FLEETS = st.builds(
    Fleet,
    workers=st.integers(1, 5),
    costs=st.just(COSTS),
    curve=st.just(CURVE),
    clients=st.none() | st.integers(1, 40),
    arrivals=st.floats(0.5, 30.0),
    batch=st.integers(1, 8),
    tokens=st.floats(5.0, 100.0),
    lengths=st.sampled_from(["exponential", "fixed"]),
    trainer_rate=st.sampled_from([0.0, 500.0]),
    gate_every=st.floats(2.0, 10.0),
    swap_stall=st.floats(0.0, 1.0),
)


@settings(deadline=None, max_examples=40)
@given(FLEETS, st.integers(0, 1000))
def test_every_request_finishes_once_and_littles_law_holds(fleet: Fleet, seed: int) -> None:
    out = Simulation(fleet, seed).run(20.0)
    assert len(out.finished) == out.requests
    assert out.finished == sorted(out.finished)
    # From empty to empty, the integral of the number in the system is the sum of the times in it, exactly.
    assert out.area == pytest.approx(out.response, rel=1e-9)
    assert out.tokens_done == sorted(out.tokens_done)
    assert 0 <= out.trained_tokens <= out.captured_tokens + 1e-6
    if fleet.clients is not None:
        assert out.area / out.finished[-1] <= fleet.clients + 1e-9


@settings(deadline=None, max_examples=10)
@given(FLEETS, st.integers(0, 1000))
def test_the_same_seed_is_the_same_run(fleet: Fleet, seed: int) -> None:
    one, two = Simulation(fleet, seed).run(10.0), Simulation(fleet, seed).run(10.0)
    assert one == two


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
def test_one_worker_whose_steps_cost_by_request_is_a_processor_sharing_queue(utilisation: float) -> None:
    """M/M/1-PS: rho / (1 - rho) requests in the system on average."""
    per_token = 0.001
    tokens = 100.0
    fleet = Fleet(
        1,
        costs(base=0.0, per_request=per_token),
        FLAT,
        arrivals=utilisation / (tokens * per_token),
        batch=10_000,
        tokens=tokens,
        shape=PLAIN,
    )
    out = Simulation(fleet, seed=1).run(8000.0)
    assert out.area / out.finished[-1] == pytest.approx(utilisation / (1 - utilisation), rel=0.12)


def test_one_at_a_time_is_a_waiting_queue() -> None:
    """M/D/1, lengths fixed, batch 1: (rho + rho^2 / (2 (1 - rho))) in the system (Pollaczek-Khinchine)."""
    fleet = Fleet(1, costs(base=0.001), FLAT, arrivals=7.0, batch=1, tokens=100.0, lengths="fixed", shape=PLAIN)
    out = Simulation(fleet, seed=1).run(6000.0)
    assert out.area / out.finished[-1] == pytest.approx(0.7 + 0.49 / 0.6, rel=0.08)


@pytest.mark.parametrize("clients", [1, 4, 8])
def test_a_full_batch_is_the_cost_models_own_throughput(clients: int) -> None:
    fleet = Fleet(1, COSTS, LearningCurve(2.0, 2.0, 1.0), clients=clients, batch=8, tokens=50.0)
    out = Simulation(fleet, seed=0).run(60.0)
    assert out.tokens_per_s == pytest.approx(clients * 2.0 / (0.01 + clients * 8 * 0.0001 + 3 * 0.001), rel=1e-6)
    assert COSTS.seconds(TREE, clients, 1.0) == pytest.approx(0.013 + clients * 8 * 0.0001)


@pytest.mark.parametrize("clients", [3, 24, 200])
def test_more_workers_never_lower_throughput(clients: int) -> None:
    speeds = [
        Simulation(Fleet(workers, COSTS, CURVE, clients=clients, batch=8, tokens=80.0), seed=0).run(40.0).tokens_per_s
        for workers in (1, 2, 3, 5, 8)
    ]
    assert all(more >= 0.99 * fewer for fewer, more in pairwise(speeds))


def test_a_stall_costs_its_time_and_nothing_else() -> None:
    """Ten swaps of 0.5 s in 100 s, and an accepted length that hardly moves: five per cent of the tokens."""
    curve = LearningCurve(2.0, 2.001, 1e9)
    fleet = Fleet(1, COSTS, curve, clients=8, batch=8, tokens=50.0, trainer_rate=1e3, gate_every=10.0, least_gain=0.0,
                  swap_stall=0.5)  # fmt: skip
    stalled = Simulation(fleet, seed=0).run(100.0)
    free = Simulation(Fleet(1, COSTS, curve, clients=8, batch=8, tokens=50.0), seed=0).run(100.0)
    assert stalled.swaps == 9
    assert 1 - stalled.tokens_done[-1] / free.tokens_done[-1] == pytest.approx(0.045, abs=0.002)


def test_learning_is_bounded_by_the_trainer_and_by_the_capture() -> None:
    slow = Fleet(2, COSTS, CURVE, clients=16, batch=8, trainer_rate=100.0, gate_every=10.0)
    out = Simulation(slow, seed=0).run(101.0)
    assert out.trained_tokens == pytest.approx(100.0 * 100.0)
    starved = Fleet(2, COSTS, CURVE, clients=16, batch=8, trainer_rate=1e9, gate_every=10.0, sample_rate=0.25)
    out = Simulation(starved, seed=0).run(101.0)
    assert out.trained_tokens == out.captured_tokens == pytest.approx(0.25 * out.tokens_done[100], rel=1e-6)


def test_a_forecast_breaks_even_where_refreshing_pays() -> None:
    fleet = Fleet(8, COSTS, CURVE, clients=64, batch=8, tokens=100.0, trainer_rate=5e3, gate_every=10.0,
                  bytes_per_token=1e4, drafter_bytes=1e6)  # fmt: skip
    row = forecast(fleet, 120.0, seed=0)
    assert row.speedup_static > 1.3
    assert row.speedup_plain > 1.0
    assert row.break_even_requests is not None
    assert row.capture_bytes_per_s == pytest.approx(1e4 * row.tokens_per_s)
    assert row.swap_bytes > 0
    assert row.swap_bytes % 8e6 == 0
    # A drafter that cannot get better never pays for the device that trains it.
    never = forecast(Fleet(8, COSTS, LearningCurve(2.0, 2.0, 1.0), clients=64, batch=8, trainer_rate=5e3), 60.0, seed=0)
    assert never.break_even_requests is None
    assert never.speedup_static < 1.0
