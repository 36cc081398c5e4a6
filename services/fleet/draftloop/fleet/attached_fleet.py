"""A fleet that something else runs: its servers come and go with its router's list; only their drafters are ours."""

from __future__ import annotations

import itertools
import time
from typing import Any

from draftloop.fleet.fleet import Fleet
from draftloop.fleet.member import Member
from draftloop.fleet.worker import WorkerActor


class AttachedFleet(Fleet):
    """One actor beside each server that the router lists."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._numbers = itertools.count()
        self._urls: dict[str, str] = {}

    def adopt(self, router_port: int | None) -> list[str]:
        """Raises ServerError when the router does not answer."""
        self.router.adopt(router_port)
        return []

    def poll(self) -> None:
        super().poll()
        routed = self.router.routed or frozenset()
        failures: dict[str, int] = {}
        for name, url in list(self._urls.items()):
            member = self._members[name]
            # A lost one that is still listed is tried again under a new name, after ever longer pauses.
            if url not in routed or (member.phase == "dead" and time.monotonic() >= member.retry_at):
                member.end()
                failures[url] = member.failures
                del self._members[name], self._urls[name]
        for url in sorted(routed - set(self._urls.values())):
            self._attach(f"w{next(self._numbers)}", url, failures.get(url, 0))

    def _attach(self, name: str, url: str, failures: int) -> None:
        handle = WorkerActor.options(num_cpus=0).remote(self._target, self._config, self._logs / f"attached-{name}.log")
        member = Member(name, name, "starting", handle=handle, failures=failures)
        member.begin("start", handle.attach.remote(url))
        self._members[name], self._urls[name] = member, url
