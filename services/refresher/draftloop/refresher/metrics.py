"""The Prometheus exporter: what the loop decides and measures, under the names that dashboard and alerts use.

Fed from two sides: `event` takes every event as it is logged, `observe` the loop's state and the traffic's figures
every turn. A figure that is not known yet has no sample or is NaN, rather than a zero.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server

from draftloop.core.config import MetricsConfig
from draftloop.core.errors import DraftloopError
from draftloop.refresher.loop import LoopState

_STALL_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class WorkerFigures:
    """What is known of one worker now. ready: it serves.  accept_length: by domain, of a recent window."""

    name: str
    version: str
    ready: bool = True
    tokens_per_s: float | None = None
    accept_length: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrafficTotals:
    """Since the start. requests: answered.  failed: refused or cut."""

    requests: int
    failed: int
    tokens: int


class Exporter:
    """Holds the metrics; as a context manager it serves them on `config.host`:`config.port`, if there is a port.

    Entering raises DraftloopError in one line when the port is taken.
    """

    def __init__(self, config: MetricsConfig) -> None:
        self._config = config
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"draftloop_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"draftloop_{name}", text, labels, registry=registry)

        self._requests = counter("requests", "Requests by how they ended", ["outcome"])
        self._tokens = counter("generated_tokens", "Tokens the fleet answered")
        self._tokens_per_s = gauge("tokens_per_second", "Generated tokens a second, recent window", ["worker"])
        self._accept = gauge("accept_length", "Tokens a verification step, recent window", ["worker", "domain"])
        self._ready = gauge("worker_ready", "1 while the worker serves", ["worker"])
        self._version = gauge("worker_version", "1 for the drafter version a worker serves", ["worker", "version"])
        self._promoted = Info("draftloop_promoted", "The drafter version that is in service", registry=registry)
        self._swaps = counter("swaps", "Drafters put into a running server")
        self._swap_failures = counter("swap_failures", "Swaps that a server refused or broke off")
        self._rollbacks = counter("rollbacks", "Candidates taken back after their canary")
        self._stall = Histogram(
            "draftloop_swap_stall_seconds",
            "Longest gap of a streaming client at a swap, less its median gap",
            registry=registry,
            buckets=_STALL_BUCKETS_S,
        )
        self._candidates = counter("candidates", "Candidates by the gate's verdict", ["verdict"])
        self._gate = gauge("gate_accept_length", "Expected accepted length at the newest gate", ["drafter"])
        self._gate_low = gauge("gate_gain_lower_bound", "Lower bound of the newest candidate's gain")
        self._records = gauge("capture_records", "Captured records by what became of them", ["state"])
        self._captured_tokens = counter("captured_tokens", "Positions in the collected records")
        self._drift = counter("drift_alarms", "Drift alarms", ["signal"])
        self._training = gauge("training_active", "0 while training is paused for want of gain")
        self._speculating = gauge("speculation_pays", "0 while plain decoding is predicted to be faster")
        self._steps = counter("train_steps", "Optimiser steps")
        self._loss = gauge("train_loss", "Loss of the newest optimiser step")
        for unknown in (self._loss, self._gate_low):
            unknown.set(math.nan)

    @property
    def names(self) -> set[str]:
        """Every sample name that a scrape can hold."""
        return {
            f"{metric.name}{suffix}"
            for metric in self.registry.collect()
            for suffix in {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}.get(
                metric.type, ("",)
            )
        }

    def event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Take an event as it is logged."""
        match kind:
            case "candidate":
                self._gate.labels("serving").set(data["gate_before"])
                self._gate.labels("candidate").set(data["gate_after"])
                if data["gain_bounds"]:
                    self._gate_low.set(data["gain_bounds"][0])
            case "promoted" | "refused":
                self._candidates.labels(kind).inc()
            case "swap":
                self._swaps.inc()
                if data["stall_ms"] is not None:
                    self._stall.observe(data["stall_ms"] / 1e3)
            case "swap_failed":
                self._swap_failures.inc()
            case "rolled_back":
                self._rollbacks.inc()
            case "drift":
                self._drift.labels(data["signal"]).inc()

    def observe(self, state: LoopState, traffic: TrafficTotals, workers: Sequence[WorkerFigures]) -> None:
        """Take the present state. Workers that are no longer named lose their samples."""
        _raise_to(self._requests.labels("ok"), traffic.requests)
        _raise_to(self._requests.labels("failed"), traffic.failed)
        _raise_to(self._tokens, traffic.tokens)
        _raise_to(self._captured_tokens, state.captured.tokens)
        _raise_to(self._steps, state.train_steps)
        for name, count in asdict(state.buffer).items():
            self._records.labels(name).set(count)
        self._promoted.info({"version": state.serving})
        self._training.set(state.training)
        self._speculating.set(state.speculating)
        if state.loss is not None:
            self._loss.set(state.loss)
        for family in (self._ready, self._version, self._tokens_per_s, self._accept):
            family.clear()
        for worker in workers:
            self._ready.labels(worker.name).set(worker.ready)
            self._version.labels(worker.name, worker.version).set(1)
            if worker.tokens_per_s is not None:
                self._tokens_per_s.labels(worker.name).set(worker.tokens_per_s)
            for domain, length in worker.accept_length.items():
                self._accept.labels(worker.name, domain).set(length)

    def __enter__(self) -> Exporter:
        if self._config.port is not None:
            try:
                self._server, self._thread = start_http_server(
                    self._config.port, self._config.host, registry=self.registry
                )
            except OSError as err:
                raise DraftloopError(
                    f"metrics cannot listen on {self._config.host}:{self._config.port}: {err.strerror}; "
                    "set metrics.port to a free one"
                ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def _raise_to(counter: Counter, total: float) -> None:
    """Let a counter show a total that is counted elsewhere; a total that fell (a restart) adds nothing."""
    samples = [sample for metric in counter.collect() for sample in metric.samples]
    shown = next(sample.value for sample in samples if sample.name.endswith("_total"))
    counter.inc(max(0.0, total - shown))
