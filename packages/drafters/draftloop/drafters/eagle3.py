"""The EAGLE-3 drafter: one Llama layer that reads fused target states and guesses the tokens after the next.

Parameter names and the forward pass are those of SGLang's `models/llama_eagle3.py`, so a saved state dict is
served as it is:

    h = fc(f)                                                        f: K target layers side by side
    a = attention([input_layernorm(e), hidden_norm(h)]) + h          the residual is the un-normed h
    g = mlp(post_attention_layernorm(a)) + a                         g is the feature the next step reads
    logits = lm_head(norm(g))                                        over the draft vocabulary

The target's embedding is frozen and shared, so it is passed in and is no part of the state dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.core.errors import ConfigError
from draftloop.drafters.ttt_attention import rope_tables, rotate, ttt_attention
from draftloop.drafters.vocab import ids_from_offsets, offsets_from_ids


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """The target layers whose outputs are fused: (1, L//2-1, L-4), or an even spread where those collide.

    The last layer is never one of them: its output is what the target's own head already reads, and SGLang
    cannot capture it.  L=30 -> (1, 14, 26).  L=4 -> (0, 1, 2).
    """
    if num_layers < 4:
        raise ConfigError(f"EAGLE-3 fuses three inner layers; a target of {num_layers} layers has too few")
    low, middle, high = 1, num_layers // 2 - 1, num_layers - 4
    if low < middle < high:
        return low, middle, high
    return 0, (num_layers - 2) // 2, num_layers - 2


@dataclass(frozen=True)
class Eagle3Config:
    """The drafter's shape. `hidden_size` is the target's too, because the embedding is shared.

    layer_ids: target layers whose OUTPUT is fused (output of layer i), K of them, in fusing order.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    draft_vocab_size: int
    layer_ids: tuple[int, ...]
    max_position_embeddings: int

    def __post_init__(self) -> None:
        if len(self.layer_ids) < 2:
            # SGLang skips fc when the captured width already equals the hidden size.
            raise ConfigError(f"EAGLE-3 needs at least two fused layers, not {list(self.layer_ids)}")
        if self.num_heads % self.num_kv_heads != 0:
            raise ConfigError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(
                f"draft vocabulary {self.draft_vocab_size} must be between 1 and the target's {self.vocab_size}"
            )

    @property
    def num_fused_layers(self) -> int:
        return len(self.layer_ids)

    @classmethod
    def for_target(
        cls,
        target: Mapping[str, Any],
        draft_vocab_size: int,
        layer_ids: tuple[int, ...] | None = None,
        intermediate_size: int | None = None,
    ) -> Eagle3Config:
        """Shape a drafter like one layer of the target, given the target's parsed `config.json`.

        None means the default: `default_layer_ids`, the target's own MLP width.
        """
        hidden, heads = int(target["hidden_size"]), int(target["num_attention_heads"])
        rope = target.get("rope_parameters") or {}
        return cls(
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=int(target.get("num_key_value_heads") or heads),
            head_dim=int(target.get("head_dim") or hidden // heads),
            intermediate_size=intermediate_size or int(target["intermediate_size"]),
            rms_norm_eps=float(target.get("rms_norm_eps", 1e-6)),
            rope_theta=float(target.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            vocab_size=int(target["vocab_size"]),
            draft_vocab_size=draft_vocab_size,
            layer_ids=layer_ids or default_layer_ids(int(target["num_hidden_layers"])),
            max_position_embeddings=int(target["max_position_embeddings"]),
        )


class Eagle3Drafter(nn.Module):
    """See the module's drawing. Buffer `d2t` [Vd] holds offsets: target id = d + d2t[d]."""

    d2t: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_fused_layers * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Midlayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @classmethod
    def untrained(
        cls,
        config: Eagle3Config,
        draft_to_target: Tensor,
        target_lm_head: Tensor,
        target_norm_weight: Tensor | None,
        seed: int,
        last_layer: Mapping[str, Tensor] | None = None,
    ) -> Eagle3Drafter:
        """A drafter that knows the target's head, and its last layer when given, but nothing else.

        draft_to_target: [Vd] int64 sorted target ids.  target_lm_head: [V, H].  target_norm_weight: [H], the
        target's final norm, or None for ones.  last_layer: the target's last layer under its Hugging Face names
        ("self_attn.q_proj.weight", ...); what has another shape in the drafter stays random.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drafter = cls(config)
            drafter._start_as_logit_lens(draft_to_target, target_lm_head, target_norm_weight)
        if last_layer is not None:
            drafter._start_from_layer(last_layer)
        return drafter

    @torch.no_grad()
    def _start_as_logit_lens(self, ids: Tensor, target_lm_head: Tensor, norm_weight: Tensor | None) -> None:
        """Start where the highest fused layer passes straight to the target's own head.

        Its state already lies near the final one, so the first gradients shape what the layer ADDS to it
        instead of rebuilding the residual stream.
        """
        hidden = self.config.hidden_size
        self.d2t.copy_(offsets_from_ids(ids, self.config.vocab_size))
        self.lm_head.weight.copy_(target_lm_head[ids])
        if norm_weight is not None:
            self.norm.weight.copy_(norm_weight)
        for weight in (self.fc.weight, *(p for p in self.midlayer.parameters() if p.dim() == 2)):
            nn.init.normal_(weight, std=0.02)
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -hidden:] += torch.eye(hidden)

    @torch.no_grad()
    def _start_from_layer(self, layer: Mapping[str, Tensor]) -> None:
        """Let the drafter's layer do to the feature what the target's last layer does to its input.

        The feature is the second half of q, k and v's input. SmolLM2 on 48 requests, held-out accepted length
        after 28 s of training: 1.62 from here, 1.43 from the logit lens, 1.46 from a usual random start.
        """
        hidden, own = self.config.hidden_size, self.midlayer.state_dict()
        for name, source in layer.items():
            # The target's input norm is what reads its residual stream; here hidden_norm does.
            place = "hidden_norm.weight" if name == "input_layernorm.weight" else name
            if place not in own:
                continue
            weight = own[place]
            if place.startswith("self_attn.") and place != "self_attn.o_proj.weight":
                weight = weight[:, hidden:]
            if weight.shape == source.shape:
                weight.copy_(source)

    def draft_ids(self) -> Tensor:
        """[Vd] int64: the target id of each draft id."""
        return ids_from_offsets(self.d2t)

    def forward(self, fused: Tensor, embeddings: Tensor, positions: Tensor, steps: int) -> list[Tensor]:
        """Unroll `steps` steps from S chosen positions: true states at step 0, the drafter's features after.

        fused: [B, T, K*H].  embeddings: [B, T+steps-1, H], where step j of position t reads row t+j.
        positions: [B, S] int64.  Returns one [B, S, H] per step: the features before `norm`.

            t = 0, 3 steps:   step 0 reads f[0], e[0]    step 1 reads g0[0], e[1]    step 2 reads g1[0], e[2]
        """
        attention, length = self.midlayer.self_attn, fused.shape[1]
        cos, sin = rope_tables(embeddings.shape[1], self.config.head_dim, self.config.rope_theta, fused.device)
        # A step reads the embedding's part of q, k, v one position later than the step before: project once.
        token_part = self.midlayer.project_tokens(embeddings)
        feature = cast(Tensor, self.fc(fused))
        qkv = token_part[:, :length] + self.midlayer.project_feature(feature)
        query, *prefix = attention.heads(qkv, cos[None, :length], sin[None, :length])
        query = choose_rows(query.transpose(1, 2), positions).transpose(1, 2)
        feature = choose_rows(feature, positions)
        own: list[tuple[Tensor, Tensor]] = []
        features: list[Tensor] = []
        for step in range(steps):
            if step > 0:
                now = positions + step
                qkv = choose_rows(token_part, now) + self.midlayer.project_feature(feature)
                query, key, value = attention.heads(qkv, cos[now], sin[now])
                own.append((key, value))
            feature = self.midlayer(feature, ttt_attention(query, positions, (prefix[0], prefix[1]), own))
            features.append(feature)
        return features

    def logits(self, features: Tensor) -> Tensor:
        """[..., H] features before `norm` -> [..., Vd] draft logits."""
        return cast(Tensor, self.lm_head(self.norm(features)))


def choose_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Take rows [B, S] of each sequence of x [B, T, ...]: [B, S, ...]."""
    starts = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    # index_select has the one row-gather backward that is fast on a CPU.
    return x.flatten(0, 1).index_select(0, (rows + starts).flatten()).view(*rows.shape, *x.shape[2:])


class _Midlayer(nn.Module):
    """The drafter's one Llama layer, whose attention reads the token and the feature side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def project_tokens(self, embeddings: Tensor) -> Tensor:
        """[B, S, H] embeddings -> their share [B, S, (heads + 2*kv_heads)*D] of q, k and v."""
        return self.self_attn.project(self.input_layernorm(embeddings), first_half=True)

    def project_feature(self, feature: Tensor) -> Tensor:
        """[B, S, H] features -> their share [B, S, (heads + 2*kv_heads)*D] of q, k and v."""
        return self.self_attn.project(self.hidden_norm(feature), first_half=False)

    def forward(self, feature: Tensor, attended: Tensor) -> Tensor:
        """feature: [B, S, H], the residual.  attended: [B, heads, S, D].  Returns the next feature [B, S, H]."""
        merged = attended.transpose(1, 2).flatten(2)
        feature = feature + cast(Tensor, self.self_attn.o_proj(merged))
        return feature + cast(Tensor, self.mlp(self.post_attention_layernorm(feature)))


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.hidden = config.hidden_size
        self.q_proj = nn.Linear(2 * self.hidden, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * self.hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * self.hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, self.hidden, bias=False)

    def project(self, half: Tensor, *, first_half: bool) -> Tensor:
        """Apply q, k and v to one half of the 2H input: [B, S, H] -> [B, S, (heads + 2*kv_heads)*D]."""
        columns = slice(0, self.hidden) if first_half else slice(self.hidden, None)
        weights = [proj.weight[:, columns] for proj in (self.q_proj, self.k_proj, self.v_proj)]
        return F.linear(half, torch.cat(weights))

    def heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split and rotate. qkv: [B, S, (heads + 2*kv_heads)*D].  cos, sin: [B or 1, S, D].

        Returns query [B, heads, S, D], key and value [B, kv_heads, S, D].
        """
        heads = qkv.view(*qkv.shape[:2], -1, self.head_dim).transpose(1, 2)
        turned = self.num_heads + self.num_kv_heads
        rotated = rotate(heads[:, :turned], cos, sin)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, turned:]


class _Mlp(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))
