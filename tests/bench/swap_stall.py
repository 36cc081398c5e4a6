"""The stall of hot swaps under load, as a streaming client sees it.

    python tests/bench/swap_stall.py [--swaps 50] [--concurrency 4]

Last line, JSON: stall_p50_ms, stall_p99_ms (longest gap between tokens less the median gap), step_ms (median gap),
copy_ms (the update call alone, server idle), paused_p50_ms, failed_requests, swaps. no_swap_p50_ms, no_swap_p99_ms:
what the same client sees of the same traffic over as long a stretch in which nothing is swapped: new requests'
prefills make others wait too. Stretches with and without a swap take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
import uuid
from collections.abc import Sequence

from serving import Bench, speculative_worker

from draftloop.fleet.stall import WARM_UP_PIECES, StallProbe
from draftloop.fleet.worker import UNCAPTURED_DOMAIN, WorkerSwap
from draftloop.generator.driver import TrafficDriver
from draftloop.generator.results import TrafficStats

IDLE_SWAPS = 6


def swap(bench: Bench, number: int) -> WorkerSwap:
    """Swap back and forth between the two drafters."""
    return bench.worker.swap(bench.drafters[(number + 1) % 2])


def stall_without_swap(bench: Bench, seconds: float) -> float | None:
    with StallProbe(bench.url, f"{UNCAPTURED_DOMAIN}--{uuid.uuid4().hex}", bench.config.target.context_length) as probe:
        time.sleep(seconds)
    return probe.stall_ms


def take_turns(bench: Bench, count: int) -> tuple[list[WorkerSwap], list[float]]:
    """`count` swaps, and the stalls of as many stretches of about their length without one."""
    done, usual = [], []
    for number in range(count):
        begin = time.perf_counter()
        done.append(swap(bench, number))
        probing = 2 * WARM_UP_PIECES * (done[-1].step_ms or 0.0) / 1e3  # before and after the swap itself
        usual.append(stall_without_swap(bench, max(0.0, time.perf_counter() - begin - probing)))
        print(f"{number}: {done[-1].stall_ms} ms, without a swap {usual[-1]} ms", flush=True)
    return done, [stall for stall in usual if stall is not None]


def p99(stalls: Sequence[float]) -> float:
    return statistics.quantiles(stalls, n=100, method="inclusive")[-1]


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
        idle = [swap(bench, number) for number in range(IDLE_SWAPS)]
        load = Load(bench, arguments.concurrency)
        load.start()
        done, usual = take_turns(bench, arguments.swaps)
        stats = load.finish()
    stalls = [swap.stall_ms for swap in done if swap.stall_ms is not None]
    steps = [swap.step_ms for swap in done if swap.step_ms is not None]
    result = {
        "stall_p50_ms": round(statistics.median(stalls), 1),
        "stall_p99_ms": round(p99(stalls), 1),
        "no_swap_p50_ms": round(statistics.median(usual), 1),
        "no_swap_p99_ms": round(p99(usual), 1),
        "step_ms": round(statistics.median(steps), 1),
        "copy_ms": round(statistics.median(swap.report.update_ms for swap in idle), 1),
        "paused_p50_ms": round(statistics.median(swap.report.paused_ms for swap in done), 1),
        "failed_requests": stats.failed,
        "swaps": len(done),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
