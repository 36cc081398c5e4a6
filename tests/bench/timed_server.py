"""Stock SGLang's server with one addition: a line a target forward, for a bench to read.

    python timed_server.py FILE [arguments of sglang.launch_server]

A line of FILE: the forward's mode, its batch size, its tokens, its seconds.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def time_forwards(path: Path) -> None:
    """Hook the model runner of this process; on a CPU the scheduler is forked from it."""
    lines = path.open("w", buffering=1)

    def timed(original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = original(runner, forward_batch, *args, **kwargs)
        if not runner.is_draft_worker:
            seconds = time.perf_counter() - start
            tokens = len(forward_batch.input_ids)
            lines.write(f"{forward_batch.forward_mode.name} {forward_batch.batch_size} {tokens} {seconds}\n")
        return result

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", timed, HookType.AROUND)


if __name__ == "__main__":
    time_forwards(Path(sys.argv[1]))
    sys.argv = ["sglang.launch_server", *sys.argv[2:]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
