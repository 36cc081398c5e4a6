"""Losses against the plain formulas."""

from __future__ import annotations

import torch

from draftloop.drafters.objectives import draft_distribution, hard_cross_entropy, mean_of_valid, soft_cross_entropy


def test_soft_cross_entropy_is_the_plain_formula() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(5, 7, dtype=torch.float64).softmax(-1)
    expected = -(probs * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(soft_cross_entropy(logits, probs), expected)
    assert torch.autograd.gradcheck(lambda z: soft_cross_entropy(z, probs), (logits,))


def test_draft_distribution_renormalises_the_full_one() -> None:
    full = torch.randn(4, 20, dtype=torch.float64)
    ids = torch.tensor([1, 4, 9, 16])
    restricted = full.softmax(-1)[:, ids]
    torch.testing.assert_close(draft_distribution(full[:, ids]), restricted / restricted.sum(-1, keepdim=True))


def test_hard_cross_entropy_is_the_soft_one_of_a_point_mass() -> None:
    logits, labels = torch.randn(6, 9), torch.tensor([0, 3, 8, 2, 2, 5])
    point = torch.nn.functional.one_hot(labels, 9).float()
    torch.testing.assert_close(hard_cross_entropy(logits, labels), soft_cross_entropy(logits, point))


def test_mean_of_valid_ignores_the_batch_size() -> None:
    assert float(mean_of_valid(torch.tensor([2.0, 4.0]), 2)) == 3.0
    assert float(mean_of_valid(torch.zeros(0), 0)) == 0.0
