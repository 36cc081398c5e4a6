"""What serving teaches beside the target's distribution, as extra terms on rows an objective teaches anyway:

refused drafts      the unlikelihood of a token that a verification refused at this very position and step
forgetting guard    on replayed rows, the divergence from what an earlier drafter said there
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.drafters.batch import Batch
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.objectives import forgetting_guard, unlikelihood
from draftloop.drafters.target import FrozenTarget


@dataclass(frozen=True)
class LessonSettings:
    """What each extra term weighs against the row's own loss; 0 leaves it out."""

    refused_weight: float = 0.0
    guard_weight: float = 0.0


@dataclass(frozen=True)
class Rows:
    """The M rows of logits an objective teaches: line b, position t and step j of each, [M] int64.

    Row t guesses the token t+2+j at step j; the target's row t+1+j teaches it.
    """

    line: Tensor
    position: Tensor
    step: Tensor


@dataclass(frozen=True)
class Echo:
    """What an earlier drafter makes of the rows old_row [O] int64. features: [O, H], read out.  head: [Vd, H]."""

    old_row: Tensor
    features: Tensor
    head: Tensor


@dataclass(frozen=True)
class Lessons:
    """refused_row, refused_id: [R] int64, row of the logits and draft id.  teacher: [R, H], the target's state there.
    echo: None without a guard."""

    settings: LessonSettings
    target: FrozenTarget
    refused_row: Tensor
    refused_id: Tensor
    teacher: Tensor
    echo: Echo | None

    @property
    def empty(self) -> bool:
        return len(self.refused_row) == 0 and self.echo is None

    def add(self, loss: Tensor, logits: Tensor, begin: int, end: int) -> Tensor:
        """loss: [m] and logits: [m, Vd] of the rows begin..end.  Returns the loss with the extra terms."""
        here = (self.refused_row >= begin) & (self.refused_row < end)
        row, probs = self.refused_row[here] - begin, self.target.draft_probs(self.teacher[here])
        extra = unlikelihood(logits[row], self.refused_id[here], probs)
        loss = loss.index_add(0, row, self.settings.refused_weight * extra)
        if self.echo is not None:
            here = (self.echo.old_row >= begin) & (self.echo.old_row < end)
            row, said = self.echo.old_row[here] - begin, F.linear(self.echo.features[here], self.echo.head)
            extra = forgetting_guard(logits[row], said.to(logits.dtype))
            loss = loss.index_add(0, row, self.settings.guard_weight * extra)
        return loss


def lessons_of(
    batch: Batch, rows: Rows, draft_ids: Tensor, target: FrozenTarget, settings: LessonSettings, echo: Echo | None
) -> Lessons:
    """Find the refused drafts that fall on these rows. draft_ids: [Vd] int64, increasing."""
    wanted = batch.refused if settings.refused_weight else batch.refused[:0]
    line, position, step, token = wanted.unbind(1)
    # Place of each row's (line, position, step), with one step more for those that are not unrolled.
    steps = int(rows.step.max()) + 1 if len(rows.step) else 0
    place = torch.full((*batch.token_ids.shape, steps + 1), -1, device=token.device)
    place[rows.line, rows.position, rows.step] = torch.arange(len(rows.step), device=token.device)
    row = place[line, position, step.clamp(max=steps)]
    index = torch.searchsorted(draft_ids, token.contiguous()).clamp(max=len(draft_ids) - 1)
    kept = (row >= 0) & (draft_ids[index] == token)
    teacher = batch.last_hidden[line, position + 1 + step]
    return Lessons(settings, target, row[kept], index[kept], teacher[kept], echo)


def echo_of(
    batch: Batch, rows: Rows, target: FrozenTarget, earlier: Drafter | None, features: Callable[[Drafter], Tensor]
) -> Echo | None:
    """The earlier drafter's word on the replayed ones of the rows. features: drafter -> [M, H] of all rows."""
    old = batch.replayed[rows.line, rows.position].nonzero().flatten()
    if earlier is None or len(old) == 0:
        return None
    with torch.no_grad():
        return Echo(old, earlier.readout(features(earlier)[old]), earlier.head(target))
