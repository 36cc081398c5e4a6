"""Load: many streaming clients on a fleet while its drafter is swapped again and again."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import psutil
from clients import Question
from fleet_run import FleetRun
from processes import marked

REQUEST_TIMEOUT_S = 300.0
NEAR_SWAP_S = 1.0


@dataclass
class LoadReport:
    """gap_*: between two pieces of one client's stream, ms; at_swap: those within a second of a swap.
    rss_growth: resident memory of all the fleet's processes, last quarter over second quarter."""

    clients: int
    seconds: float
    requests: int
    failed_requests: int
    wrong_outputs: int
    swaps: int
    gap_p50_ms: float
    gap_p99_ms: float
    gap_at_swap_p99_ms: float | None
    rss_growth: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class StreamingClients:
    """A context manager. gaps: (when, seconds) of every wait between two pieces of a stream."""

    def __init__(self, router: str, questions: Sequence[Question], count: int) -> None:
        self._url = f"{router}/generate"
        self._questions = itertools.cycle(questions)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        self.ok = self.failed = self.wrong = 0
        self.gaps: list[tuple[float, float]] = []

    def __enter__(self) -> StreamingClients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
            while not self._stopping.is_set():
                with self._lock:
                    question = next(self._questions)
                gaps: list[tuple[float, float]] = []
                answer = self._stream(client, question, gaps)
                with self._lock:
                    self.gaps += gaps
                    self.failed += answer is None
                    self.ok += answer == question.answer
                    self.wrong += answer is not None and answer != question.answer

    def _stream(
        self, client: httpx.Client, question: Question, gaps: list[tuple[float, float]]
    ) -> tuple[int, ...] | None:
        parameters = {"temperature": 0.0, "max_new_tokens": len(question.answer), "ignore_eos": True}
        body = {"input_ids": list(question.prompt), "sampling_params": parameters, "stream": True}
        answer: tuple[int, ...] | None = None
        last: float | None = None
        try:
            with client.stream("POST", self._url, json=body) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == line or data == "[DONE]":
                        continue
                    now = time.monotonic()
                    if last is not None:
                        gaps.append((now, now - last))
                    last, answer = now, tuple(json.loads(data)["output_ids"])
        except (httpx.HTTPError, KeyError, ValueError):
            return None
        return answer


def swaps_under_load(
    fleet: FleetRun, questions: Sequence[Question], clients: int, seconds: float, swap_every_s: float
) -> LoadReport:
    """Order another version every `swap_every_s`; the roll-out goes over all workers each time."""
    status = fleet.status()
    assert status is not None
    promoted = status["rollout"]["promoted"]
    other = next(version for version in status["versions"] if version not in (promoted, "random"))
    order = itertools.cycle((other, promoted))
    before = len(fleet.events("swap"))
    memory: list[float] = []
    began = time.monotonic()
    with StreamingClients(str(status["router"]), questions, clients) as streams:
        due = began + swap_every_s
        while time.monotonic() < began + seconds:
            time.sleep(1.0)
            memory.append(resident_bytes(fleet))
            if time.monotonic() >= due:
                due += swap_every_s
                fleet.wait_until(fleet.converged)
                fleet.ask("rollback", {"version": next(order)})
        fleet.wait_until(fleet.converged)
    events = fleet.events("swap")[before:]
    # Events tell wall time; the streams' clock is monotonic.
    offset = time.monotonic() - time.time()
    moments = [event.time + offset for event in events]
    gaps = [gap for _, gap in streams.gaps]
    near = [gap for when, gap in streams.gaps if any(abs(when - moment) < NEAR_SWAP_S for moment in moments)]
    quarter = max(1, len(memory) // 4)
    return LoadReport(
        clients=clients,
        seconds=time.monotonic() - began,
        requests=streams.ok,
        failed_requests=streams.failed,
        wrong_outputs=streams.wrong,
        swaps=len(events),
        gap_p50_ms=statistics.median(gaps) * 1e3,
        gap_p99_ms=percentile_99(gaps) * 1e3,
        gap_at_swap_p99_ms=percentile_99(near) * 1e3 if len(near) > 1 else None,
        rss_growth=statistics.median(memory[-quarter:]) / statistics.median(memory[quarter : 2 * quarter] or memory),
    )


def percentile_99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def resident_bytes(fleet: FleetRun) -> float:
    total = 0.0
    for process in marked(fleet.mark):
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total
