"""The other ways to start: `draftloop serve`, `draftloop attach` to servers of somebody else, and `ray job submit`.

Each with one tiny server; what a whole fleet does is `test_fleet`'s business.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from clients import Clients, Question
from fleet_run import RAY_ENVIRONMENT, FleetRun, RayCluster, Remains
from processes import marked, new_mark
from ray.util.placement_group import placement_group_table
from tiny_fleet import fleet_config
from tiny_llama import TinyTarget
from typer.testing import CliRunner

from draftloop.capture.ring import RingWriter
from draftloop.cli.main import app
from draftloop.core.config import CapturePolicy, RouterConfig
from draftloop.core.errors import ServerError
from draftloop.fleet.attached import ring_of, server_behind
from draftloop.fleet.router import RouterClient, router_command
from draftloop.sglang.client import ServerClient
from draftloop.sglang.server import free_port

pytestmark = pytest.mark.timeout(600)

CLIENTS = 4
GONE_WITHIN_S = 60.0
JOB_RUNS_WITHIN_S = 120.0


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("started")


@pytest.fixture(scope="module")
def config(target: TinyTarget, scratch: Path) -> dict[str, Any]:
    return fleet_config(target, scratch, fleet={"workers": 1, "cpus_per_worker": 0.5})


def answers(run: FleetRun, questions: list[Question]) -> None:
    with Clients(run.router(), questions, CLIENTS) as clients:
        run.wait_until(lambda: clients.outcome.ok >= len(questions))
    assert (clients.outcome.wrong, clients.outcome.failures) == (0, 0)


def command(*arguments: str) -> str:
    """What a draftloop command prints."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output.strip()


def assert_gone(remains: Remains) -> None:
    assert remains.alive(GONE_WITHIN_S) == []
    # A worker releases its ring after its server has gone.
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := remains.files():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_fleet_that_only_serves(scratch: Path, config: dict[str, Any], questions: list[Question]) -> None:
    with FleetRun(scratch / "serves", config, ["serve"], durable=False) as run:
        run.wait_until(run.converged)
        answers(run, questions)
        assert run.processes("trainer") == []
        status = run.status()
        assert status is not None
        assert (status["rollout"]["promoted"], status["captured"]["records"] > 0) == ("v0", True)
        remains = Remains(run)
        assert command("stop", "--out", str(run.folder)) == "stopped"
        assert_gone(remains)
        with pytest.raises(ServerError, match="no controller runs"):
            run.ask("status")


@dataclass(frozen=True)
class Own:
    """A server and a router as somebody else runs them."""

    server: str
    router: str


@pytest.fixture
def own(scratch: Path, config: dict[str, Any]) -> Iterator[Own]:
    """By the line that `draftloop server-command` prints, with a drafter that `draftloop new-drafter` made."""
    file = scratch / "own.yaml"
    file.write_text(yaml.safe_dump(config))
    drafter = scratch / "first"
    command("new-drafter", str(drafter), "--config", str(file))
    options = ["--drafter", str(drafter), "--reports", str(scratch / "reports"), "--config", str(file)]
    line = command("server-command", *options)
    port = re.search(r"--port (\d+)", line)
    assert port is not None
    router = RouterConfig(port=None, metrics_port=None)
    routes = free_port("127.0.0.1", None)
    mark = new_mark()
    with (scratch / "own.log").open("wb") as log:
        started = [
            subprocess.Popen(words, env=os.environ | mark, stdout=log, stderr=log, shell=isinstance(words, str))
            for words in (f"exec {line}", router_command(router, routes))
        ]
    made = Own(f"http://127.0.0.1:{port[1]}", f"http://127.0.0.1:{routes}")
    try:
        wait_for_own(made, started, scratch / "own.log")
        yield made
    finally:
        for process in started:
            process.terminate()
        psutil.wait_procs(marked(mark), timeout=20)
        for process in marked(mark):
            process.kill()


def wait_for_own(own: Own, started: list[subprocess.Popen[bytes]], log: Path) -> None:
    router = RouterClient(own.router)
    with ServerClient(own.server) as client:
        while not client.healthy():
            assert all(process.poll() is None for process in started), log.read_text()[-4000:]
            time.sleep(0.3)
    router.add(own.server)
    while own.server not in router.workers():
        time.sleep(0.2)
    router.close()


def version_of(server: str) -> str:
    with ServerClient(server) as client:
        return str(client.get("/model_info")["weight_version"])


