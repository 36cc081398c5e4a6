"""Time on either device, and what the card can do at best: copies and matrix products, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

WARM_UP = 3
LEAST_REPEATS, MOST_REPEATS = 5, 50
BUDGET_S = 0.5


@dataclass(frozen=True)
class Setting:
    """dry: tiny shapes on the CPU.  alone: one stage has all the time.  deadline: of time.monotonic, after which the
    rest of a stage is left out."""

    device: torch.device
    dry: bool
    alone: bool
    deadline: float

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


def seconds(work: Callable[[], object], setting: Setting) -> float:
    """Median time of a call, warm; of a single one in a dry run."""
    if setting.dry:
        return _once(work, setting)
    for _ in range(WARM_UP):
        work()
    first = _once(work, setting)
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(BUDGET_S / max(first, 1e-6))))
    return statistics.median(_once(work, setting) for _ in range(repeats))


def _once(work: Callable[[], object], setting: Setting) -> float:
    if setting.device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    work()
    end_event.record()
    end_event.synchronize()
    return begin_event.elapsed_time(end_event) / 1e3


def graphed(work: Callable[[], object], setting: Setting) -> Callable[[], object]:
    """The same work as a captured CUDA graph, so that a time is the kernels' and not Python's; as it is on a CPU."""
    if setting.device.type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def copy_bandwidth(setting: Setting) -> float:
    """Bytes a second of a large copy, reading and writing counted."""
    size = 1 << (22 if setting.dry else 31)
    source = torch.empty(size, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), setting)


def matrix_peak(setting: Setting) -> float:
    """Operations a second of a large square product, bf16 on a GPU and fp32 on a CPU."""
    width = 256 if setting.dry else 8192
    dtype = torch.float32 if setting.dry else torch.bfloat16
    a, b = (torch.randn(width, width, device=setting.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * width**3 / seconds(lambda: torch.mm(a, b, out=out), setting)
