"""Entry point `sglang.srt.plugins`: SGLang calls `load` early in each of its processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from draftloop.core.errors import HookError
from draftloop.sglang.exact_rows import exact_hooks
from draftloop.sglang.hooks import SCHEDULER, TOKENIZER_MANAGER, Hook, check, confirm_applied, front_hooks, tap_hooks
from draftloop.sglang.platform import PLATFORM_NAME
from draftloop.sglang.swap_hooks import swap_hooks
from draftloop.sglang.tap import Tap, TapSettings


def load() -> None:
    """Tell every process the CPU attention backend's name; hook the process of the models and, with a tap, of HTTP."""
    on_cpu = os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME
    if on_cpu:
        from draftloop.sglang.cpu.register import register_backend

        register_backend()
    settings = TapSettings.from_environment()
    if hooks_belong_here(on_cpu):
        _hook_scheduler(on_cpu, settings)
    if settings is not None and multiprocessing.parent_process() is None:
        _install(front_hooks(), f"{TOKENIZER_MANAGER}.__init__")


def hooks_belong_here(on_cpu: bool) -> bool:
    """On a CPU the scheduler is forked from the server's first process and inherits its hooks (`cpu.fast_start`).

    On a GPU it is a fresh child process; the detokenizer, which is one too, must not load the models for hooks.
    """
    child = multiprocessing.parent_process() is not None
    return not child if on_cpu else child and "sglang.srt.managers.scheduler" in sys.modules


def _hook_scheduler(on_cpu: bool, settings: TapSettings | None) -> None:
    hooks = swap_hooks() + exact_hooks()
    if on_cpu:
        from draftloop.sglang.cpu.register import cpu_hooks, supply_kernels

        supply_kernels()
        hooks += cpu_hooks()
    if settings is not None:
        hooks += tap_hooks(Tap(settings), settings.algorithm)
    _install(hooks, f"{SCHEDULER}.init_model_worker")


def _install(hooks: tuple[Hook, ...], confirmed_before: str) -> None:
    """Check and register the hooks; look whether they were applied when SGLang calls `confirmed_before`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

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
    HookRegistry.register(confirmed_before, confirm, HookType.BEFORE)


def _refuse(err: HookError) -> None:
    """End the server. An ordinary exception in a plugin would only be logged."""
    print(f"draftloop: {err}", file=sys.stderr, flush=True)
    sys.exit(2)
