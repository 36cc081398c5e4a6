"""Ray for one command: started here, actors created here, everything gone when the command ends."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

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
        # Ray's workers step back (nice 15) by default, and a server started in one would inherit that.
        os.environ[WORKER_NICENESS] = "0"
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
        )
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


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def plain_error(error: BaseException) -> DraftloopError | None:
    """The one-line error behind what a Ray call raised, or None for a fault of our own."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, DraftloopError):
        return error.cause
    if isinstance(error, DraftloopError):
        return error
    if isinstance(error, RayActorError):
        return ServerError(f"a Ray actor died: {' '.join(str(error).split())[:200]}")
    return None
