"""The controller: one tick gathers, decides, saves, acts.

    fleet.poll -> samples, faults -> rollout.advance -> state.json -> plan -> fleet.act

Commands (scale, rollback, promote) change what is desired; the next tick acts on it. Killed at any point, a new
controller reads state.json, adopts what still runs, and ticks on.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from draftloop.capture.collector import CollectorCounts
from draftloop.core.config import Config
from draftloop.core.errors import BusyError, DraftloopError
from draftloop.core.manifest import Manifest
from draftloop.core.versions import VersionRegistry, VersionState
from draftloop.drafters.checkpoint import verify_checkpoint
from draftloop.drafters.target import target_identity
from draftloop.fleet.counters import WorkerSample
from draftloop.fleet.fleet import Emit, Fleet
from draftloop.fleet.plan import Desired, WorkerView, names_for, plan
from draftloop.refresher.canary import Evidence, judge
from draftloop.refresher.loop import RECORDS_A_TURN
from draftloop.refresher.rollout import Fault, Rollout, Step, Verdict, advance, begin, order
from draftloop.refresher.state import FleetState

# What becomes of a version at each step of its roll-out.
ENTERS: dict[str, VersionState] = {"canary": "canary", "rolled_out": "promoted", "rolled_back": "rolled_back"}


@dataclass(frozen=True)
class Paths:
    """root: the run folder, absolute.  checkpoints: one folder a version."""

    root: Path
    checkpoints: Path

    def of(self, version: str) -> Path:
        return self.checkpoints / version


class Controller:
    """Owns the fleet's desired state. Thread-safe: the control endpoint and the training thread call it too.

    state: as saved in the run folder.  make_fleet: (folder of a version, blame) -> the fleet.  managed: False when
    something else starts the servers.  trained: records go to a trainer; else they are only counted.
    """

    def __init__(
        self,
        target: Path,
        config: Config,
        paths: Paths,
        state: FleetState,
        make_fleet: Callable[..., Fleet],
        emit: Emit,
        now: Callable[[], float],
        *,
        managed: bool,
        trained: bool,
    ) -> None:
        self._target = target_identity(target)
        self._config = config
        self._paths = paths
        self._emit = emit
        self._now = now
        self._managed = managed
        self._trained = trained
        self._lock = threading.RLock()
        self._state = state
        self._faults: list[Fault] = []
        self._evidence = Evidence()
        self._captured = CapturedTotals()
        self._canary_since = time.monotonic()
        self._verdict = Verdict("wait", "no roll-out")
        self._registry = VersionRegistry(paths.root)
        self.fleet = make_fleet(paths.of, self._blame)

    def open(self) -> None:
        """Take over what an earlier controller left; one that was killed may have left its last word unsaid."""
        if not self._registry.knows(self.promoted):
            self._registry.add(self._paths.of(self.promoted))
        serving = self._registry.serving()
        if self.idle and (serving is None or serving.name != self.promoted):
            self._registry.move(self.promoted, "promoted", "it serves")
        self.fleet.adopt(self._state.router_port)

    def _blame(self, worker: str, version: str, reason: str) -> None:
        self._faults.append(Fault(worker, version, reason))

    @property
    def promoted(self) -> str:
        """The version that serves, or is to serve, everywhere."""
        return self._state.rollout.promoted

    @property
    def captured(self) -> CollectorCounts:
        """What all servers captured so far."""
        return self._captured.total

    @property
    def idle(self) -> bool:
        """No roll-out is under way."""
        return self._state.rollout.stage == "steady"

    def tick(self) -> None:
        """One turn; never waits for a worker."""
        with self._lock:
            self.fleet.poll()
            for name, sample in self.fleet.samples().items():
                self._evidence.add(name, sample)
                self._captured.add(name, sample)
            self._advance()
            if not self._trained:
                for handle in self.fleet.handles():
                    handle.take.remote(RECORDS_A_TURN)
            for action in plan(self._desired(), self.fleet.observed()):
                self.fleet.act(action)

    def _desired(self) -> Desired:
        rollout = self._state.rollout
        present = list(self.fleet.views())
        names = names_for(self._state.workers, present) if self._managed else tuple(present)
        return Desired(names, rollout.promoted, rollout.canary, self._config.rollout.max_at_once, self._managed)

    def _wanted_views(self) -> dict[str, WorkerView]:
        views = self.fleet.views()
        return {name: views.get(name, WorkerView("waiting")) for name in self._desired().names}

    def _advance(self) -> None:
        faults, self._faults = self._faults, []
        views = self._wanted_views()
        self._verdict = self._judge(views)
        overdue = time.monotonic() - self._canary_since > self._config.rollout.max_canary_s
        rollout, step = advance(self._state.rollout, views, faults, self._verdict, overdue)
        self._keep(rollout, step)

    def _judge(self, views: dict[str, WorkerView]) -> Verdict:
        rollout = self._state.rollout
        if rollout.candidate is None or rollout.previous is None:
            return Verdict("wait", "no roll-out")
        canary = None if rollout.canary is None else views.get(rollout.canary.worker)
        if canary is not None and canary.version != rollout.candidate:
            return Verdict("wait", f"worker {rollout.canary_worker} has not got it yet")
        if rollout.stage == "rolling" and all(view.version != rollout.previous for view in views.values()):
            return Verdict("wait", "no worker is left to compare with")
        new, old = self._evidence.of(rollout.candidate), self._evidence.of(rollout.previous)
        return judge(new, old, self._config.rollout)

    def _keep(self, rollout: Rollout, step: Step | None, workers: int | None = None) -> None:
        """Save first, then say so; acting comes last."""
        ordered = self._state.rollout.ordered
        state = self._state.model_copy(
            update={
                "workers": workers or self._state.workers,
                "rollout": rollout,
                "router_port": self.fleet.router.port,
            }
        )
        if state != self._state:
            state.save(self._paths.root)
            self._state = state
        if step is not None:
            if step.event == "rolled_out" and ordered:
                self._registry.roll_back(step.version, step.reason)
            elif step.event != "rolling":
                self._registry.move(step.version, ENTERS[step.event], step.reason)
            self._emit(step.event, t_s=self._now(), version=step.version, reason=step.reason)

    # --- commands

    def scale(self, workers: int) -> int:
        """Serve with so many workers; returns their number. Raises DraftloopError."""
        if not self._managed:
            raise DraftloopError("this fleet's servers were started by something else: scale it there")
        if not 1 <= workers <= 1000:
            raise DraftloopError(f"cannot scale to {workers} workers: choose 1 to 1000")
        if workers > 1 and self._config.server.port is not None:
            raise DraftloopError("server.port is one port for all workers: leave it out to have more than one")
        with self._lock:
            self._emit("scaled", t_s=self._now(), workers=workers, before=self._state.workers)
            self._keep(self._state.rollout, None, workers)
        return workers

    def rollback(self, version: str) -> str:
        """Serve an earlier version everywhere, whatever is under way; returns it.

        Raises VersionError when it never served or is tainted, ManifestError or CheckpointError when it does not fit.
        """
        with self._lock:
            self._registry.check_restorable(version)
            self._check_fits(self._paths.of(version))
            self._keep(*order(self._state.rollout, version))
        return version

    def promote(self, folder: Path) -> str:
        """Try the checkpoint in `folder` on a canary, without the gate; returns its version.

        Raises ManifestError or CheckpointError when it does not fit, BusyError during a roll-out.
        """
        with self._lock:
            try:
                version = self._check_fits(folder)
            except DraftloopError as error:
                self._emit("refused", t_s=self._now(), version=folder.name, reason=str(error))
                raise
            self._candidate_worker()  # busy is said before anything is copied
            place = self._paths.of(version)
            if not place.exists():
                copy_checkpoint(folder, place)
            elif Manifest.load(place) != Manifest.load(folder):
                raise DraftloopError(f"this fleet has another drafter {version}: give {folder} a version of its own")
            self.offer(version)
            return version

    def offer(self, version: str) -> None:
        """Begin the roll-out of a version whose checkpoint lies in its place. Raises BusyError."""
        with self._lock:
            worker = self._candidate_worker()
            if not self._registry.knows(version):
                self._registry.add(self._paths.of(version))
            alone = len(self._desired().names) == 1
            self._evidence.restart(keep=self.promoted if alone else None)
            self._canary_since = time.monotonic()
            self._keep(*begin(self._state.rollout, version, worker))

    def _candidate_worker(self) -> str:
        """Who may be the canary now. Raises BusyError."""
        rollout = self._state.rollout
        if rollout.stage != "steady":
            raise BusyError(f"the roll-out of {rollout.candidate} is {rollout.stage}: wait, see draftloop status")
        ready = sorted(name for name, view in self._wanted_views().items() if view.phase == "ready")
        if not ready:
            raise BusyError("no worker is ready to try a drafter: wait, see draftloop status")
        return ready[0]

    def _check_fits(self, folder: Path) -> str:
        serving = Manifest.load(self._paths.of(self.promoted))
        return verify_checkpoint(folder, self._target, serving.layer_ids).version

    def status(self) -> dict[str, Any]:
        """Plain JSON: what `draftloop status` shows."""
        with self._lock:
            views, samples = self._wanted_views(), self.fleet.samples()
            rollout = self._state.rollout
            return {
                "router": self.fleet.router.url,
                "routed": sorted(self.fleet.router.routed or ()),
                "workers": [_worker_status(name, view, samples.get(name)) for name, view in sorted(views.items())],
                "wanted_workers": len(views),
                "rollout": rollout.model_dump(),
                "verdict": self._verdict.reason,
                "versions": self._registry.restorable(),
                "captured": asdict(self._captured.total),
            }


def copy_checkpoint(folder: Path, place: Path) -> None:
    """Every version that ever served stays restorable from the run folder. `place` appears whole or not at all."""
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder, partial)
    partial.rename(place)


def _worker_status(name: str, view: WorkerView, sample: WorkerSample | None) -> dict[str, Any]:
    return {
        "name": name,
        "phase": view.phase,
        "version": view.version,
        "url": view.url,
        "running": sample.running if sample is not None else 0,
    }


class CapturedTotals:
    """What all servers captured, the dead included."""

    def __init__(self) -> None:
        self._last: dict[str, WorkerSample] = {}
        self.total = CollectorCounts()

    def add(self, worker: str, sample: WorkerSample) -> None:
        last, self._last[worker] = self._last.get(worker), sample
        before = last.captured if last is not None and last.url == sample.url else CollectorCounts()
        after, total = sample.captured, self.total
        self.total = CollectorCounts(
            **{f.name: getattr(total, f.name) + getattr(after, f.name) - getattr(before, f.name) for f in fields(total)}
        )
