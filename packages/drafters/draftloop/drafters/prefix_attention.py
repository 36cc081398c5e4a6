"""Attention that every drafter here trains with: a long prefix of true rows, and a few keys of the query's own.

    query of position t        prefix keys 0 1 .. t | own keys (EAGLE: its earlier steps; DFlash: its block)
                               one causal matrix product  +  a few small ones, merged into ONE softmax

The prefix part is computed a strip of queries at a time and gives back its log-sum-exp, so no [S, T] matrix
outlives its strip, in the forward pass or in the backward pass (the recomputation of FlashAttention, arXiv
2205.14135, algorithm 4; a gradient on the log-sum-exp adds to every score's gradient in proportion to its weight).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Scores alive at a time: 4 MiB in fp32. They are walked several times, so they should stay in a CPU's cache; and
# the shorter a strip, the fewer hidden keys are multiplied.
_STRIP_SCORES = 1 << 20


def rope(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, S, D], fp32, of positions [B, S] (Llama's half-split layout)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.unsqueeze(-1) * theta**-exponent
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, S, D] by cos, sin [B or 1, S, D]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1).to(x.dtype) + torch.cat((-high, low), dim=-1) * sin.unsqueeze(1).to(x.dtype)


def prefix_attention(
    query: Tensor, first: Tensor, visible: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend to the prefix rows first <= t < visible, of which there is at least one.

    query: [B, heads, S, D].  first, visible: [B, S] int64.  key, value: [B, kv_heads, T, D].
    Returns the attended values [B, heads, S, D] and the log-sum-exp of the scores [B, heads, S] (fp32 or fp64).
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    return _PrefixAttention.apply(query.contiguous(), first, visible, key, value)


def merge(out: Tensor, log_norm: Tensor, own_scores: Tensor, own_values: Tensor) -> Tensor:
    """One softmax over the prefix and J own keys a query.

    out: [B, heads, S, D], log_norm: [B, heads, S] of the prefix.  own_scores: [B, heads, S, J], scaled.
    own_values: [B, heads, S, J, D] or broadcastable to it.  Returns [B, heads, S, D].
    """
    both = torch.cat((log_norm.unsqueeze(-1), own_scores.to(log_norm.dtype)), dim=-1).softmax(-1).to(out.dtype)
    own = torch.matmul(both[..., None, 1:], own_values).squeeze(-2)
    return out * both[..., :1] + own


def share_heads(x: Tensor, heads: int) -> Tensor:
    """[B, kv_heads, ...] -> [B, heads, ...]: head h reads key-value head h // (heads / kv_heads)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: Tensor,
        first: Tensor,
        visible: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        grouped = _group(query, key)
        out = torch.empty_like(grouped)
        log_norm = grouped.new_empty(grouped.shape[:-1], dtype=_wide(query.dtype))
        for strip in _strips(grouped, first, visible, key):
            scores = _scores(grouped[..., strip.rows, :], first, visible, key, strip)
            top = scores.amax(-1, keepdim=True)
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            log_norm[..., strip.rows] = (top + total.log()).squeeze(-1)
            attended = _by_rows(weights.to(query.dtype), value[:, :, strip.keys])
            out[..., strip.rows, :] = attended / total
        ctx.save_for_backward(query, first, visible, key, value, out, log_norm)
        return out.flatten(1, 2), log_norm.flatten(1, 2)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None, Tensor, Tensor]:
        query, first, visible, key, value, out, log_norm = ctx.saved_tensors  # type: ignore[attr-defined]
        grouped, scale = _group(query, key), query.shape[-1] ** -0.5
        grad_out, grad_norm = grads[0].view_as(out), grads[1].view_as(log_norm)
        # What every weight's gradient loses to the softmax, less what the log-sum-exp itself is asked for.
        lost = (grad_out * out).sum(-1, dtype=log_norm.dtype) - grad_norm
        grad_query = torch.empty_like(grouped)
        grad_key = torch.zeros_like(key, dtype=log_norm.dtype)
        grad_value = torch.zeros_like(value, dtype=log_norm.dtype)
        for strip in _strips(grouped, first, visible, key):
            rows, keys = strip.rows, strip.keys
            q, g = grouped[..., rows, :], grad_out[..., rows, :]
            weights = _scores(q, first, visible, key, strip).sub_(log_norm[..., rows, None]).exp_()
            grad_value[:, :, keys] += _by_columns(weights.to(g.dtype), g)
            grad_weights = _by_rows(g, value[:, :, keys].transpose(-1, -2)).to(weights.dtype)
            grad_scores = grad_weights.sub_(lost[..., rows, None]).mul_(weights).to(q.dtype)
            grad_query[..., rows, :] = _by_rows(grad_scores, key[:, :, keys])
            grad_key[:, :, keys] += _by_columns(grad_scores, q)
        grad_query, grad_key = grad_query.mul_(scale), grad_key.mul_(scale)
        return grad_query.flatten(1, 2), None, None, grad_key.to(key.dtype), grad_value.to(value.dtype)


