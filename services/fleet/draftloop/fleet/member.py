"""One worker as the controller keeps it: its actor, the operation under way, what is known of it."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from draftloop.core.config import Config
from draftloop.drafters.device import use_cuda
from draftloop.fleet.counters import WorkerSample
from draftloop.fleet.plan import Phase, WorkerView
from draftloop.fleet.worker import WorkerActor

Operation = Literal["room", "start", "sample", "swap", "resample", "stop"]
ACTOR_PREFIX = "worker-"


@dataclass
class Member:
    """operation: what `pending` will answer, begun at `since` (monotonic s). swapping_to: of a swap."""

    name: str
    actor_name: str
    phase: Phase
    handle: Any = None
    group: Any = None
    operation: Operation | None = None
    pending: Any = None
    since: float = 0.0
    born_with: str | None = None
    swapping_to: str | None = None
    version: str | None = None
    url: str | None = None
    refused: str | None = None
    failures: int = 0
    retry_at: float = 0.0
    sample: WorkerSample | None = None
    told_no_room: bool = False

    @property
    def view(self) -> WorkerView:
        return WorkerView(self.phase, self.version, self.url, self.refused, self.retry_at)

    def begin(self, operation: Operation, pending: Any) -> None:
        self.operation, self.pending, self.since = operation, pending, time.monotonic()

    def age(self) -> float:
        """Seconds the operation has taken so far."""
        return time.monotonic() - self.since

    def finished(self) -> bool:
        """Whether `pending` has its answer, good or bad."""
        return self.pending is not None and bool(ray.wait([self.pending], timeout=0)[0])

    def take(self) -> Any:
        """The answer of the finished operation. Raises what the actor raised, or RayActorError."""
        pending, self.pending, self.operation = self.pending, None, None
        return ray.get(pending)

    def end(self) -> None:
        """Kill the actor; its server dies with it. Give the room back."""
        if self.handle is not None:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self.handle)
        if self.group is not None:
            with contextlib.suppress(RayError, ValueError):
                remove_placement_group(self.group)
        self.handle = self.group = self.pending = self.operation = None


def new_member(name: str, config: Config, version: str, durable: bool) -> Member:
    """A worker that waits for its room. durable: reserve for as long as the cluster lives, not just this process."""
    member = Member(name, f"{ACTOR_PREFIX}{name}-{uuid.uuid4().hex[:8]}", "waiting", born_with=version)
    bundle = {key: value for key, value in resources(config).items() if value > 0}
    if not bundle:
        member.begin("room", ray.put(True))
        return member
    member.group = placement_group(
        [bundle], strategy="STRICT_PACK", name=room_name(member.actor_name), lifetime="detached" if durable else None
    )
    member.begin("room", member.group.ready())
    return member


def room_name(actor_name: str) -> str:
    """Of the placement group that holds the actor. Groups of all runs are listed together."""
    return f"{ray.get_runtime_context().namespace}.{actor_name}"


def remove_empty_rooms(actor_names: Collection[str]) -> None:
    """Give back this run's rooms, those of the actors named aside: a controller killed before it made an actor leaves
    one, and nobody else would ever get it."""
    rooms = [entry["name"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"]
    ours = {name for name in rooms if name.startswith(room_name(ACTOR_PREFIX))}
    for name in sorted(ours - {room_name(name) for name in actor_names}):
        with contextlib.suppress(RayError, ValueError):
            remove_placement_group(ray.util.get_placement_group(name))


def create_actor(member: Member, config: Config, durable: bool, *args: Any) -> None:
    """Make the actor in its room. A reservation of nothing needs no placement group."""
    needs = resources(config)
    options: dict[str, Any] = {"name": member.actor_name, "num_cpus": needs["CPU"], "num_gpus": needs["GPU"]}
    if durable:
        options["lifetime"] = "detached"
    if member.group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(member.group)
    member.handle = WorkerActor.options(**options).remote(*args)


def resources(config: Config) -> dict[str, float]:
    """What Ray reserves for one worker."""
    gpus = config.fleet.gpus_per_worker
    if gpus is None:
        gpus = 1.0 if use_cuda(config.server.device) else 0.0
    return {"CPU": config.fleet.cpus_per_worker, "GPU": gpus}
