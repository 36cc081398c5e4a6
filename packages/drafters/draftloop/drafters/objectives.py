"""Training objectives: small pure functions over rows that are already selected (no padding inside)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def soft_cross_entropy(logits: Tensor, target_probs: Tensor) -> Tensor:
    """Per-row cross-entropy against a distribution.

    logits: [M, Vd].  target_probs: [M, Vd], rows sum to one (see `draft_distribution`).  Returns [M].
    """
    return _SoftCrossEntropy.apply(logits, target_probs)


def hard_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Per-row cross-entropy against draft ids. logits: [M, Vd].  labels: [M] int64.  Returns [M]."""
    return F.cross_entropy(logits, labels, reduction="none")


def draft_distribution(target_logits: Tensor) -> Tensor:
    """The target's distribution renormalised over the draft vocabulary.

    target_logits: [M, Vd], the target's logits of the draft tokens only: a softmax over them IS the
    renormalised distribution, so the full vocabulary is never formed.
    """
    return target_logits.softmax(-1)


def mean_of_valid(per_row: Tensor, count: int) -> Tensor:
    """Sum of the rows over the number of valid ones: padding must not dilute the loss."""
    return per_row.sum() / max(count, 1)


class _SoftCrossEntropy(torch.autograd.Function):
    """logsumexp(z) - <p, z>, whose gradient softmax(z) - p is formed once, in the forward pass.

    Autograd of the plain formula walks the [M, Vd] matrix five times; this walks it three times.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits: Tensor, target_probs: Tensor) -> Tensor:
        log_norm = logits.logsumexp(-1)
        loss = log_norm - torch.linalg.vecdot(target_probs, logits)
        ctx.save_for_backward(logits, target_probs, log_norm)
        return loss

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        logits, target_probs, log_norm = ctx.saved_tensors  # type: ignore[attr-defined]
        probs = (logits - log_norm.unsqueeze(-1)).exp_()
        return probs.sub_(target_probs).mul_(grads[0].unsqueeze(-1)), None
