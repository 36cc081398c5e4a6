"""The refresh loop: one turn moves records, trains a slice, and now and then lets a candidate try the gate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray

from draftloop.capture.collector import CollectorCounts
from draftloop.capture.ledger import Counts
from draftloop.capture.transport import Receipt
from draftloop.core.config import Config
from draftloop.core.errors import DraftloopError
from draftloop.drafters.online import StepReport
from draftloop.fleet.worker import WorkerSwap
from draftloop.refresher.budget import SpeculationPolicy
from draftloop.refresher.gate import Decision, decide
from draftloop.refresher.watch import Said, Watch
from draftloop.trainer.trainer import Comparison, Start
from draftloop.trainer.vocabulary import VocabularyChange

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
    speculation: a measured cost model; without one nothing is said about tokens/s.
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
        speculation: SpeculationPolicy | None = None,
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
        self._start: Any = trainer.started.remote()
        self._receipts: dict[Any, Receipt] = {}
        self._watch = Watch(config, serving, speculation)
        self.state = LoopState(versions=[serving])

    def turn(self) -> None:
        """Move records, train for a slice, try the gate when it is time. Raises ServerError when the server died."""
        moving = self._move_records()
        seen = self._trainer.take_observations.remote()
        # One slice is always queued behind the running one, so that the trainer never waits for this loop.
        running, self._queued = self._queued, self._next_slice()
        self._note_records(moving)
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
        version = f"v{self._next_version}"
        self._next_version += 1
        before, after = comparison.before, comparison.after
        decision = decide(before, after, self._config.gate, self._config.seed + self._next_version)
        gate = self._gate_figures(version, comparison, decision)
        self._emit("candidate", t_s=self._now(), **gate)
        self._say(self._watch.candidate(decision))
        if not decision.promote:
            self._refuse(gate, decision.reason)
            return
        folder: Path = ray.get(
            self._trainer.save_candidate.remote(self._checkpoints / version, version, comparison.metrics)
        )
        self._emit("promoted", t_s=self._now(), reason=decision.reason, **gate)
        self._put_in_service(folder, version)

    def _gate_figures(self, version: str, comparison: Comparison, decision: Decision) -> dict[str, Any]:
        """What an event says about a candidate: lengths, bounds of the gain, change by domain, predicted tokens/s."""
        before, after = comparison.before.accept_length, comparison.after.accept_length
        gain = decision.gain
        return {
            "version": version,
            "gate_before": before,
            "gate_after": after,
            "gain_bounds": [] if gain is None or not math.isfinite(gain.low) else [gain.low, gain.high],
            "by_domain": decision.by_domain,
            "records": comparison.records,
            "tokens_per_s_before": self._watch.predicted_tokens_per_s(before),
            "tokens_per_s_after": self._watch.predicted_tokens_per_s(after),
        }

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


def next_version(checkpoints: Path) -> int:
    """One more than the highest number of a folder vN."""
    return 1 + max((int(path.name[1:]) for path in checkpoints.glob("v*") if path.name[1:].isdigit()), default=0)
