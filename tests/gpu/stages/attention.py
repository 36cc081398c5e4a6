"""Stage attention: every form of tree attention on the same random batch, against fp32 SDPA, and how fast it reads.

    cascade     FlashInfer, prefix unmasked + own tree       masked   FlashInfer, one call under a full mask
    sdpa        our torch backend, its gather included       flex     FlexAttention on contiguous copies made before

Bytes are what must be read and written once: the visible keys and values, the queries and the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from draftloop.attention.flashinfer_backend import FlashInferCascade, FlashInferMasked, Limits, new_workspace
from draftloop.attention.interface import TreeAttention, TreeBatch
from draftloop.attention.paging import slots_of, tree_mask
from draftloop.attention.torch_backend import TorchTreeAttention
from draftloop.attention.torch_cascade import TorchCascadeAttention
from draftloop.attention.trees import lay_out
from stages.clock import Setting, copy_bandwidth, graphed, seconds
from stages.result import Row

# Largest error against fp32: an output is a mean of values, and rounds like one of them (8 and 11 bits); fp32 differs
# from itself by the order of its sums.
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
SERVED = (32, 8, 128)  # heads, key-value heads, head size of Llama-3.1-8B and Qwen3-8B
# Requests, longest prefix, nodes. FlexAttention is compiled anew for each shape, so only some have it.
SPEED = [(1, 1024, 16), (1, 32768, 64), (8, 8192, 16), (8, 8192, 64), (32, 2048, 8), (32, 8192, 16), (64, 4096, 64)]
WITH_FLEX = {(1, 32768, 64), (8, 8192, 16), (64, 4096, 64), (1, 64, 8), (3, 40, 5)}
PARITY = [(torch.float16, (32, 8, 128)), (torch.bfloat16, (16, 16, 64)), (torch.float16, (8, 1, 64))]
DRY_SPEED = [(1, 64, 8), (3, 40, 5)]


@dataclass(frozen=True)
class Problem:
    """A random batch of ragged prefixes and different trees, with its query and caches."""

    batch: TreeBatch
    query: Tensor
    keys: Tensor
    values: Tensor
    scale: float

    @property
    def bytes_moved(self) -> int:
        row = self.keys.shape[1] * self.keys.shape[2] * self.keys.element_size()
        return int(self.batch.kv_lens.sum()) * 2 * row + 2 * self.query.numel() * self.query.element_size()


def make_problem(
    setting: Setting, size: tuple[int, int, int], heads: tuple[int, int, int], dtype: torch.dtype, page_size: int = 1
) -> Problem:
    """size: requests, longest prefix, nodes.  heads: query heads, key-value heads, head size.

    Prefixes lie between half the longest and the longest; pages are dealt out at random.
    """
    requests, longest, nodes = size
    generator = torch.Generator().manual_seed(requests * 1009 + longest * 31 + nodes)
    prefixes = torch.randint(longest // 2, longest + 1, (requests,), generator=generator)
    sizes = torch.randint(max(1, nodes // 2), nodes + 1, (requests,), generator=generator)
    sizes[0] = nodes
    trees = [random_parents(int(size), generator) for size in sizes]
    pages = -(-(longest + nodes) // page_size)
    table = torch.randperm(requests * pages, generator=generator).view(requests, pages).int()
    device = setting.device
    mask = lay_out(trees, prefixes).mask
    batch = TreeBatch(table.to(device), (prefixes + nodes).to(device), nodes, mask.to(device), page_size)
    query_heads, kv_heads, dim = heads
    query = torch.randn(requests * nodes, query_heads, dim, device=device).to(dtype)
    keys, values = (
        torch.randn(requests * pages * page_size, kv_heads, dim, device=device, dtype=dtype) for _ in range(2)
    )
    return Problem(batch, query, keys, values, dim**-0.5)


def random_parents(nodes: int, generator: torch.Generator) -> Tensor:
    """[N] parents, the root first."""
    draws = torch.rand(nodes, generator=generator)
    return (draws * torch.arange(nodes)).long() - (torch.arange(nodes) == 0).long()


def limits_of(problem: Problem) -> Limits:
    batch = problem.batch
    return Limits(
        num_heads=problem.query.shape[1],
        num_kv_heads=problem.keys.shape[1],
        head_dim=problem.keys.shape[2],
        dtype=problem.keys.dtype,
        max_requests=batch.kv_lens.numel(),
        max_nodes=batch.num_nodes,
        max_pages=batch.kv_indices.shape[1],
        device=problem.query.device,
    )


def flashinfer_problem(setting: Setting, heads: tuple[int, int, int], dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot run here, found by running it once, which also compiles its kernels; None when it can."""
    if find_spec("flashinfer") is None:
        return "not installed"
    if setting.device.type != "cuda":
        return "has no CPU kernels"
    problem = make_problem(setting, (1, 16, 4), heads, dtype)
    attention = FlashInferCascade(limits_of(problem), new_workspace(setting.device))
    try:
        attention.plan(problem.batch)
        attention.run(problem.query, problem.keys, problem.values, problem.scale)
    except Exception as error:  # no nvcc, no toolkit headers, another CUDA: its own words say which
        return f"cannot run ({str(error).splitlines()[0][:100]})"
    return None


