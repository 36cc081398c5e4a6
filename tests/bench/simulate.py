"""Does the fleet model predict a real server? Calibrated on SmolLM2 at batch 1 and 4, it predicts batch 8.

    python tests/bench/simulate.py [--tokens 64] [--rounds 2]

One worker with an untrained drafter, the built-in prompts, greedy. The batches take turns over the rounds, and each
batch's throughput is the best of its rounds. Last line, JSON: error (predicted over measured tokens/s, less 1),
predicted, measured, and tokens_per_s and accept_length by batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from serving import Bench, speculative_worker

from draftloop.fleet.worker import UNCAPTURED_DOMAIN
from draftloop.generator.batch import generate_batch
from draftloop.refresher.simulate import Fleet, LearningCurve, MeasuredRun, Simulation, calibrate

CALIBRATED, PREDICTED = (1, 4), 8


def measure(bench: Bench, batch: int, tokens: int) -> MeasuredRun:
    """Two prompts for each place in the batch, every answer of exactly `tokens`."""
    prompts = bench.input_ids[: 2 * batch]
    began = time.perf_counter()
    done = asyncio.run(
        generate_batch(bench.url, prompts, tokens, domain=UNCAPTURED_DOMAIN, concurrency=batch, ignore_eos=True)
    )
    seconds = time.perf_counter() - began
    total = sum(generation.completion_tokens for generation in done)
    steps = sum(generation.spec_verify_ct or 0 for generation in done)
    server = bench.config.server
    return MeasuredRun(batch, server.num_draft_tokens, server.num_steps, total / seconds, total / steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    batches = (*CALIBRATED, PREDICTED)
    best: dict[int, MeasuredRun] = {}
    with speculative_worker(arguments.overrides) as bench:
        # Fills the prefix cache for every prompt, so that no round pays for prefill that another did not.
        measure(bench, PREDICTED, 4)
        for _ in range(arguments.rounds):
            for batch in batches:
                run = measure(bench, batch, arguments.tokens)
                if batch not in best or run.tokens_per_s > best[batch].tokens_per_s:
                    best[batch] = run
        server = bench.config.server
    length = sum(best[batch].accept_length for batch in CALIBRATED) / len(CALIBRATED)
    fleet = Fleet(
        workers=1,
        costs=calibrate([best[batch] for batch in CALIBRATED]),
        curve=LearningCurve(length, length, 1.0),
        clients=PREDICTED,
        batch=server.max_running_requests,
        tokens=float(arguments.tokens),
        lengths="fixed",
        nodes=server.num_draft_tokens,
        depth=server.num_steps,
    )
    predicted = Simulation(fleet, seed=0).run(60.0).tokens_per_s
    measured = best[PREDICTED].tokens_per_s
    result = {
        "error": round(predicted / measured - 1.0, 4),
        "predicted": round(predicted, 1),
        "measured": round(measured, 1),
        "tokens_per_s": {batch: round(best[batch].tokens_per_s, 1) for batch in batches},
        "accept_length": {batch: round(best[batch].accept_length, 3) for batch in batches},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
