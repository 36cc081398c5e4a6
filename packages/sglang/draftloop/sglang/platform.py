"""Entry point `sglang.srt.platforms`: the CPU platform, chosen by `SGLANG_PLATFORM=draftloop_cpu`."""

from __future__ import annotations

import os

PLATFORM_NAME = "draftloop_cpu"


def activate() -> str | None:
    """The platform class when a server process asked for it; None leaves the machine's own platform (a GPU's)."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    return "draftloop.sglang.cpu.platform.DraftloopCpuPlatform"
