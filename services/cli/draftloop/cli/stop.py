"""How a fleet ends: by its controller, by `draftloop stop`, or by the heir of a controller that was not given the time.

`ray job stop` kills 3 s after it has asked, unless the job's environment says otherwise; servers, router and trainer
take longer to go in order, and in a cluster they outlive their controller. So a controller that is told to stop names
an heir first, a process that waits for its death and does what was left undone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from draftloop.cli.run_folder import RunFolder, locked
from draftloop.core.errors import DraftloopError, ServerError
from draftloop.refresher.control import CONTROL_FILE, call_controller
from draftloop.refresher.state import FleetState

ENDS_WITHIN_S = 60.0


def stop_fleet(root: Path) -> list[str]:
    """End the fleet of a run folder, with or without its controller; what a killed one had left, by name.

    Raises ServerError when no fleet has run there, DraftloopError when its controller does not end.
    """
    address = _ray_address(root)
    with contextlib.suppress(ServerError):  # none runs
        call_controller(root, "stop", {})
    with contextlib.ExitStack() as held:
        _wait_for_lock(held, RunFolder(root))
        (root / CONTROL_FILE).unlink(missing_ok=True)  # a killed one's
        return _end_what_is_left(root, address)


def _wait_for_lock(held: contextlib.ExitStack, folder: RunFolder) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while True:
        try:
            held.enter_context(locked(folder))
        except DraftloopError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)
        else:
            return


def inherit(root: Path, controller: int) -> list[str]:
    """As the heir of the process `controller`, whose lock of the folder is held on here: wait for its death."""
    psutil.wait_procs([psutil.Process(controller)] if psutil.pid_exists(controller) else [])
    return _end_what_is_left(root, _ray_address(root))


def _end_what_is_left(root: Path, address: str | None) -> list[str]:
    if address is None:  # a local cluster has died with its controller
        return []
    # Imported late: an heir is seldom needed, and its seconds of imports would be taken from the stop it waits for.
    from draftloop.cli.actors import RaySession, namespace_of
    from draftloop.fleet.leftovers import end_leftovers

    with RaySession(namespace_of(root), address):
        return end_leftovers()


def _ray_address(root: Path) -> str | None:
    state = FleetState.load(root)
    if state is None:
        raise ServerError(f"no fleet has run in {root}: name its folder with --out")
    return state.ray_address


@contextmanager
def with_heir(root: Path, lock: int) -> Iterator[None]:
    """What is done in here an heir does, should this process be killed meanwhile. lock: descriptor of the folder's."""
    command = [sys.executable, "-m", "draftloop.cli.main", "stop", "--out", str(root), "--heir-of", str(os.getpid())]
    with (root / "heir.log").open("ab") as log:
        # A session of its own: who kills a job kills its process group.
        heir = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(lock,)
        )
    try:
        yield
    finally:
        heir.kill()
        heir.wait()
