"""Chaos: kill -9 of a fleet's processes at random moments of a roll-out, under load, and what came of it."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from clients import Clients, Question
from fleet_run import FleetRun

from draftloop.capture.ledger import Counts
from draftloop.core.errors import ServerError

KINDS = ("worker", "trainer", "controller", "router")
NEWS = {"worker": "worker_lost", "trainer": "trainer_lost", "controller": "run_started", "router": "router_lost"}
CLIENTS = 4
CONVERGED_WITHIN_S = 300.0
# A kill falls somewhere in the roll-out that has just been ordered.
LATEST_KILL_S = 3.0


@dataclass
class Report:
    """unbalanced: runs after which the records did not add up.  unconverged: runs after which a worker was missing, or
    on another version.  failed_requests: by HTTP status, or by the client's error when there was no answer."""

    runs: int = 0
    ok: int = 0
    wrong_outputs: int = 0
    unbalanced: int = 0
    unconverged: int = 0
    failed_requests: dict[str, int] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Chaos:
    """kinds: what may be killed; each run kills one of them, or two at once."""

    def __init__(
        self, fleet: FleetRun, questions: Sequence[Question], rng: random.Random, kinds: tuple[str, ...] = KINDS
    ) -> None:
        self._fleet = fleet
        self._questions = questions
        self._rng = rng
        self._kinds = kinds

    def run(self, runs: int) -> Report:
        report = Report()
        for _ in range(runs):
            self._one(report)
            print(report.as_json(), flush=True)
        return report

    def _one(self, report: Report) -> None:
        fleet, rng = self._fleet, self._rng
        victims = rng.sample(self._kinds, rng.choice((1, 2)))
        with Clients(fleet.router(), self._questions, CLIENTS) as clients:
            self._order_a_roll_out()
            time.sleep(rng.uniform(0.0, LATEST_KILL_S))
            before = self._news()
            killed = self._kill(victims)
            with contextlib.suppress(AssertionError):
                fleet.wait_until(lambda: self._settled(killed, before), CONVERGED_WITHIN_S)
        report.runs += 1
        report.killed.append("+".join(sorted(killed)))
        report.unconverged += not fleet.converged()
        report.unbalanced += not balanced(fleet)
        report.ok += clients.outcome.ok
        report.wrong_outputs += clients.outcome.wrong
        for failure, count in clients.outcome.failed.items():
            report.failed_requests[failure] = report.failed_requests.get(failure, 0) + count

    def _kill(self, victims: Sequence[str]) -> list[str]:
        """Kill them; whom it met. One that is just being replaced cannot die."""
        killed = [victim for victim in victims if self._fleet.kill(victim, self._rng)]
        if "controller" in killed:
            self._fleet.start_controller()
        return killed

    def _news(self) -> dict[str, int]:
        """How many deaths of each kind the fleet has told of."""
        return {victim: len(self._fleet.events(kind)) for victim, kind in NEWS.items()}

    def _settled(self, killed: Sequence[str], before: Mapping[str, int]) -> bool:
        # A controller takes its trainer along; that is no news to the next one.
        told = [victim for victim in killed if victim != "trainer" or "controller" not in killed]
        news = self._news()
        noticed = all(news[victim] > before[victim] for victim in told)
        return noticed and self._fleet.converged() and books(self._fleet) is not None

    def _order_a_roll_out(self) -> None:
        """Any version but the one that serves."""
        status = self._fleet.status()
        if status is not None:
            others = [name for name in status["versions"] if name not in (status["rollout"]["promoted"], "random")]
            with contextlib.suppress(ServerError):
                self._fleet.ask("rollback", {"version": self._rng.choice(others)})


def balanced(fleet: FleetRun) -> bool:
    """Whether every captured record is somewhere."""
    counts = books(fleet)
    return counts is not None and counts.balanced


def books(fleet: FleetRun) -> Counts | None:
    """What became of the records; None until a trainer that has just started has read its journal."""
    status = fleet.status()
    counts = Counts(**status["accounting"]) if status is not None else Counts()
    return counts if counts.captured else None
