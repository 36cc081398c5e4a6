"""The traffic driver as a Ray actor."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from draftloop.core.config import TrafficConfig
from draftloop.generator.driver import TrafficDriver
from draftloop.generator.prompts import Prompt
from draftloop.generator.results import TrafficStats


class Generator:
    """One driver at a time. An async actor: its methods answer while the traffic runs."""

    def __init__(self) -> None:
        self._driver: TrafficDriver | None = None
        self._last = TrafficStats()

    async def start(
        self, base_urls: Sequence[str], prompts: Sequence[Prompt], config: TrafficConfig, seed: int
    ) -> None:
        """Begin traffic, after stopping what ran before."""
        await self.stop()
        self._driver = TrafficDriver(base_urls, prompts, config, seed)
        await self._driver.start()

    async def stats(self) -> TrafficStats:
        """Totals of the running driver, or of the last one."""
        return self._last if self._driver is None else self._driver.stats()

    async def wait(self) -> None:
        """Until the traffic ends. Raises ServerError when the server failed every request."""
        if self._driver is not None:
            await self._driver.wait()

    async def stop(self, deadline_s: float = 30.0) -> TrafficStats:
        """End the traffic and return its totals; see `TrafficDriver.stop`."""
        driver, self._driver = self._driver, None
        if driver is not None:
            self._last = driver.stats()
            self._last = await driver.stop(deadline_s)
        return self._last


GeneratorActor = ray.remote(Generator)
