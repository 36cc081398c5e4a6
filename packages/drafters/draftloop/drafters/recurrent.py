"""What EAGLE-1 and EAGLE-3 share: one layer that reads its own last feature and the next token, step after step.

At step j position t sees the true prefix and, of each self-generated step, only its own key. For t = 2, j = 2
(. = not seen):

    step 0 keys   K0[0] K0[1] K0[2]   .          causal: an ordinary attention
    step 1 keys     .     .   K1[2]   .          diagonal: one dot product
    step 2 keys     .     .   K2[2]   .          diagonal

So any subset of the positions can be unrolled alone, in training (only the rows that teach, a segment at a time)
and in serving (many paths from the one last position). Sequences are padded on the right, so the causal prefix
never reaches a padded key. RoPE turns step j of position t by t + j.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.drafters.batch import Batch
from draftloop.drafters.drafter import Drafter, Shape, choose_rows
from draftloop.drafters.prefix_attention import merge, prefix_attention, share_heads
from draftloop.drafters.target import FrozenTarget


@dataclass(frozen=True)
class Prefix:
    """Step 0 of every position, from true states.

    residual: [B, T, H], what the layer adds to.  query: [B, heads, T, D].  key, value: [B, kv_heads, T, D].
    token_part: [B, T+steps-1, P], row t+j is what the token that step j of position t reads brings.
    starts: [B, T] int64, the first row that row t may see.
    """

    residual: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    token_part: Tensor
    starts: Tensor

    def tensors(self) -> list[Tensor]:
        """Those with a gradient."""
        return [self.residual, self.query, self.key, self.value, self.token_part]

    def leaves(self) -> Prefix:
        """The same numbers cut off from the graph, collecting gradients of their own."""
        residual, query, key, value, token_part = (tensor.detach().requires_grad_() for tensor in self.tensors())
        return Prefix(residual, query, key, value, token_part, self.starts)


@dataclass(frozen=True)
class OwnKeys:
    """Keys and values of the steps so far at S chosen positions: lists of [B, kv_heads, S, D], one a step."""

    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()


class RecurrentDrafter(Drafter):
    """A subclass says what a step's layer reads; the recurrence over the steps is here."""

    # Step j of position t reads x[t + 1 + j + token_lag]. Only an ablation of EAGLE-1 is not 0.
    token_lag: int = 0

    @abstractmethod
    def states(self, batch: Batch) -> Tensor:
        """The captured states the drafter reads, [B, T, W]."""

    @abstractmethod
    def first_feature(self, states: Tensor) -> Tensor:
        """[B, T, W] true states -> the feature [B, T, H] that step 0 reads."""

    @abstractmethod
    def project_tokens(self, embeddings: Tensor) -> Tensor:
        """[B, S, H] embeddings -> what they bring to a step, [B, S, P]; computed once for all steps."""

    @abstractmethod
    def join(self, token_part: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, P] and a feature [B, S, H] -> the residual [B, S, H] and q, k, v [B, S, (heads+2*kv)*D]."""

    @abstractmethod
    def finish_layer(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual: [B, S, H].  attended: [B, heads, S, D].  Returns the next feature [B, S, H]."""

    def forward(self, states: Tensor, embeddings: Tensor, positions: Tensor, steps: int) -> list[Tensor]:
        """Unroll `steps` steps from S chosen positions: true states at step 0, the drafter's features after.

        states: [B, T, W].  embeddings: [B, T+steps-1, H], where step j of position t reads row t+j.
        positions: [B, S] int64.  Returns one [B, S, H] per step: the features before `readout`.

            t = 0, 3 steps:   step 0 reads f[0], e[0]    step 1 reads g0[0], e[1]    step 2 reads g1[0], e[2]
        """
        return self.unroll(self.prefix(states, embeddings), positions, steps)

    def guess(self, batch: Batch, target: FrozenTarget, positions: Tensor, steps: int) -> list[Tensor]:
        return self.unroll(self.batch_prefix(batch, target, steps), positions, steps)

    def batch_prefix(self, batch: Batch, target: FrozenTarget, steps: int) -> Prefix:
        """See `Prefix`; each record of the batch is by itself."""
        prefix = self.prefix(self.states(batch), self.step_embeddings(batch, target, steps))
        return replace(prefix, starts=batch.starts)

    def step_embeddings(self, batch: Batch, target: FrozenTarget, steps: int) -> Tensor:
        """[B, T+steps-1, H]: row t+j is the embedding of the token that step j of position t reads."""
        return step_embeddings(batch, target.embedding, steps, self.token_lag)

    def prefix(self, states: Tensor, embeddings: Tensor, start: int = 0) -> Prefix:
        """See `Prefix`. states: [B, T, W], rows of positions start, start+1, ...  embeddings: [B, T+steps-1, H]."""
        length = states.shape[1]
        cos, sin = self.shape.rope(torch.arange(start, start + length, device=states.device)[None])
        token_part = self.project_tokens(embeddings)
        residual, qkv = self.join(token_part[:, :length], self.first_feature(states))
        starts = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)
        return Prefix(residual, *self.shape.split(qkv, cos, sin), token_part, starts)

    def unroll(self, prefix: Prefix, positions: Tensor, steps: int) -> list[Tensor]:
        """The features of `steps` steps from the chosen positions [B, S]: one [B, S, H] per step."""
        query = choose_rows(prefix.query.transpose(1, 2), positions).transpose(1, 2)
        own = OwnKeys()
        feature = self.attend(choose_rows(prefix.residual, positions), query, positions, prefix, own)
        features = [feature]
        for step in range(1, steps):
            now = positions + step
            token_part = choose_rows(prefix.token_part, now)
            feature, own = self.advance(feature, token_part, now, positions, prefix, own)
            features.append(feature)
        return features

    def advance(
        self, feature: Tensor, token_part: Tensor, now: Tensor, seen: Tensor, prefix: Prefix, own: OwnKeys
    ) -> tuple[Tensor, OwnKeys]:
        """One self-generated step. feature: [B, S, H].  token_part: [B, S, P].  now: [B, S], where RoPE stands.
        seen: [B, S], the prefix position the path started from.  Returns the feature and the longer own keys."""
        residual, qkv = self.join(token_part, feature)
        query, key, value = self.shape.split(qkv, *self.shape.rope(now))
        own = OwnKeys((*own.keys, key), (*own.values, value))
        return self.attend(residual, query, seen, prefix, own), own

    def attend(self, residual: Tensor, query: Tensor, positions: Tensor, prefix: Prefix, own: OwnKeys) -> Tensor:
        attended = ttt_attention(
            query, prefix.starts.gather(1, positions), positions, (prefix.key, prefix.value), own.keys, own.values
        )
        return self.finish_layer(residual, attended)


