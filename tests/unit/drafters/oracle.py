"""A slow, independent EAGLE-3: one sequence, dense tree mask, plain loops. The fast code must agree with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from draftloop.drafters.eagle3 import Eagle3Drafter


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x: [heads, N, D], rotated one pair (i, i + D/2) at a time."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = positions.to(x.dtype) * theta ** (-i / half)
        a, b = x[..., i], x[..., i + half]
        out[..., i] = a * angle.cos() - b * angle.sin()
        out[..., i + half] = b * angle.cos() + a * angle.sin()
    return out


def tree_mask(length: int, steps: int) -> torch.Tensor:
    """[steps*T, steps*T] bool: node (j, t) sees (0, s <= t) and (i, t) for i <= j."""
    mask = torch.zeros(steps, length, steps, length, dtype=torch.bool)
    for j in range(steps):
        for t in range(length):
            mask[j, t, 0, : t + 1] = True
            for i in range(1, j + 1):
                mask[j, t, i, t] = True
    return mask.view(steps * length, steps * length)


def unroll(drafter: Eagle3Drafter, fused: torch.Tensor, embeddings: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """fused: [T, K*H].  embeddings: [T+steps-1, H].  Returns one [T, H] per step."""
    c, w = drafter.config, dict(drafter.named_parameters())
    length = fused.shape[0]
    mask = tree_mask(length, steps)
    feature = fused @ w["fc.weight"].T
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    features: list[torch.Tensor] = []
    for j in range(steps):
        tokens = rms(embeddings[j : j + length], w["midlayer.input_layernorm.weight"], c.rms_norm_eps)
        both = torch.cat((tokens, rms(feature, w["midlayer.hidden_norm.weight"], c.rms_norm_eps)), -1)
        heads = {}
        for name, count in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
            projected = both @ w[f"midlayer.self_attn.{name}_proj.weight"].T
            heads[name] = projected.view(length, count, c.head_dim).transpose(0, 1)
        positions = torch.arange(length) + j
        keys.append(rope(heads["k"], positions, c.rope_theta))
        values.append(heads["v"])
        repeat = c.num_heads // c.num_kv_heads
        key = torch.cat(keys, 1).repeat_interleave(repeat, 0)
        value = torch.cat(values, 1).repeat_interleave(repeat, 0)
        scores = rope(heads["q"], positions, c.rope_theta) @ key.transpose(1, 2) / c.head_dim**0.5
        allowed = mask[j * length : (j + 1) * length, : (j + 1) * length]
        attended = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value
        merged = attended.transpose(0, 1).reshape(length, -1)
        residual = feature + merged @ w["midlayer.self_attn.o_proj.weight"].T
        normed = rms(residual, w["midlayer.post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = F.silu(normed @ w["midlayer.mlp.gate_proj.weight"].T)
        feature = (
            residual + (gate * (normed @ w["midlayer.mlp.up_proj.weight"].T)) @ w["midlayer.mlp.down_proj.weight"].T
        )
        features.append(feature)
    return features


def logits(drafter: Eagle3Drafter, feature: torch.Tensor) -> torch.Tensor:
    return rms(feature, drafter.norm.weight, drafter.config.rms_norm_eps) @ drafter.lm_head.weight.T
