"""DFlash's loss: random anchors, one block each, hard labels that weigh less the deeper they lie.

    anchor a = 4, block of 4     slot       0     1     2     3
                                 reads     x[4]  MASK  MASK  MASK
                                 label      .    x[5]  x[6]  x[7]      no shift: slot k is the token at a+k
                                 weight     0     1    e^-1/g e^-2/g   then divided by the sum of all weights

A slot teaches when its token exists and was generated. An anchor has at least one such slot and one context row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftloop.drafters.batch import Batch
from draftloop.drafters.dflash import DflashDrafter
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.head_loss import head_loss, label_loss
from draftloop.drafters.lessons import Lessons, LessonSettings, Rows, echo_of, lessons_of
from draftloop.drafters.losses import Plan, Tally, mixed_precision, tally
from draftloop.drafters.objectives import hard_cross_entropy
from draftloop.drafters.target import FrozenTarget

# Slots (over the batch) denoised together.
_SEGMENT_SLOTS = 8192


@dataclass(frozen=True)
class DflashSettings:
    """anchors: at most so many a sequence, drawn anew each time.  gamma: of the decay exp(-(k-1)/gamma); the
    paper takes 7, 5, 4 for blocks of 16, 10, 8."""

    anchors: int = 512
    gamma: float = 7.0


@dataclass(frozen=True)
class Anchors:
    """positions: [B, A] int64, padded with 1.  taught: [B, A, N] bool, slots with a label."""

    positions: Tensor
    taught: Tensor


def draw_anchors(batch: Batch, block_size: int, most: int, generator: torch.Generator) -> Anchors:
    """Up to `most` distinct anchors a sequence, sorted."""
    device = batch.generated.device
    # Row a of `generated` speaks about the token a+1, the label of slot 1.
    row = torch.arange(batch.generated.shape[1], device=device)
    eligible = batch.generated & (row + 1 < batch.ends) & (row > batch.starts)
    lottery = torch.rand(eligible.shape, generator=generator).to(device).masked_fill(~eligible, 2.0)
    width = max(1, min(most, int(eligible.sum(1).max())))
    drawn = lottery.topk(width, dim=1, largest=False)
    real = drawn.values < 2.0
    positions = drawn.indices.masked_fill(~real, batch.generated.shape[1]).sort(dim=1).values
    real = positions < batch.generated.shape[1]
    positions = positions.masked_fill(~real, 1)
    slot = positions.unsqueeze(-1) + torch.arange(block_size, device=device)
    told = torch.gather(batch.generated, 1, (slot - 1).clamp(max=batch.generated.shape[1] - 1).flatten(1))
    taught = told.view_as(slot) & (slot < batch.ends.gather(1, positions).unsqueeze(-1)) & real.unsqueeze(-1)
    taught[..., 0] = False
    return Anchors(positions, taught)


@dataclass(frozen=True)
class DflashObjective:
    """See the module's drawing. The tally's groups are the slots 1 .. N-1; their masses are one sum, shared."""

    drafter: DflashDrafter
    target: FrozenTarget
    settings: DflashSettings
    lessons: LessonSettings = field(default_factory=LessonSettings)
    earlier: Drafter | None = None

    def plan(self, batch: Batch, generator: torch.Generator) -> Plan:
        anchors = draw_anchors(batch, self.drafter.config.block_size, self.settings.anchors, generator)
        weights = anchors.taught[..., 1:] * self._decay(batch.fused.device)
        return Plan(weights.sum().expand(self.drafter.config.block_size - 1), anchors)

    def backward(self, batch: Batch, plan: Plan, mass: Tensor) -> Tally:
        width = max(1, _SEGMENT_SLOTS // (len(batch.lengths) * self.drafter.config.block_size))
        parts = []
        for positions, taught in zip(
            plan.rows.positions.split(width, dim=1), plan.rows.taught.split(width, dim=1), strict=True
        ):
            with mixed_precision(mass.device):
                part = self.loss(batch, Anchors(positions, taught), mass)
            part.loss.backward()  # type: ignore[no-untyped-call]
            parts.append(part.detached())
        return sum(parts[1:], start=parts[0])

    def loss(self, batch: Batch, anchors: Anchors, mass: Tensor) -> Tally:
        """The share of the loss of these anchors. mass: [N-1], all entries the same sum of weights."""
        size = self.drafter.config.block_size
        tokens = torch.gather(batch.token_ids, 1, anchors.positions.clamp(max=batch.token_ids.shape[1] - 1))
        z = self.drafter.denoise(batch, self.target, anchors.positions, tokens)
        slots = anchors.positions.unsqueeze(-1) + torch.arange(size, device=mass.device)
        wanted = torch.gather(batch.token_ids, 1, slots.clamp(max=batch.token_ids.shape[1] - 1).flatten(1))
        labels = wanted.view_as(slots)[anchors.taught]
        group = torch.nonzero(anchors.taught)[:, 2] - 1
        weights = (self._decay(mass.device) / mass)[group]

        head, features = self.drafter.head(self.target), self.drafter.readout(z[anchors.taught])
        lessons = self._lessons(batch, anchors, tokens)
        if lessons.empty:
            return tally(*label_loss(features, head, weights, labels), group, size - 1)

        def row_loss(logits: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
            own = labels[begin:end]
            loss = lessons.add(hard_cross_entropy(logits, own), logits, begin, end)
            return loss, logits.detach().argmax(-1) == own

        return tally(*head_loss(features, head, weights, row_loss), group, size - 1)

    def _lessons(self, batch: Batch, anchors: Anchors, tokens: Tensor) -> Lessons:
        """A block at a starts from position a - 1; its slot 1 + j is step j."""
        line, place, slot = torch.nonzero(anchors.taught).unbind(1)
        rows = Rows(line, anchors.positions[line, place] - 1, slot - 1)

        def features(earlier: Drafter) -> Tensor:
            assert isinstance(earlier, DflashDrafter)
            return earlier.denoise(batch, self.target, anchors.positions, tokens)[anchors.taught]

        echo = echo_of(batch, rows, self.target, self.earlier, features)
        return lessons_of(batch, rows, self.drafter.draft_ids(), self.target, self.lessons, echo)

    def _decay(self, device: torch.device) -> Tensor:
        """[N-1]: the weights of slots 1, 2, ..."""
        slots = range(self.drafter.config.block_size - 1)
        return torch.tensor([math.exp(-k / self.settings.gamma) for k in slots], device=device)
