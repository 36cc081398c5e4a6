"""Training beside a fleet: a thread that keeps a trainer actor alive, feeds it, and offers what passes the gate."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from draftloop.capture.privacy import PrivacyError
from draftloop.core.config import Config
from draftloop.core.errors import BusyError, DraftloopError
from draftloop.fleet.fleet import Emit
from draftloop.fleet.ray_errors import one_line, plain_error
from draftloop.refresher.controller import Controller, Paths
from draftloop.refresher.loop import LoopState, Refresher
from draftloop.trainer.peers import trainer_gpus
from draftloop.trainer.trainer import TrainerActor

RESTART_AFTER_S = 2.0
CLOSE_TIMEOUT_S = 8.0


class FleetRefresher(Refresher):
    """The loop with a whole fleet in the worker's place: a candidate is offered to the controller."""

    def __init__(
        self, controller: Controller, trainer: Any, config: Config, paths: Paths, emit: Emit, now: Any
    ) -> None:
        super().__init__(None, trainer, config, paths.checkpoints, controller.promoted, emit, now)
        self._controller = controller
        self._paths = paths

    def _workers(self) -> list[Any]:
        return self._controller.fleet.handles()

    def _note_records(self, moving: dict[Any, Any]) -> None:
        """A worker that died with its records is the controller's news; a dead trainer ends this loop."""
        self._receipts = {}
        for worker, coming in moving.items():
            try:
                self._receipts[worker] = ray.get(coming)
            except RayError as error:
                if isinstance(failed := plain_error(error), PrivacyError):
                    self._emit("error", t_s=self._now(), message=str(failed))
        self.state.buffer = ray.get(self._trainer.receive.remote(None)).counts
        serving = self._controller.promoted
        if self._controller.idle and serving != self.state.serving:
            ray.get(self._trainer.promoted.remote(self._paths.of(serving)))
            self.state.versions.append(serving)
            self._watch.new_drafter(serving)

    def try_gate(self) -> None:
        if self._controller.idle:
            super().try_gate()

    def _put_in_service(self, folder: Path, version: str) -> None:
        try:
            self._controller.offer(version)
        except BusyError as error:
            self._emit("refused", t_s=self._now(), version=version, reason=str(error))


class Training(threading.Thread):
    """Runs until `finish`. A trainer that dies is replaced, with its peers; it goes on from what it saved last."""

    def __init__(
        self,
        target: Path,
        config: Config,
        paths: Paths,
        controller: Controller,
        emit: Emit,
        now: Callable[[], float],
    ) -> None:
        super().__init__(name="draftloop-training", daemon=True)
        self._target = target
        self._config = config
        self._paths = paths
        self._controller = controller
        self._emit = emit
        self._now = now
        self._finish = threading.Event()
        self._trainer: Any = None
        self._refresher: FleetRefresher | None = None

    def run(self) -> None:
        while not self._finish.is_set():
            try:
                self._train()
            except Exception as error:  # whatever it was, the fleet serves on
                if not self._finish.is_set():
                    self._emit("trainer_lost", t_s=self._now(), reason=one_line(error))
                self._end()
                self._finish.wait(RESTART_AFTER_S)

    def _train(self) -> None:
        serving = self._paths.of(self._controller.promoted)
        actor = TrainerActor.options(num_cpus=0, num_gpus=trainer_gpus(self._config))
        self._trainer = actor.remote(self._target, serving, self._config, self._paths.root)
        refresher = FleetRefresher(self._controller, self._trainer, self._config, self._paths, self._emit, self._now)
        self._refresher = refresher
        while not self._finish.is_set():
            refresher.turn()

    def finish(self) -> None:
        """End the trainer, which saves its state; return when the thread is done."""
        self._finish.set()
        if self._trainer is not None:
            with contextlib.suppress(RayError, DraftloopError):
                ray.get(self._trainer.close.remote(), timeout=CLOSE_TIMEOUT_S)
        self._end()
        self.join(CLOSE_TIMEOUT_S)

    def _end(self) -> None:
        if self._trainer is not None:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self._trainer)
        self._trainer = self._refresher = None

    def state(self, serving: str) -> LoopState:
        """What the loop has done in this life of the trainer."""
        refresher = self._refresher
        return LoopState([serving]) if refresher is None else refresher.state

    def status(self) -> dict[str, Any]:
        """Plain JSON: steps, loss, and where the captured records are; nothing of the latter while no trainer lives."""
        refresher = self._refresher
        if refresher is None:
            return {"train_steps": 0, "loss": None, "accounting": {}}
        state = refresher.state
        return {"train_steps": state.train_steps, "loss": state.loss, "accounting": asdict(state.buffer)}
