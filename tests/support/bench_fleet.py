"""What the fleet benches share: two tiny servers behind the router, a trainer, and two versions that may serve."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from clients import Clients, Question, clear_questions
from fleet_run import FleetRun
from tiny_fleet import fleet_config, make_trained
from tiny_llama import make_tiny_target

from draftloop.core.config import Config

QUESTIONS, ANSWER_TOKENS = 8, 24
PROMOTING_CLIENTS = 2


@contextmanager
def two_versions() -> Iterator[tuple[FleetRun, list[Question]]]:
    """A running fleet, and questions whose plain answers are known. The trainer adds versions of its own."""
    with tempfile.TemporaryDirectory(prefix="draftloop-bench-") as name:
        scratch = Path(name)
        target = make_tiny_target(scratch / "tiny-llama", seed=0)
        questions = clear_questions(target, QUESTIONS, ANSWER_TOKENS, seed=7)
        config = fleet_config(target, scratch)
        good = make_trained(target, Config.model_validate(config), scratch / "good")
        with FleetRun(scratch / "run", config) as fleet:
            fleet.wait_until(fleet.converged)
            _roll_out(fleet, good, questions)
            yield fleet, questions


def _roll_out(fleet: FleetRun, checkpoint: Path, questions: Sequence[Question]) -> None:
    """Promote a drafter under the traffic that its canary is judged by."""

    def restorable() -> bool:
        status = fleet.status()
        return status is not None and checkpoint.name in status["versions"]

    with Clients(fleet.router(), questions, PROMOTING_CLIENTS):
        fleet.wait_until(lambda: fleet.offer(checkpoint))
        fleet.wait_until(lambda: restorable() and fleet.converged())
