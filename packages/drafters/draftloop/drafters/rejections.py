"""Which drafts serving refused, as rows of a training batch.

The place that matters is where a verification stopped: every child of the last accepted node was refused there,
and the target said another token.

    root x[P], tree  P -> a -> b      accepted 1: a is x[P+1], b was refused, the target said x[P+2]
                                      position t = P-1, step 1 (it guesses x[t+3] = x[P+2]), token b
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftloop.core.records import CaptureRecord


@dataclass(frozen=True)
class Refused:
    """Parallel lists [R] int64: position t (a row of the record), step j of the unroll, the refused target id."""

    positions: Tensor
    steps: Tensor
    tokens: Tensor


def refused_drafts(record: CaptureRecord) -> Refused:
    """Every refused draft of a record whose position and teaching row (t+1+j) lie inside it."""
    found: list[tuple[int, int, int]] = []
    for verify in record.verify_steps:
        root = verify.position - record.start
        if root >= 1 and root + verify.accepted < record.num_tokens:
            found += [(root - 1, verify.accepted, token) for token in verify.rejected.tolist()]
    columns = torch.tensor(found, dtype=torch.int64).view(-1, 3).T
    return Refused(columns[0], columns[1], columns[2])
