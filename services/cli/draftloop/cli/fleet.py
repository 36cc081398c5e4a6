"""`draftloop refresh`, `serve` and `attach`: one controller, until it is told to stop.

prepare      target, run folder (one controller each), first drafter or the saved state
connect      the Ray cluster, the actors of an earlier controller in it
tick         until Ctrl-C or SIGTERM
stop         trainer, workers, router; nothing stays
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from draftloop.capture.privacy import load_redactor
from draftloop.cli.actors import RaySession, namespace_of
from draftloop.cli.new_drafter import first_of_run
from draftloop.cli.run_folder import RunFolder, locked, open_run_folder
from draftloop.cli.stop import with_heir
from draftloop.core.config import Config, save_config
from draftloop.core.errors import ServerError
from draftloop.core.events import EventKind, EventLog
from draftloop.drafters.checkpoint import verify_checkpoint
from draftloop.drafters.target import target_identity
from draftloop.fleet.attached import drafter_of
from draftloop.fleet.attached_fleet import AttachedFleet
from draftloop.fleet.fleet import Fleet, require_free_ports
from draftloop.fleet.router import RouterClient
from draftloop.fleet.router_keeper import AttachedRouter, RouterKeeper
from draftloop.refresher.control import ControlServer
from draftloop.refresher.controller import Controller, Paths, copy_checkpoint
from draftloop.refresher.fleet_figures import FleetFigures
from draftloop.refresher.loop import LoopState
from draftloop.refresher.metrics import Exporter, TrafficTotals
from draftloop.refresher.rollout import Rollout
from draftloop.refresher.state import FleetState
from draftloop.refresher.training import Training
from draftloop.sglang.client import ServerClient
from draftloop.sglang.target import resolve_target

QUIET = ("train_step", "progress")


class Journalist:
    """Events of one run: into events.jsonl, and the decisions among them as a line on the terminal. Thread-safe."""

    def __init__(self, path: Path, exporter: Exporter) -> None:
        self._log = EventLog(path)
        self._exporter = exporter
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def now(self) -> float:
        """Seconds since this controller started."""
        return time.monotonic() - self._started

    def emit(self, kind: EventKind, **data: Any) -> None:
        with self._lock:
            self._log.emit(kind, **data)
            self._exporter.event(kind, data)
            if kind not in QUIET:
                said = " ".join(f"{key}={value}" for key, value in data.items() if key != "t_s" and value is not None)
                typer.echo(f"{time.strftime('%H:%M:%S')} {kind} {said}")


@dataclass(frozen=True)
class Errand:
    """What a controller is for. folder: of an absolute path.  train: keep the drafter fresh.  router: URL of one to
    attach to."""

    config: Config
    target: Path
    folder: RunFolder
    train: bool
    router: str | None


def run_fleet(config: Config, root: Path, train: bool, router: str | None) -> None:
    """Run until Ctrl-C, SIGTERM or `draftloop stop`. root, train, router: see `Errand`.

    Raises DraftloopError in one line; nothing is left running.
    """
    require_free_ports(config)
    # Each worker loads it, but only after minutes of start-up.
    load_redactor(config.privacy.redactor, config.privacy.redactor_options)
    folder = RunFolder(root)
    errand = Errand(config, resolve_target(config.target.path).resolve(), folder, train, router)
    if FleetState.load(root) is None:
        open_run_folder(root, resume=False)
    with locked(folder) as lock:
        save_config(config, folder.config)
        state = FleetState.load(root) or _first_state(errand)
        # `ray job submit` sets it.
        state = state.model_copy(update={"ray_address": os.environ.get("RAY_ADDRESS")})
        state.save(root)
        exporter = Exporter(config.metrics)
        journal = Journalist(folder.events, exporter)
        journal.emit("run_started", t_s=0.0, target=errand.target.name, drafter=state.rollout.promoted)
        with exporter, RaySession(namespace_of(root), state.ray_address):
            _control(errand, state, lock, journal, exporter)
        journal.emit("run_finished", t_s=journal.now())


def _control(errand: Errand, state: FleetState, lock: int, journal: Journalist, exporter: Exporter) -> None:
    """lock: descriptor of the folder's."""
    config, target, folder = errand.config, errand.target, errand.folder
    paths = Paths(folder.root, folder.checkpoints)
    # A cluster of this process ends with it; another one outlives it, and so may the actors.
    durable, managed = state.ray_address is not None, errand.router is None

    def make_fleet(folder_of: Callable[[str], Path], blame: Any) -> Fleet:
        if errand.router is not None:
            watched = AttachedRouter(errand.router)
            parts = (target, config, folder.root, folder_of, False, watched, journal.emit, blame, journal.now)
            return AttachedFleet(*parts)
        keeper = RouterKeeper(config.router, folder.root / "router.log", durable, journal.emit, journal.now)
        return Fleet(target, config, folder.root, folder_of, durable, keeper, journal.emit, blame, journal.now)

    controller = Controller(
        target, config, paths, state, make_fleet, journal.emit, journal.now, managed=managed, trained=errand.train
    )
    training = None
    if errand.train:
        training = Training(target, config, paths, controller, journal.emit, journal.now)
    fleet_config = config.fleet
    server = ControlServer(
        fleet_config.control_host,
        fleet_config.control_port,
        folder.root,
        lambda: controller.status() | (training.status() if training is not None else {}),
        {
            "scale": lambda body: {"workers": controller.scale(int(body["workers"]))},
            "rollback": lambda body: {"version": controller.rollback(str(body["version"]))},
            "promote": lambda body: {"version": controller.promote(Path(body["checkpoint"]))},
            "stop": lambda body: {"stopping": _interrupt_this()},
        },
    )
    meter = Meter(exporter)
    try:
        controller.open()
        if training is not None:
            training.start()
        with server, contextlib.suppress(KeyboardInterrupt):
            while True:
                controller.tick()
                meter.turn(controller, training)
                time.sleep(fleet_config.tick_s)
    finally:
        _ignore_signals()
        with with_heir(folder.root, lock) if durable else contextlib.nullcontext():
            if training is not None:
                training.finish()
            controller.fleet.stop()


