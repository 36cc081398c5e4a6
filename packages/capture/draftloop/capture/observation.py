"""What one record says about the traffic, in a few numbers that may leave the trainer: no text, no ids, no states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftloop.core.records import CaptureRecord


@dataclass(frozen=True, slots=True)
class Observation:
    """One record.

    drafter_version: the newest that drafted for it ('' for none).  verify_steps: verifications that version's drafts
    went through; a step in which the drafter rested is none.  emitted: tokens they gave, the target's own included.
    generated: tokens of the answer in the span.  unspoken: those of them that the drafter's vocabulary lacks.
    """

    domain: str
    drafter_version: str
    verify_steps: int
    emitted: int
    generated: int
    unspoken: int


def observe(record: CaptureRecord, spoken: NDArray[np.bool_] | None) -> Observation:
    """spoken: [V], True for each target id the drafter can say; None when it can say them all."""
    version = record.drafter_version
    steps = [step for step in record.verify_steps if step.drafter_version == version and len(step.draft_tokens)]
    answer = record.token_ids[max(0, record.prompt_len - record.start) :]
    return Observation(
        domain=record.domain,
        drafter_version=version,
        verify_steps=len(steps),
        emitted=sum(step.accepted + 1 for step in steps),
        generated=len(answer),
        unspoken=0 if spoken is None else int((~spoken[answer]).sum()),
    )
