"""Streaming clients on two tiny servers behind the router, with a swap over both every half minute.

    python tests/bench/load.py [--clients 64] [--seconds 600] [--swap-every 30]

Last line, JSON: clients, seconds, requests, failed_requests, wrong_outputs, swaps, gap_p50_ms, gap_p99_ms,
gap_at_swap_p99_ms (between two pieces of one stream), rss_growth (all processes, last quarter over second quarter).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from bench_fleet import two_versions
from load_runs import swaps_under_load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--swap-every", type=float, default=30.0)
    arguments = parser.parse_args()
    with two_versions() as (fleet, questions):
        report = swaps_under_load(fleet, questions, arguments.clients, arguments.seconds, arguments.swap_every)
    print(json.dumps(report.as_json()))


if __name__ == "__main__":
    main()