def captures(server: str) -> bool:
    ring = RingWriter.attach(ring_of(server_behind(server)))  # a second reader would be refused
    try:
        said = ring.control.read()
        return said is not None and CapturePolicy.model_validate_json(said[1]).sample_rate > 0
    finally:
        ring.close()


def test_attach_refreshes_servers_of_somebody_else(
    scratch: Path, config: dict[str, Any], questions: list[Question], own: Own
) -> None:
    assert version_of(own.server) == "first"
    assert not captures(own.server), "nobody has said of whom"
    with FleetRun(scratch / "attached", config, ["attach", "--router", own.router], durable=False) as run:
        with Clients(own.router, questions, CLIENTS) as clients:
            run.wait_until(lambda: bool(run.events("rolled_out")) and run.converged())
        assert (clients.outcome.wrong, clients.outcome.failures) == (0, 0)
        version = run.events("rolled_out")[-1].data["version"]
        assert version != "first"
        assert version_of(own.server) == version
        tried = next(event.data for event in run.events("candidate") if event.data["version"] == version)
        assert 0 < tried["tokens_per_s_before"] < tried["tokens_per_s_after"], "by what its own steps cost"
        with pytest.raises(ServerError, match="scale it there"):
            run.ask("scale", {"workers": 2})
        assert captures(own.server)
        assert run.stop_controller() == 0
    assert not captures(own.server), "nobody would read it"
    with Clients(own.router, questions, CLIENTS) as clients:
        deadline = time.monotonic() + 60
        while clients.outcome.ok < len(questions):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert (clients.outcome.wrong, clients.outcome.failures) == (0, 0)
    assert version_of(own.server) == version, "it goes on with what it has"


class JobRun(FleetRun):
    """As a Ray job of the plainest kind; its settings are the cluster's."""

    program = "bin/draftloop"

    def _make_cluster(self) -> RayCluster:
        return RayCluster(self.mark, dashboard=True)

    def _ray_job(self, *arguments: str) -> str:
        assert self._cluster is not None
        words = [f"{sys.prefix}/bin/ray", "job", arguments[0], "--address", self._cluster.dashboard, *arguments[1:]]
        done = subprocess.run(words, env=os.environ | RAY_ENVIRONMENT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start_controller(self) -> None:
        folder = self.folder.with_name("job")
        folder.mkdir()
        shutil.copy(self._config, folder / "draftloop.yaml")
        options = ["--no-wait", "--submission-id", "fleet", "--working-dir", str(folder)]
        entry = f"draftloop refresh --config draftloop.yaml --out {self.folder}"
        self._ray_job("submit", *options, "--", *entry.split())
        deadline = time.monotonic() + JOB_RUNS_WITHIN_S
        while not self.controller_lives:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.5)

    @property
    def controller_lives(self) -> bool:
        return bool(self.processes("controller"))

    def stop_controller(self) -> int | None:
        if not self.processes("controller"):
            return None
        self._ray_job("stop", "--no-wait", "fleet")
        return 0

    def left_in_cluster(self) -> list[str]:
        """Named actors, and reserved rooms."""
        assert self._cluster is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", RAY_ENVIRONMENT["RAY_AUTH_MODE"])
            ray.init(self._cluster.address, log_to_driver=False)
        try:
            rooms = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
            ours = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
            return rooms + [name for name in ours if "ray_internal" not in name]
        finally:
            ray.shutdown()

    def said(self) -> str:
        return self._ray_job("logs", "fleet")[-4000:]


def test_a_ray_job_ends_whole_also_when_ray_does_not_wait(
    scratch: Path, config: dict[str, Any], questions: list[Question]
) -> None:
    """`ray job stop` kills after 3 s; here the controller is killed as soon as it has begun to stop."""
    with JobRun(scratch / "run", config) as run:
        run.wait_until(run.converged)
        answers(run, questions)
        assert len(run.processes("trainer")) == 1
        remains = Remains(run)
        (controller,) = run.processes("controller")
        run.stop_controller()
        while not run.processes("heir") and controller.is_running():
            time.sleep(0.01)
        with contextlib.suppress(psutil.Error):
            controller.send_signal(signal.SIGKILL)
        assert_gone(remains)
        while run.processes("heir"):
            time.sleep(0.1)
        assert "router" in (run.folder / "heir.log").read_text(), "it was the heir that ended them"
        assert run.left_in_cluster() == []
