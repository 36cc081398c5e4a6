"""The refresh loop: one turn moves records, trains a slice, and now and then lets a candidate try the gate."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from draftloop.capture.collector import CollectorCounts
from draftloop.capture.ledger import Counts
from draftloop.capture.transport import Receipt
from draftloop.core.config import Config
from draftloop.core.errors import DraftloopError
from draftloop.drafters.load.served import ServedCosts
from draftloop.drafters.online import StepReport
from draftloop.fleet.fleet import Emit
from draftloop.fleet.worker import WorkerSwap
from draftloop.refresher.candidates import Candidates, next_version
from draftloop.refresher.watch import Said, Watch
from draftloop.trainer.trainer import Comparison, Start
from draftloop.trainer.vocabulary import VocabularyChange

TRAIN_SLICE_S = 2.0
RECORDS_A_TURN = 64
SAMPLED_STEP_EVERY = 5


@dataclass
class LoopState:
    """What the loop has done so far."""

    versions: list[str]
    train_steps: int = 0
    loss: float | None = None
    captured: CollectorCounts = field(default_factory=CollectorCounts)
    buffer: Counts = field(default_factory=Counts)
    swaps: int = 0
    refused: int = 0
    training: bool = True
    speculating: bool = True

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
        self._emit = emit
        self._now = now
        self._next_gate = time.monotonic() + config.gate.every_seconds
        self._step_at_last_gate = 0
        self._queued: Any = None
        self._start: Any = trainer.started.remote()
        self._receipts: dict[Any, Receipt] = {}
        self._watch = Watch(config, serving)
        self._candidates = Candidates(
            config, checkpoints, next_version(checkpoints), emit, now, self._watch.predicted_tokens_per_s
        )
        self.state = LoopState(versions=[serving])

    def turn(self) -> None:
        """Move records, train for a slice, try the gate when it is time. Raises ServerError when the server died."""
        moving = self._move_records()
        seen = self._trainer.take_observations.remote()
        # One slice is always queued behind the running one, so that the trainer never waits for this loop.
        running, self._queued = self._queued, self._next_slice()
        self._note_records(moving)
        self._watch.measured(self._step_costs())
        self._note_start()
        self._say(self._watch.traffic(ray.get(seen)))
        if self._watch.rebuild_wanted:
            self._rebuild_vocabulary()
        self._note_steps([] if running is None else ray.get(running))
        if time.monotonic() >= self._next_gate:
            self.try_gate()
            self._next_gate = time.monotonic() + self._config.gate.every_seconds

    def _workers(self) -> list[Any]:
        """Whose records are taken."""
        return [self._worker]

    def _move_records(self) -> dict[Any, Any]:
        """From workers to trainer through the transport; this process never holds them. Worker -> receipt to come."""
        return {
            worker: self._trainer.receive.remote(worker.offer.remote(RECORDS_A_TURN, self._receipts.get(worker)))
            for worker in self._workers()
        }

    def _note_records(self, moving: dict[Any, Any]) -> None:
        self.state.captured = ray.get(self._worker.counts.remote())
        self._receipts = {worker: ray.get(coming) for worker, coming in moving.items()}
        self.state.buffer = self._receipts[self._worker].counts

    def _step_costs(self) -> list[ServedCosts]:
        """What the servers measured about their steps; one that died, or has not served yet, says nothing."""
        costs: list[ServedCosts] = []
        for coming in [worker.costs.remote() for worker in self._workers()]:
            with contextlib.suppress(RayActorError):
                costs += filter(None, [ray.get(coming)])
        return costs

    def _note_start(self) -> None:
        if self._start is not None:
            start: Start = ray.get(self._start)
            self._start = None
            self._emit("trainer_started", t_s=self._now(), steps=start.steps, reason=start.reason)

    def _next_slice(self) -> Any:
        return self._trainer.train.remote(TRAIN_SLICE_S) if self._watch.training else None

    def _say(self, events: list[Said]) -> None:
        for event in events:
            self._emit(event.kind, t_s=self._now(), **event.data)
        self.state.training, self.state.speculating = self._watch.training, self._watch.speculating

    def _rebuild_vocabulary(self) -> None:
        change: VocabularyChange | None = ray.get(self._trainer.rebuild_vocabulary.remote())
        self._watch.vocabulary_rebuilt()
        if change is None:
            return
        self._emit(
            "vocabulary_rebuilt",
            t_s=self._now(),
            replaced=change.replaced,
            coverage_before=change.coverage_before,
            coverage_after=change.coverage_after,
        )

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
        trial = self._candidates.judge(comparison)
        self._say(self._watch.candidate(trial.decision))
        if not trial.decision.promote:
            self.state.refused += 1
            return
        folder: Path = ray.get(self._trainer.save_candidate.remote(trial.folder, trial.version, comparison.metrics))
        self._candidates.promoted(trial)
        self._put_in_service(folder, trial.version)

    def _put_in_service(self, folder: Path, version: str) -> None:
        try:
            done: WorkerSwap = ray.get(self._worker.swap.remote(folder))
        except DraftloopError as err:
            self._emit("swap_failed", t_s=self._now(), version=version, reason=str(err))
            raise
        ray.get(self._trainer.promoted.remote(folder))
        self._watch.new_drafter(version)
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
