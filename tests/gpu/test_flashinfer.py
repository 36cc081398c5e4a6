"""FlashInfer's kernels behind our interface, on a GPU: right for every shape, right in a CUDA graph, and the trap.

Not seen running where this was written, for want of a GPU; the arguments they are given are tested on the CPU
(tests/unit/attention/test_paging.py). Each dtype and head size compiles kernels of its own at first use.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftloop.attention.flashinfer_backend import FlashInferCascade, FlashInferMasked, Limits, new_workspace
from draftloop.attention.interface import TreeAttention, TreeBatch
from draftloop.attention.paging import masked_arguments
from draftloop.attention.torch_backend import TorchTreeAttention
from draftloop.attention.trees import lay_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# An output is a mean of values of size about 1, rounded once to 8 or 11 bits; the weights are rounded too.
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
KINDS = list(itertools.product((torch.bfloat16, torch.float16), (64, 128)))
# Requests, prefixes from .. to, nodes, page size, key-value heads, query heads for each of them.
SHAPES = [
    (1, (0, 0), 1, 1, 8, 1),
    (1, (32768, 32768), 64, 64, 8, 4),
    (2, (0, 5), 7, 1, 2, 3),
    (5, (0, 40), 33, 16, 1, 8),
    (8, (500, 2000), 16, 16, 8, 4),
    (16, (0, 4096), 8, 64, 4, 2),
    (33, (1, 300), 60, 1, 8, 4),
    (64, (0, 1024), 64, 16, 8, 4),
]


def limits_of(batch: TreeBatch, query: Tensor, keys: Tensor, spare: int = 0) -> Limits:
    return Limits(
        num_heads=query.shape[1],
        num_kv_heads=keys.shape[1],
        head_dim=keys.shape[2],
        dtype=keys.dtype,
        max_requests=batch.kv_lens.numel() + spare,
        max_nodes=batch.num_nodes + spare,
        max_pages=batch.kv_indices.shape[1] + spare,
        device=query.device,
    )


def fresh(
    requests: int, prefixes: tuple[int, int], nodes: int, page_size: int, kv_heads: int, group: int,
    dtype: torch.dtype, dim: int,
) -> tuple[TreeBatch, Tensor, Tensor, Tensor]:  # fmt: skip
    """New random numbers every time. Trees of 1 .. nodes nodes, padded; pages dealt out at random."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(prefixes[0], prefixes[1] + 1, (requests,), generator=generator)
    sizes = torch.randint(1, nodes + 1, (requests,), generator=generator)
    sizes[0] = nodes
    trees = []
    for size in sizes.tolist():
        parents = [-1, *(int(torch.randint(0, node, (), generator=generator)) for node in range(1, size))]
        trees.append(torch.tensor(parents))
    mask = lay_out(trees, lengths).mask
    pages = -(-(prefixes[1] + nodes) // page_size)
    table = torch.randperm(requests * pages, generator=generator).view(requests, pages).int()
    query = torch.randn(requests * nodes, kv_heads * group, dim, generator=generator)
    keys, values = (torch.randn(requests * pages * page_size, kv_heads, dim, generator=generator) for _ in range(2))
    batch = TreeBatch(table.cuda(), (lengths + nodes).cuda(), nodes, mask.cuda(), page_size)
    return batch, *(x.to("cuda", dtype) for x in (query, keys, values))  # type: ignore[return-value]


def expected(batch: TreeBatch, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The same rounded numbers through the torch backend in fp32."""
    attention = TorchTreeAttention(query.shape[1], keys.shape[1], torch.float32)
    attention.plan(batch)
    return attention.run(query.float(), keys.float(), values.float(), scale)


@pytest.fixture(scope="module")
def workspace() -> Tensor:
    return new_workspace(torch.device("cuda"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("dtype", "dim"), KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("form", ["cascade", "masked"])
def test_every_shape_agrees_with_torch(
    form: str, shape: tuple[int, tuple[int, int], int, int, int, int], dtype: torch.dtype, dim: int, workspace: Tensor
) -> None:
    batch, query, keys, values = fresh(*shape, dtype, dim)
    limits = limits_of(batch, query, keys)
    attention: TreeAttention = (
        FlashInferCascade(limits, workspace)
        if form == "cascade"
        else FlashInferMasked(limits, workspace, batch.page_size)
    )
    attention.plan(batch)
    for scale in (dim**-0.5, 0.05):  # a plan serves layers of any scale
        got = attention.run(query, keys, values, scale)
        assert bool(got.isfinite().all())
        worst = float((got.float() - expected(batch, query, keys, values, scale)).abs().max())
        assert worst <= BOUNDS[dtype]


@pytest.mark.parametrize("chain", [True, False])
def test_a_captured_graph_follows_every_new_plan(chain: bool, workspace: Tensor) -> None:
    """Capture once; then other prefixes, other trees, other numbers, the same graph. Run allocates nothing."""
    shape = (4, (0, 900), 12, 16, 8, 4)
    batch, query, keys, values = fresh(*shape, torch.bfloat16, 128)
    batch = replace(batch, tree_mask=None) if chain else batch
    attention = FlashInferCascade(limits_of(batch, query, keys, spare=2), workspace)
    attention.plan(batch)
    attention.run(query, keys, values, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        out = attention.run(query, keys, values, 0.1)
    assert torch.cuda.memory_allocated() == before
    for _ in range(3):
        again, *numbers = fresh(*shape, torch.bfloat16, 128)
        again = replace(again, tree_mask=None) if chain else again
        for old, new in zip((query, keys, values), numbers, strict=True):
            old.copy_(new)
        attention.plan(again)
        graph.replay()
        worst = float((out.float() - expected(again, query, keys, values, 0.1)).abs().max())
        assert worst <= BOUNDS[torch.bfloat16]


def test_one_backend_serves_batches_of_all_sizes_in_turn(workspace: Tensor) -> None:
    """As a server does: wrappers for each size, buffers shared."""
    big, query, keys, values = fresh(6, (0, 300), 10, 1, 8, 4, torch.bfloat16, 128)
    attention = FlashInferCascade(limits_of(big, query, keys), workspace)
    for requests in (6, 1, 3, 6, 2):
        batch = TreeBatch(
            big.kv_indices[:requests], big.kv_lens[:requests], 10, big.tree_mask[:requests]  # type: ignore[index]
        )  # fmt: skip
        rows = query[: requests * 10]
        attention.plan(batch)
        worst = (attention.run(rows, keys, values, 0.1).float() - expected(batch, rows, keys, values, 0.1)).abs().max()
        assert float(worst) <= BOUNDS[torch.bfloat16]


def test_packed_masks_are_flashinfers_own(workspace: Tensor) -> None:
    from flashinfer import segment_packbits

    batch, *_ = fresh(5, (0, 40), 7, 1, 2, 2, torch.bfloat16, 64)
    ours = masked_arguments(batch)
    assert ours.packed_mask is not None
    assert ours.mask_indptr is not None
    from draftloop.attention.paging import visible_mask

    lengths = batch.kv_lens.long()
    mask = visible_mask(batch, int(lengths.max()))
    flat = torch.cat([mask[row, :, : int(length)].flatten() for row, length in enumerate(lengths.tolist())])
    begins = torch.nn.functional.pad((lengths * batch.num_nodes).cumsum(0), (1, 0)).int()
    packed, packed_begins = segment_packbits(flat, begins, bitorder="little")
    assert packed_begins.tolist() == ours.mask_indptr.tolist()
    assert packed.tolist() == ours.packed_mask[: len(packed)].tolist()


@pytest.mark.parametrize("requests", [1, 3])
def test_a_packed_mask_alone_is_right_for_one_request_only(requests: int, workspace: Tensor) -> None:
    """The trap. `plan` given `packed_custom_mask` alone keeps the masks' offsets in bits, and the kernel takes them for
    bytes: harmless for one request, wrong for the others. When this fails for 3, FlashInfer has mended it, and
    `_Wrapper.plan` need not write the offsets again."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    batch, query, keys, values = fresh(requests, (64, 64), 16, 1, 8, 4, torch.bfloat16, 128)
    given = masked_arguments(batch)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    # Room behind the mask, so that the wrong offsets read zeros and not foreign memory.
    spare = torch.zeros(8 * 3 * 16 * 80, dtype=torch.uint8, device="cuda")
    wrapper.plan(
        given.qo_indptr, given.kv_indptr, given.kv_indices, given.last_page_len, query.shape[1], keys.shape[1], 128, 1,
        packed_custom_mask=torch.cat((given.packed_mask, spare)), sm_scale=0.1, q_data_type=torch.bfloat16,
    )  # fmt: skip
    got = wrapper.run(query, (keys[:, None], values[:, None]))
    wrong = (got.float() - expected(batch, query, keys, values, 0.1)).abs() > BOUNDS[torch.bfloat16]
    assert not bool(wrong[:16].any())
    assert bool((wrong | ~got.isfinite())[16:].any()) == (requests > 1)
