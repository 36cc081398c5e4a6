"""The roll-out of a new drafter: canary, then worker after worker, or back. A pure state machine.

              begin                good                all serve it
    steady ----------> canary ----------> rolling ----------------------> steady
       ^                 | bad, fault,       | bad, fault
       |                 v too late          v
       +----------- rolling_back <-----------+
       all serve the old one

The state is saved before anything follows from it. `fleet.plan` turns it into swaps, so a roll-out cut anywhere goes
on from what is saved and from what the workers say they serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from draftloop.fleet.plan import Canary, WorkerView

Stage = Literal["steady", "canary", "rolling", "rolling_back"]


class Rollout(BaseModel):
    """promoted: what the fleet should serve; a worker that restarts is born with it.  candidate: what is being tried.
    previous: where a failed roll-out returns to; None for one that must not return (an operator's rollback)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    promoted: str
    stage: Stage = "steady"
    candidate: str | None = None
    previous: str | None = None
    canary_worker: str | None = None

    @property
    def ordered(self) -> bool:
        """Whether an operator's version is on its way to every worker."""
        return self.stage == "rolling" and self.previous is None

    @property
    def canary(self) -> Canary | None:
        if self.stage != "canary" or self.canary_worker is None or self.candidate is None:
            return None
        return Canary(self.canary_worker, self.candidate)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something went wrong with a worker while it served, or should have taken, `version`."""

    worker: str
    version: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the figures say of the candidate. wait: too little traffic so far."""

    outcome: Literal["wait", "good", "bad"]
    reason: str


@dataclass(frozen=True, slots=True)
class Step:
    """A decision of `advance`: the event it is told as, and why."""

    event: Literal["canary", "rolling", "rolled_out", "rolled_back"]
    version: str
    reason: str


def begin(rollout: Rollout, version: str, canary_worker: str) -> tuple[Rollout, Step]:
    """Try `version` on one worker. Only from steady."""
    changed = rollout.model_copy(
        update={"stage": "canary", "candidate": version, "previous": rollout.promoted, "canary_worker": canary_worker}
    )
    return changed, Step("canary", version, f"worker {canary_worker} gets it first")


def order(rollout: Rollout, version: str) -> tuple[Rollout, Step]:
    """An operator wants `version` everywhere: no canary, no way back but another order. From any stage."""
    changed = Rollout(promoted=version, stage="rolling", candidate=version)
    return changed, Step("rolling", version, f"ordered by the operator, {rollout.promoted} served before")


def advance(
    rollout: Rollout, workers: Mapping[str, WorkerView], faults: Sequence[Fault], verdict: Verdict, overdue: bool
) -> tuple[Rollout, Step | None]:
    """The next state. workers: all that should be.  overdue: the canary has had all the time it gets."""
    match rollout.stage:
        case "canary":
            return _from_canary(rollout, workers, faults, verdict, overdue)
        case "rolling":
            return _from_rolling(rollout, workers, faults, verdict)
        case "rolling_back" if _all_serve(rollout.promoted, workers):
            return Rollout(promoted=rollout.promoted), None
    return rollout, None


def _from_canary(
    rollout: Rollout, workers: Mapping[str, WorkerView], faults: Sequence[Fault], verdict: Verdict, overdue: bool
) -> tuple[Rollout, Step | None]:
    candidate = str(rollout.candidate)
    lost = rollout.canary_worker not in workers
    if lost or (reason := _blame(candidate, faults)):
        return _back(rollout, "the canary worker left the fleet" if lost else reason)
    if verdict.outcome == "bad":
        return _back(rollout, verdict.reason)
    if verdict.outcome == "good":
        changed = rollout.model_copy(update={"stage": "rolling", "promoted": candidate, "canary_worker": None})
        return changed, Step("rolling", candidate, verdict.reason)
    return _back(rollout, f"not judged in time: {verdict.reason}") if overdue else (rollout, None)


def _from_rolling(
    rollout: Rollout, workers: Mapping[str, WorkerView], faults: Sequence[Fault], verdict: Verdict
) -> tuple[Rollout, Step | None]:
    candidate = str(rollout.candidate)
    if rollout.previous is not None:
        reason = verdict.reason if verdict.outcome == "bad" else _blame(candidate, faults)
        if reason:
            return _back(rollout, reason)
    if _all_serve(candidate, workers):
        return Rollout(promoted=candidate), Step("rolled_out", candidate, f"{len(workers)} workers serve it")
    return rollout, None


def _back(rollout: Rollout, reason: str) -> tuple[Rollout, Step]:
    changed = Rollout(promoted=str(rollout.previous), stage="rolling_back", candidate=rollout.candidate)
    return changed, Step("rolled_back", str(rollout.candidate), reason)


def _blame(version: str, faults: Sequence[Fault]) -> str:
    """Why `version` cannot stay; empty when nothing speaks against it."""
    return next((f"worker {fault.worker}: {fault.reason}" for fault in faults if fault.version == version), "")


def _all_serve(version: str, workers: Mapping[str, WorkerView]) -> bool:
    return bool(workers) and all(view.phase == "ready" and view.version == version for view in workers.values())
