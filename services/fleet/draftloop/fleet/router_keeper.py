"""Keeps one router running and its list of workers as the plan wants it; or watches a router of somebody else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from draftloop.core.config import RouterConfig
from draftloop.core.errors import DraftloopError
from draftloop.fleet.ray_errors import one_line
from draftloop.fleet.router import RouterActor, RouterClient, RouterSample

ACTOR_NAME = "router"
ASK_AGAIN_S = 3.0
SILENT_S = 20.0
RESTART_AFTER_S = 1.0
MOST_MISSES = 4
WATCH_EVERY_S = 2.0


class _Emit(Protocol):
    def __call__(self, kind: Any, **data: Any) -> None: ...


class RouterKeeper:
    """routed: URLs that the router sends requests to; None while it does not answer. url: where clients go."""

    def __init__(self, config: RouterConfig, log: Path, durable: bool, emit: _Emit, now: Callable[[], float]) -> None:
        self._config = config
        self._log = log
        self._durable = durable
        self._emit = emit
        self._now = now
        self._actor: Any = None
        self._pending: Any = None
        self._operation: Literal["start", "sample"] | None = None
        self._since = 0.0
        self._retry_at = 0.0
        self._port: int | None = None
        self._misses = 0
        self._asked: dict[tuple[str, bool], float] = {}
        self.url: str | None = None
        self.routed: frozenset[str] | None = None

    @property
    def port(self) -> int | None:
        """Clients know it, so that a new process takes it again."""
        return self._port

    def adopt(self, port: int | None) -> None:
        """Take over the router an earlier controller left, or start one. port: that of the earlier one."""
        self._port = port
        try:
            self._actor = ray.get_actor(ACTOR_NAME)
            self._begin("sample", self._actor.sample.remote())
        except ValueError:
            self._start()

    def poll(self) -> None:
        """Note what finished; ask anew, or restart the process."""
        if self._pending is None:
            if self._actor is None:
                if time.monotonic() >= self._retry_at:
                    self._start()
            else:
                self._begin("sample", self._actor.sample.remote())
        elif ray.wait([self._pending], timeout=0)[0]:
            self._finish()
        elif time.monotonic() - self._since > SILENT_S:
            self._lose("no answer")

    def route(self, url: str, *, add: bool) -> None:
        """Ask the router to add or remove a worker. It does so in its own time, so asking twice soon is no use."""
        now = time.monotonic()
        if now - self._asked.get((url, add), -ASK_AGAIN_S) < ASK_AGAIN_S:
            return
        self._asked[(url, add)] = now
        # Its errors show in the next sample.
        self._actor.route.remote([url] if add else [], [] if add else [url])

    def _start(self) -> None:
        # Beside the controller: of several machines, the one that clients are told of.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        options: dict[str, Any] = {"name": ACTOR_NAME, "num_cpus": 0, "scheduling_strategy": here}
        if self._durable:
            options["lifetime"] = "detached"
        try:
            self._actor = self._actor or RouterActor.options(**options).remote(self._config, self._log)
        except ValueError:  # the name of a dead one is given back late
            self._retry_at = time.monotonic() + RESTART_AFTER_S
            return
        self._asked = {}
        self._begin("start", self._actor.start.remote(self._port))

    def _begin(self, operation: Literal["start", "sample"], pending: Any) -> None:
        self._operation, self._pending, self._since = operation, pending, time.monotonic()

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        try:
            answer = ray.get(pending)
        except (DraftloopError, RayError) as error:
            self._lose(one_line(error))
            return
        if self._operation == "start":
            self.url = answer
            self._port = int(answer.rsplit(":", 1)[1])
            self._emit("router_started", t_s=self._now(), url=answer)
        else:
            self._sampled(answer)

    def _sampled(self, sample: RouterSample) -> None:
        if sample.problem is None and sample.url is not None:
            self.url, self.routed, self._misses = sample.url, sample.routed, 0
            self._port = int(sample.url.rsplit(":", 1)[1])
            return
        self._misses += 1
        # A process that is gone is gone; one that is only slow has clients in it.
        if sample.url is None or self._misses >= MOST_MISSES:
            self.routed, self._misses = None, 0
            self._emit("router_lost", t_s=self._now(), reason=sample.problem)
            self._start()

    def _lose(self, reason: str) -> None:
        """The actor is gone: a new one after a pause."""
        self._emit("router_lost", t_s=self._now(), reason=reason)
        self.routed = None
        self.end()
        self._retry_at = time.monotonic() + RESTART_AFTER_S

    def stopping(self) -> list[Any]:
        """Begin to stop; the calls to wait for."""
        return [] if self._actor is None else [self._actor.stop.remote()]

    def end(self) -> None:
        """Kill the actor; the process dies with it."""
        if self._actor is not None:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self._actor)
        self._actor = self._pending = None


class AttachedRouter:
    """A router that something else runs: it is read, never changed."""

    def __init__(self, url: str) -> None:
        self._client = RouterClient(url)
        self._next = 0.0
        self.url: str | None = self._client.base_url
        self.routed: frozenset[str] | None = None

    @property
    def port(self) -> int | None:
        """Nothing to come back to."""
        return None

    def adopt(self, port: int | None) -> None:
        """Raises ServerError when the router does not answer."""
        self.routed = frozenset(self._client.workers())

    def poll(self) -> None:
        """Look now and then; a router that does not answer leaves the last list."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + WATCH_EVERY_S
        with contextlib.suppress(DraftloopError):
            self.routed = frozenset(self._client.workers())

    def route(self, url: str, *, add: bool) -> None:
        """The plan of a fleet that is not managed never asks."""

    def stopping(self) -> list[Any]:
        return []

    def end(self) -> None:
        self._client.close()
