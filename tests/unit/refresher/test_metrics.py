"""The exporter says what the loop says, and listens on loopback."""

from __future__ import annotations

import math
import socket
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from draftloop.capture.buffer import Counts
from draftloop.capture.collector import CollectorCounts
from draftloop.core.config import MetricsConfig
from draftloop.core.errors import DraftloopError
from draftloop.refresher.loop import LoopState
from draftloop.refresher.metrics import Exporter, TrafficTotals, WorkerFigures

STATE = LoopState(
    versions=["v0", "v3"],
    train_steps=12,
    captured=CollectorCounts(records=9, tokens=800, records_dropped=2),
    buffer=Counts(captured=11, trained=3, expired=1, dropped=2, held_out=2, pending=3),
)
WORKERS = [WorkerFigures("a", "v3", True, 50.0, {"chat": 1.9, "code": 2.4}), WorkerFigures("b", "v0", ready=False)]


def value(exporter: Exporter, name: str, **labels: str) -> float | None:
    return exporter.registry.get_sample_value(f"draftloop_{name}", labels)


def test_state_and_totals() -> None:
    exporter = Exporter(MetricsConfig())
    exporter.observe(STATE, TrafficTotals(10, 1, 900), WORKERS)
    assert value(exporter, "requests_total", outcome="ok") == 10
    assert value(exporter, "accept_length", worker="a", domain="code") == 2.4
    assert value(exporter, "worker_version", worker="b", version="v0") == 1
    assert value(exporter, "worker_ready", worker="b") == 0
    assert value(exporter, "tokens_per_second", worker="b") is None
    assert math.isnan(value(exporter, "train_loss") or 0.0)
    assert value(exporter, "promoted_info", version="v3") == 1
    records = {state: value(exporter, "capture_records", state=state) for state in ("captured", "held_out", "dropped")}
    assert records == {"captured": 11, "held_out": 2, "dropped": 2}
    # Counters follow the totals; one that fell was counted by a process that restarted.
    exporter.observe(replace(STATE, loss=1.5, training=False), TrafficTotals(25, 1, 100), WORKERS[:1])
    assert value(exporter, "requests_total", outcome="ok") == 25
    assert value(exporter, "generated_tokens_total") == 900
    assert (value(exporter, "train_loss"), value(exporter, "training_active")) == (1.5, 0)
    assert value(exporter, "worker_ready", worker="b") is None


def test_events() -> None:
    exporter = Exporter(MetricsConfig())
    gate = {"gate_before": 1.5, "gate_after": 1.7, "gain_bounds": [0.1, 0.3]}
    exporter.event("candidate", gate)
    exporter.event("promoted", gate)
    exporter.event("swap", {"stall_ms": 120.0})
    exporter.event("swap", {"stall_ms": None})
    exporter.event("drift", {"signal": "domain_mix"})
    exporter.event("phase", {"phase": "refreshing"})
    exporter.event("candidate", gate | {"gain_bounds": []})
    exporter.event("refused", gate)
    assert value(exporter, "gate_accept_length", drafter="candidate") == 1.7
    assert value(exporter, "gate_gain_lower_bound") == 0.1
    assert value(exporter, "candidates_total", verdict="promoted") == 1
    assert value(exporter, "candidates_total", verdict="refused") == 1
    assert value(exporter, "swaps_total") == 2
    assert value(exporter, "swap_stall_seconds_count") == 1
    assert value(exporter, "swap_stall_seconds_sum") == pytest.approx(0.12)
    assert value(exporter, "drift_alarms_total", signal="domain_mix") == 1


def test_names_are_those_of_a_scrape() -> None:
    exporter = Exporter(MetricsConfig())
    exporter.observe(STATE, TrafficTotals(1, 0, 2), WORKERS)
    for line in generate_latest(exporter.registry).decode().splitlines():
        name = line.split("{")[0].split(" ")[0]
        # Prometheus ignores the time a counter began.
        assert line.startswith("#") or name.endswith("_created") or name in exporter.names


def free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


def test_it_is_served_on_loopback_until_the_end() -> None:
    config = MetricsConfig(port=free_port())
    url = f"http://127.0.0.1:{config.port}/metrics"
    with Exporter(config) as exporter:
        exporter.observe(STATE, TrafficTotals(1, 0, 2), WORKERS)
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert 'draftloop_worker_version{version="v3",worker="a"} 1.0' in answer.read().decode()
        with pytest.raises(DraftloopError, match=r"set metrics\.port to a free one"):
            Exporter(config).__enter__()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)


def test_without_a_port_nothing_listens() -> None:
    with Exporter(MetricsConfig()) as exporter:
        assert exporter.names
