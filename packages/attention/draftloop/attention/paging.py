"""A batch of trees in the words of a paged prefill kernel: index pointers, page lists, last-page lengths, packed masks.

FlashInfer's `BatchPrefillWithPagedKVCacheWrapper.plan` takes these; what they mean is written out as a loop in
tests/unit/attention/prefill_by_hand.py. For two requests of prefixes 5 and 0, N = 2 and pages of 4:

    prefix    kv_indptr 0 2 2     kv_indices: 2 pages      last_page_len 1 0       no mask
    tree      kv_indptr 0 2 4     kv_indices: 4 SLOTS      last_page_len 1 1       2 x 2 bits a request
    masked    kv_indptr 0 2 3     kv_indices: 3 pages      last_page_len 3 2       2 x 7 and 2 x 2 bits
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.attention.interface import TreeBatch
from draftloop.attention.trees import pack_segments


@dataclass(frozen=True, slots=True)
class PrefillArguments:
    """One prefill call. All int32 but the mask, on the batch's device.

    qo_indptr, kv_indptr: [B + 1].  kv_indices: [kv_indptr[-1]], pages of `page_size` slots.  last_page_len: [B].
    packed_mask: uint8, or None when every query sees all; mask_indptr: [B + 1], in BYTES.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor
    page_size: int
    packed_mask: Tensor | None = None
    mask_indptr: Tensor | None = None


def slots_of(batch: TreeBatch) -> Tensor:
    """[B, L] int64, the slot of every position, page by page."""
    if batch.page_size == 1:
        return batch.kv_indices.long()
    inside = torch.arange(batch.page_size, device=batch.kv_indices.device)
    return (batch.kv_indices.long()[:, :, None] * batch.page_size + inside).flatten(1)


def node_slots(batch: TreeBatch) -> Tensor:
    """[B, N] int64, the slots of the nodes' own keys and values."""
    order = torch.arange(batch.num_nodes, device=batch.kv_lens.device)
    position = (batch.kv_lens.long() - batch.num_nodes)[:, None] + order
    page = batch.kv_indices.long().gather(1, position // batch.page_size)
    return page * batch.page_size + position % batch.page_size


def tree_mask(batch: TreeBatch) -> Tensor:
    """[B, N, N] bool; a chain's is lower triangular."""
    if batch.tree_mask is not None:
        return batch.tree_mask
    nodes = batch.num_nodes
    chain = torch.ones(nodes, nodes, dtype=torch.bool, device=batch.kv_lens.device).tril()
    return chain.expand(batch.kv_lens.numel(), nodes, nodes)


def visible_mask(batch: TreeBatch, length: int) -> Tensor:
    """[B, N, length] bool, True where node i of request b may see column j.

    kv_lens = 5, N = 2, length = 6, tree_mask = [[1,0],[0,1]] (two siblings)

    column    0 1 2 | 3 4 | 5
              prefix  nodes padding
    node 0    1 1 1   1 0   0
    node 1    1 1 1   0 1   0
    """
    nodes, prefix = batch.num_nodes, batch.kv_lens.long() - batch.num_nodes
    column = torch.arange(length, device=prefix.device)
    mask = (column < prefix[:, None])[:, None].expand(prefix.numel(), nodes, length).clone()
    own = prefix[:, None] + torch.arange(nodes, device=prefix.device)
    return mask.scatter_(2, own[:, None].expand(prefix.numel(), nodes, nodes), tree_mask(batch))


def prefix_arguments(batch: TreeBatch) -> PrefillArguments:
    """Every node against its whole prefix: no mask, whatever the tree."""
    return _paged(batch, batch.kv_lens - batch.num_nodes)


def tree_arguments(batch: TreeBatch) -> PrefillArguments:
    """The nodes among themselves. A tree begins anywhere in a page, so its keys are named slot by slot."""
    requests, nodes = batch.kv_lens.numel(), batch.num_nodes
    indptr = _steps(requests, nodes, batch.kv_lens)
    sizes = torch.full((requests,), nodes * nodes, device=batch.kv_lens.device)
    packed, begins = pack_segments(tree_mask(batch).flatten(), sizes)
    ones = torch.ones(requests, dtype=torch.int32, device=batch.kv_lens.device)
    return PrefillArguments(indptr, indptr, node_slots(batch).flatten().int(), ones, 1, packed, begins)


def masked_arguments(batch: TreeBatch) -> PrefillArguments:
    """Prefix and nodes in one call, under a mask of N bits for every visible column."""
    lengths = batch.kv_lens.long()
    longest = int(lengths.max())
    mask = visible_mask(batch, longest)
    column = torch.arange(longest, device=mask.device)
    real = (column < lengths[:, None])[:, None].expand_as(mask)
    packed, begins = pack_segments(mask[real], lengths * batch.num_nodes)
    plain = _paged(batch, lengths)
    return PrefillArguments(
        plain.qo_indptr, plain.kv_indptr, plain.kv_indices, plain.last_page_len, plain.page_size, packed, begins
    )


def _paged(batch: TreeBatch, lengths: Tensor) -> PrefillArguments:
    """Every node against the first `lengths` [B] positions of its request."""
    size = batch.page_size
    pages = (lengths + size - 1) // size
    column = torch.arange(batch.kv_indices.shape[1], device=lengths.device)
    return PrefillArguments(
        qo_indptr=_steps(lengths.numel(), batch.num_nodes, lengths),
        kv_indptr=torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int(),
        kv_indices=batch.kv_indices[column < pages[:, None]].int(),
        # An empty prefix has no page, so its last one holds 0.
        last_page_len=(lengths - (pages - 1).clamp(min=0) * size).int(),
        page_size=size,
    )


def _steps(requests: int, nodes: int, like: Tensor) -> Tensor:
    return torch.arange(0, (requests + 1) * nodes, nodes, dtype=torch.int32, device=like.device)
