"""Drift detectors on simulated streams: false alarms as seldom as promised, shifts found as fast as theory says."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.capture.observation import Observation
from draftloop.core.config import DriftConfig
from draftloop.refresher.drift import (
    SLACK,
    Cusum,
    DriftMonitor,
    MixDetector,
    cusum_threshold,
    mix_p_value,
    total_variation,
)


def first_alarm(values: np.ndarray, cusum: Cusum) -> int | None:
    """How many values it took."""
    return next((number for number, value in enumerate(values, start=1) if cusum.add(float(value))), None)


def alarms(values: np.ndarray, cusum: Cusum) -> int:
    count = 0
    for value in values:
        if cusum.add(float(value)):
            count += 1
            cusum.reset()
    return count


def gamma(rng: np.random.Generator, size: int) -> np.ndarray:
    """Skewed as means of short windows are."""
    return 1.7 + 0.1 * (rng.gamma(9.0, 1 / 3, size) - 3.0)


@pytest.mark.parametrize("direction", [1, -1])
def test_false_alarms_are_as_seldom_as_promised(direction: int) -> None:
    rng = np.random.default_rng(5)
    every, length = 200.0, 40_000
    cusum = Cusum(direction, every, least_deviation=0.0)
    found = alarms(rng.normal(1.7, 0.1, length), cusum)
    # 200 expected. Siegmund's formula is good to some per cent, the count to 14 (two standard errors: 28).
    assert 130 <= found <= 260


@pytest.mark.parametrize("direction", [1, -1])
def test_skewed_values_do_not_multiply_false_alarms(direction: int) -> None:
    found = alarms(gamma(np.random.default_rng(5), 40_000), Cusum(direction, 200.0, least_deviation=0.0))
    assert found <= 2.5 * 200


@pytest.mark.parametrize(("shift", "most"), [(1.0, 30), (2.0, 10), (4.0, 5)])
def test_a_lasting_shift_is_found_soon(shift: float, most: int) -> None:
    """In deviations; after 100 values without one. Theory: about h / (shift - slack) values."""
    delays = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        cusum = Cusum(-1, 1e5, least_deviation=0.0)
        assert first_alarm(rng.normal(1.7, 0.1, 100), cusum) is None
        delays.append(first_alarm(rng.normal(1.7 - 0.1 * shift, 0.1, 400), cusum) or 400)
    assert np.median(delays) <= most
    assert cusum_threshold(1e5) / (shift - SLACK) / 3 <= np.median(delays)


def test_the_other_direction_is_no_alarm() -> None:
    rng = np.random.default_rng(0)
    cusum = Cusum(-1, 1e5, least_deviation=0.0)
    assert first_alarm(np.concatenate([rng.normal(1.5, 0.1, 80), rng.normal(2.5, 0.1, 80)]), cusum) is None


def test_a_constant_signals_first_wobble_is_no_alarm() -> None:
    cusum = Cusum(1, 1000, least_deviation=0.005)
    assert first_alarm(np.array([0.0] * 50 + [0.004] * 3), cusum) is None
    assert first_alarm(np.array([0.05] * 10), cusum) is not None


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=60), st.floats(0.1, 10), st.floats(-50, 50))
def test_neither_unit_nor_origin_matters(values: list[float], unit: float, origin: float) -> None:
    if len(values) > 1 and np.ptp(values[:2]) < 0.01:
        values[1] = values[0] + 0.5
    one, other = Cusum(1, 500, least_deviation=0.0001), Cusum(1, 500, least_deviation=0.0001 * unit)
    for value in values:
        assert one.add(value) == other.add(value * unit + origin)


@settings(deadline=None, max_examples=40)
@given(st.floats(20, 1e6))
def test_the_threshold_solves_siegmunds_formula(every: float) -> None:
    b = cusum_threshold(every) + 1.166
    assert (math.exp(2 * SLACK * b) - 2 * SLACK * b - 1) / (2 * SLACK**2) == pytest.approx(every, rel=1e-4)


def draws(rng: np.random.Generator, shares: dict[str, float], size: int) -> list[str]:
    return rng.choice(list(shares), p=list(shares.values()), size=size).tolist()


def test_one_mix_is_hardly_ever_called_two() -> None:
    rng = np.random.default_rng(2)
    shares = {"chat": 0.5, "code": 0.3, "math": 0.12, "rare": 0.05, "rarer": 0.03}
    small = [
        mix_p_value(Counter(draws(rng, shares, 100)), Counter(draws(rng, shares, 100))) < 0.05 for _ in range(1000)
    ]
    # 5 % expected; three standard errors are 2 %.
    assert np.mean(small) <= 0.08


def test_a_changed_mix_is_found_in_the_next_window() -> None:
    rng = np.random.default_rng(3)
    detector = MixDetector(64, 1000)
    quiet = [detector.add(name) for name in draws(rng, {"code": 0.9, "chat": 0.1}, 64 * 40)]
    assert [value for value in quiet if value is not None] == []
    loud = [detector.add(name) for name in draws(rng, {"code": 0.2, "chat": 0.8}, 64 * 20)]
    found = [index for index, value in enumerate(loud) if value is not None]
    # Once: the new mix is the reference from there on.
    assert found == [63]
    assert loud[63] == pytest.approx(0.7, abs=0.15)


def test_a_small_change_is_of_no_interest_however_certain() -> None:
    rng = np.random.default_rng(3)
    detector = MixDetector(5000, 1000)
    values = [detector.add(name) for name in draws(rng, {"code": 0.50, "chat": 0.50}, 5000)]
    values += [detector.add(name) for name in draws(rng, {"code": 0.56, "chat": 0.44}, 5000)]
    assert set(values) == {None}


def test_mix_distances() -> None:
    assert total_variation(Counter(a=2, b=2), Counter(a=4)) == 0.5
    assert total_variation(Counter(a=1), Counter(b=7)) == 1.0
    assert mix_p_value(Counter(a=5), Counter(a=50)) == 1.0
    # By hand, one degree of freedom: expected 75 and 25 in each window, 2 * 625 / 75 + 2 * 625 / 25 = 66.67.
    assert mix_p_value(Counter(a=100), Counter(a=50, b=50)) == pytest.approx(
        math.erfc(math.sqrt(66.6667 / 2)), rel=1e-3
    )


def traffic(
    rng: np.random.Generator, count: int, accepted: float, unspoken: float, domain: str, version: str
) -> list[Observation]:
    """Requests of 60 verification steps and 100 generated tokens."""
    return [
        Observation(domain, version, 60, 60 + int(rng.binomial(180, (accepted - 1) / 3)), 100,
                    int(rng.binomial(100, unspoken)))
        for _ in range(count)
    ]  # fmt: skip


def test_the_monitor_tells_signals_apart() -> None:
    rng = np.random.default_rng(0)
    config = DriftConfig(false_alarm_every=10_000)

    def signals(monitor: DriftMonitor, seen: list[Observation]) -> list[tuple[str, str]]:
        return [(drift.signal, drift.action) for one in seen for drift in monitor.add(one)]

    quiet = traffic(rng, 300, 2.0, 0.02, "chat", "v3")
    for changed, expected in [
        (traffic(rng, 128, 1.6, 0.02, "chat", "v3"), ("accept_length", "train")),
        (traffic(rng, 128, 2.0, 0.10, "chat", "v3"), ("out_of_vocabulary", "rebuild_vocabulary")),
        (traffic(rng, 128, 2.0, 0.02, "code", "v3"), ("domain_mix", "train")),
    ]:
        monitor = DriftMonitor(config, "v3")
        assert signals(monitor, quiet) == []
        assert set(signals(monitor, changed)) == {expected}


def test_a_swap_starts_the_accepted_length_afresh_and_old_records_do_not_count() -> None:
    rng = np.random.default_rng(0)
    monitor = DriftMonitor(DriftConfig(false_alarm_every=10_000), "v3")
    seen = traffic(rng, 200, 1.5, 0.0, "chat", "v3")
    assert [drift for one in seen for drift in monitor.add(one)] == []
    monitor.new_drafter("v4")
    seen = traffic(rng, 100, 2.4, 0.0, "chat", "v4") + traffic(rng, 100, 1.2, 0.0, "chat", "v3")
    assert [drift for one in seen for drift in monitor.add(one)] == []
    # The new drafter's own level counts now, though it falls to no less than the old one's.
    seen = traffic(rng, 20, 1.8, 0.0, "chat", "v4")
    assert [drift.signal for one in seen for drift in monitor.add(one)] == ["accept_length"]


def test_a_shift_that_comes_with_a_swap_is_seen_against_the_predecessor() -> None:
    rng = np.random.default_rng(0)
    monitor = DriftMonitor(DriftConfig(false_alarm_every=10_000), "v3")
    seen = traffic(rng, 200, 2.0, 0.0, "chat", "v3")
    assert [drift for one in seen for drift in monitor.add(one)] == []
    monitor.new_drafter("v4")
    found = [drift for one in traffic(rng, 30, 1.5, 0.0, "chat", "v4") for drift in monitor.add(one)]
    assert [(drift.signal, drift.action) for drift in found] == [("accept_length", "train")]
    assert found[0].before == pytest.approx(2.0, abs=0.05)


def test_probation_hardly_adds_false_alarms() -> None:
    """100 swaps to drafters as good as their predecessors: 100 x 16 windows at one in 10,000."""
    rng = np.random.default_rng(0)
    monitor = DriftMonitor(DriftConfig(false_alarm_every=10_000), "v0")
    alarms = 0
    for version in range(100):
        alarms += sum(len(monitor.add(one)) for one in traffic(rng, 40, 2.0, 0.0, "chat", f"v{version}"))
        monitor.new_drafter(f"v{version + 1}")
    assert alarms <= 3
