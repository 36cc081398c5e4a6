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
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from chaos_runs import Chaos
from clients import clear_questions, roll_out
from fleet_run import FleetRun
from tiny_fleet import fleet_config, make_trained
from tiny_llama import make_tiny_target

from draftloop.core.config import Config

QUESTIONS, ANSWER_TOKENS = 8, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftloop-chaos-") as name:
        scratch = Path(name)
        target = make_tiny_target(scratch / "tiny-llama", seed=0)
        questions = clear_questions(target, QUESTIONS, ANSWER_TOKENS, seed=7)
        config = fleet_config(target, scratch)
        good = make_trained(target, Config.model_validate(config), scratch / "good")
        with FleetRun(scratch / "run", config) as fleet:
            fleet.wait_until(fleet.converged)
            roll_out(fleet, good, questions)  # the trainer adds others
            report = Chaos(fleet, questions, random.Random(arguments.seed)).run(arguments.runs)
    print(json.dumps(report.as_json()))


if __name__ == "__main__":
    main()
