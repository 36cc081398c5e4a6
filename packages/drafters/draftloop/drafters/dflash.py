"""The DFlash drafter (arXiv 2602.06036): a small block-diffusion model that guesses a whole block in one pass.

Parameter names and the forward pass are those of SGLang's `models/dflash.py`:

    c = hidden_norm(fc(f))                            f: K target layers side by side, one row a known token
    z = embedding of the block [x[a], MASK, MASK ..]  at positions a, a+1, ...
    each layer (Qwen3's, with q_norm and k_norm):
        q from input_layernorm(z);  k, v from [c of rows before a ; input_layernorm(z)]  (the same k_proj, v_proj)
        every query of the block sees the whole context and the whole block, in both directions
    logits of slot k = norm(z) @ lm_head.T            the guess of x[a+k]; slot 0 is known and guesses nothing

For the anchor a = 3 and blocks of 3 (. = not seen):

                     context c0 c1 c2 c3 ..   block 3 4 5
    slot 0 (x[3])            T  T  T  .             T T T
    slot 1 (MASK)            T  T  T  .             T T T

The target's embedding and head are frozen and shared, so they are passed in and are no part of the state dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.core.errors import ConfigError
from draftloop.core.manifest import DrafterKind
from draftloop.drafters.batch import Batch
from draftloop.drafters.drafter import Drafter, Shape, shape_of_target
from draftloop.drafters.prefix_attention import prefix_attention, rotate, share_heads
from draftloop.drafters.recurrent import Mlp
from draftloop.drafters.target import FrozenTarget

# The context rows each query sees, first <= t < stop: two [B, A*N] int64, at least one row each.
Seen = tuple[Tensor, Tensor]


def default_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The target layers whose outputs are the context: an even spread from 1 to L-3 (section 3.2; SGLang's rule).

    L=30, 5 -> (1, 8, 14, 20, 27).  One layer -> (L//2,).
    """
    if num_target_layers < 4:
        raise ConfigError(f"DFlash reads inner layers; a target of {num_target_layers} layers has too few")
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


@dataclass(frozen=True)
class DflashConfig(Shape):
    """num_layers: of the drafter.  block_size: slots of a block, the known one included.  mask_token_id: the
    token whose embedding stands for an unknown slot.  num_target_layers: of the target."""

    num_layers: int
    block_size: int
    mask_token_id: int
    num_target_layers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2:
            raise ConfigError(f"a block of {self.block_size} leaves nothing to guess; block_size must be at least 2")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask token {self.mask_token_id} is outside the target's vocabulary {self.vocab_size}")
        if not self.layer_ids or not all(0 <= i < self.num_target_layers for i in self.layer_ids):
            raise ConfigError(f"layers {list(self.layer_ids)} are not those of a {self.num_target_layers}-layer target")

    @classmethod
    def for_target(
        cls,
        target: Mapping[str, Any],
        mask_token_id: int,
        num_layers: int = 5,
        block_size: int = 16,
        layer_ids: tuple[int, ...] | None = None,
        intermediate_size: int | None = None,
    ) -> DflashConfig:
        """Shape a drafter like `num_layers` layers of the target, given the target's parsed `config.json`."""
        depth = int(target["num_hidden_layers"])
        return cls(
            **shape_of_target(target, intermediate_size),
            layer_ids=layer_ids or default_layer_ids(depth, num_layers),
            num_layers=num_layers,
            block_size=block_size,
            mask_token_id=mask_token_id,
            num_target_layers=depth,
        )


