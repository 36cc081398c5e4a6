"""What FlashInfer's paged prefill makes of its arguments, as a loop: its documentation and `variants.cuh`, on a CPU."""

from __future__ import annotations

import math

import torch

from draftloop.attention.paging import PrefillArguments


def prefill(
    arguments: PrefillArguments, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [rows, h, d].  keys, values: [S, hk, d].  Returns out [rows, h, d] and lse [rows, h], base e here.

    A row that sees nothing gets NaN and -inf: the kernel leaves it undefined.
    """
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("-inf"))
    group, size = q.shape[1] // keys.shape[1], arguments.page_size
    for request in range(len(arguments.last_page_len)):
        first, last = arguments.kv_indptr[request : request + 2].tolist()
        begin, end = arguments.qo_indptr[request : request + 2].tolist()
        length = max(last - first - 1, 0) * size + int(arguments.last_page_len[request])
        pages = arguments.kv_indices[first:last].tolist()
        slots = [pages[position // size] * size + position % size for position in range(length)]
        for row in range(begin, end):
            seen = [s for column, s in enumerate(slots) if _bit(arguments, request, (row - begin) * length + column)]
            for head in range(q.shape[1] if seen else 0):
                scores = torch.stack([scale * q[row, head] @ keys[slot, head // group] for slot in seen])
                lse[row, head] = torch.logsumexp(scores, 0)
                picked = torch.stack([values[slot, head // group] for slot in seen])
                out[row, head] = (scores - lse[row, head]).exp() @ picked
    return out, lse


def _bit(arguments: PrefillArguments, request: int, offset: int) -> bool:
    if arguments.packed_mask is None or arguments.mask_indptr is None:
        return True
    byte = int(arguments.packed_mask[int(arguments.mask_indptr[request]) + offset // 8])
    return bool(byte >> (offset % 8) & 1)


def merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    """`merge_state_in_place` with its mask: rows whose other part is empty keep what they have."""
    merged = out.clone()
    for row in range(len(out)):
        for head in range(out.shape[1]):
            a, b = float(lse[row, head]), float(other_lse[row, head])
            if b > -math.inf:
                share = 1 / (1 + math.exp(b - a))
                merged[row, head] = share * out[row, head] + (1 - share) * other[row, head]
    return merged
