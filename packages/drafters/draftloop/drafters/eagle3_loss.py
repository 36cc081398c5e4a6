"""EAGLE-3's loss: training-time test over a padded batch.

Who reads what at position t (x token, f fused states, h final hidden state, g the drafter's own feature):

    step 0    reads f[t],  x[t+1]     guesses x[t+2]    taught by h[t+1] @ lm_head.T
    step 1    reads g0[t], x[t+2]     guesses x[t+3]    taught by h[t+2] @ lm_head.T
    step j    reads g(j-1)[t], x[t+1+j]                 taught by h[t+1+j] @ lm_head.T

So the row that teaches step j of position t is t+1+j. Only rows that predict generated tokens teach: prompt rows
would too, but on SmolLM2 they brought nothing a record (accepted length 1.50 with and without them after 40
steps) and took twice the time a step.

Memory: step 0's keys are all that one position needs of another, so the positions are unrolled a segment at a
time, each going backward before the next begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftloop.core.config import Divergence
from draftloop.drafters.batch import Batch
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.head_loss import head_loss
from draftloop.drafters.lessons import LessonSettings, Rows, echo_of, lessons_of
from draftloop.drafters.losses import Plan, Tally, mixed_precision, tally
from draftloop.drafters.objectives import DIVERGENCES
from draftloop.drafters.recurrent import Prefix, RecurrentDrafter
from draftloop.drafters.target import FrozenTarget

# Positions (over the batch) unrolled together.
_SEGMENT_POSITIONS = 4096


@dataclass(frozen=True)
class TttSettings:
    """steps: unrolled steps.  decay: step j weighs decay**j.  divergence: what a row's loss is."""

    steps: int = 3
    decay: float = 0.8
    divergence: Divergence = "cross-entropy"


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

    def segments(self) -> Iterator[Unrolled]:
        """The same positions, at most `_SEGMENT_POSITIONS` at a time."""
        batch, size = self.positions.shape
        width = max(1, _SEGMENT_POSITIONS // batch)
        for begin in range(0, size, width):
            part = slice(begin, begin + width)
            yield Unrolled(self.positions[:, part], self.row[:, :, part], self.taught[:, :, part])


def unroll_from(teaches: Tensor, ends: Tensor, steps: int) -> Unrolled:
    """Choose every position whose next row teaches.

    teaches: [B, T] bool.  ends: [B, T] int64, one past the last row of the record that row t belongs to.
    """
    length = teaches.shape[1]
    chosen = teaches[:, 1:] & (ends[:, 1:] == ends[:, :-1])
    width = max(int(chosen.sum(1).max()), 1)
    # A stable sort moves the chosen positions to the front, in order.
    positions = torch.argsort(chosen.to(torch.uint8), dim=1, descending=True, stable=True)[:, :width]
    real = torch.gather(chosen, 1, positions)
    positions = positions * real
    row = positions + torch.arange(1, steps + 1, device=teaches.device)[:, None, None]
    inside = row < ends.gather(1, positions)
    row = row.clamp(max=length - 1)
    taught = torch.stack([torch.gather(teaches, 1, r) for r in row]) & inside & real
    return Unrolled(positions, row, taught)


@dataclass(frozen=True)
class TttObjective:
    """The weighted mean over the steps of the mean loss over the positions taught at that step.

    Any recurrent drafter can be trained so: EAGLE-3 is.
    """

    drafter: RecurrentDrafter
    target: FrozenTarget
    settings: TttSettings
    lessons: LessonSettings = field(default_factory=LessonSettings)
    earlier: Drafter | None = None

    def plan(self, batch: Batch, generator: torch.Generator) -> Plan:
        unrolled = unroll_from(batch.generated, batch.ends, self.settings.steps)
        return Plan(unrolled.taught.sum((1, 2)).float(), unrolled)

    def backward(self, batch: Batch, plan: Plan, mass: Tensor) -> Tally:
        with mixed_precision(mass.device):
            prefix = self._prefix(batch)
        leaves = prefix.leaves()
        parts = []
        for segment in plan.rows.segments():
            with mixed_precision(mass.device):
                part = self.loss(batch, segment, mass, leaves)
            part.loss.backward()  # type: ignore[no-untyped-call]
            parts.append(part.detached())
        # One sweep from the leaves' gradients into the weights that made the prefix.
        pairs = [(whole, leaf.grad) for whole, leaf in zip(prefix.tensors(), leaves.tensors(), strict=True)]
        reached = [(whole, grad) for whole, grad in pairs if grad is not None]
        torch.autograd.backward([whole for whole, _ in reached], [grad for _, grad in reached])
        return sum(parts[1:], start=parts[0])

    def loss(self, batch: Batch, unrolled: Unrolled, mass: Tensor, prefix: Prefix | None = None) -> Tally:
        """The share of the loss of these positions; the prefix is computed when it is not given."""
        drafter, steps = self.drafter, self.settings.steps
        features = drafter.unroll(prefix or self._prefix(batch), unrolled.positions, steps)
        # Each taught row of each step, ordered by the target row that teaches it: neighbours share a teacher.
        flat = unrolled.row + torch.arange(len(batch.lengths), device=mass.device)[:, None] * batch.generated.shape[1]
        teacher, order = torch.sort(flat[unrolled.taught], stable=True)
        rows = _rows(unrolled, order)
        student = _flat(features, unrolled, order)
        decay = torch.tensor([self.settings.decay**j for j in range(steps)], device=mass.device)
        weights = (decay / decay.sum() / mass)[rows.step].to(
            student.dtype if student.dtype == torch.float64 else mass.dtype
        )

        states = batch.last_hidden.flatten(0, 1)
        divergence = DIVERGENCES[self.settings.divergence]
        echo = echo_of(
            batch, rows, self.target, self.earlier,
            lambda earlier: _flat(earlier.guess(batch, self.target, unrolled.positions, steps), unrolled, order),
        )  # fmt: skip
        lessons = lessons_of(batch, rows, drafter.draft_ids(), self.target, self.lessons, echo)

        def row_loss(logits: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
            rows, place = torch.unique_consecutive(teacher[begin:end], return_inverse=True)
            probs = self.target.draft_probs(states[rows])
            hits = logits.detach().argmax(-1) == probs.argmax(-1)[place]
            loss = divergence(logits, probs.index_select(0, place))
            return loss if lessons.empty else lessons.add(loss, logits, begin, end), hits

        result = head_loss(drafter.readout(student), drafter.head(self.target), weights, row_loss)
        return tally(*result, rows.step, steps)

    def _prefix(self, batch: Batch) -> Prefix:
        return self.drafter.batch_prefix(batch, self.target, self.settings.steps)


def _flat(features: Sequence[Tensor], unrolled: Unrolled, order: Tensor) -> Tensor:
    """One [B, S, H] a step -> the taught rows in this order, [M, H]."""
    return torch.stack(list(features))[unrolled.taught].index_select(0, order)


def _rows(unrolled: Unrolled, order: Tensor) -> Rows:
    step, line, place = (x[order] for x in torch.nonzero(unrolled.taught).unbind(1))
    return Rows(line, unrolled.positions[line, place], step)


def eagle3_loss(drafter: RecurrentDrafter, batch: Batch, target: FrozenTarget, settings: TttSettings) -> TttLoss:
    """The loss of one batch by itself, with its graph."""
    objective = TttObjective(drafter, target, settings)
    unrolled = unroll_from(batch.generated, batch.ends, settings.steps)
    mass = unrolled.taught.sum((1, 2)).float().clamp(min=1.0)
    parts = objective.loss(batch, unrolled, mass)
    counts = parts.counts.clamp(min=1.0)
    return TttLoss(
        parts.loss,
        tuple((parts.sums / counts).tolist()),
        tuple((parts.hits / counts).tolist()),
        int(parts.counts.sum()),
    )
