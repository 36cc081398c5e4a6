"""The reconciling step and the roll-out, run against a small fleet in memory where everything may fail at any time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.fleet.plan import Action, Canary, Desired, Observed, WorkerView, names_for, plan
from draftloop.refresher.rollout import Fault, Rollout, Verdict, advance, begin, order

BACKOFF = 2.0


@dataclass
class World:
    """A fleet in memory. Operations take a tick; `fail` makes the ones that end in this tick fail.

    It checks on the way what must hold at any moment, and lets nothing but `plan` and `advance` decide.
    """

    workers: int
    max_at_once: int
    rollout: Rollout = field(default_factory=lambda: Rollout(promoted="v0"))
    views: dict[str, WorkerView] = field(default_factory=dict)
    routed: set[str] = field(default_factory=set)
    router: bool = True
    pending: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    known: set[str] = field(default_factory=lambda: {"v0"})
    now: float = 0.0
    starts: int = 0

    @property
    def desired(self) -> Desired:
        names = names_for(self.workers, list(self.views))
        return Desired(names, self.rollout.promoted, self.rollout.canary, self.max_at_once)

    def try_candidate(self, version: str) -> None:
        if self.rollout.stage != "steady":
            return
        ready = [name for name, view in self.views.items() if view.phase == "ready"]
        if ready:
            self.known.add(version)
            self.rollout, _ = begin(self.rollout, version, ready[0])

    def kill(self, name: str) -> None:
        if name in self.views and self.views[name].phase != "dead":
            served = self.pending.pop(name, None) or self.views[name].version
            self.faults.append(Fault(name, str(served), "died"))
            self.views[name] = WorkerView("dead", retry_at=self.now + BACKOFF)

    def tick(self, verdict: str = "wait", fail: bool = False, torn: bool = False) -> None:
        self.now += 1.0
        self._finish_pending(fail, torn)
        wanted = {name: self.views.get(name, WorkerView("waiting")) for name in self.desired.names}
        faults, self.faults = self.faults, []
        self.rollout, _ = advance(self.rollout, wanted, faults, Verdict(verdict, verdict), overdue=False)  # type: ignore[arg-type]
        routed = frozenset(self.routed) if self.router else None
        for action in plan(self.desired, Observed(self.now, dict(self.views), routed)):
            self._act(action)
        swapping = [view for view in self.views.values() if view.phase == "swapping"]
        assert len(swapping) <= self.max_at_once

    def _finish_pending(self, fail: bool, torn: bool) -> None:
        for name, version in list(self.pending.items()):
            del self.pending[name]
            view = self.views[name]
            if view.phase == "starting" and fail:
                self.views[name] = WorkerView("dead", retry_at=self.now + BACKOFF)
            elif fail:
                left = f"torn-{version}" if torn else view.version
                self.faults.append(Fault(name, version, "swap failed"))
                self.views[name] = replace(view, phase="ready", version=left, refused=version, retry_at=self.now + 1)
            else:
                self.views[name] = replace(view, phase="ready", version=version, refused=None)

    def _act(self, action: Action) -> None:
        name = action.worker
        match action.kind:
            case "start":
                assert name not in self.views or self.views[name].phase == "dead"
                assert action.version == self.rollout.promoted
                self.starts += 1
                self.views[name] = WorkerView("starting", url=f"http://{name}.{self.starts}")
                self.pending[name] = action.version
            case "swap":
                assert self.views[name].phase == "ready"
                assert action.version in self.known
                assert action.version in (self.rollout.promoted, self.rollout.candidate)
                self.views[name] = replace(self.views[name], phase="swapping")
                self.pending[name] = str(action.version)
            case "stop":
                self.pending.pop(name, None)
                del self.views[name]
            case "register":
                self.routed.add(str(action.url))
            case "unregister":
                self.routed.remove(str(action.url))

    def settle(self) -> None:
        for _ in range(40):
            self.tick(verdict="good")

    def assert_converged(self) -> None:
        assert self.rollout.stage == "steady"
        assert sorted(self.views) == sorted(self.desired.names)
        assert len(self.views) == self.workers
        assert all(v.phase == "ready" and v.version == self.rollout.promoted for v in self.views.values())
        assert self.routed == {view.url for view in self.views.values()}
        assert self.rollout.promoted in self.known


events = st.one_of(
    st.tuples(st.just("tick"), st.sampled_from(["wait", "good", "bad"])),
    st.tuples(st.just("failing"), st.booleans()),
    st.tuples(st.just("kill"), st.integers(0, 5)),
    st.tuples(st.just("candidate"), st.integers(1, 5)),
    st.tuples(st.just("order"), st.integers(0, 5)),
    st.tuples(st.just("scale"), st.integers(1, 5)),
    st.tuples(st.just("router"), st.booleans()),
    st.tuples(st.just("restart"), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(workers=st.integers(1, 4), max_at_once=st.integers(1, 3), script=st.lists(events, max_size=60))
def test_any_sequence_of_failures_converges(workers: int, max_at_once: int, script: list[tuple[str, object]]) -> None:
    world = World(workers, max_at_once)
    for kind, value in script:
        match kind:
            case "tick":
                world.tick(verdict=str(value))
            case "failing":
                world.tick(fail=True, torn=bool(value))
            case "kill":
                world.kill(f"w{value}")
            case "candidate":
                world.try_candidate(f"v{value}")
            case "order" if f"v{value}" in world.known:
                world.rollout, _ = order(world.rollout, f"v{value}")
            case "scale":
                world.workers = int(str(value))
            case "router":
                world.router, world.routed = bool(value), set()
            case "restart":
                # The controller forgets all but its saved state; the workers say what they serve.
                world.faults = []
                world.rollout = Rollout.model_validate_json(world.rollout.model_dump_json())
                world.views = {n: replace(v, refused=None, retry_at=0.0) for n, v in world.views.items()}
    world.router = True
    world.settle()
    world.assert_converged()


def steady(workers: int) -> World:
    world = World(workers, 1)
    world.settle()
    world.assert_converged()
    return world


def test_a_good_candidate_reaches_everyone_one_at_a_time() -> None:
    world = steady(4)
    world.try_candidate("v1")
    world.tick()
    world.tick()
    assert sorted(str(view.version) for view in world.views.values()) == ["v0", "v0", "v0", "v1"]
    assert world.rollout.promoted == "v0"
    served: list[int] = []
    for _ in range(8):
        world.tick(verdict="good")
        served.append(sum(view.version == "v1" for view in world.views.values()))
    assert served == sorted(served)
    assert {after - before for before, after in pairwise(served)} <= {0, 1}
    assert world.rollout == Rollout(promoted="v1")


@pytest.mark.parametrize("when", ["canary", "rolling"])
def test_a_bad_candidate_comes_back(when: str) -> None:
    world = steady(3)
    world.try_candidate("v1")
    world.tick()
    world.tick()
    if when == "rolling":
        world.tick(verdict="good")
    assert world.rollout.stage == when
    world.tick(verdict="bad")
    assert world.rollout.stage == "rolling_back"
    for _ in range(6):
        world.tick()
    world.assert_converged()
    assert world.rollout == Rollout(promoted="v0")


def test_a_worker_killed_as_the_canary_takes_the_candidate_back() -> None:
    world = steady(2)
    world.try_candidate("v1")
    world.tick()
    world.tick()
    world.kill(str(world.rollout.canary_worker))
    world.tick()
    assert world.rollout.stage == "rolling_back"
    for _ in range(6):
        world.tick()
    world.assert_converged()
    assert world.rollout.promoted == "v0"


def test_a_worker_that_cannot_take_the_fleets_version_is_born_anew() -> None:
    world = steady(2)
    world.views["w1"] = replace(world.views["w1"], version="torn-v7")
    before = world.starts
    world.tick()
    world.tick(fail=True, torn=True)
    assert world.starts == before
    for _ in range(4):
        world.tick()
    world.assert_converged()
    assert world.starts == before + 1


def test_a_fleet_of_others_is_only_swapped() -> None:
    views = {"w0": WorkerView("ready", "v0", "http://a"), "w1": WorkerView("dead"), "w7": WorkerView("ready", "v0")}
    desired = Desired(("w0", "w1", "w2"), "v0", Canary("w0", "v1"), managed=False)
    assert plan(desired, Observed(9.0, views, frozenset({"http://b"}))) == [Action("swap", "w0", version="v1")]


@given(count=st.integers(1, 6), present=st.sets(st.integers(0, 12), max_size=6))
def test_names(count: int, present: set[int]) -> None:
    names = names_for(count, [f"w{number}" for number in present])
    assert len(set(names)) == count
    kept = [f"w{number}" for number in sorted(present)][:count]
    assert list(names[: len(kept)]) == kept
    assert len(kept) == count or set(kept) == {f"w{number}" for number in present}
