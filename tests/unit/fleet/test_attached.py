"""Finding what belongs to a server that something else started, by real processes that listen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftloop.capture.ring import RingError, RingReader
from draftloop.core.errors import ServerError
from draftloop.drafters.load.shapes import Shape
from draftloop.fleet.attached import load_folder_of, ring_of, server_behind
from draftloop.sglang.load.settings import LOAD_ENV, LoadSettings
from draftloop.sglang.tap import TAP_ENV, TapSettings

SERVER = """
import socket
from draftloop.sglang.tap import Tap, TapSettings
settings = TapSettings.from_environment()
tap = None if settings is None else Tap(settings)
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
input()
"""
TAP = {TAP_ENV: TapSettings(ring_mib=1).model_dump_json()}


@contextmanager
def listening(environment: dict[str, str]) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.communicate(b"\n")


def test_the_server_makes_the_ring_and_it_goes_with_it() -> None:
    with listening(TAP) as url:
        name = ring_of(server_behind(url))
        reader = RingReader.attach(name)
        assert reader.control.version == 0, "nothing is captured before somebody says of whom"
        reader.close()
    with pytest.raises(RingError):
        RingReader.attach(name)


def test_each_server_has_its_own_ring() -> None:
    with listening(TAP) as one, listening(TAP) as other:
        assert ring_of(server_behind(one)) != ring_of(server_behind(other))


def test_a_server_without_a_tap() -> None:
    with listening({}) as url, pytest.raises(ServerError, match=r"no rings of captured states.*server-command"):
        ring_of(server_behind(url))


def test_where_a_server_reports_its_steps(tmp_path: Path) -> None:
    load = LoadSettings(folder=tmp_path, shapes=(Shape(2, 1, 3),))
    with listening({LOAD_ENV: load.model_dump_json()}) as url:
        assert load_folder_of(server_behind(url)) == tmp_path
    with listening({}) as url:
        assert load_folder_of(server_behind(url)) is None


def test_nobody_listens() -> None:
    with pytest.raises(ServerError, match="cannot be inspected"):
        server_behind("http://127.0.0.1:1")


def test_another_machine() -> None:
    with pytest.raises(ServerError, match="not on this machine"):
        server_behind("http://192.0.2.77:30000")