def backends(problem: Problem, setting: Setting, with_flashinfer: bool) -> dict[str, TreeAttention]:
    """Every form of our interface that can run here."""
    sdpa = TorchTreeAttention(problem.query.shape[1], problem.keys.shape[1], problem.keys.dtype)
    if not with_flashinfer:
        return {"torch cascade": TorchCascadeAttention(), "sdpa": sdpa} if setting.dry else {"sdpa": sdpa}
    limits, workspace = limits_of(problem), new_workspace(setting.device)
    masked = FlashInferMasked(limits, workspace, problem.batch.page_size)
    return {"cascade": FlashInferCascade(limits, workspace), "masked": masked, "sdpa": sdpa}


def reference(problem: Problem) -> Tensor:
    """The same numbers through SDPA in fp32."""
    attention = TorchTreeAttention(problem.query.shape[1], problem.keys.shape[1], torch.float32)
    attention.plan(problem.batch)
    return attention.run(problem.query.float(), problem.keys.float(), problem.values.float(), problem.scale)


def flex(problem: Problem, setting: Setting) -> Callable[[], Tensor]:
    """FlexAttention over contiguous copies of the visible keys and values."""
    batch = problem.batch
    requests, nodes = batch.kv_lens.numel(), batch.num_nodes
    slots = slots_of(batch)
    # [B, heads, L or N, d]
    keys, values = (x[slots].transpose(1, 2).contiguous() for x in (problem.keys, problem.values))
    query = problem.query.view(requests, nodes, *problem.query.shape[1:]).transpose(1, 2).contiguous()
    prefix, tree = (batch.kv_lens - nodes).to(setting.device), tree_mask(batch)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        node = (k - prefix[b]).clamp(0, nodes - 1)
        return (k < prefix[b]) | ((k < prefix[b] + nodes) & tree[b, q.clamp(max=nodes - 1), node])

    mask = create_block_mask(visible, requests, None, nodes, slots.shape[1], device=setting.device.type)
    compiled: Any = flex_attention if setting.dry else torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        out = compiled(query, keys, values, block_mask=mask, scale=problem.scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(problem.query.shape)

    return run


def measure(setting: Setting) -> list[Row]:
    bandwidth = copy_bandwidth(setting)
    rows = [Row("attention", "", "copy", bandwidth / 1e9, "GB/s", 1.0, "measured: the peak below")]
    dtype = torch.float32 if setting.dry else torch.bfloat16
    heads = (4, 2, 16) if setting.dry else SERVED
    problem_with_it = flashinfer_problem(setting, heads, dtype)
    if problem_with_it is not None:
        rows.append(Row("attention", "", "FlashInfer", None, "", note=f"{problem_with_it}: left out of this run"))
    usable = problem_with_it is None
    for size in DRY_SPEED if setting.dry else SPEED:
        problem = make_problem(setting, size, heads, dtype)
        rows += compare(problem, setting, bandwidth, with_flashinfer=usable, with_flex=size in WITH_FLEX)
    for page_size in (16, 64):
        problem = make_problem(setting, (3, 40, 5) if setting.dry else (8, 4096, 16), heads, dtype, page_size)
        rows += compare(problem, setting, bandwidth, with_flashinfer=usable)
    # Each of these compiles FlashInfer kernels of its own, a minute or more: only when the stage has all the time.
    for other, other_heads in PARITY if setting.alone and usable else ():
        problem = make_problem(setting, (8, 1024, 16), other_heads, other)
        rows += compare(problem, setting, bandwidth, with_flashinfer=True)
    return rows


def compare(
    problem: Problem, setting: Setting, bandwidth: float, *, with_flashinfer: bool, with_flex: bool = False
) -> list[Row]:
    """A row for each form: its time, and in the note its largest error against fp32."""
    batch, (heads, dim) = problem.batch, problem.query.shape[1:]
    longest = int(batch.kv_lens.max()) - batch.num_nodes
    kind = str(problem.keys.dtype).removeprefix("torch.")
    case = (
        f"B{batch.kv_lens.numel()} prefix<={longest} N{batch.num_nodes} h{heads}/{problem.keys.shape[1]} d{dim} {kind}"
    )
    case += f" page{batch.page_size}" if batch.page_size > 1 else ""
    if setting.late:
        return [Row("attention", case, "left out", None, "", note="out of time: --minutes")]
    expected = reference(problem)
    calls: dict[str, Callable[[], Tensor]] = {}
    for name, attention in backends(problem, setting, with_flashinfer).items():
        attention.plan(batch)
        calls[name] = lambda a=attention: a.run(problem.query, problem.keys, problem.values, problem.scale)
    if with_flex:
        calls["flex"] = flex(problem, setting)
    rows = []
    for name, call in calls.items():
        error = float((call().float() - expected).abs().max())
        good = "ok" if error <= BOUNDS[problem.keys.dtype] else f"ABOVE {BOUNDS[problem.keys.dtype]:g}"
        note = f"max error {error:.1e} {good}"
        spent = seconds(graphed(call, setting), setting)
        share = problem.bytes_moved / spent / bandwidth
        rows.append(Row("attention", case, name, spent * 1e6, "us", share, note))
    return rows
