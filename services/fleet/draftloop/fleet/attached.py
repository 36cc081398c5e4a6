"""A server that something else started: where its drafter, its capture ring and its step costs are."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from draftloop.capture.ring import rings_of
from draftloop.core.errors import ServerError
from draftloop.sglang.client import ServerClient
from draftloop.sglang.load.settings import LOAD_ENV, LoadSettings
from draftloop.sglang.swap_loader import LOADER

# SGLang's --weight-version when it is not given.
UNNAMED_VERSION = "default"


def drafter_of(client: ServerClient) -> Path:
    """The checkpoint folder the server was born with. Raises ServerError when its drafter cannot be refreshed."""
    info = client.get("/server_info")
    folder = info.get("speculative_draft_model_path")
    if folder is None:
        raise ServerError(f"{client.base_url} serves without a drafter: start it with --speculative-draft-model-path")
    if LOADER not in (info.get("custom_weight_loader") or ()):
        raise ServerError(f"{client.base_url} takes no swaps: start it with --custom-weight-loader {LOADER}")
    return Path(folder)


def server_behind(url: str) -> psutil.Process:
    """The process that listens at `url`. Raises ServerError.

    Its ring is shared memory: the server must run on this machine, and as this user.
    """
    place = urlsplit(url)
    host, port = place.hostname or "", place.port
    if not _is_local(host):
        raise ServerError(
            f"{url} is not on this machine, and its captured states are read from shared memory: run draftloop attach "
            "on the machine of the servers"
        )
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None:
            return psutil.Process(connection.pid)
    raise ServerError(f"the process behind {url} cannot be inspected: run draftloop attach as its user")


def ring_of(server: psutil.Process) -> str:
    """Name of the capture ring that the server or a child of it has made. Raises ServerError."""
    family = [server, *server.children(recursive=True)]
    rings = rings_of({process.pid for process in family})
    if len(rings) != 1:
        raise ServerError(
            f"the server of process {server.pid} has {len(rings) or 'no'} rings of captured states, not one: start it "
            "with the line that draftloop server-command prints"
        )
    return rings[0]


def load_folder_of(server: psutil.Process) -> Path | None:
    """Where the server reports what its steps cost; None when it was not told to."""
    raw = server.environ().get(LOAD_ENV)
    return None if raw is None else LoadSettings.model_validate_json(raw).folder


def _is_local(host: str) -> bool:
    addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return all(address in own for address in addresses)
