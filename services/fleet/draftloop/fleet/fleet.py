"""The fleet: N workers behind a router, as Ray actors. The thin executor around `plan`.

`poll` gathers what finished, `observed` says how things are, `act` begins what the plan wants. Nothing here waits: a
start of a minute or a swap of seconds is a Ray call whose answer a later `poll` finds.

Actors carry names in the run's Ray namespace. In a cluster that outlives the controller they outlive it too, and
`adopt` finds them again, whatever they were doing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError

from draftloop.core.config import Config
from draftloop.core.errors import DraftloopError, ServerError
from draftloop.fleet.counters import WorkerSample
from draftloop.fleet.member import (
    ACTOR_PREFIX,
    Member,
    create_actor,
    new_member,
    remove_empty_rooms,
    resources,
    room_name,
)
from draftloop.fleet.plan import Action, Observed, WorkerView
from draftloop.fleet.ray_errors import one_line
from draftloop.fleet.router_keeper import AttachedRouter, RouterKeeper
from draftloop.fleet.worker import WorkerSwap

# A worker that leaves finishes what it runs, for so long.
DRAIN_S = 30.0
STOP_TIMEOUT_S = 12.0
NO_ROOM_AFTER_S = 10.0
SWAP_TIMEOUT_S = 300.0


class Emit(Protocol):
    """Where events go."""

    def __call__(self, kind: Any, **data: Any) -> None: ...


class Blame(Protocol):
    """Told when a worker failed with, or for, a drafter version."""

    def __call__(self, worker: str, version: str, reason: str) -> None: ...


class Fleet:
    """logs: folder of the servers' logs.  folder_of: a version's checkpoint folder.  durable: the actors outlive this
    process, as the cluster does.  now: seconds since the run started, for events."""

    def __init__(
        self,
        target: Path,
        config: Config,
        logs: Path,
        folder_of: Callable[[str], Path],
        durable: bool,
        router: RouterKeeper | AttachedRouter,
        emit: Emit,
        blame: Blame,
        now: Callable[[], float],
    ) -> None:
        self._target = target
        self._config = config
        self._logs = logs
        self._folder_of = folder_of
        self._durable = durable
        self._emit = emit
        self._blame = blame
        self._now = now
        self._members: dict[str, Member] = {}
        self._leaving: list[Member] = []
        self.router = router

    def adopt(self, router_port: int | None) -> list[str]:
        """Take over the actors an earlier controller left; returns the workers' names. router_port: it had this."""
        for actor_name in sorted(ray.util.list_named_actors()):
            if actor_name.startswith(ACTOR_PREFIX):
                name = actor_name.split("-")[1]
                member = Member(name, actor_name, "starting", handle=ray.get_actor(actor_name))
                member.group = self._group_of(actor_name)
                # The sample waits behind whatever the actor is doing.
                member.begin("sample", member.handle.sample.remote())
                (self._leaving.append(member) if name in self._members else self._members.update({name: member}))
        remove_empty_rooms([member.actor_name for member in [*self._members.values(), *self._leaving]])
        self.router.adopt(router_port)
        return list(self._members)

    def _group_of(self, actor_name: str) -> Any:
        if not any(value > 0 for value in resources(self._config).values()):
            return None
        return ray.util.get_placement_group(room_name(actor_name))

    def observed(self) -> Observed:
        return Observed(time.monotonic(), self.views(), self.router.routed)

    def views(self) -> dict[str, WorkerView]:
        return {name: member.view for name, member in self._members.items()}

    def samples(self) -> Mapping[str, WorkerSample]:
        """The newest sample of each worker that answers."""
        return {name: m.sample for name, m in self._members.items() if m.phase == "ready" and m.sample is not None}

    def handles(self) -> list[Any]:
        """Actors of the workers that can be asked for records now."""
        return [member.handle for member in list(self._members.values()) if member.phase == "ready"]

    def poll(self) -> None:
        """Note what finished, ask the idle for a sample, give up on the silent."""
        self.router.poll()
        for member in list(self._members.values()):
            if member.finished():
                self._finish(member)
            elif member.pending is not None:
                self._check_patience(member)
            elif member.phase == "ready":
                member.begin("sample", member.handle.sample.remote())
        self._leaving = [member for member in self._leaving if not self._left(member)]

    def _finish(self, member: Member) -> None:
        operation = member.operation
        try:
            answer = member.take()
        except (DraftloopError, RayError) as error:
            if operation == "swap" and not isinstance(error, RayActorError):
                self._swap_failed(member, one_line(error))
            else:
                self._lose(member, one_line(error))
            return
        match operation:
            case "room":
                self._create(member)
            case "start":
                # Ready once it has said what it serves.
                self._emit("worker_started", t_s=self._now(), worker=member.name, url=answer, version=member.born_with)
                member.begin("sample", member.handle.sample.remote())
            case "swap":
                self._swapped(member, answer)
            case "sample" | "resample":
                self._sampled(member, answer)

    def _create(self, member: Member) -> None:
        log = self._logs / f"server-{member.name}.log"
        create_actor(member, self._config, self._durable, self._target, self._config, log)
        member.phase = "starting"
        member.begin("start", member.handle.start.remote(self._folder_of(str(member.born_with))))

    def _sampled(self, member: Member, sample: WorkerSample) -> None:
        if sample.problem is not None:
            self._lose(member, sample.problem)
            return
        member.sample, member.version, member.url = sample, sample.version, sample.url
        member.phase, member.failures, member.swapping_to = "ready", 0, None

    def _swapped(self, member: Member, done: WorkerSwap) -> None:
        version = done.report.version
        member.phase, member.version, member.refused, member.swapping_to = "ready", version, None, None
        self._emit(
            "swap",
            t_s=self._now(),
            worker=member.name,
            version=version,
            stall_ms=done.stall_ms,
            paused_ms=done.report.paused_ms,
            copy_ms=done.report.update_ms,
            checksum_ok=done.report.checksum_ok,
        )
        most = self._config.rollout.max_stall_ms
        if done.stall_ms is not None and done.stall_ms > most:
            self._blame(member.name, version, f"the swap stalled a client for {done.stall_ms:.0f} ms of {most:.0f}")

    def _swap_failed(self, member: Member, reason: str) -> None:
        version = str(member.swapping_to)
        self._emit("swap_failed", t_s=self._now(), worker=member.name, version=version, reason=reason)
        self._blame(member.name, version, reason)
        member.refused, member.retry_at = version, time.monotonic() + self._config.fleet.backoff_s
        # What it serves now only the server knows.
        member.begin("resample", member.handle.sample.remote())

    def _check_patience(self, member: Member) -> None:
        most = self._config.fleet.health_timeout_s
        match member.operation:
            case "room":
                if member.age() > NO_ROOM_AFTER_S and not member.told_no_room:
                    member.told_no_room = True
                    needs = ", ".join(f"{value:g} {key}" for key, value in resources(self._config).items() if value)
                    reason = f"the Ray cluster has no room for worker {member.name} ({needs}); it waits"
                    self._emit("error", t_s=self._now(), message=reason)
                return
            case "start":
                most += self._config.server.start_timeout_s
            case "sample" if member.phase == "starting":
                most += self._config.server.start_timeout_s
            case "swap":
                most = SWAP_TIMEOUT_S
        if member.age() > most:
            self._lose(member, f"no answer for {most:.0f} s")

    def _lose(self, member: Member, reason: str) -> None:
        """The worker is gone, or as good as gone: a new one takes its place after a pause."""
        version = member.swapping_to or member.version or member.born_with
        self._emit("worker_lost", t_s=self._now(), worker=member.name, version=version, reason=reason)
        if version is not None:
            self._blame(member.name, version, reason)
        member.end()
        fleet = self._config.fleet
        pause = min(fleet.max_backoff_s, fleet.backoff_s * 2.0**member.failures)
        failures = member.failures + 1
        self._members[member.name] = Member(
            member.name, member.actor_name, "dead", failures=failures, retry_at=time.monotonic() + pause
        )

    def act(self, action: Action) -> None:
        """Begin one action of the plan."""
        member = self._members.get(action.worker)
        match action.kind:
            case "start":
                fresh = new_member(action.worker, self._config, str(action.version), self._durable)
                fresh.failures = member.failures if member is not None else 0
                self._members[action.worker] = fresh
            case "swap" if member is not None:
                member.phase, member.swapping_to = "swapping", action.version
                member.begin("swap", member.handle.swap.remote(self._folder_of(str(action.version))))
            case "stop" if member is not None:
                self._leave(member)
            case "register":
                self.router.route(str(action.url), add=True)
            case "unregister":
                self.router.route(str(action.url), add=False)

    def _leave(self, member: Member) -> None:
        """Out of the routing at once (the plan sees to it), out of the cluster when its requests are done."""
        del self._members[member.name]
        self._emit("worker_stopped", t_s=self._now(), worker=member.name)
        if member.phase != "ready":
            member.end()
            return
        member.begin("sample", member.handle.sample.remote())
        self._leaving.append(member)
        member.retry_at = time.monotonic() + DRAIN_S

    def _left(self, member: Member) -> bool:
        """Whether a leaving worker is gone. It is stopped when it is idle or out of time, killed when that fails."""
        if member.pending is not None and not member.finished() and member.age() < STOP_TIMEOUT_S:
            return False
        if member.operation == "sample" and time.monotonic() < member.retry_at and not _is_idle(member):
            member.begin("sample", member.handle.sample.remote())
            return False
        if member.operation != "stop":
            member.begin("stop", member.handle.stop.remote())
            return False
        member.end()
        return True

    def stop(self) -> None:
        """End every worker and the router; returns when they are gone."""
        members = [member for member in [*self._members.values(), *self._leaving] if member.handle is not None]
        stops = [member.handle.stop.remote() for member in members] + self.router.stopping()
        if stops:
            with contextlib.suppress(RayError):
                ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)
        for member in [*self._members.values(), *self._leaving]:
            member.end()
        self.router.end()
        self._members, self._leaving = {}, []


def require_free_ports(config: Config) -> None:
    """Several workers cannot share one fixed port. Raises ServerError in one line."""
    if config.server.port is not None and config.fleet.workers > 1:
        raise ServerError(
            f"server.port={config.server.port} is one port for {config.fleet.workers} workers: leave server.port out, "
            "clients use the router's"
        )


def _is_idle(member: Member) -> bool:
    """Whether the finished sample tells of no running request; a worker that cannot tell has none."""
    try:
        sample: WorkerSample = ray.get(member.pending, timeout=0)
    except (DraftloopError, RayError):
        return True
    return sample.problem is not None or sample.running == 0
