"""The one form of all training losses: plan a batch, learn how much it teaches, then go backward.

A loss is a sum of groups (EAGLE-3: one a step; EAGLE-1 and DFlash: one), each divided by what it weighs over ALL
batches of an optimiser step. So the weight of every batch is asked first; batches accumulated one after another,
or spread over processes, then give exactly the gradient of one large batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draftloop.drafters.batch import Batch


@dataclass(frozen=True)
class Tally:
    """What one or more batches taught; tallies of the same step add up.

    loss: scalar, with gradient until `detached`.  sums: [G], the unweighted losses.  hits: [G], rows whose best
    guess was the target's.  counts: [G], rows that taught.
    """

    loss: Tensor
    sums: Tensor
    hits: Tensor
    counts: Tensor

    def detached(self) -> Tally:
        return Tally(self.loss.detach(), self.sums, self.hits, self.counts)

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.loss + other.loss, self.sums + other.sums, self.hits + other.hits, self.counts + other.counts)


@dataclass(frozen=True)
class Plan:
    """What of a batch will teach. mass: [G], what it weighs.  rows: the objective's own choice of rows."""

    mass: Tensor
    rows: Any


class Objective(Protocol):
    """A drafter's loss, bound to the drafter, its target and its settings."""

    def plan(self, batch: Batch, generator: torch.Generator) -> Plan:
        """Choose what the batch teaches. `generator` is the only randomness (anchors, noise)."""
        ...

    def backward(self, batch: Batch, plan: Plan, mass: Tensor) -> Tally:
        """Add the gradient of this batch's share of the loss. mass: [G], of all batches of the step, at least
        the smallest number that can be divided by."""
        ...


def mixed_precision(device: torch.device) -> torch.autocast:
    """bf16 products on a GPU, plain fp32 on a CPU; for the forward pass only."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def tally(weighted: Tensor, row_loss: Tensor, hits: Tensor, group: Tensor, groups: int) -> Tally:
    """Sort rows into their groups. weighted: scalar.  row_loss, hits, group: [R]."""

    def per_group(values: Tensor) -> Tensor:
        return torch.zeros(groups, dtype=row_loss.dtype, device=row_loss.device).index_add_(
            0, group, values.to(row_loss.dtype)
        )

    return Tally(weighted, per_group(row_loss), per_group(hits), per_group(torch.ones_like(row_loss)))
