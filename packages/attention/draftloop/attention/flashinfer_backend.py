"""Tree attention by FlashInfer (GPU only): one masked prefill, or prefix and tree apart (the default).

    FlashInferCascade    prefix without a mask, any page size   +   own tree, N x N bits, slot by slot
                         merged in place by their log-sum-exps (`torch_cascade` is the same in plain torch)
    FlashInferMasked     one call under N bits for every visible column: what SGLang's own backend does

Both are made for CUDA graphs: whatever a kernel reads or writes lies in buffers made once (a set of wrappers for each
B and N, made at its first plan), so `run` allocates nothing and a captured graph sees each new plan.
FlashInfer compiles its kernels at first use, one module for each dtype and head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftloop.attention.interface import TreeAttention, TreeBatch
from draftloop.attention.paging import PrefillArguments, masked_arguments, prefix_arguments, tree_arguments

if TYPE_CHECKING:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

# Enough for 64 trees of 64 nodes at 64 heads of 128; where it is not, FlashInfer's plan says so.
WORKSPACE_BYTES = 384 << 20
# FlashInfer's merge kernel runs all heads of a row in one block, 8 values of a head a thread.
_MERGE_THREADS = 1024
_MERGE_VALUES = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """The shape of the model's attention, and the largest batch a backend makes room for.

    max_pages: of one request, for the page size of its batches.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    max_requests: int
    max_nodes: int
    max_pages: int
    device: torch.device

    def __post_init__(self) -> None:
        if self.num_heads * self.head_dim > _MERGE_THREADS * _MERGE_VALUES:
            raise ValueError(
                f"FlashInfer merges at most {_MERGE_THREADS * _MERGE_VALUES // self.head_dim} heads of "
                f"{self.head_dim}, not {self.num_heads}: spread the model over more cards"
            )

    @property
    def max_rows(self) -> int:
        return self.max_requests * self.max_nodes


def new_workspace(device: torch.device) -> Tensor:
    """Where split prefixes leave their partial results. One does for all backends of a stream."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class _Wrapper:
    """One `BatchPrefillWithPagedKVCacheWrapper` with every buffer ours, for a fixed B and N."""

    def __init__(
        self, limits: Limits, requests: int, workspace: Tensor, kv_indices: Tensor, packed_mask: Tensor | None
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=limits.device)

        self._limits = limits
        self._mask_indptr = None if packed_mask is None else zeros(requests + 1)
        # fa2 for both parts: the only one with custom masks, and it splits a long prefix over the card's processors,
        # which a handful of query rows needs.
        self._wrapper: BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=zeros(requests + 1),
            paged_kv_indptr_buf=zeros(requests + 1),
            paged_kv_indices_buf=kv_indices,
            paged_kv_last_page_len_buf=zeros(requests),
            custom_mask_buf=packed_mask,
            mask_indptr_buf=self._mask_indptr,
            backend="fa2",
        )
        self._page_size = 1

    def plan(self, arguments: PrefillArguments) -> None:
        limits = self._limits
        self._page_size = arguments.page_size
        self._wrapper.plan(
            arguments.qo_indptr,
            arguments.kv_indptr,
            arguments.kv_indices,
            arguments.last_page_len,
            limits.num_heads,
            limits.num_kv_heads,
            limits.head_dim,
            arguments.page_size,
            packed_custom_mask=arguments.packed_mask,
            sm_scale=1.0,
            q_data_type=limits.dtype,
            kv_data_type=limits.dtype,
        )
        if self._mask_indptr is not None and arguments.mask_indptr is not None:
            # Given a packed mask, 0.7.2 leaves its offsets in bits, which only the first request survives.
            self._mask_indptr.copy_(arguments.mask_indptr)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        """Fill out [rows, h, d] and lse [rows, h] (base 2). The scale reaches the kernel as the query's own."""
        paged = (-1, self._page_size, *k_cache.shape[1:])
        self._wrapper.run(
            q, (k_cache.view(paged), v_cache.view(paged)), q_scale=scale, out=out, lse=lse, return_lse=True
        )


