"""The one number the gate decides by: the expected accepted length on held-out records, record by record.

From every position t whose next token was known to the server, the drafter guesses the tokens t+2, t+3, ...
exactly as in training: its own features, the target's tokens (a later guess only matters where the earlier ones
were accepted, and then the tokens are the same). Step j is accepted when the target's greedy token, over the
FULL vocabulary, is among the drafter's best k_j; so a token outside the draft vocabulary is a miss. The
accepted length is 1 (the target's own token) plus the leading accepted steps.

    target's tokens     w  o  r  d          k = (2, 1, 1)
    drafter's best      o  o  r  a
                        w                   accepted: w (second best), o, r -> and not d: length 1 + 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.core.records import CaptureRecord
from draftloop.drafters.batch import Batch, collate
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle3_loss import unroll_from
from draftloop.drafters.target import FrozenTarget


@dataclass(frozen=True, slots=True)
class RecordScore:
    """One record.  positions: how many were scored.  tokens: the sum of their accepted lengths, at least
    `positions`; not a number where the drafter's logits are not."""

    domain: str
    positions: int
    tokens: float


@dataclass(frozen=True)
class GateScore:
    """records: one score each, in the order of the holdout, so that two drafters' scores pair up.
    per_step: share of positions where the step alone agrees.  survival: share where it and all before it agree."""

    records: tuple[RecordScore, ...]
    per_step: tuple[float, ...]
    survival: tuple[float, ...]

    @property
    def positions(self) -> int:
        return sum(record.positions for record in self.records)

    @property
    def accept_length(self) -> float:
        """The mean over positions, at least 1."""
        return mean_accept_length(self.records)

    @property
    def per_domain(self) -> dict[str, float]:
        """The accepted length of each domain."""
        domains = sorted({record.domain for record in self.records})
        return {name: mean_accept_length([r for r in self.records if r.domain == name]) for name in domains}


def mean_accept_length(records: Sequence[RecordScore]) -> float:
    """Tokens by position over all the records; 1 when nothing was scored."""
    positions = sum(record.positions for record in records)
    return sum(record.tokens for record in records) / positions if positions else 1.0


@dataclass(frozen=True)
class Holdout:
    """Held-out records, prepared once and scored by many drafters.

    batches: with their domains, one a row, and the target's greedy token after each row, [B, T] int64.
    """

    batches: tuple[tuple[Batch, tuple[str, ...], Tensor], ...]


def prepare_holdout(
    records: Sequence[CaptureRecord], target: FrozenTarget, max_length: int, device: torch.device | str
) -> Holdout:
    """Pad the records, four of like length together, and find the target's greedy tokens (the costly part)."""
    ordered = sorted(records, key=lambda record: record.num_tokens)
    batches = []
    for begin in range(0, len(ordered), 4):
        group = ordered[begin : begin + 4]
        batch = collate(group, max_length, device)
        greedy = torch.full_like(batch.token_ids, -1)
        greedy[batch.generated] = target.greedy_tokens(batch.last_hidden[batch.generated])
        batches.append((batch, tuple(record.domain for record in group), greedy))
    return Holdout(tuple(batches))


@torch.no_grad()
def expected_accepted_length(
    drafter: Drafter, holdout: Holdout, target: FrozenTarget, topk: Sequence[int]
) -> GateScore:
    """Score a drafter. topk: k_j of each step; all ones for a chain, what the tree explores for a tree."""
    records: list[RecordScore] = []
    step_hits, survivors = torch.zeros(2, len(topk), dtype=torch.int64)
    for batch, domains, greedy in holdout.batches:
        hits, sound, row_of = _step_hits(drafter, batch, greedy, target, topk)
        leading = hits.to(torch.int64).cumprod(0)
        step_hits += hits.sum(1).cpu()
        survivors += leading.sum(1).cpu()
        length = torch.where(sound, 1.0 + leading.sum(0), torch.nan)
        positions = torch.bincount(row_of, minlength=len(domains)).tolist()
        tokens = torch.zeros(len(domains), device=length.device).index_add(0, row_of, length)
        records += map(RecordScore, domains, positions, tokens.tolist())
    total = max(sum(record.positions for record in records), 1)
    shares = [tuple(int(count) / total for count in counts) for counts in (step_hits, survivors)]
    return GateScore(tuple(records), *shares)


def _step_hits(
    drafter: Drafter, batch: Batch, greedy: Tensor, target: FrozenTarget, topk: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """[steps, M] bool hits of the positions with a full horizon, [M] bool whether all their logits are numbers, and
    [M] the batch row of each.

    The first row that predicts a generated token teaches in training, but serving never drafts its token (the
    prefill gives it), so scoring begins one row later.
    """
    scored = batch.generated.clone()
    scored[:, 1:] &= batch.generated[:, :-1]
    steps = len(topk)
    unrolled = unroll_from(scored, batch.ends, steps)
    whole = unrolled.taught.all(0)
    features = drafter.guess(batch, target, unrolled.positions, steps)
    draft_ids = drafter.draft_ids()
    hits, sound = [], []
    for feature, row, k in zip(features, unrolled.row, topk, strict=True):
        wanted = torch.gather(greedy, 1, row)[whole]
        logits = drafter.guess_logits(feature[whole], target)
        hits.append((draft_ids[logits.topk(k, dim=-1).indices] == wanted[:, None]).any(-1))
        sound.append(logits.isfinite().all(-1))
    return torch.stack(hits), torch.stack(sound).all(0), whole.nonzero()[:, 0]
