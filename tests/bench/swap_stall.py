"""The stall of hot swaps under load, as a streaming client sees it.

    python tests/bench/swap_stall.py [--swaps 50] [--concurrency 4]

Last line, JSON: stall_p50_ms, stall_p99_ms (longest gap between tokens less the median gap), step_ms (median gap),
copy_ms (the update call alone, server idle), paused_p50_ms, failed_requests, swaps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading

from serving import Bench, speculative_worker

from draftloop.fleet.worker import WorkerSwap
from draftloop.generator.driver import TrafficDriver
from draftloop.generator.results import TrafficStats

IDLE_SWAPS = 5


def swaps(bench: Bench, count: int) -> list[WorkerSwap]:
    """Swap back and forth between the two drafters."""
    return [bench.worker.swap(bench.drafters[(index + 1) % 2]) for index in range(count)]


class Load(threading.Thread):
    """Chat traffic in a thread of its own until `finish`."""

    def __init__(self, bench: Bench, concurrency: int) -> None:
        super().__init__(daemon=True)
        config = bench.config.traffic.model_copy(update={"concurrency": concurrency})
        self._driver = TrafficDriver([bench.url], bench.prompts, config, seed=0)
        self._loop = asyncio.new_event_loop()
        self._finished = asyncio.Event()
        self.stats = TrafficStats()

    def run(self) -> None:
        self._loop.run_until_complete(self._drive())

    async def _drive(self) -> None:
        await self._driver.start()
        await self._finished.wait()
        self.stats = await self._driver.stop()

    def finish(self) -> TrafficStats:
        self._loop.call_soon_threadsafe(self._finished.set)
        self.join()
        return self.stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    with speculative_worker(arguments.overrides, drafters=2) as bench:
        idle = swaps(bench, IDLE_SWAPS + IDLE_SWAPS % 2)
        load = Load(bench, arguments.concurrency)
        load.start()
        done = swaps(bench, arguments.swaps)
        stats = load.finish()
    stalls = [swap.stall_ms for swap in done if swap.stall_ms is not None]
    steps = [swap.step_ms for swap in done if swap.step_ms is not None]
    result = {
        "stall_p50_ms": round(statistics.median(stalls), 1),
        "stall_p99_ms": round(statistics.quantiles(stalls, n=100, method="inclusive")[-1], 1),
        "step_ms": round(statistics.median(steps), 1),
        "copy_ms": round(statistics.median(swap.report.update_ms for swap in idle), 1),
        "paused_p50_ms": round(statistics.median(swap.report.paused_ms for swap in done), 1),
        "failed_requests": stats.failed,
        "swaps": len(done),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
