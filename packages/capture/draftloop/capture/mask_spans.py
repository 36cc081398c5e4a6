"""A redactor: blanks given sequences of token ids. An example of what `privacy.redactor` may name.

privacy:
  redactor: draftloop.capture.mask_spans:mask_spans
  redactor_options: {spans: [[1734, 29, 881]], mask: 0}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from draftloop.core.records import CaptureRecord, VerifyStep


def mask_spans(record: CaptureRecord, *, spans: Sequence[Sequence[int]], mask: int) -> CaptureRecord:
    """The record with every occurrence of a span replaced by `mask`, and what gives it away blanked.

    The states of a span's rows become zero, and so do those of the row before it, whose logits foretell the span;
    verification steps that drafted into it go. Later rows are kept: the target computed them with the span in view,
    so a secret that must leave no trace at all needs a redactor that returns None.
    """
    hidden = _occurrences(record.token_ids, spans)
    if not hidden.any():
        return record
    foretold = hidden | np.append(hidden[1:], False)
    rows = foretold[:, None]
    return replace(
        record,
        token_ids=np.where(hidden, np.int32(mask), record.token_ids),
        fused=np.where(rows, 0, record.fused).astype(record.fused.dtype),
        last_hidden=np.where(rows, 0, record.last_hidden).astype(record.last_hidden.dtype),
        verify_steps=tuple(step for step in record.verify_steps if not _reaches(step, record.start, hidden)),
    )


def _reaches(step: VerifyStep, start: int, hidden: NDArray[np.bool_]) -> bool:
    """Whether a tree's root, or a token as deep as the tree can be, lies in a hidden row."""
    root = step.position - start
    return bool(hidden[max(root, 0) : root + len(step.parents) + 1].any())


def _occurrences(token_ids: NDArray[np.int32], spans: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
    """[T] bool: the tokens that belong to an occurrence of one of the spans."""
    hidden = np.zeros(len(token_ids), np.bool_)
    for span in spans:
        width = len(span)
        if 0 < width <= len(token_ids):
            windows = np.lib.stride_tricks.sliding_window_view(token_ids, width)
            for begin in np.flatnonzero((windows == np.array(span)).all(axis=1)):
                hidden[begin : begin + width] = True
    return hidden
