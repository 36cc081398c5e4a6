"""The fleet's reconciling step: what should be, what is, what to do now. Pure.

    desired   how many workers, which drafter version, one canary with another
    observed  each worker's phase and version, what the router routes to
    actions   start, stop, swap, register, unregister: each is safe to repeat

`plan` is called again and again. It remembers nothing, so a controller that was killed goes on where the fleet is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

# waiting: for room in the cluster; starting: until it answers; dead: its process or its actor is gone.
Phase = Literal["waiting", "starting", "ready", "swapping", "dead"]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What is known of one worker.

    version: as its server says, None before it answers; a torn or foreign one is just another name.  refused: the
    version that its last swap failed to bring.  retry_at: not before this moment (monotonic s) is it started again.
    """

    phase: Phase
    version: str | None = None
    url: str | None = None
    refused: str | None = None
    retry_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Canary:
    """The one worker that serves another drafter than the fleet."""

    worker: str
    version: str


@dataclass(frozen=True, slots=True)
class Desired:
    """names: the workers that should be.  managed: False for servers that something else starts and stops."""

    names: tuple[str, ...]
    version: str
    canary: Canary | None = None
    max_at_once: int = 1
    managed: bool = True

    def wanted(self, name: str) -> str:
        """The version this worker should serve."""
        return self.canary.version if self.canary is not None and self.canary.worker == name else self.version


@dataclass(frozen=True, slots=True)
class Observed:
    """routed: the URLs the router sends requests to; None while there is no router to ask."""

    now: float
    workers: Mapping[str, WorkerView] = field(default_factory=dict)
    routed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """worker: whom it concerns.  version: of a start or a swap.  url: of a registration."""

    kind: Literal["start", "stop", "swap", "register", "unregister"]
    worker: str
    version: str | None = None
    url: str | None = None


def plan(desired: Desired, observed: Observed) -> list[Action]:
    """The actions of this moment, stops first."""
    actions = _stops(desired, observed) if desired.managed else []
    stopped = {action.worker for action in actions}
    if desired.managed:
        actions += _starts(desired, observed)
    actions += _swaps(desired, observed, stopped)
    if desired.managed and observed.routed is not None:
        actions += _routes(observed, stopped, observed.routed)
    return actions


def _stops(desired: Desired, observed: Observed) -> list[Action]:
    """Workers too many, and those that refused what they must serve: born anew, they have it from the start."""
    return [
        Action("stop", name)
        for name, view in sorted(observed.workers.items())
        if name not in desired.names or (view.phase == "ready" and _stuck(desired, name, view))
    ]


def _stuck(desired: Desired, name: str, view: WorkerView) -> bool:
    wanted = desired.wanted(name)
    # A canary's refusal is the roll-out's to judge.
    return view.version != wanted and view.refused == wanted == desired.version


def _starts(desired: Desired, observed: Observed) -> list[Action]:
    """The missing and the dead; a canary too is born with the fleet's version."""
    actions = []
    for name in desired.names:
        view = observed.workers.get(name)
        if view is None or (view.phase == "dead" and observed.now >= view.retry_at):
            actions.append(Action("start", name, version=desired.version))
    return actions


def _swaps(desired: Desired, observed: Observed, stopped: set[str]) -> list[Action]:
    """Bring ready workers to their version, never more than `max_at_once` together; the canary first."""
    free = desired.max_at_once - sum(view.phase == "swapping" for view in observed.workers.values())
    behind = [
        name
        for name, view in sorted(observed.workers.items())
        if view.phase == "ready"
        and name in desired.names
        and name not in stopped
        and view.version != desired.wanted(name)
        and (view.refused != desired.wanted(name) or observed.now >= view.retry_at)
    ]
    behind.sort(key=lambda name: desired.canary is None or name != desired.canary.worker)
    return [Action("swap", name, version=desired.wanted(name)) for name in behind[: max(0, free)]]


def _routes(observed: Observed, stopped: set[str], routed: frozenset[str]) -> list[Action]:
    """The router knows exactly the workers that answer. A swapping worker stays: its requests only pause."""
    serving = {
        view.url: name
        for name, view in sorted(observed.workers.items())
        if view.phase in ("ready", "swapping") and view.url is not None and name not in stopped
    }
    missing = [Action("register", name, url=url) for url, name in serving.items() if url not in routed]
    return missing + [Action("unregister", "", url=url) for url in sorted(routed - serving.keys())]


def names_for(count: int, present: Sequence[str]) -> tuple[str, ...]:
    """`count` worker names: those present with the lowest numbers first, then new ones (w0, w1, ...)."""
    kept = sorted(present, key=lambda name: int(name.removeprefix("w")))[:count]
    fresh = (f"w{number}" for number in range(count + len(kept)) if f"w{number}" not in kept)
    return tuple(kept) + tuple(next(fresh) for _ in range(count - len(kept)))
