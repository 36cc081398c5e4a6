"""What capture costs serving: paired batches with and without it, on one server.

    python tests/bench/tap_overhead.py [--pairs 12] [--set server.threads=2]

Last line, JSON: overhead (1 - median ratio of throughputs with/without), ratio, ratio_p10, ratio_p90, pairs.
Prompts whose domain is skipped are not captured, so both halves of a pair run the same server, prompts and cache.
"""

from __future__ import annotations

import argparse
import json
import statistics

from serving import speculative_worker

from draftloop.cli.measure import capture_overhead

PROMPTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    with speculative_worker(arguments.overrides) as bench:
        cost = capture_overhead(bench.url, bench.input_ids[:PROMPTS], arguments.pairs)
    ratios = sorted(pair.on / pair.off for pair in cost.pairs)
    tenths = statistics.quantiles(ratios, n=10)
    result = {
        "overhead": round(1 - statistics.median(ratios), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_p10": round(tenths[0], 4),
        "ratio_p90": round(tenths[-1], 4),
        "pairs": len(ratios),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
