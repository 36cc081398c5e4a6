"""Finding the ring of a server that something else started, by real processes that listen."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from draftloop.capture.ring import RingError, RingReader
from draftloop.core.errors import ServerError
from draftloop.fleet.attached import ring_of
from draftloop.sglang.tap import TAP_ENV, TapSettings

LISTEN = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


def listening(environment: dict[str, str]) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN], env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.communicate(b"\n")


@pytest.fixture
def server() -> Iterator[str]:
    yield from listening({TAP_ENV: TapSettings(ring="mine", ring_mib=1).model_dump_json()})


@pytest.fixture
def server_without_tap() -> Iterator[str]:
    yield from listening({})


def test_the_ring_is_named_in_the_servers_environment(server: str) -> None:
    assert ring_of(server) == "mine"


def test_a_server_without_a_tap(server_without_tap: str) -> None:
    with pytest.raises(ServerError, match="captures nothing"):
        ring_of(server_without_tap)


def test_nobody_listens() -> None:
    with pytest.raises(ServerError, match="cannot be inspected"):
        ring_of("http://127.0.0.1:1")


def test_another_machine() -> None:
    with pytest.raises(ServerError, match="not on this machine"):
        ring_of("http://192.0.2.77:30000")


def test_the_server_makes_the_ring_and_it_goes_with_it() -> None:
    name = f"draftloop-test-{uuid.uuid4().hex[:8]}"
    code = (
        "from draftloop.sglang.tap import Tap, TapSettings\n"
        f"tap = Tap(TapSettings(ring={name!r}, ring_mib=1))\n"
        "print('ready', flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    reader = RingReader.attach(name)
    assert reader.control.read() is not None, "without a policy nothing is captured"
    reader.close()
    process.communicate(b"\n")
    with pytest.raises(RingError):
        RingReader.attach(name)
