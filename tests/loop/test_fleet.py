"""A live fleet as an operator runs it: two real servers and router, a trainer, `draftloop refresh` on a Ray cluster.

One fleet for the whole module, as a server's start is most of the time; each test leaves it converged.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chaos_runs import Chaos
from clients import Clients, Question
from fleet_run import FleetRun, Remains
from load_runs import swaps_under_load
from tiny_fleet import Drafters, fleet_config, make_drafters
from tiny_llama import TinyTarget

from draftloop.core.config import Config
from draftloop.core.errors import ServerError
from draftloop.core.manifest import Manifest
from draftloop.refresher.control import CONTROL_FILE

# The first test also pays for the fleet's start.
pytestmark = pytest.mark.timeout(1200)

CLIENTS = 4


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def drafters(target: TinyTarget, scratch: Path) -> Drafters:
    return make_drafters(target, Config.model_validate(fleet_config(target, scratch)), scratch)


@pytest.fixture(scope="module")
def fleet(target: TinyTarget, scratch: Path, drafters: Drafters) -> Iterator[FleetRun]:
    """`drafters` is asked for first: what can fail cheaply should not cost two servers' start."""
    with FleetRun(scratch / "run", fleet_config(target, scratch)) as run:
        run.wait_until(run.converged)
        yield run


def promote(run: FleetRun, checkpoint: Path) -> str:
    """Offer a drafter as soon as no other roll-out is under way; its version."""
    run.wait_until(lambda: run.offer(checkpoint))
    return checkpoint.name


def told(run: FleetRun, kind: str, version: str) -> bool:
    return any(event.data["version"] == version for event in run.events(kind))


def versions(run: FleetRun) -> set[str]:
    status = run.status()
    assert status is not None
    return {worker["version"] for worker in status["workers"]}


def test_what_the_trainer_learned_rolls_over_both(fleet: FleetRun, questions: list[Question]) -> None:
    with Clients(fleet.router(), questions, CLIENTS) as clients:
        fleet.wait_until(lambda: bool(fleet.events("rolled_out")))
        fleet.wait_until(fleet.converged)
    assert (clients.outcome.wrong, clients.outcome.failures) == (0, 0)
    assert clients.outcome.ok > 0
    version = fleet.events("rolled_out")[0].data["version"]
    assert told(fleet, "promoted", version), "it passed the gate"
    tried = next(event.data for event in fleet.events("candidate") if event.data["version"] == version)
    assert 0 < tried["tokens_per_s_before"] < tried["tokens_per_s_after"], "by what both servers' steps cost"
    assert told(fleet, "canary", version)
    manifest = Manifest.load(fleet.folder / "checkpoints" / version)
    assert manifest.lineage.train_steps > 0
    swaps = [event for event in fleet.events("swap") if event.data["version"] == version]
    assert {event.data["worker"] for event in swaps} == {"w0", "w1"}
    assert all(event.data["checksum_ok"] for event in swaps)


def test_the_control_endpoint_wants_the_token(fleet: FleetRun) -> None:
    path = fleet.folder / CONTROL_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    url = json.loads(path.read_text())["url"]
    assert httpx.URL(url).host == "127.0.0.1"
    for headers in ({}, {"Authorization": "Bearer nothing"}):
        assert httpx.get(f"{url}/status", headers=headers, trust_env=False).status_code == 401
        assert httpx.post(f"{url}/scale", json={"workers": 9}, headers=headers, trust_env=False).status_code == 401
    for path_, body, message in (
        ("scale", {"workers": 0}, "choose 1 to 1000"),
        ("rollback", {"version": "v999"}, "v999"),
        ("nonsense", {}, "there is no /nonsense"),
    ):
        with pytest.raises(ServerError, match=message):
            fleet.ask(path_, body)


def test_poison_never_stays(fleet: FleetRun, drafters: Drafters, questions: list[Question]) -> None:
    """No gate stands before an operator's `promote`: what fits no server is refused, what drafts badly comes back."""
    with Clients(fleet.router(), questions, CLIENTS) as clients:
        for folder, message in (
            (drafters.nan, "NaN"),
            (drafters.layers, "reads target layers"),
            (drafters.template, "chat template"),
        ):
            with pytest.raises(ServerError, match=message):
                fleet.ask("promote", {"checkpoint": str(folder)})
        bad = promote(fleet, drafters.random)
        fleet.wait_until(lambda: told(fleet, "rolled_back", bad))
        fleet.wait_until(fleet.converged)
    (back,) = [event for event in fleet.events("rolled_back") if event.data["version"] == bad]
    assert "accepted length" in back.data["reason"]
    assert bad not in versions(fleet)
    assert not told(fleet, "rolled_out", bad)
    canaries = {event.data["worker"] for event in fleet.events("swap") if event.data["version"] == bad}
    assert len(canaries) == 1
    assert (clients.outcome.wrong, clients.outcome.failures) == (0, 0)


def test_a_killed_worker_comes_back_with_the_promoted_drafter(fleet: FleetRun, questions: list[Question]) -> None:
    with Clients(fleet.router(), questions, CLIENTS) as clients:
        lost = len(fleet.events("worker_lost"))
        fleet.kill("worker", random.Random(2))
        fleet.wait_until(lambda: len(fleet.events("worker_lost")) > lost)
        fleet.wait_until(fleet.converged)
    started = fleet.events("worker_started")[-1].data
    assert started["worker"] == fleet.events("worker_lost")[-1].data["worker"]
    assert started["version"] != "v0", "the drafter it was born with"
    assert clients.outcome.wrong == 0
    # What ran on the dead worker may fail, with a status; the router sends the rest to the other one.
    assert set(clients.outcome.failed) <= {"500", "502", "503"}
    assert clients.outcome.ok > 0


def test_controller_trainer_and_router_killed(fleet: FleetRun, questions: list[Question]) -> None:
    chaos = Chaos(fleet, questions, random.Random(11), kinds=("controller", "trainer", "router"))
    report = chaos.run(3)
    assert (report.runs, report.wrong_outputs, report.unbalanced, report.unconverged) == (3, 0, 0, 0)
    assert report.ok > 0


def test_streams_live_through_swaps(fleet: FleetRun, questions: list[Question]) -> None:
    report = swaps_under_load(fleet, questions, clients=64, seconds=60.0, swap_every_s=15.0)
    assert (report.failed_requests, report.wrong_outputs) == (0, 0)
    assert report.swaps >= 3
    assert report.requests > 64


def test_scaling_down_fails_no_request_and_stopping_leaves_nothing(fleet: FleetRun, questions: list[Question]) -> None:
    with Clients(fleet.router(), questions, CLIENTS) as clients:
        fleet.ask("scale", {"workers": 1})
        fleet.wait_until(lambda: fleet.converged() and len(fleet.processes("worker")) == 1)
    assert (clients.outcome.wrong, clients.outcome.failures) == (0, 0)
    remains = Remains(fleet)
    assert fleet.stop_controller() == 0
    assert remains.alive(within_s=15) == []
    assert remains.files() == []
    assert not (fleet.folder / CONTROL_FILE).exists()
