"""The real router's process and its API for workers, without a server behind it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from draftloop.core.config import RouterConfig
from draftloop.core.errors import ServerError
from draftloop.fleet.router import Router, RouterClient


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    router = Router(RouterConfig(port=None, metrics_port=None), tmp_path / "router.log")
    try:
        yield router
    finally:
        router.stop()


def test_start_and_restart_on_the_same_port(router: Router) -> None:
    assert router.sample().problem is not None
    with pytest.raises(ServerError, match="not running"):
        router.route(["http://127.0.0.1:1"], [])
    url = router.start(None)
    sample = router.sample()
    assert (sample.url, sample.routed, sample.problem) == (url, frozenset(), None)
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    assert router.start(int(url.rsplit(":", 1)[1])) == url
    # Nobody is there to answer: a clear status, not a hang.
    body = {"text": "bado", "sampling_params": {}}
    assert httpx.post(f"{url}/generate", json=body, trust_env=False, timeout=60).status_code == 503
    router.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)


def test_a_worker_that_never_answers_is_never_routed_to(router: Router) -> None:
    url = router.start(None)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        router.route([f"http://127.0.0.1:{nobody.getsockname()[1]}"], ["http://127.0.0.1:1"])
        assert router.sample().routed == frozenset()
    client = RouterClient(url)
    assert client.workers() == {}
    client.close()


def test_no_router() -> None:
    client = RouterClient("http://127.0.0.1:1")
    with pytest.raises(ServerError, match="does not answer"):
        client.workers()
    client.close()
