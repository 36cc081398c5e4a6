"""An operator's rollback: what may serve again, and what the registry says when it does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_llama import TinyTarget, random_prompts

from draftloop.core.config import Config
from draftloop.core.versions import VersionError, VersionRegistry
from draftloop.fleet.plan import Action, Observed, WorkerView
from draftloop.refresher.controller import Controller, Paths
from draftloop.refresher.rollout import Rollout
from draftloop.refresher.state import FleetState
from draftloop.trainer.day0 import make_untrained

URL = "http://127.0.0.1:1"


class ReadyFleet:
    """One worker that has at once what it is given."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.router = SimpleNamespace(port=1, url=URL, routed=frozenset({URL}))

    def adopt(self, router_port: int | None) -> None: ...

    def poll(self) -> None: ...

    def samples(self) -> dict[str, Any]:
        return {}

    def views(self) -> dict[str, WorkerView]:
        return {"w0": WorkerView("ready", self.version, URL)}

    def observed(self) -> Observed:
        return Observed(0.0, self.views(), self.router.routed)

    def act(self, action: Action) -> None:
        assert action.kind == "swap"
        self.version = str(action.version)


@pytest.fixture
def run(target: TinyTarget, tmp_path: Path) -> Path:
    """v0, v1 and v2 served one after the other; v3 is a candidate."""
    config = Config()
    config.drafter.draft_vocab_size = 64
    registry = VersionRegistry(tmp_path)
    for number in range(4):
        folder = tmp_path / "checkpoints" / f"v{number}"
        make_untrained(target.folder, config.drafter, random_prompts(4, [20], seed=0), folder, folder.name, seed=number)
        registry.add(folder)
        if number < 3:
            registry.move(folder.name, "promoted", "better")
    return tmp_path


def controller(target: TinyTarget, run: Path, promoted: str, events: list[tuple[str, str]]) -> Controller:
    def emit(kind: Any, **data: Any) -> None:
        events.append((kind, data["version"]))

    state = FleetState.load(run) or FleetState(workers=1, rollout=Rollout(promoted=promoted))
    made = Controller(
        target.folder,
        Config(),
        Paths(run, run / "checkpoints"),
        state,
        lambda *_: ReadyFleet(promoted),  # type: ignore[return-value]
        emit,
        lambda: 0.0,
        managed=True,
        trained=True,
    )
    made.open()
    return made


def states(run: Path) -> list[str]:
    return [version.state for version in VersionRegistry(run).all()]


def test_a_rollback_is_in_the_registry_when_the_fleet_has_it(target: TinyTarget, run: Path) -> None:
    events: list[tuple[str, str]] = []
    fleet = controller(target, run, "v2", events)
    assert fleet.status()["versions"] == ["v0", "v1", "v2"]
    assert fleet.rollback("v0") == "v0"
    assert states(run) == ["promoted", "promoted", "promoted", "candidate"], "no worker has it yet"
    for _ in range(3):
        fleet.tick()
    assert fleet.idle
    assert events == [("rolling", "v0"), ("rolled_out", "v0")]
    assert states(run) == ["promoted", "rolled_back", "rolled_back", "candidate"]
    serving = VersionRegistry(run).serving()
    assert serving is not None
    assert serving.name == "v0"
    fleet.rollback("v2")
    for _ in range(3):
        fleet.tick()
    assert states(run) == ["promoted", "rolled_back", "promoted", "candidate"]


def test_what_may_not_serve_is_refused_and_changes_nothing(target: TinyTarget, run: Path) -> None:
    VersionRegistry(run).taint(lambda name: name == "v1", "its records were deleted")
    events: list[tuple[str, str]] = []
    fleet = controller(target, run, "v2", events)
    for version, message in (("v3", "v3 never served"), ("v1", "v1 is tainted"), ("v9", "there is no version v9")):
        with pytest.raises(VersionError, match=message):
            fleet.rollback(version)
    assert (fleet.idle, fleet.promoted, events) == (True, "v2", [])


def test_a_controller_killed_before_it_told_the_registry_is_made_good(target: TinyTarget, run: Path) -> None:
    FleetState(workers=1, rollout=Rollout(promoted="v0")).save(run)
    controller(target, run, "v0", [])
    serving = VersionRegistry(run).serving()
    assert serving is not None
    assert serving.name == "v0"
