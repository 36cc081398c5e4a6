"""The refresh loop: one turn moves records, trains a slice, and now and then lets a candidate try the gate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray

from draftloop.capture.buffer import Counts
from draftloop.capture.collector import CollectorCounts
from draftloop.core.config import Config
from draftloop.core.errors import DraftloopError
from draftloop.drafters.online import StepReport
from draftloop.fleet.worker import WorkerSwap
from draftloop.refresher.gate import decide
from draftloop.trainer.trainer import Comparison

TRAIN_SLICE_S = 2.0
RECORDS_A_TURN = 64
SAMPLED_STEP_EVERY = 5


class Emit(Protocol):
    """Where events go: `EventLog.emit` and the live view."""

    def __call__(self, kind: Any, **data: Any) -> None: ...


@dataclass
class LoopState:
    """What the loop has done so far."""

    versions: list[str]
    train_steps: int = 0
    loss: float | None = None
    captured: CollectorCounts = field(default_factory=CollectorCounts)
    buffer: Counts = field(default_factory=lambda: Counts(0, 0, 0, 0))
    swaps: int = 0
    refused: int = 0

    @property
    def serving(self) -> str:
        return self.versions[-1]


class Refresher:
    """Drives one worker and one trainer, both Ray actor handles. `turn` is called as long as the loop should run.

    checkpoints: folder that holds one folder a version. now: seconds since the run started, for events.
    """

    def __init__(
        self,
        worker: Any,
        trainer: Any,
        config: Config,
        checkpoints: Path,
        serving: str,
        emit: Emit,
        now: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._trainer = trainer
        self._config = config
        self._checkpoints = checkpoints
        self._emit = emit
        self._now = now
        self._next_gate = time.monotonic() + config.gate.every_seconds
        self._next_version = next_version(checkpoints)
        self._step_at_last_gate = 0
        self._queued: Any = None
        self.state = LoopState(versions=[serving])

    def turn(self) -> None:
        """Move records, train for a slice, try the gate when it is time. Raises ServerError when the server died."""
        moving = self._move_records()
        # One slice is always queued behind the running one, so that the trainer never waits for this loop.
        running, self._queued = self._queued, self._trainer.train.remote(TRAIN_SLICE_S)
        self._note_records(moving)
        if running is not None:
            self._note_steps(ray.get(running))
        if time.monotonic() >= self._next_gate:
            self.try_gate()
            self._next_gate = time.monotonic() + self._config.gate.every_seconds

    def _move_records(self) -> list[Any]:
        """From worker to trainer through the object store; this process never holds them. The trainer's answers."""
        return [self._trainer.add_records.remote(self._worker.take.remote(RECORDS_A_TURN))]

    def _note_records(self, moving: list[Any]) -> None:
        self.state.captured = ray.get(self._worker.counts.remote())
        (self.state.buffer,) = ray.get(moving)

    def _note_steps(self, reports: list[StepReport]) -> None:
        if not reports:
            time.sleep(TRAIN_SLICE_S / 4)
        for report in reports:
            self.state.train_steps = report.step
            if report.skipped:
                continue
            self.state.loss = report.loss
            if report.step % SAMPLED_STEP_EVERY == 1:
                self._emit(
                    "train_step",
                    t_s=self._now(),
                    step=report.step,
                    loss=report.loss,
                    step_accuracy=list(report.step_accuracy),
                    tokens=report.tokens,
                )

    def try_gate(self) -> None:
        """Compare, then promote and swap, or refuse. Without new training or enough held-out records, nothing."""
        if self.state.train_steps == self._step_at_last_gate:
            return
        comparison: Comparison | None = ray.get(self._trainer.compare.remote())
        if comparison is None:
            return
        self._step_at_last_gate = self.state.train_steps
        version = f"v{self._next_version}"
        self._next_version += 1
        before, after = comparison.before, comparison.after
        decision = decide(before, after, self._config.gate.min_gain)
        gate = {"version": version, "gate_before": before.accept_length, "gate_after": after.accept_length}
        self._emit("candidate", t_s=self._now(), **gate)
        if not decision.promote:
            self._refuse(gate, decision.reason)
            return
        metrics = {"accept_length": after.accept_length, "parent_accept_length": before.accept_length}
        folder: Path = ray.get(self._trainer.save_candidate.remote(self._checkpoints / version, version, metrics))
        self._emit("promoted", t_s=self._now(), reason=decision.reason, **gate)
        self._put_in_service(folder, version)

    def _refuse(self, gate: dict[str, Any], reason: str) -> None:
        self.state.refused += 1
        self._emit("refused", t_s=self._now(), reason=reason, **gate)

    def _put_in_service(self, folder: Path, version: str) -> None:
        try:
            done: WorkerSwap = ray.get(self._worker.swap.remote(folder))
        except DraftloopError as err:
            self._emit("swap_failed", t_s=self._now(), version=version, reason=str(err))
            raise
        ray.get(self._trainer.promoted.remote(folder))
        self.state.versions.append(version)
        self.state.swaps += 1
        self._emit(
            "swap",
            t_s=self._now(),
            version=version,
            stall_ms=done.stall_ms,
            paused_ms=done.report.paused_ms,
            copy_ms=done.report.update_ms,
            checksum_ok=done.report.checksum_ok,
        )


def next_version(checkpoints: Path) -> int:
    """One more than the highest number of a folder vN."""
    return 1 + max((int(path.name[1:]) for path in checkpoints.glob("v*") if path.name[1:].isdigit()), default=0)
