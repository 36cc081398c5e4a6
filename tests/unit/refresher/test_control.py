"""The control endpoint over real HTTP, and the state file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftloop.core.errors import ConfigError, DraftloopError, ServerError
from draftloop.refresher.control import CONTROL_FILE, ControlServer, call_controller
from draftloop.refresher.controller import BusyError
from draftloop.refresher.rollout import Rollout
from draftloop.refresher.state import STATE_FILE, FleetState


def scale(body: dict[str, Any]) -> dict[str, Any]:
    if body["workers"] == 13:
        raise BusyError("wait")
    if int(body["workers"]) < 1:
        raise DraftloopError("too few")
    return {"workers": body["workers"]}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with ControlServer("127.0.0.1", None, tmp_path, lambda: {"fine": True}, {"scale": scale}):
        yield tmp_path


def test_commands_and_refusals(folder: Path) -> None:
    assert call_controller(folder, "status") == {"fine": True}
    assert call_controller(folder, "scale", {"workers": 3}) == {"workers": 3}
    for path, body, message in (
        ("scale", {"workers": 0}, "too few"),
        ("scale", {"workers": 13}, "wait"),
        ("scale", {}, "workers"),
        ("scale", {"workers": "many"}, "many"),
        ("nonsense", {}, "there is no /nonsense"),
    ):
        with pytest.raises(ServerError, match=message):
            call_controller(folder, path, body)


def test_a_roll_out_under_way_is_a_conflict(folder: Path) -> None:
    control = json.loads((folder / CONTROL_FILE).read_text())
    headers = {"Authorization": f"Bearer {control['token']}"}
    body = {"workers": 13}
    assert httpx.post(f"{control['url']}/scale", json=body, headers=headers, trust_env=False).status_code == 409


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer nothing", "Bearer \u00e9"])
def test_nothing_without_the_token(folder: Path, authorization: str | None) -> None:
    assert (folder / CONTROL_FILE).stat().st_mode & 0o777 == 0o600
    url = json.loads((folder / CONTROL_FILE).read_text())["url"]
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    for answer in (
        httpx.get(f"{url}/status", headers=headers, trust_env=False),
        httpx.post(f"{url}/scale", json={"workers": 3}, headers=headers, trust_env=False),
    ):
        assert answer.status_code == 401
        assert "fine" not in answer.text


def test_no_controller(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="no controller runs in"):
        call_controller(tmp_path, "status")
    with ControlServer("127.0.0.1", None, tmp_path, dict, {}):
        left = (tmp_path / CONTROL_FILE).read_text()
    assert not (tmp_path / CONTROL_FILE).exists()
    (tmp_path / CONTROL_FILE).write_text(left)
    with pytest.raises(ServerError, match="it was killed"):
        call_controller(tmp_path, "status")


def test_state_comes_back(tmp_path: Path) -> None:
    assert FleetState.load(tmp_path) is None
    rollout = Rollout(promoted="v3", stage="canary", candidate="v4", previous="v3", canary_worker="w1")
    state = FleetState(workers=5, rollout=rollout, router_port=30000)
    state.save(tmp_path)
    assert FleetState.load(tmp_path) == state
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
    (tmp_path / STATE_FILE).write_text('{"workers": 5')
    with pytest.raises(ConfigError, match=r"state\.json cannot be read"):
        FleetState.load(tmp_path)
