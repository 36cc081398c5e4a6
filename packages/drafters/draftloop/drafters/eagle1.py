"""The EAGLE-1 head (arXiv 2401.15077), which EAGLE-2 (arXiv 2406.16858) drafts with too.

Parameter names and the forward pass are those of SGLang's `models/llama_eagle.py`:

    h = fc([e, f]) + b            e: embedding of the NEXT token, f: the target's final hidden state (or its guess)
    a = attention(h) + h          a Llama layer without input_layernorm
    g = mlp(post_attention_layernorm(a)) + a        g guesses the next f, and is read by the next step as it is
    logits = g @ lm_head.T        the target's frozen head over the whole vocabulary; no final norm

Training (section 4.2): step 0 only, g[t] is taught the feature h[t+1] by smooth L1 and its distribution by a soft
cross-entropy of weight 0.1; the features it reads carry uniform noise, since its own guesses will be wrong too.

    reads f[t], x[t+1]     taught by h[t+1]     guesses x[t+2]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.core.manifest import DrafterKind
from draftloop.drafters.batch import Batch
from draftloop.drafters.drafter import Shape, choose_rows, shape_of_target
from draftloop.drafters.eagle3_loss import Unrolled, unroll_from
from draftloop.drafters.head_loss import head_loss
from draftloop.drafters.losses import Plan, Tally, mixed_precision, tally
from draftloop.drafters.objectives import soft_cross_entropy
from draftloop.drafters.recurrent import Mlp, RecurrentDrafter
from draftloop.drafters.target import FrozenTarget


@dataclass(frozen=True)
class Eagle1Config(Shape):
    """shifted_token: False is the paper's ablation: the head reads x[t] beside f[t], not x[t+1]. SGLang serves
    shifted heads only. `layer_ids` is empty: the head reads the final hidden state."""

    shifted_token: bool = True

    @classmethod
    def for_target(cls, target: Mapping[str, Any], intermediate_size: int | None = None) -> Eagle1Config:
        """Shape a head like one layer of the target, given the target's parsed `config.json`."""
        return cls(**shape_of_target(target, intermediate_size), layer_ids=())

    def without_shifted_token(self) -> Eagle1Config:
        return replace(self, shifted_token=False)


class Eagle1Drafter(RecurrentDrafter):
    """See the module's drawing."""

    kind: ClassVar[DrafterKind] = "eagle1"

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        self.config = self.shape = config
        self.token_lag = 0 if config.shifted_token else -1
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([_Layer(config)])

    @classmethod
    def untrained(cls, config: Eagle1Config, seed: int) -> Eagle1Drafter:
        """A head that passes the feature through; its layer is random.

        The target's last layer would be a bad start: it was made for states that are not yet normed, and on SmolLM2
        its output is so large that the loss begins at 87 instead of 1.9.
        """
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            head = cls(config)
            for weight in head.parameters():
                if weight.dim() == 2:
                    nn.init.normal_(weight, std=0.02)
            head.fc.weight.mul_(0.1)
            head.fc.weight[:, config.hidden_size :] += torch.eye(config.hidden_size)
            head.fc.bias.zero_()
        return head

    def states(self, batch: Batch) -> Tensor:
        return batch.last_hidden

    def first_feature(self, states: Tensor) -> Tensor:
        return states

    def project_tokens(self, embeddings: Tensor) -> Tensor:
        return F.linear(embeddings, self.fc.weight[:, : self.config.hidden_size], self.fc.bias)

    def join(self, token_part: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        residual = token_part + F.linear(feature, self.fc.weight[:, self.config.hidden_size :])
        return residual, self._layer.self_attn.project(residual)

    def finish_layer(self, residual: Tensor, attended: Tensor) -> Tensor:
        return self._layer(residual, attended)

    def readout(self, features: Tensor) -> Tensor:
        return features

    def head(self, target: FrozenTarget) -> Tensor:
        return target.lm_head

    def draft_ids(self) -> Tensor:
        return torch.arange(self.config.vocab_size, device=self.fc.weight.device)

    @property
    def _layer(self) -> _Layer:
        return cast(_Layer, self.layers[0])


class _Layer(nn.Module):
    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = Mlp(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual: [B, S, H].  attended: [B, heads, S, D].  Returns [B, S, H]."""
        a = residual + cast(Tensor, self.self_attn.o_proj(attended.transpose(1, 2).flatten(2)))
        return a + cast(Tensor, self.mlp(self.post_attention_layernorm(a)))


class _Attention(nn.Module):
    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=False)

    def project(self, x: Tensor) -> Tensor:
        """[B, S, H] -> q, k and v side by side, [B, S, (heads + 2*kv_heads)*D]."""
        return F.linear(x, torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)))


@dataclass(frozen=True)
class Eagle1Settings:
    """token_weight: of the cross-entropy beside the feature loss.  noise: width of the uniform noise on features
    (0.2 in the public code, scaled by 512/T there too)."""

    token_weight: float = 0.1
    noise: float = 0.2


@dataclass(frozen=True)
class _Rows:
    unrolled: Unrolled
    noise: Tensor


@dataclass(frozen=True)
class Eagle1Objective:
    """Smooth L1 on the feature (mean over H) + `token_weight` * soft cross-entropy, mean over the rows that teach."""

    drafter: Eagle1Drafter
    target: FrozenTarget
    settings: Eagle1Settings

    def plan(self, batch: Batch, generator: torch.Generator) -> Plan:
        unrolled = unroll_from(batch.generated, batch.ends, 1)
        noise = torch.rand(batch.last_hidden.shape, generator=generator).sub_(0.5).to(batch.last_hidden.device)
        noise *= self.settings.noise * 512 / (batch.ends - batch.starts).clamp(min=1).unsqueeze(-1)
        return Plan(unrolled.taught.sum((1, 2)).float(), _Rows(unrolled, noise))

    def backward(self, batch: Batch, plan: Plan, mass: Tensor) -> Tally:
        with mixed_precision(mass.device):
            result = self.loss(batch, plan.rows.unrolled, plan.rows.noise, mass)
        result.loss.backward()  # type: ignore[no-untyped-call]
        return result.detached()

    def loss(self, batch: Batch, unrolled: Unrolled, noise: Tensor, mass: Tensor) -> Tally:
        drafter = self.drafter
        noisy = replace(batch, last_hidden=batch.last_hidden + noise)
        (feature,) = drafter.guess(noisy, self.target, unrolled.positions, 1)
        taught = unrolled.taught[0]
        student, teacher = feature[taught], choose_rows(batch.last_hidden, unrolled.row[0])[taught]
        feature_loss = F.smooth_l1_loss(student, teacher, reduction="none").mean(-1)
        weights = (self.settings.token_weight / mass).expand(len(student))

        def row_loss(logits: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
            probs = self.target.draft_probs(teacher[begin:end])
            return soft_cross_entropy(logits, probs), logits.detach().argmax(-1) == probs.argmax(-1)

        token_loss, per_row, hits = head_loss(drafter.readout(student), drafter.head(self.target), weights, row_loss)
        total = (feature_loss / mass).sum() + token_loss
        each = feature_loss.detach() + self.settings.token_weight * per_row
        return tally(total, each, hits, torch.zeros(len(student), dtype=torch.int64, device=mass.device), 1)