class _Buffers:
    """What wrappers of all sizes share: only one of them runs at a time."""

    def __init__(self, limits: Limits, workspace: Tensor, parts: int, mask_bits: int) -> None:
        self.workspace = workspace
        self.pages = torch.zeros(limits.max_requests * limits.max_pages, dtype=torch.int32, device=limits.device)
        self.slots = torch.zeros(limits.max_rows, dtype=torch.int32, device=limits.device)
        # pack_segments rounds down once and leaves a spare byte a request.
        self.packed_mask = torch.zeros(
            limits.max_requests * (mask_bits // 8 + 2), dtype=torch.uint8, device=limits.device
        )
        rows = (parts, limits.max_rows, limits.num_heads)
        self.out = torch.zeros(*rows, limits.head_dim, dtype=limits.dtype, device=limits.device)
        self.lse = torch.zeros(*rows, dtype=torch.float32, device=limits.device)
        self.has_prefix = torch.zeros(limits.max_rows, dtype=torch.uint8, device=limits.device)


class FlashInferCascade(TreeAttention):
    """See the module's text. Parts: 0 the tree, 1 the prefix."""

    def __init__(self, limits: Limits, workspace: Tensor) -> None:
        self._limits = limits
        self._buffers = _Buffers(limits, workspace, parts=2, mask_bits=limits.max_nodes**2)
        self._wrappers: dict[tuple[int, int], tuple[_Wrapper, _Wrapper]] = {}
        self._now: tuple[int, int] | None = None

    def plan(self, batch: TreeBatch) -> None:
        requests, nodes = batch.kv_lens.numel(), batch.num_nodes
        self._now = (requests, nodes)
        if self._now not in self._wrappers:
            shared = self._buffers
            self._wrappers[self._now] = (
                _Wrapper(self._limits, requests, shared.workspace, shared.slots, shared.packed_mask),
                _Wrapper(self._limits, requests, shared.workspace, shared.pages, None),
            )
        tree, prefix = self._wrappers[self._now]
        tree.plan(tree_arguments(batch))
        prefix.plan(prefix_arguments(batch))
        has_prefix = (batch.kv_lens > nodes).repeat_interleave(nodes, output_size=requests * nodes)
        self._buffers.has_prefix[: requests * nodes].copy_(has_prefix)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        from flashinfer.cascade import merge_state_in_place

        if self._now is None:
            raise RuntimeError("FlashInferCascade.run called before plan")
        rows = self._now[0] * self._now[1]
        shared = self._buffers
        for part, wrapper in enumerate(self._wrappers[self._now]):
            wrapper.run(q, k_cache, v_cache, scale, shared.out[part, :rows], shared.lse[part, :rows])
        # Rows with no prefix keep their tree's result: what a kernel leaves for zero keys is not defined.
        merge_state_in_place(
            shared.out[0, :rows],
            shared.lse[0, :rows],
            shared.out[1, :rows],
            shared.lse[1, :rows],
            shared.has_prefix[:rows],
        )
        return shared.out[0, :rows]


class FlashInferMasked(TreeAttention):
    """See the module's text."""

    def __init__(self, limits: Limits, workspace: Tensor, page_size: int) -> None:
        self._limits = limits
        columns = limits.max_pages * page_size
        self._buffers = _Buffers(limits, workspace, parts=1, mask_bits=limits.max_nodes * columns)
        self._wrappers: dict[tuple[int, int], _Wrapper] = {}
        self._now: tuple[int, int] | None = None

    def plan(self, batch: TreeBatch) -> None:
        requests = batch.kv_lens.numel()
        self._now = (requests, batch.num_nodes)
        if self._now not in self._wrappers:
            shared = self._buffers
            self._wrappers[self._now] = _Wrapper(
                self._limits, requests, shared.workspace, shared.pages, shared.packed_mask
            )
        self._wrappers[self._now].plan(masked_arguments(batch))

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        if self._now is None:
            raise RuntimeError("FlashInferMasked.run called before plan")
        rows = self._now[0] * self._now[1]
        out, lse = self._buffers.out[0, :rows], self._buffers.lse[0, :rows]
        self._wrappers[self._now].run(q, k_cache, v_cache, scale, out, lse)
        return out
