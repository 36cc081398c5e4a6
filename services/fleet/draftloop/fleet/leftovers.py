"""What a killed controller left in a Ray cluster that outlives it, when no other is to take it over."""

from __future__ import annotations

import contextlib

import ray
from ray.exceptions import RayError

from draftloop.fleet.fleet import STOP_TIMEOUT_S
from draftloop.fleet.member import ACTOR_PREFIX, remove_empty_rooms
from draftloop.fleet.router_keeper import ACTOR_NAME


def end_leftovers() -> list[str]:
    """Stop the workers and the router of this Ray namespace and give their room back; the actors' names."""
    names = [n for n in sorted(ray.util.list_named_actors()) if n == ACTOR_NAME or n.startswith(ACTOR_PREFIX)]
    actors = [ray.get_actor(name) for name in names]
    if actors:
        with contextlib.suppress(RayError):
            ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=STOP_TIMEOUT_S)
    for actor in actors:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor)
    remove_empty_rooms([])
    return names
