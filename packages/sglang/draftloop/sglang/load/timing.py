"""Start-up measurement: the matrix products of a loaded model, by the rows of their input."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase, RowParallelLinear

from draftloop.drafters.load.cost_model import Experts, RowCost, StartUp

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
REPEATS = 3


def time_products(model: torch.nn.Module, head: Any, dtype: torch.dtype) -> RowCost:
    """Run every linear layer and the output head of `model` once a row count, REPEATS times; keep the fastest.

    All of them one after the other, as in a forward, so that the weights stream from memory as they do there.
    """
    shapes = [(module, input_width(module)) for module in [*linear_layers(model), head]]
    device = head.weight.device

    def run(rows: int) -> None:
        for module, width in shapes:
            module.quant_method.apply(module, inputs[width][:rows], None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    inputs = {width: torch.zeros(ROWS[-1], width, dtype=dtype, device=device) for _, width in shapes}
    return RowCost(ROWS, increasing_times([fastest(run, rows) for rows in ROWS]))


def input_width(module: Any) -> int:
    """Columns of the module's input. Not its weight's, which a quantised layer may hold in another layout."""
    if isinstance(module, RowParallelLinear):
        return int(module.input_size_per_partition)
    return int(module.input_size if isinstance(module, LinearBase) else module.embedding_dim)


def fastest(run: Callable[[int], None], rows: int) -> float:
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run(rows)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def increasing_times(seconds: list[float]) -> tuple[float, ...]:
    """More rows never cost less: a fluctuation would make a larger tree look cheaper than a smaller one."""
    longest, result = 0.0, []
    for value in seconds:
        longest = max(longest, value)
        result.append(longest)
    return tuple(result)


@torch.no_grad()
def start_up(target: Any, draft: Any) -> StartUp:
    """What the model runners of target and drafter cost before anything was served."""
    products = time_products(target.model, target.model.lm_head, target.dtype)
    # A DFlash drafter has no head: its guesses go through the target's.
    own_head = "lm_head" in dict(draft.model.named_children())
    head = draft.model.lm_head if own_head else target.model.lm_head
    times = StartUp(products, time_products(draft.model, head, draft.dtype))
    # SGLang's fused experts keep all of a layer's gate and up projections in `w13_weight`.
    fused: list[Any] = [module for module in target.model.modules() if hasattr(module, "w13_weight")]
    if not fused:
        return times
    layer = fused[0]
    expert_bytes = layer.w13_weight[0].nbytes + layer.w2_weight[0].nbytes
    # Streaming a byte of an expert takes as long as one of the layers that were timed with a single row.
    timed_bytes = sum(m.weight.nbytes for m in [*linear_layers(target.model), target.model.lm_head])
    experts = Experts.balanced(len(fused), layer.num_experts, layer.top_k)
    return replace(times, experts=experts, expert_seconds=products.seconds[0] * expert_bytes / timed_bytes)


def linear_layers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LinearBase)]
