"""Entry point `sglang.srt.plugins`: SGLang calls `load` early in each of its processes."""

from __future__ import annotations

import os
import sys
from typing import Any

from draftloop.core.errors import HookError
from draftloop.sglang.platform import PLATFORM_NAME
from draftloop.sglang.tap import Tap, TapSettings


def load() -> None:
    """Register what this server process needs: the CPU attention backend, and the tap's hooks in the scheduler."""
    if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        from draftloop.sglang.cpu.register import register_backend

        register_backend()
    settings = TapSettings.from_environment()
    # Only a process that runs the scheduler has its module; the detokenizer must not load models for hooks.
    if settings is not None and "sglang.srt.managers.scheduler" in sys.modules and _is_child():
        _register_tap(settings)


def _is_child() -> bool:
    from multiprocessing import parent_process

    return parent_process() is not None


def _register_tap(settings: TapSettings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from draftloop.sglang.hooks import check, confirm_applied, tap_hooks

    hooks = tap_hooks(Tap(settings))
    try:
        check(hooks)
    except HookError as err:
        _refuse(err)

    def confirm(*args: Any, **kwargs: Any) -> None:
        try:
            confirm_applied(hooks)
        except HookError as err:
            _refuse(err)

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_model_worker", confirm, HookType.BEFORE)


def _refuse(err: HookError) -> None:
    """End the server. An ordinary exception in a plugin would only be logged."""
    print(f"draftloop: {err}", file=sys.stderr, flush=True)
    sys.exit(2)
