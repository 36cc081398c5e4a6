"""Losses against the plain formulas."""

from __future__ import annotations

import math

import pytest
import torch

from draftloop.drafters.head_loss import head_loss, label_loss
from draftloop.drafters.objectives import (
    DIVERGENCES,
    Divergence,
    acceptance,
    draft_distribution,
    forgetting_guard,
    hard_cross_entropy,
    mean_of_valid,
    soft_cross_entropy,
    unlikelihood,
)


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


def _loop(name: Divergence, p: list[float], q: list[float]) -> float:
    match name:
        case "cross-entropy":
            return -sum(a * math.log(b) for a, b in zip(p, q, strict=True))
        case "hard-cross-entropy":
            return -math.log(q[max(range(len(p)), key=p.__getitem__)])
        case "forward-kl":
            return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)
        case "reverse-kl":
            return sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
        case "acceptance":
            return 1 - sum(map(min, p, q))
        case "log-acceptance":
            return -math.log(sum(map(min, p, q)))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_against_a_loop_and_finite_differences(name: Divergence) -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(5, 7, dtype=torch.float64).softmax(-1)
    expected = [_loop(name, p, q) for p, q in zip(probs.tolist(), logits.softmax(-1).tolist(), strict=True)]
    assert DIVERGENCES[name](logits, probs).tolist() == pytest.approx(expected)
    assert torch.autograd.gradcheck(lambda z: DIVERGENCES[name](z, probs), (logits,))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_bear_certain_targets(name: Divergence) -> None:
    logits = torch.randn(2, 4, requires_grad=True)
    loss = DIVERGENCES[name](logits, torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()  # type: ignore[arg-type]


def test_acceptance_is_what_sampled_verification_accepts() -> None:
    """One draft drawn from q, accepted with min(1, p/q)."""
    logits, p = torch.randn(1, 6).double(), torch.randn(1, 6).double().softmax(-1)
    q = logits.softmax(-1)
    expected = sum(float(q[0, x]) * min(1.0, float(p[0, x] / q[0, x])) for x in range(6))
    assert float(acceptance(logits, p)) == pytest.approx(expected)


def test_unlikelihood_lowers_refused_tokens_the_target_does_not_want() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    probs, rejected = torch.randn(4, 6).double().softmax(-1), torch.tensor([0, 5, 2, 2])
    q = logits.softmax(-1)
    expected = [-(1 - float(probs[i, x])) * math.log(1 - float(q[i, x])) for i, x in enumerate(rejected.tolist())]
    loss = unlikelihood(logits, rejected, probs)
    assert loss.tolist() == pytest.approx(expected)
    assert torch.autograd.gradcheck(lambda z: unlikelihood(z, rejected, probs), (logits,))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert (grad.gather(1, rejected[:, None]) > 0).all()


def test_the_guard_is_zero_where_nothing_was_forgotten() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    guard = forgetting_guard(logits, logits.detach())
    torch.testing.assert_close(guard, torch.zeros(3).double())
    torch.testing.assert_close(torch.autograd.grad(guard.sum(), logits)[0], torch.zeros(3, 5).double())
    assert (forgetting_guard(logits, torch.randn(3, 5).double()) > 0).all()


@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_head_loss_is_the_plain_product_and_loss(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftloop.drafters.head_loss._CHUNK_ROWS", chunk)
    features = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    head = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    weights, probs = torch.rand(7).double(), torch.randn(7, 8).double().softmax(-1)
    seen = []

    def row_loss(logits: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((begin, end))
        return soft_cross_entropy(logits, probs[begin:end]), logits.argmax(-1) == probs[begin:end].argmax(-1)

    loss, rows, hits = head_loss(features, head, weights, row_loss)
    plain = -(probs * (features @ head.T).log_softmax(-1)).sum(-1)
    torch.testing.assert_close(rows, plain.detach())
    torch.testing.assert_close(loss, (plain * weights).sum())
    assert hits.tolist() == ((features @ head.T).argmax(-1) == probs.argmax(-1)).tolist()
    assert len(seen) == -(-7 // chunk)
    fast, slow = (torch.autograd.grad(3 * x, (features, head)) for x in (loss, (plain * weights).sum()))
    torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_label_loss_is_the_plain_cross_entropy(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftloop.drafters.head_loss._CHUNK_ROWS", chunk)
    features = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    head, weights, labels = torch.randn(8, 5).double(), torch.rand(7).double(), torch.randint(0, 8, (7,))
    logits = 30 * features @ head.T
    labels[2] = logits[2].argmax()
    loss, rows, hits = label_loss(features, 30 * head, weights, labels)
    plain = hard_cross_entropy(logits, labels)
    torch.testing.assert_close(rows, plain.detach())
    assert hits.tolist() == (logits.argmax(-1) == labels).tolist()
    assert hits[2]
    torch.testing.assert_close(*(torch.autograd.grad(x, features)[0] for x in (3 * loss, 3 * (plain * weights).sum())))
