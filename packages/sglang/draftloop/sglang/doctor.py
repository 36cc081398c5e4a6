"""Does the installed SGLang have what our hooks expect? Run as a module, in a server's environment.

    python -m draftloop.sglang.doctor     one JSON object a hook, a line each

A process of its own: SGLang decides by its environment, when it is imported, whether it runs on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from draftloop.capture.ring import RingOwner
from draftloop.core.config import Config
from draftloop.core.errors import HookError
from draftloop.drafters.load.shapes import PLAIN, Shape
from draftloop.sglang.algorithms import Algorithm
from draftloop.sglang.exact_rows import exact_hooks
from draftloop.sglang.hooks import Hook, front_hooks, problem_with, tap_hooks
from draftloop.sglang.load import load_hooks
from draftloop.sglang.load.settings import LoadSettings
from draftloop.sglang.platform import PLATFORM_NAME
from draftloop.sglang.server import server_environment
from draftloop.sglang.swap_hooks import swap_hooks
from draftloop.sglang.tap import Tap, TapSettings

RING_BYTES = 1 << 20
TIMEOUT_S = 180.0
ALGORITHMS: tuple[Algorithm, ...] = ("EAGLE3", "DFLASH")


@dataclass(frozen=True, slots=True)
class HookState:
    """One hook target. problem: why the hook cannot be applied, None when it can."""

    target: str
    kind: str
    problem: str | None


def hook_states(config: Config) -> list[HookState]:
    """Check every hook of a server with this config, in a process with its environment."""
    command = [sys.executable, "-m", "draftloop.sglang.doctor"]
    environment = server_environment(config, None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise HookError(f"SGLang cannot be imported: {last[0]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [HookState(**json.loads(line)) for line in lines]


def states_of(hooks: Sequence[Hook]) -> list[HookState]:
    return [HookState(hook.target, hook.kind, problem_with(hook)) for hook in hooks]


def main() -> None:
    """Print this process's hook states."""
    ring = RingOwner.create(f"draftloop-doctor-{uuid.uuid4().hex[:8]}", RING_BYTES)
    try:
        tap = Tap(TapSettings(ring=ring.name))
        # A target that several hooks share is listed once.
        found = [hook for name in ALGORITHMS for hook in tap_hooks(tap, name)]
        for name in ALGORITHMS:
            settings = LoadSettings(folder=Path(), algorithm=name, shapes=(PLAIN, Shape(1, 1, 2)))
            found += load_hooks(settings)
        hooks = tuple({hook.target: hook for hook in (*found, *front_hooks(), *swap_hooks(), *exact_hooks())}.values())
        if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
            from draftloop.sglang.cpu.register import cpu_hooks

            hooks += cpu_hooks()
        for state in states_of(hooks):
            print(json.dumps(asdict(state)))
    finally:
        ring.close()


if __name__ == "__main__":
    main()
