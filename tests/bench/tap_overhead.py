"""What capture costs serving: paired batches with capture on and off, on one server.

    python tests/bench/tap_overhead.py [--minutes 7] [--set server.threads=2]

Last line, JSON: overhead (1 - median ratio of throughputs on/off), ratio_p10, ratio_p90, low, high (95 % bootstrap of
the overhead), pairs, records, on_tokens_per_s, off_tokens_per_s.

Capture is turned on and off by the live policy, so both halves of a pair have the same server, prompts and cache. A
pair is short (drift of the machine is slow against it) and its order alternates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass

import numpy as np
from serving import Bench, speculative_worker

from draftloop.core.config import CapturePolicy
from draftloop.generator.batch import generate_batch

PROMPTS = 8
TOKENS = 48
FEWEST_PAIRS = 8
ON, OFF = CapturePolicy(), CapturePolicy(sample_rate=0.0)


@dataclass(frozen=True)
class Pair:
    """Tokens a second."""

    on: float
    off: float


def throughput(bench: Bench, policy: CapturePolicy) -> float:
    """Tokens a second of one batch of PROMPTS concurrent greedy answers, each of exactly TOKENS tokens."""
    bench.worker.set_capture(policy)
    start = time.perf_counter()
    done = asyncio.run(
        generate_batch(
            bench.url, bench.input_ids[:PROMPTS], TOKENS, domain="bench", concurrency=PROMPTS, ignore_eos=True
        )
    )
    return sum(answer.completion_tokens for answer in done) / (time.perf_counter() - start)


def measure(bench: Bench, until: float) -> tuple[list[Pair], int]:
    """Pairs until `until` (time.perf_counter), and the records they left."""
    throughput(bench, OFF)  # fills the prefix cache, so that no timed batch pays for prefill
    pairs: list[Pair] = []
    records = 0
    while len(pairs) < FEWEST_PAIRS or time.perf_counter() < until:
        order = (("on", ON), ("off", OFF)) if len(pairs) % 2 == 0 else (("off", OFF), ("on", ON))
        pairs.append(Pair(**{name: throughput(bench, policy) for name, policy in order}))
        records += len(bench.worker.take(PROMPTS * 4))
    return pairs, records


def overhead_bounds(ratios: list[float]) -> tuple[float, float]:
    """95 % interval of 1 - median, by bootstrap over the pairs."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (4000, len(ratios))), axis=1)
    low, high = np.quantile(1 - medians, (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=6.0, help="wall clock after the server's start")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    with speculative_worker(arguments.overrides) as bench:
        pairs, records = measure(bench, time.perf_counter() + 60 * arguments.minutes)
    ratios = sorted(pair.on / pair.off for pair in pairs)
    tenths = statistics.quantiles(ratios, n=10)
    low, high = overhead_bounds(ratios)
    result = {
        "overhead": round(1 - statistics.median(ratios), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "ratio_p10": round(tenths[0], 4),
        "ratio_p90": round(tenths[-1], 4),
        "pairs": len(pairs),
        "records": records,
        "on_tokens_per_s": round(statistics.median(pair.on for pair in pairs), 1),
        "off_tokens_per_s": round(statistics.median(pair.off for pair in pairs), 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
