"""kill -9 of workers, trainer, controller and router, one at a time and in pairs, under load and amid roll-outs.

    python tests/bench/chaos.py [--runs 30] [--seed 0]

A fleet of two tiny servers on a Ray cluster of its own, with a trainer and four clients whose answers are compared
with plain decoding. Last line, JSON: runs, ok, wrong_outputs, unbalanced, unconverged, failed_requests (by status),
killed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from bench_fleet import two_versions
from chaos_runs import Chaos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with two_versions() as (fleet, questions):
        report = Chaos(fleet, questions, random.Random(arguments.seed)).run(arguments.runs)
    print(json.dumps(report.as_json()))


if __name__ == "__main__":
    main()
