"""The one number the gate decides by: the expected accepted length on held-out records.

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


@dataclass(frozen=True)
class GateScore:
    """accept_length: the mean over positions, at least 1.  per_step: share of positions where the step alone
    agrees.  survival: share where it and all steps before it agree.  per_domain: domain -> (accept_length,
    positions).  positions: how many were scored."""

    accept_length: float
    per_step: tuple[float, ...]
    survival: tuple[float, ...]
    per_domain: dict[str, tuple[float, int]]
    positions: int


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
    nothing = torch.zeros(len(topk), 0, dtype=torch.bool)
    by_domain: dict[str, Tensor] = {}
    for batch, domains, greedy in holdout.batches:
        hits, row_of = _step_hits(drafter, batch, greedy, target, topk)
        for row, domain in enumerate(domains):
            by_domain[domain] = torch.cat((by_domain.get(domain, nothing), hits[:, row_of == row].cpu()), dim=1)
    every = torch.cat((nothing, *by_domain.values()), dim=1)
    positions = every.shape[1]
    return GateScore(
        accept_length=_accept_length(every),
        per_step=tuple(float(step.sum()) / max(positions, 1) for step in every),
        survival=tuple(float(step.sum()) / max(positions, 1) for step in every.to(torch.int64).cumprod(0)),
        per_domain={name: (_accept_length(hits), hits.shape[1]) for name, hits in sorted(by_domain.items())},
        positions=positions,
    )


def _step_hits(
    drafter: Drafter, batch: Batch, greedy: Tensor, target: FrozenTarget, topk: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """[steps, M] bool hits of the positions with a full horizon, and [M] the batch row of each.

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
    hits = []
    for feature, row, k in zip(features, unrolled.row, topk, strict=True):
        wanted = torch.gather(greedy, 1, row)[whole]
        guesses = draft_ids[drafter.guess_logits(feature[whole], target).topk(k, dim=-1).indices]
        hits.append((guesses == wanted[:, None]).any(-1))
    return torch.stack(hits), whole.nonzero()[:, 0]


def _accept_length(hits: Tensor) -> float:
    """1 + the mean number of leading hits. hits: [steps, M] bool."""
    if hits.shape[1] == 0:
        return 1.0
    return 1.0 + float(hits.to(torch.int64).cumprod(0).sum()) / hits.shape[1]
