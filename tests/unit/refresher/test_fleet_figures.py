"""Counters become rates over a window; a restarted server counts from zero."""

from __future__ import annotations

from draftloop.fleet.counters import DecodeCounters, StepTally, WorkerSample
from draftloop.fleet.plan import WorkerView
from draftloop.refresher.fleet_figures import FleetFigures, accept_lengths


def sample(url: str, tokens: float, steps: int, accepted: int) -> WorkerSample:
    tally = StepTally(steps, accepted, accepted)
    return WorkerSample(url=url, version="v1", steps={("v1", "chat"): tally}, decode=DecodeCounters(tokens, 1.0))


def test_a_window_shows_what_came_since_the_last() -> None:
    figures = FleetFigures()
    views = {"a": WorkerView("ready", "v1"), "b": WorkerView("starting")}
    first, _ = figures.close_window(views, {"a": sample("u", 100.0, 50, 75)})
    assert first == 100.0
    second, (a, b) = figures.close_window(views, {"a": sample("u", 160.0, 70, 135)})
    assert second == 60.0
    assert (a.name, a.version, a.ready, a.accept_length) == ("a", "v1", True, {"chat": 3.0})
    assert (b.ready, b.accept_length) == (False, {})
    assert not figures.due
    third, _ = figures.close_window(views, {"a": sample("another", 30.0, 10, 20)})
    assert third == 30.0


def test_a_domain_without_steps_is_left_out() -> None:
    now = sample("u", 1.0, 4, 8)
    assert accept_lengths(now, now) == {}
    assert accept_lengths(now, WorkerSample()) == {"chat": 2.0}
