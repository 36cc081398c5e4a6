"""The gate's metric against a loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from draftloop.core.records import CaptureRecord
from draftloop.drafters.eagle3 import Eagle3Drafter
from draftloop.drafters.metrics import expected_accepted_length, prepare_holdout
from draftloop.drafters.target import FrozenTarget

from . import oracle
from .conftest import make_record


def _loop(
    drafter: Eagle3Drafter, frozen: FrozenTarget, records: list[CaptureRecord], topk: tuple[int, ...]
) -> tuple[list[float], list[list[bool]]]:
    lengths, hits = [], []
    ids = drafter.draft_ids()
    for record in records:
        x = torch.from_numpy(record.token_ids).long()
        embedded = F.embedding(torch.cat((x[1:], torch.zeros(len(topk), dtype=torch.int64))), frozen.embedding)
        features = oracle.unroll(drafter, torch.from_numpy(record.fused), embedded, len(topk))
        greedy = (torch.from_numpy(record.last_hidden) @ frozen.lm_head.T).argmax(-1)
        for t in range(record.num_tokens):
            # Serving drafts from t once x[t+1] is generated, and the horizon must lie in the span.
            if record.start + t + 1 < record.prompt_len or t + len(topk) >= record.num_tokens:
                continue
            row = []
            for step, k in enumerate(topk):
                best = oracle.logits(drafter, features[step][t]).argsort(descending=True)[:k]
                row.append(int(greedy[t + 1 + step]) in ids[best].tolist())
            hits.append(row)
            lengths.append(1.0 + (row.index(False) if False in row else len(row)))
    return lengths, hits


@pytest.mark.parametrize("topk", [(1,), (1, 1, 1), (4, 2, 1)])
def test_expected_accepted_length_is_the_loops(
    drafter: Eagle3Drafter, frozen: FrozenTarget, topk: tuple[int, ...]
) -> None:
    records = [
        make_record(14, 4, 1, "code"),
        make_record(9, 1, 2, "chat"),
        make_record(11, 6, 3, "code"),
        make_record(3, 2, 4, "short"),
        make_record(12, 30, 5, "chat", start=25),
        make_record(7, 3, 6, "chat"),
    ]
    score = expected_accepted_length(drafter, prepare_holdout(records, frozen, 64, "cpu"), frozen, topk)
    lengths, hits = _loop(drafter, frozen, records, topk)
    assert score.positions == len(lengths)
    assert score.accept_length == pytest.approx(sum(lengths) / len(lengths))
    assert score.per_step == pytest.approx([sum(column) / len(hits) for column in zip(*hits, strict=True)])
    assert sorted(r.domain for r in score.records) == sorted(r.domain for r in records)
    # The holdout is ordered by length, which is each record's own here but for two.
    by_length = sorted(records, key=lambda record: record.num_tokens)
    for record, scored in zip(by_length, score.records, strict=True):
        own, _ = _loop(drafter, frozen, [record], topk)
        assert (scored.domain, scored.positions, scored.tokens) == (record.domain, len(own), sum(own))
    for domain, value in score.per_domain.items():
        own, _ = _loop(drafter, frozen, [r for r in records if r.domain == domain], topk)
        assert value == pytest.approx(sum(own) / len(own) if own else 1.0)


def test_a_token_outside_the_draft_vocabulary_is_a_miss(drafter: Eagle3Drafter, frozen: FrozenTarget) -> None:
    outside = FrozenTarget(frozen.embedding, frozen.lm_head.clone(), frozen.draft_head)
    outside.lm_head[drafter.draft_ids()] = 0.0
    records = [make_record(14, 2, seed) for seed in range(3)]
    score = expected_accepted_length(drafter, prepare_holdout(records, outside, 64, "cpu"), outside, (11, 11))
    assert score.accept_length == 1.0
    assert score.positions > 0


def test_no_records_score_one(drafter: Eagle3Drafter, frozen: FrozenTarget) -> None:
    score = expected_accepted_length(drafter, prepare_holdout([], frozen, 64, "cpu"), frozen, (1, 1))
    assert (score.accept_length, score.positions, score.records) == (1.0, 0, ())
