"""What every drafter is to the trainer, the gate and the decoder: one form for all algorithms.

A drafter stands at position t: it has seen the target's states of rows 0..t and knows the token x[t+1].
Its step j (0, 1, ...) guesses x[t+2+j]. How it gets there is the algorithm's own business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.core.errors import ConfigError
from draftloop.core.manifest import DrafterKind
from draftloop.drafters.batch import Batch
from draftloop.drafters.prefix_attention import rope, rotate
from draftloop.drafters.target import FrozenTarget


@dataclass(frozen=True)
class Shape:
    """The shape of a drafter's layers. `hidden_size` is the target's too, because the embedding is shared.

    layer_ids: target layers whose OUTPUT the drafter reads (output of layer i), in fusing order.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    layer_ids: tuple[int, ...]
    max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads != 0:
            raise ConfigError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly")

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, S, D] of positions [B, S]."""
        return rope(positions, self.head_dim, self.rope_theta)

    def split(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split and rotate. qkv: [B, S, (heads + 2*kv_heads)*D].  cos, sin: [B or 1, S, D].

        Returns query [B, heads, S, D], key and value [B, kv_heads, S, D].
        """
        heads = qkv.view(*qkv.shape[:2], -1, self.head_dim).transpose(1, 2)
        turned = self.num_heads + self.num_kv_heads
        rotated = rotate(heads[:, :turned], cos, sin)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, turned:]


def shape_of_target(target: Mapping[str, Any], intermediate_size: int | None = None) -> dict[str, Any]:
    """What a drafter's layer takes over from the target's parsed `config.json`, by the names of `Shape`.

    intermediate_size: None means the target's own MLP width.
    """
    hidden, heads = int(target["hidden_size"]), int(target["num_attention_heads"])
    rope = target.get("rope_parameters") or {}
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": int(target.get("num_key_value_heads") or heads),
        "head_dim": int(target.get("head_dim") or hidden // heads),
        "intermediate_size": intermediate_size or int(target["intermediate_size"]),
        "rms_norm_eps": float(target.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(target.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        "vocab_size": int(target["vocab_size"]),
        "max_position_embeddings": int(target["max_position_embeddings"]),
    }


class Drafter(nn.Module, ABC):
    """See the module's text. `kind` names the checkpoint layout."""

    kind: ClassVar[DrafterKind]
    shape: Shape

    @abstractmethod
    def guess(self, batch: Batch, target: FrozenTarget, positions: Tensor, steps: int) -> list[Tensor]:
        """What the drafter thinks at S chosen positions, given the true tokens where it has accepted them.

        positions: [B, S] int64.  Returns one [B, S, H] a step: step j of position t guesses x[t+2+j].
        """

    @abstractmethod
    def readout(self, features: Tensor) -> Tensor:
        """[..., H] features -> [..., H], what the head multiplies."""

    @abstractmethod
    def head(self, target: FrozenTarget) -> Tensor:
        """[Vd, H]: the drafter's own head, or the target's where it is shared."""

    @abstractmethod
    def draft_ids(self) -> Tensor:
        """[Vd] int64: the target id of each draft id."""

    def guess_logits(self, features: Tensor, target: FrozenTarget) -> Tensor:
        """[..., H] features -> [..., Vd] draft logits."""
        return F.linear(self.readout(features), self.head(target))


def choose_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Take rows [B, S] of each sequence of x [B, T, ...]: [B, S, ...]."""
    starts = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    # index_select has the one row-gather backward that is fast on a CPU.
    return x.flatten(0, 1).index_select(0, (rows + starts).flatten()).view(*rows.shape, *x.shape[2:])
