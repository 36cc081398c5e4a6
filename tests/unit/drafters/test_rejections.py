"""Refused drafts, drawn by hand."""

from __future__ import annotations

import dataclasses

import numpy as np

from draftloop.core.records import VerifyStep
from draftloop.drafters.rejections import refused_drafts

from .conftest import make_record


def _step(position: int, tokens: list[int], parents: list[int], accepted: int, rejected: list[int]) -> VerifyStep:
    drawn = np.array(tokens, np.int32), np.array(parents, np.int32)
    return VerifyStep(position, *drawn, accepted, "v1", np.array(rejected, np.int32))


def test_refused_drafts_are_the_children_where_verification_stopped() -> None:
    record = make_record(10, 3, 0, start=100)
    x = record.token_ids.tolist()
    other = [(token + 1) % 29 for token in x]
    steps = (
        # Root x[4]; 5 right, then two wrong guesses of x[6]; a wrong sibling of x[5] is left alone.
        _step(104, [x[5], other[5], other[6], (other[6] + 1) % 29], [0, 0, 1, 1], 1, [other[6], (other[6] + 1) % 29]),
        _step(106, [other[7]], [0], 0, [other[7]]),
        # All accepted: nothing was refused.
        _step(107, [x[8]], [0], 1, []),
        # Its root has no row before it; and one whose tokens left the span.
        _step(100, [other[1]], [0], 0, [other[1]]),
        _step(109, [3, 4], [0, 1], 1, [4]),
    )
    refused = refused_drafts(dataclasses.replace(record, verify_steps=steps))
    triples = list(zip(refused.positions.tolist(), refused.steps.tolist(), refused.tokens.tolist(), strict=True))
    assert triples == [(3, 1, other[6]), (3, 1, (other[6] + 1) % 29), (5, 0, other[7])]
    for t, j, token in triples:
        assert x[t + 2 + j] != token


def test_a_record_without_drafts_has_none() -> None:
    assert len(refused_drafts(make_record(5, 2, 1)).tokens) == 0
