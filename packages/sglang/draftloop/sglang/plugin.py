"""Entry point `sglang.srt.plugins`: SGLang calls `load` early in each of its processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from draftloop.core.errors import HookError
from draftloop.sglang.load.settings import LoadSettings
from draftloop.sglang.platform import PLATFORM_NAME
from draftloop.sglang.tap import Tap, TapSettings


def load() -> None:
    """Tell every process the CPU attention backend's name; where the models will live, hook what this server needs."""
    on_cpu = os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME
    if on_cpu:
        from draftloop.sglang.cpu.register import register_backend

        register_backend()
    if hooks_belong_here(on_cpu):
        _hook_scheduler(on_cpu, TapSettings.from_environment(), LoadSettings.from_environment())


def hooks_belong_here(on_cpu: bool) -> bool:
    """On a CPU the scheduler is forked from the server's first process and inherits its hooks (`cpu.fast_start`).

    On a GPU it is a fresh child process; the detokenizer, which is one too, must not load the models for hooks.
    """
    child = multiprocessing.parent_process() is not None
    return not child if on_cpu else child and "sglang.srt.managers.scheduler" in sys.modules


def _hook_scheduler(on_cpu: bool, settings: TapSettings | None, load: LoadSettings | None) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from draftloop.sglang.exact_rows import exact_hooks
    from draftloop.sglang.hooks import check, confirm_applied, tap_hooks
    from draftloop.sglang.swap_hooks import swap_hooks

    hooks = swap_hooks() + exact_hooks()
    if on_cpu:
        from draftloop.sglang.cpu.register import cpu_hooks, supply_kernels

        supply_kernels()
        hooks += cpu_hooks()
    if settings is not None:
        hooks += tap_hooks(Tap(settings), settings.algorithm)
    if load is not None:
        from draftloop.sglang.load import load_hooks

        hooks += load_hooks(load)
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
