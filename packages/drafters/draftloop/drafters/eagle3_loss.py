"""EAGLE-3's loss: training-time test over a padded batch.

Who reads what at position t (x token, f fused states, h final hidden state, g the drafter's own feature):

    step 0    reads f[t],  x[t+1]     guesses x[t+2]    taught by h[t+1] @ lm_head.T
    step 1    reads g0[t], x[t+2]     guesses x[t+3]    taught by h[t+2] @ lm_head.T
    step j    reads g(j-1)[t], x[t+1+j]                 taught by h[t+1+j] @ lm_head.T

So the row that teaches step j of position t is t+1+j. Only rows that predict generated tokens teach: prompt rows
would too, but on SmolLM2 they brought nothing a record (accepted length 1.50 with and without them after 40
steps) and took twice the time a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.drafters.batch import Batch
from draftloop.drafters.eagle3 import Eagle3Drafter
from draftloop.drafters.objectives import mean_of_valid, soft_cross_entropy
from draftloop.drafters.target import FrozenTarget


@dataclass(frozen=True)
class TttSettings:
    """steps: unrolled steps.  decay: step j weighs decay**j."""

    steps: int = 3
    decay: float = 0.8


@dataclass(frozen=True)
class TttLoss:
    """loss: scalar with gradient.  step_loss, step_accuracy: one number a step, detached; accuracy is the
    agreement of the two arg-maxes within the draft vocabulary.  positions: rows that taught, all steps."""

    loss: Tensor
    step_loss: tuple[float, ...]
    step_accuracy: tuple[float, ...]
    positions: int


@dataclass(frozen=True)
class Unrolled:
    """The positions a batch is unrolled from.

    positions: [B, S] int64, padded with 0.  row: [steps, B, S] int64, the row t+1+j that teaches step j of
    position t.  taught: [steps, B, S] bool, False for padding and where that row does not exist.

        length 4, all rows teach, 2 steps:  positions 0 1 2    step 0 taught T T T    step 1 taught T T .
    """

    positions: Tensor
    row: Tensor
    taught: Tensor


def unroll_from(teaches: Tensor, steps: int) -> Unrolled:
    """Choose every position whose next row teaches. teaches: [B, T] bool."""
    length = teaches.shape[1]
    chosen = teaches[:, 1:]
    width = max(int(chosen.sum(1).max()), 1)
    # A stable sort moves the chosen positions to the front, in order.
    positions = torch.argsort(chosen.to(torch.uint8), dim=1, descending=True, stable=True)[:, :width]
    real = torch.gather(chosen, 1, positions)
    positions = positions * real
    row = positions + torch.arange(1, steps + 1, device=teaches.device)[:, None, None]
    inside = row < length
    row = row.clamp(max=length - 1)
    taught = torch.stack([torch.gather(teaches, 1, r) for r in row]) & inside & real
    return Unrolled(positions, row, taught)


def step_embeddings(batch: Batch, embedding: Tensor, steps: int) -> Tensor:
    """[B, T+steps-1, H]: row t+j is the embedding of x[t+1+j], what step j of position t reads."""
    return F.embedding(F.pad(batch.token_ids[:, 1:], (0, steps)), embedding)


def eagle3_loss(drafter: Eagle3Drafter, batch: Batch, target: FrozenTarget, settings: TttSettings) -> TttLoss:
    """The weighted mean over the steps of the mean soft cross-entropy over the positions taught at that step."""
    teaches = batch.generated
    unrolled = unroll_from(teaches, settings.steps)
    # The target's distributions, once for all steps; index finds each teaching row among them.
    probs = target.draft_probs(batch.last_hidden[teaches])
    best = probs.argmax(-1)
    index = (teaches.flatten().cumsum(0) - 1).view_as(teaches)

    embeddings = step_embeddings(batch, target.embedding, settings.steps)
    features = drafter(batch.fused, embeddings, unrolled.positions, settings.steps)
    losses, accuracies, counts = [], [], []
    for feature, row, taught in zip(features, unrolled.row, unrolled.taught, strict=True):
        rows = torch.gather(index, 1, row)[taught]
        logits = drafter.logits(feature[taught])
        losses.append(mean_of_valid(soft_cross_entropy(logits, probs.index_select(0, rows)), len(rows)))
        accuracies.append((logits.detach().argmax(-1) == best[rows]).float().sum() / max(len(rows), 1))
        counts.append(len(rows))
    weights = torch.tensor([settings.decay**step for step in range(settings.steps)], device=probs.device)
    loss = (torch.stack(losses) * weights).sum() / weights.sum()
    return TttLoss(loss, tuple(float(x.detach()) for x in losses), tuple(float(x) for x in accuracies), sum(counts))
