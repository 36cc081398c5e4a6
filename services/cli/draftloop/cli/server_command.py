"""`draftloop server-command`: how to start a server by hand so that `draftloop attach` can refresh its drafter."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from draftloop.core.config import Config
from draftloop.drafters.checkpoint import verify_checkpoint
from draftloop.drafters.target import target_identity
from draftloop.sglang.server import Speculation, free_port, load_settings, server_command, server_environment
from draftloop.sglang.tap import TapSettings
from draftloop.sglang.target import resolve_target


def server_line(config: Config, drafter: Path, reports: Path) -> str:
    """The shell line: what `draftloop serve` would set in the environment and run, with a ring of the server's own.

    drafter: checkpoint folder.  reports: where each server's folder of step costs goes.
    Raises ManifestError or CheckpointError when the drafter does not fit the target, ServerError for a taken port.
    """
    target = resolve_target(config.target.path).resolve()
    manifest = verify_checkpoint(drafter, target_identity(target))
    speculation = Speculation(drafter.resolve(), manifest.version, manifest.kind)
    port = free_port(config.server.host, config.server.port)
    capture = config.capture
    tap = TapSettings(ring_mib=capture.ring_mib, algorithm=speculation.algorithm, top_logits=capture.top_logits)
    load = load_settings(config, speculation, reports.resolve() / f"server-{port}.load")
    environment = server_environment(config, tap, load)
    added = [f"{key}={value}" for key, value in environment.items() if os.environ.get(key) != value]
    return shlex.join(["env", *added, *server_command(target, config.target, config.server, port, speculation)])
