"""The real sglang-router in front of the workers: its process as a Ray actor, and its API for workers."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import ray

from draftloop.core.config import RouterConfig
from draftloop.core.errors import ServerError
from draftloop.sglang.server import ServerProcess, free_port

START_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 5.0
# A dead worker is found by the controller or, should that be dead too, by the router's own checks.
_HEALTH_INTERVAL_S = 2
_HEALTH_FAILURES = 2
# Together with max_retries: long enough for a dead worker to be taken out of the routing.
_RETRY_FIRST_MS = 200
_RETRY_MOST_MS = 2000
_STOP_GRACE_S = 3
_REGISTRATION_TIMEOUT_S = 60


def router_command(config: RouterConfig, port: int) -> list[str]:
    """The command line of the router, without workers: they are added through its API."""
    command = [sys.executable, "-m", "draftloop.fleet.router_process"]
    options: dict[str, object] = {
        "host": config.host,
        "port": port,
        "policy": config.policy,
        "balance-abs-threshold": config.balance_abs_threshold,
        "balance-rel-threshold": config.balance_rel_threshold,
        "request-timeout-secs": config.request_timeout_s,
        "retry-max-retries": config.max_retries,
        "retry-initial-backoff-ms": _RETRY_FIRST_MS,
        "retry-max-backoff-ms": _RETRY_MOST_MS,
        "health-check-interval-secs": _HEALTH_INTERVAL_S,
        "health-failure-threshold": _HEALTH_FAILURES,
        "health-success-threshold": 1,
        "worker-startup-timeout-secs": _REGISTRATION_TIMEOUT_S,
        "worker-startup-check-interval": 1,
        "shutdown-grace-period-secs": _STOP_GRACE_S,
        "prometheus-host": config.host,
        "prometheus-port": free_port(config.host, config.metrics_port, "router.metrics_port"),
        "log-level": "warn",
    }
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return command


class RouterClient:
    """The router's API for its workers."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")
        self._http = httpx.Client(base_url=self.base_url, timeout=CALL_TIMEOUT_S, trust_env=False)

    def workers(self) -> dict[str, str]:
        """The router's id of each worker by URL, those included that it takes for unhealthy. Raises ServerError."""
        return {entry["url"].rstrip("/"): entry["id"] for entry in self._call("GET", "/workers")["workers"]}

    def add(self, url: str) -> None:
        """Route to `url` too. Returns when the router has accepted it; it appears in `workers` once it answers."""
        self._call("POST", "/workers", {"url": url})

    def remove(self, url: str) -> None:
        """No new request goes to `url`; those that run there run on. Nothing when it is not routed to."""
        worker_id = self.workers().get(url)
        if worker_id is not None:
            self._call("DELETE", f"/workers/{worker_id}")

    def close(self) -> None:
        self._http.close()

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=body)
            response.raise_for_status()
            answer: dict[str, Any] = response.json()
        except (httpx.HTTPError, ValueError) as err:
            raise ServerError(f"the router {self.base_url} does not answer {path} ({type(err).__name__})") from err
        return answer


@dataclass(frozen=True)
class RouterSample:
    """The router's answer. routed: worker URLs; problem: why it routes nothing."""

    url: str | None = None
    routed: frozenset[str] = field(default_factory=frozenset)
    problem: str | None = None


class Router:
    """The router's process and its workers. As a Ray actor it outlives the controller, so that clients do not notice
    when that is replaced."""

    def __init__(self, config: RouterConfig, log: Path) -> None:
        self._config = config
        self._log = log
        self._process: ServerProcess | None = None
        self._client: RouterClient | None = None

    def start(self, port: int | None) -> str:
        """(Re)start the process; returns its URL when it answers. port: that of an earlier process, None = config's.

        Raises ServerError in one line.
        """
        self.stop()
        host = self._config.host
        chosen = free_port(host, port or self._config.port, "router.port")
        url = f"http://{host}:{chosen}"
        self._process = ServerProcess(router_command(self._config, chosen), dict(os.environ), url, self._log)
        self._process.wait_ready(START_TIMEOUT_S)
        self._client = RouterClient(url)
        return url

    def sample(self) -> RouterSample:
        """Never raises."""
        if self._process is None or self._client is None or not self._process.alive:
            return RouterSample(problem="its process is gone")
        try:
            return RouterSample(self._client.base_url, frozenset(self._client.workers()))
        except ServerError as error:
            return RouterSample(self._client.base_url, problem=str(error))

    def route(self, add: list[str], remove: list[str]) -> None:
        """Raises ServerError."""
        if self._client is None:
            raise ServerError("the router is not running")
        for url in add:
            self._client.add(url)
        for url in remove:
            self._client.remove(url)

    def stop(self) -> None:
        """End the process. Safe to call twice."""
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            self._process.stop()
        self._client = self._process = None


RouterActor = ray.remote(Router)