@dataclass(frozen=True)
class Context:
    """Keys and values of the known rows, one a layer: [B, kv_heads, T, D] each."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def extend(self, more: Context) -> Context:
        """Append later rows."""
        return Context(
            tuple(torch.cat(pair, dim=2) for pair in zip(self.keys, more.keys, strict=True)),
            tuple(torch.cat(pair, dim=2) for pair in zip(self.values, more.values, strict=True)),
        )


class DflashDrafter(Drafter):
    """See the module's drawing."""

    kind: ClassVar[DrafterKind] = "dflash"

    def __init__(self, config: DflashConfig) -> None:
        super().__init__()
        self.config = self.shape = config
        self.fc = nn.Linear(len(config.layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @classmethod
    def untrained(cls, config: DflashConfig, target_norm_weight: Tensor | None, seed: int) -> DflashDrafter:
        """Random weights (std 0.02) and the target's final norm [H], or ones."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            drafter = cls(config)
            for weight in drafter.parameters():
                if weight.dim() == 2:
                    nn.init.normal_(weight, std=0.02)
            if target_norm_weight is not None:
                drafter.norm.weight.copy_(target_norm_weight)
        return drafter

    def context(self, fused: Tensor, start: int = 0) -> Context:
        """fused: [B, T, K*H], rows of positions start, start+1, ..."""
        states = self.hidden_norm(self.fc(fused))
        now = torch.arange(start, start + fused.shape[1], device=fused.device)[None]
        cos, sin = self.shape.rope(now)
        layers = [cast(_Layer, layer).self_attn for layer in self.layers]
        # One product for all layers: a layer's own is too narrow to be fast.
        shares = F.linear(states, torch.cat([layer.key_value_weight() for layer in layers])).chunk(len(layers), -1)
        pairs = [layer.keys_values(share, cos, sin) for layer, share in zip(layers, shares, strict=True)]
        return Context(tuple(key for key, _ in pairs), tuple(value for _, value in pairs))

    def forward(
        self, context: Context, anchor_embeddings: Tensor, mask_embedding: Tensor, anchors: Tensor, first: Tensor
    ) -> Tensor:
        """One denoising pass over A blocks a sequence.

        anchor_embeddings: [B, A, H], of the known token x[a].  mask_embedding: [H].  anchors, first: [B, A]
        int64; the block at a sees the context rows first <= t < a.  Returns [B, A, N, H], the states before `norm`.
        """
        batch, blocks = anchors.shape
        size = self.config.block_size
        masks = mask_embedding.expand(batch, blocks, size - 1, -1)
        z = torch.cat((anchor_embeddings.unsqueeze(2), masks), dim=2).flatten(1, 2)
        now = (anchors.unsqueeze(-1) + torch.arange(size, device=anchors.device)).flatten(1)
        cos, sin = self.shape.rope(now)
        seen = (first.repeat_interleave(size, dim=1), anchors.repeat_interleave(size, dim=1))
        for layer, key, value in zip(self.layers, context.keys, context.values, strict=True):
            z = layer(z, cos, sin, seen, key, value)
        return z.view(batch, blocks, size, -1)

    def guess(self, batch: Batch, target: FrozenTarget, positions: Tensor, steps: int) -> list[Tensor]:
        """Position t anchors its block on x[t+1]; slot 1 + j is the guess of step j."""
        if steps >= self.config.block_size:
            raise ConfigError(f"a block of {self.config.block_size} guesses fewer than {steps} tokens")
        anchors = positions + 1
        tokens = torch.gather(F.pad(batch.token_ids, (0, 1)), 1, anchors)
        z = self.denoise(batch, target, anchors, tokens)
        return [z[:, :, 1 + step] for step in range(steps)]

    def denoise(self, batch: Batch, target: FrozenTarget, anchors: Tensor, tokens: Tensor) -> Tensor:
        """Blocks on a batch's own context. anchors, tokens: [B, A] int64, a and x[a].  Returns [B, A, N, H]."""
        mask = target.embedding[self.config.mask_token_id]
        first = batch.starts.gather(1, anchors.clamp(max=batch.starts.shape[1] - 1))
        return self(self.context(batch.fused), F.embedding(tokens, target.embedding), mask, anchors, first)

    def readout(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.norm(features))

    def head(self, target: FrozenTarget) -> Tensor:
        return target.lm_head

    def draft_ids(self) -> Tensor:
        return torch.arange(self.config.vocab_size, device=self.fc.weight.device)


class _Layer(nn.Module):
    def __init__(self, config: DflashConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, z: Tensor, cos: Tensor, sin: Tensor, seen: Seen, key: Tensor, value: Tensor) -> Tensor:
        """z: [B, A*N, H].  cos, sin: [B, A*N, D].  key, value: [B, kv, T, D] of the context."""
        z = z + self.self_attn(self.input_layernorm(z), cos, sin, seen, key, value)
        return z + cast(Tensor, self.mlp(self.post_attention_layernorm(z)))


class _Attention(nn.Module):
    def __init__(self, config: DflashConfig) -> None:
        super().__init__()
        self.config = config
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)

    def key_value_weight(self) -> Tensor:
        """[2*kv_heads*D, H]"""
        return torch.cat((self.k_proj.weight, self.v_proj.weight))

    def keys_values(self, projected: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """projected: [B, S, 2*kv_heads*D], by `key_value_weight`.  Returns [B, kv_heads, S, D] each."""
        key, value = projected.chunk(2, dim=-1)
        return rotate(self.k_norm(self._heads(key)), cos, sin), self._heads(value)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen, key: Tensor, value: Tensor) -> Tensor:
        """x: [B, A*N, H], the normed blocks.  Returns [B, A*N, H]."""
        projected = F.linear(x, torch.cat((self.q_proj.weight, self.key_value_weight())))
        width = len(self.q_proj.weight)
        query = rotate(self.q_norm(self._heads(projected[..., :width])), cos, sin)
        own_key, own_value = self.keys_values(projected[..., width:], cos, sin)
        attended = block_attention(query, seen, (key, value), (own_key, own_value), self.config.block_size)
        return cast(Tensor, self.o_proj(attended.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)


def block_attention(
    query: Tensor, seen: Seen, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], block_size: int
) -> Tensor:
    """Each query sees the context rows that `seen` bounds and all of its own block, in one softmax.

    query: [B, heads, A*N, D].  context: key and value [B, kv_heads, T, D].
    own: key and value of the blocks, [B, kv_heads, A*N, D].  Returns [B, heads, A*N, D].
    """
    out, log_norm = prefix_attention(query, *seen, *context)
    batch, heads, _, dim = query.shape
    blocks = (batch, heads, -1, block_size)
    own_key, own_value = (share_heads(x, heads).reshape(*blocks, dim) for x in own)
    scores = (query * dim**-0.5).reshape(*blocks, dim) @ own_key.transpose(-1, -2)
    scores = torch.cat((log_norm.view(*blocks, 1), scores.to(log_norm.dtype)), dim=-1)
    weights = scores.softmax(-1).to(out.dtype)
    return out * weights[..., :1].flatten(2, 3) + (weights[..., 1:] @ own_value).flatten(2, 3)