def ttt_attention(
    query: Tensor,
    first: Tensor,
    positions: Tensor,
    prefix: tuple[Tensor, Tensor],
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
) -> Tensor:
    """Attention of training-time test at step j = len(own_keys), for S chosen positions of each sequence.

    query: [B, heads, S, D].  first, positions: [B, S] int64, where each query's record begins
    and where the query started.  prefix: step 0's key and value
    of all positions, [B, kv_heads, T, D] each.  own_keys, own_values: of steps 1..j at the chosen positions,
    [B, kv_heads, S, D] each.  Returns [B, heads, S, D].
    """
    out, log_norm = prefix_attention(query, first, positions + 1, *prefix)
    if not own_keys:
        return out
    heads, scale = query.shape[1], query.shape[-1] ** -0.5
    scores = [(query * share_heads(key, heads)).sum(-1) * scale for key in own_keys]
    values = torch.stack([share_heads(value, heads) for value in own_values], dim=-2)
    return merge(out, log_norm, torch.stack(scores, dim=-1), values)


def step_embeddings(batch: Batch, embedding: Tensor, steps: int, lag: int = 0) -> Tensor:
    """[B, T+steps-1, H]: row t+j is the embedding of x[t+1+j+lag], what step j of position t reads."""
    tokens = F.pad(batch.token_ids[:, 1 + lag :], (0, steps + lag))
    return F.embedding(tokens, embedding)


class Mlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))
