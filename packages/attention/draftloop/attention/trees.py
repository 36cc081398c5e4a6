"""From parent pointers to what attention needs: who sees whom, at which position, in which bits.

 root             parents   -1  0  0  1        mask   1 . . .
a    b            depths     0  1  1  2               1 1 . .
c                                                     1 . 1 .
                                                      1 1 . 1      row c: root, a, c
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BYTE_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """B trees padded to N nodes. A padding node is its own root behind the prefix: it sees itself and nobody sees it.

    parents: [B, N] int64, -1 for a root.  positions: [B, N] int64, prefix length plus depth.
    mask: [B, N, N] bool, ancestors and the node itself.  sizes: [B] int64, the real nodes.
    """

    parents: Tensor
    positions: Tensor
    mask: Tensor
    sizes: Tensor


def lay_out(parents: Sequence[Tensor], prefix_lens: Tensor) -> TreeLayout:
    """parents: one [n_b] int64 a tree, each parent before its children, -1 for the root.  prefix_lens: [B] int64."""
    sizes = torch.tensor([len(tree) for tree in parents], device=prefix_lens.device)
    padded = torch.full((len(parents), max(len(tree) for tree in parents)), -1, device=prefix_lens.device)
    for row, tree in enumerate(parents):
        padded[row, : len(tree)] = tree
    mask = ancestor_mask(padded)
    return TreeLayout(padded, prefix_lens[:, None] + mask.sum(-1) - 1, mask, sizes)


def ancestor_mask(parents: Tensor) -> Tensor:
    """[B, N] parents -> [B, N, N] bool. Each doubling adds the ancestors of the ancestors found so far."""
    nodes = parents.shape[1]
    order = torch.arange(nodes, device=parents.device)
    seen = (order[:, None] == order) | (parents[:, :, None] == order)
    reach = 1
    while reach < nodes:
        # bool has no matrix product; counts of paths stay far below fp32's exact range.
        seen = seen.float() @ seen.float() > 0
        reach *= 2
    return seen


def tree_block(full_mask: Tensor, prefix_lens: Tensor, nodes: int) -> Tensor:
    """The N x N part of a flat mask over prefix and nodes (SGLang's FULL_MASK): [B, N, N] bool.

    full_mask: [sum(N * (prefix_lens[b] + N))] bool, q-major; what lies beyond its end counts as visible, as for the
    padding requests of a CUDA graph.  prefix_lens: [B] int64.
    """
    widths = prefix_lens + nodes
    starts = nodes * (widths.cumsum(0) - widths)
    order = torch.arange(nodes, device=prefix_lens.device)
    rows = starts[:, None] + order * widths[:, None] + prefix_lens[:, None]
    places = rows[:, :, None] + order
    inside = places < full_mask.numel()
    return full_mask[places.clamp(max=full_mask.numel() - 1)] | ~inside


def pack_segments(bits: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Pack B segments of bits into bytes, the first bit lowest, each segment from a byte of its own.

    bits: [sum(lengths)] bool.  lengths: [B] int64.  Returns the bytes [M // 8 + B] uint8, zeros at the end, and
    [B + 1] int32, where each segment begins. This is FlashInfer's layout (`segment_packbits`, bitorder "little"),
    made without asking the device how long the result is.

        lengths 3, 9:   bits 101 110000001   ->   bytes 0b101, 0b00000011, 0b1     begins 0, 1, 3
    """
    device, total = bits.device, bits.numel()
    byte_lengths = (lengths + 7) // 8
    byte_starts = torch.nn.functional.pad(byte_lengths.cumsum(0), (1, 0))
    bit_starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    segment = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=total)
    place = torch.arange(total, device=device) - bit_starts[segment]
    weights = torch.tensor(BYTE_WEIGHTS, dtype=torch.int32, device=device)[place % 8]
    sums = torch.zeros(total // 8 + len(lengths), dtype=torch.int32, device=device)
    sums.index_add_(0, byte_starts[segment] + place // 8, bits * weights)
    return sums.to(torch.uint8), byte_starts.int()