@dataclass(frozen=True)
class _Strip:
    """Queries `rows` see no prefix row outside `keys`; of these, all see `common`."""

    rows: slice
    keys: slice
    common: slice


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _group(query: Tensor, key: Tensor) -> Tensor:
    """[B, heads, S, D] -> [B, kv_heads, group, S, D]: the heads that share a key lie together."""
    return query.view(query.shape[0], key.shape[1], -1, *query.shape[2:])


def _strips(grouped: Tensor, first: Tensor, visible: Tensor, key: Tensor) -> Iterator[_Strip]:
    rows = grouped.shape[0] * grouped.shape[1] * grouped.shape[2]
    width = max(1, min(grouped.shape[3], _STRIP_SCORES // max(rows * key.shape[2], 1)))
    begins, stops = torch.split(first.cpu(), width, dim=1), torch.split(visible.cpu(), width, dim=1)
    for index, (begin, stop) in enumerate(zip(begins, stops, strict=True)):
        part = slice(index * width, (index + 1) * width)
        keys, common = slice(int(begin.min()), int(stop.max())), slice(int(begin.max()), int(stop.min()))
        yield _Strip(part, keys, common)


def _scores(query: Tensor, first: Tensor, visible: Tensor, key: Tensor, strip: _Strip) -> Tensor:
    """query: [B, kv, group, s, D] of the strip.  first, visible: [B, S].  Returns [B, kv, group, s, len(keys)]."""
    scores = _by_rows(query * query.shape[-1] ** -0.5, key[:, :, strip.keys].transpose(-1, -2))
    scores = scores.to(_wide(query.dtype))
    low, high, begin = strip.keys.start, strip.keys.stop, strip.common.start
    if begin > low:
        columns = torch.arange(low, min(begin, high), device=key.device)
        hidden = columns < first[:, None, None, strip.rows, None]
        scores[..., : len(columns)].masked_fill_(hidden, -torch.inf)
    columns = torch.arange(max(strip.common.stop, low), high, device=key.device)
    hidden = columns >= visible[:, None, None, strip.rows, None]
    scores[..., high - low - len(columns) :].masked_fill_(hidden, -torch.inf)
    return scores


def _by_rows(x: Tensor, y: Tensor) -> Tensor:
    """x: [B, kv, group, s, n].  y: [B, kv, n, m].  Returns [B, kv, group, s, m]: one product for the group."""
    return (x.flatten(2, 3) @ y).view(*x.shape[:4], -1)


def _by_columns(x: Tensor, y: Tensor) -> Tensor:
    """x: [B, kv, group, s, n].  y: [B, kv, group, s, m].  Returns [B, kv, n, m], summed over group and s."""
    return x.flatten(2, 3).transpose(-1, -2) @ y.flatten(2, 3)
