"""A fleet under test as an operator has it: a Ray cluster of its own, `draftloop refresh` in it, kill -9 at hand."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
import yaml
from processes import marked, new_mark, shared_memory
from ray.cluster_utils import Cluster

from draftloop.core.errors import ServerError
from draftloop.core.events import Event, read_events
from draftloop.refresher.control import call_controller

START_WITHIN_S = 600.0
STOP_WITHIN_S = 60.0
OBJECT_STORE_BYTES = 256 << 20
CLUSTER_ATTEMPTS = 4
# RAY_AUTH_MODE: a token in the home directory is not the tests' business.  PATH: a job's entry point is `draftloop`.
RAY_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "disabled",
    "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}",
}
# How the processes of each kind are told from the others; what is not here is the controller.
TITLES = {
    "worker": "sglang.launch_server",
    "trainer": "ray::Trainer",
    "router": "draftloop.fleet.router_process",
    "heir": "draftloop.cli.main stop",
}


class RayCluster:
    """A context manager: a cluster that no controller owns, so that a controller's death leaves it standing."""

    def __init__(self, mark: dict[str, str], dashboard: bool = False) -> None:
        before = dict(os.environ)
        # Ray's processes, and all that starts in them, inherit these.
        os.environ.update(mark | RAY_ENVIRONMENT)
        try:
            self._cluster = _started(dashboard)
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.address: str = self._cluster.address
        self.dashboard = f"http://{self._cluster.head_node.webui_url}"

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self._cluster.shutdown()


def _started(dashboard: bool) -> Cluster:
    """A raylet waits 15 s for its agent and then gives up; a busy machine needs more than one go."""
    for _ in range(CLUSTER_ATTEMPTS - 1):
        with contextlib.suppress(Exception):
            return _start(dashboard)
    return _start(dashboard)


def _start(dashboard: bool) -> Cluster:
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=2, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=dashboard)
    except Exception:
        cluster.shutdown()
        raise
    return cluster


class FleetRun:
    """A context manager: the run in `folder`; its controller can be killed and started again.

    command: refresh, serve, or attach with its options.  durable: in a Ray cluster that outlives the controller.
    """

    program = "draftloop.cli.main"

    def __init__(
        self, folder: Path, config: dict[str, Any], command: Sequence[str] = ("refresh",), durable: bool = True
    ) -> None:
        self.folder = folder
        self.mark = new_mark()
        self._command = command
        self._config = folder.with_name(f"{folder.name}.yaml")
        self._config.write_text(yaml.safe_dump(config))
        self._output = folder.with_name(f"{folder.name}.out")
        self._cluster = self._make_cluster() if durable else None
        self._controller: subprocess.Popen[bytes] | None = None

    def _make_cluster(self) -> RayCluster:
        return RayCluster(self.mark)

    def __enter__(self) -> Self:
        self.start_controller()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.stop_controller()
        finally:
            if self._cluster is not None:
                self._cluster.__exit__(*exception)
            for process in marked(self.mark):
                process.kill()

    def start_controller(self) -> None:
        command = [sys.executable, "-m", "draftloop.cli.main", *self._command]
        command += ["--config", str(self._config), "--out", str(self.folder)]
        environment = os.environ | self.mark | RAY_ENVIRONMENT
        if self._cluster is not None:
            environment["RAY_ADDRESS"] = self._cluster.address
        with self._output.open("ab") as output:
            self._controller = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def stop_controller(self) -> int | None:
        """As `kill` or `ray job stop` does; the exit code."""
        if self._controller is None or self._controller.poll() is not None:
            return None
        self._controller.send_signal(signal.SIGTERM)
        return self._controller.wait(timeout=STOP_WITHIN_S)

    @property
    def controller_lives(self) -> bool:
        return self._controller is not None and self._controller.poll() is None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The control endpoint's answer. Raises ServerError for a refusal, or when nobody answers."""
        return call_controller(self.folder, path, body)

    def offer(self, checkpoint: Path) -> bool:
        """`draftloop promote`; False while another roll-out is under way. Raises ServerError when it is refused."""
        try:
            self.ask("promote", {"checkpoint": str(checkpoint)})
        except ServerError as error:
            if "wait, see draftloop status" in str(error):
                return False
            raise
        return True

    def status(self) -> dict[str, Any] | None:
        try:
            return self.ask("status")
        except ServerError:
            return None

    def router(self) -> str:
        status = self.status()
        assert status is not None
        return str(status["router"])

    def events(self, kind: str) -> list[Event]:
        path = self.folder / "events.jsonl"
        return [event for event in read_events(path) if event.kind == kind] if path.exists() else []

    def converged(self) -> bool:
        """Every wanted worker ready, routed, and on the promoted version; no roll-out under way; training, if it is
        wanted, alive."""
        status = self.status()
        if status is None or status["rollout"]["stage"] != "steady":
            return False
        workers, promoted = status["workers"], status["rollout"]["promoted"]
        whole = 0 < len(workers) == status["wanted_workers"] == len(status["routed"])
        trains = self._command[0] == "serve" or bool(status["accounting"])
        return (whole and trains) and all(
            w["phase"] == "ready" and w["version"] == promoted and w["url"] in status["routed"] for w in workers
        )

    def wait_until(self, condition: Callable[[], bool], within_s: float = START_WITHIN_S) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert self.controller_lives, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.3)

    def said(self) -> str:
        return f"{self._output.read_text()[-4000:]}\n{self.status()}"

    def processes(self, kind: str) -> list[psutil.Process]:
        title = TITLES.get(kind, f"{self.program} {self._command[0]}")
        found = []
        for process in marked(self.mark):
            try:
                if title in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return sorted(found, key=lambda process: process.pid)

    def kill(self, kind: str, rng: random.Random) -> bool:
        """kill -9 of one process of this kind; False when there is none just now."""
        found = self.processes(kind)
        if found:
            rng.choice(found).kill()
        if kind == "controller" and self._controller is not None:
            self._controller.wait()
        return bool(found)


class Remains:
    """What must be gone once a run has stopped: its processes, the Ray cluster's own aside, and their memory."""

    def __init__(self, run: FleetRun) -> None:
        kinds = ("worker", "router", "trainer", "controller", "heir")
        self.processes = [process for kind in kinds for process in run.processes(kind)]
        self.memory = {path for path in shared_memory(marked(run.mark)) if path.name.startswith("draftloop-")}
        assert self.memory, "the ring was never seen: nothing is proven by its absence"

    def alive(self, within_s: float) -> list[psutil.Process]:
        """The processes that have not ended within `within_s`."""
        alive: list[psutil.Process] = psutil.wait_procs(self.processes, timeout=within_s)[1]
        return alive

    def files(self) -> list[Path]:
        """The memory that is still there."""
        return [path for path in self.memory if path.exists()]
