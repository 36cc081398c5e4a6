"""A server that something else started: where its drafter and its capture ring are."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from draftloop.core.errors import ServerError
from draftloop.sglang.client import ServerClient
from draftloop.sglang.swap_loader import LOADER
from draftloop.sglang.tap import TAP_ENV, TapSettings

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


def ring_of(url: str) -> str:
    """Name of the capture ring of the server at `url`, from its process's environment. Raises ServerError.

    The ring is shared memory: the server must run on this machine, and as this user.
    """
    place = urlsplit(url)
    host, port = place.hostname or "", place.port
    if not _is_local(host):
        raise ServerError(
            f"{url} is not on this machine, and its captured states are read from shared memory: run draftloop attach "
            "on the machine of the servers"
        )
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.laddr.port != port or connection.pid is None:
            continue
        try:
            raw = psutil.Process(connection.pid).environ().get(TAP_ENV)
        except psutil.Error:
            continue
        if raw is None:
            raise ServerError(f'{url} captures nothing: start it with {TAP_ENV}=\'{{"ring": NAME, "ring_mib": 64}}\'')
        return TapSettings.model_validate_json(raw).ring
    raise ServerError(f"the process behind {url} cannot be inspected: run draftloop attach as its user")


def _is_local(host: str) -> bool:
    addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return all(address in own for address in addresses)
