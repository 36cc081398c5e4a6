"""EAGLE-3 drafting from a checkpoint's tensors with plain loops, as SGLang drafts: the served tree must equal it.

SGLang's beams are fixed places. A beam keeps the keys and values it wrote itself, also when a later level moves it to
another branch; only the parent's feature travels with the token. So from the third level on, a moved beam attends to
the tokens of the place it now holds, not to its true ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, EPS, THETA = 4, 2, 16, 1e-5, 10000.0

Path = tuple[int, ...]


@dataclass(frozen=True)
class DraftedPaths:
    """paths: the tokens from below the root to each drafted node.  margin: how near the closest decision was, as a
    ratio of two scores less one.  moved: whether a beam changed its branch, so that the rule above matters."""

    paths: frozenset[Path]
    margin: float
    moved: bool


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rope(x: Tensor, position: int) -> Tensor:
    """x: [heads, d] at one position; pairs (i, i + d/2)."""
    half = HEAD_DIM // 2
    angle = position * THETA ** (-torch.arange(half) / half)
    left, right = x[:, :half], x[:, half:]
    return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), dim=-1)


class Eagle3ByHand:
    """tensors: a checkpoint's.  embedding: [V, H], the target's."""

    def __init__(self, tensors: dict[str, Tensor], embedding: Tensor) -> None:
        self.w = tensors
        self.embedding = embedding
        self.draft_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    def project(self, token: int, feature: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query [heads, d], key and value [kv heads, d] of one token; feature: [H], the one it continues."""
        both = torch.cat((
            rms(self.embedding[token], self.w["midlayer.input_layernorm.weight"]),
            rms(feature, self.w["midlayer.hidden_norm.weight"]),
        ))  # fmt: skip
        q, k, v = (self.w[f"midlayer.self_attn.{name}_proj.weight"] @ both for name in "qkv")
        return (
            rope(q.view(HEADS, HEAD_DIM), position),
            rope(k.view(KV_HEADS, HEAD_DIM), position),
            v.view(KV_HEADS, HEAD_DIM),
        )

    def layer(self, query: Tensor, feature: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The next feature [H]. seen: keys and values [kv heads, d] in view, its own included."""
        group = HEADS // KV_HEADS
        keys = torch.stack([key for key, _ in seen]).repeat_interleave(group, 1)
        values = torch.stack([value for _, value in seen]).repeat_interleave(group, 1)
        weights = torch.softmax(torch.einsum("hd,lhd->hl", query, keys) / HEAD_DIM**0.5, dim=-1)
        merged = torch.einsum("hl,lhd->hd", weights, values).flatten()
        residual = feature + self.w["midlayer.self_attn.o_proj.weight"] @ merged
        x = rms(residual, self.w["midlayer.post_attention_layernorm.weight"])
        gate, up = self.w["midlayer.mlp.gate_proj.weight"] @ x, self.w["midlayer.mlp.up_proj.weight"] @ x
        return residual + self.w["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up)

    def probabilities(self, feature: Tensor) -> Tensor:
        """[Vd] of the token after the one that made `feature`."""
        return torch.softmax(self.w["lm_head.weight"] @ rms(feature, self.w["norm.weight"]), dim=-1)

    @torch.no_grad()
    def draft(self, fused: Tensor, next_tokens: list[int], topk: int, steps: int, nodes: int) -> DraftedPaths:
        """fused: [T, K*H] of the known rows; next_tokens: [T], the token after each, the last one the tree's root."""
        prefix: list[tuple[Tensor, Tensor]] = []
        for position, token in enumerate(next_tokens):
            feature = self.w["fc.weight"] @ fused[position]
            query, *key_value = self.project(token, feature, position)
            prefix.append((key_value[0], key_value[1]))
        feature = self.layer(query, feature, prefix)

        margin, moved = torch.inf, False
        best = self.probabilities(feature).topk(topk + 1)
        margin = min(margin, _gap(best.values))
        beams = [
            ((int(self.draft_ids[index]),), float(value), feature)
            for value, index in zip(best.values[:topk], best.indices[:topk], strict=True)
        ]
        candidates = [(value, path) for path, value, _ in beams]
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(topk)]
        for step in range(steps - 1):
            grown: list[tuple[float, int, Path, Tensor]] = []
            for place, (path, value, parent) in enumerate(beams):
                query, key, val = self.project(path[-1], parent, len(next_tokens) + step)
                own[place].append((key, val))
                feature = self.layer(query, parent, [*prefix, *own[place]])
                best = self.probabilities(feature).topk(topk + 1)
                margin = min(margin, _gap(best.values))
                for probability, index in zip(best.values[:topk], best.indices[:topk], strict=True):
                    token = int(self.draft_ids[index])
                    grown.append((value * float(probability), place, (*path, token), feature))
            candidates += [(value, path) for value, _, path, _ in grown]
            grown.sort(key=lambda item: -item[0])
            if step < steps - 2:
                margin = min(margin, _closest([item[0] for item in grown[: topk + 1]]))
                moved |= any(item[1] != place for place, item in enumerate(grown[:topk]))
            beams = [(path, value, feature) for value, _, path, feature in grown[:topk]]
        candidates.sort(key=lambda item: -item[0])
        margin = min(margin, candidates[nodes - 2][0] / candidates[nodes - 1][0] - 1)
        return DraftedPaths(frozenset(path for _, path in candidates[: nodes - 1]), margin, moved)


def _gap(values: Tensor) -> float:
    """Between the last kept and the first left out."""
    return float(values[-2] / values[-1]) - 1


def _closest(values: list[float]) -> float:
    """Between any two neighbours: their order decides who holds which place."""
    return min(first / second - 1 for first, second in pairwise(values))