class Meter:
    """Shows the fleet's figures to Prometheus, a window at a time."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._figures = FleetFigures()
        self._tokens = 0.0

    def turn(self, controller: Controller, training: Training | None) -> None:
        """Called often; does something when a window is full."""
        if not self._figures.due:
            return
        fresh, figures = self._figures.close_window(controller.fleet.views(), controller.fleet.samples())
        self._tokens += fresh
        state = LoopState([controller.promoted]) if training is None else training.state(controller.promoted)
        state = replace(state, captured=controller.captured)
        # Requests are counted where they come in: by the router, which Prometheus scrapes too.
        self._exporter.observe(state, TrafficTotals(0, 0, int(self._tokens)), figures)


def _interrupt_this() -> bool:
    os.kill(os.getpid(), signal.SIGTERM)
    return True


def _ignore_signals() -> None:
    """The stop is under way; a second Ctrl-C must not leave half of it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _first_state(errand: Errand) -> FleetState:
    """That of a fleet that begins with its first drafter."""
    config, target, folder = errand.config, errand.target, errand.folder
    if errand.router is not None:
        version = _take_over(_born_with(errand.router), target, folder)
    elif config.drafter.checkpoint is not None:
        version = _take_over(config.drafter.checkpoint, target, folder)
    else:
        version = "v0"
        first_of_run(config, target, folder.checkpoints / version)
    return FleetState(workers=config.fleet.workers, rollout=Rollout(promoted=version))


def _take_over(drafter: Path, target: Path, folder: RunFolder) -> str:
    """Copy a checkpoint into the run folder, where every version stays restorable."""
    manifest = verify_checkpoint(drafter, target_identity(target))
    if not (folder.checkpoints / manifest.version).exists():
        copy_checkpoint(drafter, folder.checkpoints / manifest.version)
    return manifest.version


def _born_with(router: str) -> Path:
    """The drafter that the servers behind a router were started with."""
    client = RouterClient(router)
    urls = sorted(client.workers())
    client.close()
    if not urls:
        raise ServerError(f"the router {router} has no workers: start the servers and add them first")
    with ServerClient(urls[0]) as server:
        return drafter_of(server)
