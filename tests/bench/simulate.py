"""Does the fleet model predict a real server? SmolLM2 serves batch 1 and 4; from its report, batch 8 is predicted.

    python tests/bench/simulate.py [--tokens 64] [--rounds 2]

One worker with an untrained drafter, the built-in prompts, greedy. What a step costs is what the server measured of
its own steps at batch 1 and 4, which take turns over the rounds; batch 8 then runs as often, and its best round counts.
Last line, JSON: error (predicted over measured tokens/s, less 1), predicted, measured, start_up_s (what timing the
models took), and tokens_per_s and accept_length by batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from serving import Bench, speculative_worker

from draftloop.drafters.load.served import ServedCosts
from draftloop.fleet.worker import UNCAPTURED_DOMAIN
from draftloop.generator.batch import generate_batch
from draftloop.refresher.simulate import Fleet, LearningCurve, Simulation
from draftloop.sglang.load.report import EVERY_S
from draftloop.sglang.load.settings import read_report

CALIBRATED, PREDICTED = (1, 4), 8


@dataclass(frozen=True)
class MeasuredRun:
    """The server under constant load of `batch` requests."""

    batch: int
    tokens_per_s: float
    accept_length: float


def measure(bench: Bench, batch: int, tokens: int, rounds: int = 2) -> MeasuredRun:
    """So many prompts for each place in the batch, every answer of exactly `tokens`."""
    prompts = bench.input_ids[: rounds * batch]
    began = time.perf_counter()
    done = asyncio.run(
        generate_batch(bench.url, prompts, tokens, domain=UNCAPTURED_DOMAIN, concurrency=batch, ignore_eos=True)
    )
    seconds = time.perf_counter() - began
    total = sum(generation.completion_tokens for generation in done)
    steps = sum(generation.spec_verify_ct or 0 for generation in done)
    return MeasuredRun(batch, total / seconds, total / steps)


def best_of(bench: Bench, batches: Sequence[int], tokens: int, rounds: int) -> dict[int, MeasuredRun]:
    """The fastest run of each batch; the batches take turns."""
    best: dict[int, MeasuredRun] = {}
    for _ in range(rounds):
        for batch in batches:
            run = measure(bench, batch, tokens)
            if batch not in best or run.tokens_per_s > best[batch].tokens_per_s:
                best[batch] = run
    return best


def served_costs(bench: Bench) -> tuple[ServedCosts, float]:
    """What the server says of its steps, and the seconds its start-up measurement took."""
    time.sleep(EVERY_S)
    measure(bench, 1, 4)  # the report is written by a step that finds it old
    report = read_report(bench.worker.load_folder)
    if report is None:
        raise SystemExit("the server reported nothing")
    return ServedCosts.load(report["served"]), report["start_up_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    with speculative_worker(arguments.overrides) as bench:
        # Fills the prefix cache for every prompt, so that no round pays for prefill that another did not; at batch 4,
        # so that no step of what is to be predicted is seen before.
        measure(bench, CALIBRATED[-1], 4, 2 * PREDICTED // CALIBRATED[-1])
        best = best_of(bench, CALIBRATED, arguments.tokens, arguments.rounds)
        served, start_up_s = served_costs(bench)
        best |= best_of(bench, [PREDICTED], arguments.tokens, arguments.rounds)
        server = bench.config.server
    length = sum(best[batch].accept_length for batch in CALIBRATED) / len(CALIBRATED)
    fleet = Fleet(
        workers=1,
        costs=served.costs,
        curve=LearningCurve(length, length, 1.0),
        clients=PREDICTED,
        batch=server.max_running_requests,
        tokens=float(arguments.tokens),
        lengths="fixed",
        shape=served.shape,
    )
    predicted = Simulation(fleet, seed=0).run(60.0).tokens_per_s
    measured = best[PREDICTED].tokens_per_s
    result = {
        "error": round(predicted / measured - 1.0, 4),
        "predicted": round(predicted, 1),
        "measured": round(measured, 1),
        "start_up_s": start_up_s,
        "tokens_per_s": {batch: round(run.tokens_per_s, 1) for batch, run in best.items()},
        "accept_length": {batch: round(run.accept_length, 3) for batch, run in best.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
