"""Torch twins of the small CPU kernels SGLang imports from `sgl_kernel`.

Names, arguments and in-place results follow SGLang's call sites (`sglang/kernels/ops/speculative`,
`sglang/srt/mem_cache/allocation.py`). Symbols: B requests, N nodes a draft tree, R rows and P columns of the
request-to-slot table. All are vectorised over requests but the two tree walks, which touch N small integers.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

__version__ = "0.4.10"

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]


def ragged_cells(rows: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """(row, column) of every cell of the spans [start, end) in request order.

    rows=[7, 3], start=[2, 0], end=[4, 1]  ->  rows [7, 7, 3], columns [2, 3, 0]
    """
    lengths = (end - start).long()
    first = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    columns = torch.arange(total) - (first - start.long()).repeat_interleave(lengths)
    return rows.long().repeat_interleave(lengths), columns


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """req_to_token[r, start:end] = the next slots of out_cache_loc."""
    rows, columns = ragged_cells(req_pool_indices, start, end)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """out_cache_loc = req_to_token[r, start:end] of all requests, one after the other."""
    rows, columns = ragged_cells(req_pool_indices, start, end)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """out_cache_loc [B * topk * num_steps] = the slots that follow each request's committed tokens."""
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[:, None], columns].reshape(-1))


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int) -> None:
    """bonus_tokens[b] = the last accepted token of request b; accept_tokens is [B, stride]."""
    last = torch.arange(accept_lens.numel()) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Gather the slots of accepted nodes (-1 marks a hole) to the front."""
    index = accept_index.reshape(-1)
    index = index[index > -1].long()
    accept_out_cache_loc[: index.numel()] = out_cache_loc[index]


def rotate_input_ids_cpu(
    input_ids: Tensor, start: Tensor, lengths: Tensor, topk_index: Tensor, select_index: Tensor | None = None
) -> None:
    """Shift each request's tokens left by one and put the next token at its end (or at select_index).

    a b c | d e, next x y  ->  b c x | e y
    """
    tail = topk_index.reshape(-1)
    for i, (first, length) in enumerate(zip(start.tolist(), lengths.tolist(), strict=True)):
        if length > 0:
            input_ids[first : first + length - 1] = input_ids[first + 1 : first + length].clone()
            at = first + length - 1 if select_index is None else int(select_index[i])
            input_ids[at] = tail[i]


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Move rows src -> tgt in every layer's K and V buffer (given as addresses and row sizes in bytes)."""
    moved = tgt_loc != src_loc
    target, source = tgt_loc[moved].long(), src_loc[moved].long()
    if target.numel() == 0:
        return
    rows = int(torch.maximum(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        raw = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = torch.frombuffer(raw, dtype=torch.uint8).view(rows, stride)
        buffer[target] = buffer[source]


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """[B * topk, pool_len] slot table: each branch sees the prefix, then its own num_steps draft slots.

    A request's draft slots follow its prefix branch by branch:
    prefix | b0s0 b0s1 | b1s0 b1s1   ->   row 0: prefix b0s0 b0s1,  row 1: prefix b1s0 b1s1
    """
    table = req_to_token[req_pool_indices.long()].repeat_interleave(topk, 0)
    branch = torch.arange(topk).repeat(req_pool_indices.numel())
    steps = torch.arange(num_steps)
    prefix = seq_lens.long().repeat_interleave(topk)[:, None]
    own = table.gather(1, (prefix + branch[:, None] * num_steps + steps).clamp_(max=pool_len - 1))
    return table.scatter_(1, (prefix + steps).clamp_(max=pool_len - 1), own)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    num_nodes: int,
    mask_mode: int,
) -> None:
    """Link each request's N selected draft nodes into a tree (node 0 is the root, the last known token).

    selected_index: [B, N-1], ascending flat index of each node among all candidates; candidates of one parent
    group are `topk` neighbours, so `index // topk` names the group and parent_list[group] the parent's own index.
    Fills next_token (first child) and next_sibling as linked lists, positions = prefix + depth, and the mask:
    mode 0 over prefix and nodes, mode 1 over nodes only.
    """
    if mask_mode not in (0, 1):
        raise NotImplementedError(f"tree mask mode {int(mask_mode)} has no CPU twin")
    batch = seq_lens.numel()
    index = retrieve_index.view(batch, num_nodes)
    index.copy_(torch.arange(batch * num_nodes).view(batch, num_nodes))
    next_token = retrieve_next_token.view(batch, num_nodes).numpy()
    next_sibling = retrieve_next_sibling.view(batch, num_nodes).numpy()
    position = positions.view(batch, num_nodes).numpy()
    flat_mask = tree_mask.view(-1)
    parents, selected = parent_list.tolist(), selected_index.tolist()
    offset = 0
    for b, length in enumerate(seq_lens.tolist()):
        parent = _node_parents(parents[b] if parents else [], selected[b], topk)
        ancestors, depths = _ancestors(parent)
        position[b] = length + depths
        for node in range(num_nodes - 1, 0, -1):  # backwards, so that each list comes out in ascending order
            if parent[node] >= 0:
                next_sibling[b, node] = next_token[b, parent[node]]
                next_token[b, parent[node]] = node
        width = num_nodes + (length if mask_mode == 0 else 0)
        rows = flat_mask[offset : offset + width * num_nodes].view(num_nodes, width)
        rows[:, width - num_nodes :] = torch.from_numpy(ancestors).to(rows.dtype)
        offset += width * num_nodes


def _node_parents(parent_list: list[int], selected: list[int], topk: int) -> list[int]:
    """Tree position of each node's parent; position i holds candidate selected[i - 1], position 0 the root.

    -1 for an orphan, whose parent lost a tie for the last places: like SGLang's kernel, it is never reached.
    """
    place = {candidate: i + 1 for i, candidate in enumerate(selected)}
    parent = [0]
    for candidate in selected:
        group = candidate // topk
        parent.append(place.get(parent_list[group], -1) if group else 0)
    return parent


def _ancestors(parent: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """([N, N] bool, itself included; [N] depth). A parent always stands before its children; orphans see the root."""
    size = len(parent)
    seen = np.eye(size, dtype=bool)
    depth = np.zeros(size, dtype=np.int64)
    for node in range(1, size):
        above = max(parent[node], 0)
        seen[node] |= seen[above]
        depth[node] = depth[above] + 1
    return seen, depth


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree along the target's argmax; the target's token after the last accepted node is the bonus.

    candidates, target_predict: [B, N]. Fills accept_index [B, depth + 1] (global node indices), accept_token_num
    [B] (drafts accepted, bonus not counted) and predicts [B * N] at the accepted nodes.
    """
    tokens, index = candidates.tolist(), retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    wanted = target_predict.reshape(-1).tolist()
    accepted_rows, counts = accept_index.tolist(), []
    nodes: list[int] = []
    for b, path in enumerate(accepted_rows):
        last = path[0] = index[b][0]
        nodes.append(last)
        count, cursor = 0, 0
        while count + 1 < len(path):
            cursor = child[b][cursor]
            while cursor != -1 and tokens[b][cursor] != wanted[last]:
                cursor = sibling[b][cursor]
            if cursor == -1:
                break
            count += 1
            last = path[count] = index[b][cursor]
            nodes.append(last)
        counts.append(count)
    accept_index.copy_(torch.tensor(accepted_rows, dtype=accept_index.dtype))
    accept_token_num.copy_(torch.tensor(counts, dtype=accept_token_num.dtype))
    at = torch.tensor(nodes, dtype=torch.long)
    predicts[at] = target_predict.reshape(-1)[at].to(predicts.dtype)
