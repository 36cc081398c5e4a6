"""Ray for one command: started here or joined; what the command made is gone when it ends."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import ray
from ray.exceptions import RayError

from draftloop.core.errors import DraftloopError, ServerError

# Ray reads its settings from variables of this mixed spelling.
WORKER_NICENESS = "RAY_worker_niceness"
OBJECT_STORE_BYTES = 512 << 20
STOP_TIMEOUT_S = 20.0


class LocalRay:
    """A context manager: a local Ray cluster and the actors made in it.

    SIGTERM is turned into KeyboardInterrupt, so that `kill` ends a run as cleanly as Ctrl-C does.
    """

    def __init__(self) -> None:
        self._actors: list[tuple[Any, str | None]] = []

    def __enter__(self) -> LocalRay:
        start_local_ray(namespace=None)
        signal.signal(signal.SIGTERM, _interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor, stop in reversed(self._actors):
            self.end(actor, stop)
        ray.shutdown()

    def start(self, actor_class: Any, *args: Any, stop: str | None = None) -> Any:
        """Create an actor. stop: its method to call before it is killed."""
        # No logical CPUs: a demo's actors share two cores by design.
        actor = actor_class.options(num_cpus=0).remote(*args)
        self._actors.append((actor, stop))
        return actor

    def end(self, actor: Any, stop: str | None) -> None:
        """Stop one actor, politely and then for good."""
        self._actors = [(other, method) for other, method in self._actors if other is not actor]
        if stop is not None:
            with contextlib.suppress(RayError, DraftloopError):
                ray.get(getattr(actor, stop).remote(), timeout=STOP_TIMEOUT_S)
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor)


class RaySession:
    """A context manager: the Ray cluster of a fleet.

    namespace: where this run's actors are found again.  address: of a cluster to join, None to start a local one.
    """

    def __init__(self, namespace: str, address: str | None) -> None:
        self._namespace = namespace
        self._address = address

    def __enter__(self) -> RaySession:
        if self._address is None:
            start_local_ray(self._namespace)
        else:
            try:
                ray.init(self._address, namespace=self._namespace, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError) as err:
                raise ServerError(
                    f"no Ray cluster answers at {self._address}: start it, or unset RAY_ADDRESS for a local one"
                ) from err
        signal.signal(signal.SIGTERM, _interrupt)
        return self

    def __exit__(self, *exception: object) -> None:
        ray.shutdown()


def namespace_of(root: Path) -> str:
    """Where the actors of the run in this folder are found. root: absolute."""
    return f"draftloop-{hashlib.sha256(str(root).encode()).hexdigest()[:12]}"


def start_local_ray(namespace: str | None) -> None:
    """A cluster of this process: it ends with it."""
    # Ray's workers step back (nice 15) by default, and a server started in one would inherit that.
    os.environ[WORKER_NICENESS] = "0"
    ray.init(
        address="local",
        namespace=namespace,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=OBJECT_STORE_BYTES,
    )


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
