"""The draft vocabulary of an EAGLE-3 drafter in training, made to follow the traffic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftloop.core.records import CaptureRecord
from draftloop.drafters.drafter import Drafter
from draftloop.drafters.eagle3 import Eagle3Drafter
from draftloop.drafters.vocab import VocabMove, build_draft_vocab, count_tokens, coverage, move_vocab


@dataclass(frozen=True, slots=True)
class VocabularyChange:
    """A rebuilt draft vocabulary. replaced: tokens that are new in it.  coverage_before, coverage_after: the share of
    the buffer's generated tokens that the old and the new one hold."""

    replaced: int
    coverage_before: float
    coverage_after: float


def spoken_tokens(drafter: Drafter) -> NDArray[np.bool_] | None:
    """[V], True for the target ids that `drafter` can say; None when it can say them all."""
    if not isinstance(drafter, Eagle3Drafter):
        return None
    spoken = np.zeros(drafter.config.vocab_size, dtype=np.bool_)
    spoken[drafter.draft_ids().cpu().numpy()] = True
    return spoken


def rebuilt(
    drafter: Drafter, records: Iterable[CaptureRecord], always: Iterable[int]
) -> tuple[VocabMove, VocabularyChange] | None:
    """A drafter's vocabulary made of the most frequent tokens of the records' answers, and those of `always`.

    None when that changes nothing, or the drafter has no vocabulary of its own.
    """
    if not isinstance(drafter, Eagle3Drafter):
        return None
    answers = (record.token_ids[max(0, record.prompt_len - record.start) :] for record in records)
    counts = count_tokens(answers, drafter.config.vocab_size)
    old = drafter.draft_ids().cpu()
    # Of tokens that were never seen, those in the old map stay before any others.
    ranked = 2 * counts
    ranked[old] += 1
    new = build_draft_vocab(ranked, len(old), always)
    move = move_vocab(old, new)
    if bool(move.kept.all()):
        return None
    return move, VocabularyChange(int((~move.kept).sum()), coverage(counts, old), coverage(counts, new))
