"""Training objectives: small pure functions over rows that are already selected (no padding inside).

Each maps logits [M, Vd] and what teaches them to one loss a row, [M]. p is the target's distribution, q the
drafter's.

    soft_cross_entropy   -sum p log q            the papers' choice; mass-covering
    greedy_cross_entropy -log q(argmax p)        the target's one best token
    forward_kl           sum p log(p/q)          the same gradient; 0 at the optimum
    reverse_kl           sum q log(q/p)          mode-seeking
    acceptance_loss      1 - sum min(p, q)       one minus the chance that a draft sampled from q is accepted
    log_acceptance_loss  -log sum min(p, q)      the same optimum, steeper where acceptance is low
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.core.config import Divergence


def soft_cross_entropy(logits: Tensor, target_probs: Tensor) -> Tensor:
    """Per-row cross-entropy against a distribution.

    logits: [M, Vd].  target_probs: [M, Vd], rows sum to one (see `draft_distribution`).  Returns [M].
    """
    return _SoftCrossEntropy.apply(logits, target_probs)


def hard_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Per-row cross-entropy against draft ids. logits: [M, Vd].  labels: [M] int64.  Returns [M]."""
    return F.cross_entropy(logits, labels, reduction="none")


def greedy_cross_entropy(logits: Tensor, target_probs: Tensor) -> Tensor:
    """Cross-entropy against the target's best token. Shapes as `soft_cross_entropy`."""
    return hard_cross_entropy(logits, target_probs.argmax(-1))


def forward_kl(logits: Tensor, target_probs: Tensor) -> Tensor:
    """KL(p || q) a row: the soft cross-entropy less the target's entropy. Shapes as `soft_cross_entropy`."""
    return soft_cross_entropy(logits, target_probs) + torch.special.xlogy(target_probs, target_probs).sum(-1)


def reverse_kl(logits: Tensor, target_probs: Tensor) -> Tensor:
    """KL(q || p) a row. Shapes as `soft_cross_entropy`; a p of 0 counts as the smallest normal number."""
    log_q = logits.log_softmax(-1)
    log_p = target_probs.clamp(min=torch.finfo(target_probs.dtype).tiny).log()
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def acceptance(logits: Tensor, target_probs: Tensor) -> Tensor:
    """sum_x min(p(x), q(x)): the chance that one draft sampled from q survives verification. Returns [M]."""
    return torch.minimum(logits.softmax(-1), target_probs).sum(-1)


def acceptance_loss(logits: Tensor, target_probs: Tensor) -> Tensor:
    """The likelihood-of-acceptance (LK) loss, total-variation form: 1 - sum min(p, q)."""
    return 1.0 - acceptance(logits, target_probs)


def log_acceptance_loss(logits: Tensor, target_probs: Tensor) -> Tensor:
    """The LK loss in log form, -log sum min(p, q); its gradient is the other's over the acceptance."""
    return -acceptance(logits, target_probs).log()


def unlikelihood(logits: Tensor, rejected: Tensor, target_probs: Tensor) -> Tensor:
    """Learn from a draft that serving refused: -(1 - p(x)) log(1 - q(x)) for the refused token x.

    Greedy verification refuses tokens the target nearly said; (1 - p) leaves those alone.
    logits, target_probs: [M, Vd].  rejected: [M] int64 draft ids.  Returns [M].
    """
    log_norm = logits.logsumexp(-1)
    others = logits.scatter(-1, rejected.unsqueeze(-1), -torch.inf).logsumexp(-1)
    wrong = 1.0 - target_probs.gather(-1, rejected.unsqueeze(-1)).squeeze(-1)
    return wrong * (log_norm - others)


def forgetting_guard(logits: Tensor, earlier_logits: Tensor) -> Tensor:
    """On replayed rows: KL from what an earlier drafter said to what this one says. Both [M, Vd]; returns [M]."""
    return forward_kl(logits, earlier_logits.softmax(-1))


DIVERGENCES: dict[Divergence, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": soft_cross_entropy,
    "hard-cross-entropy": greedy_cross_entropy,
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "acceptance": acceptance_loss,
    "log-acceptance": log_acceptance_loss,
}


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
    """logsumexp(z) - <p, z>, whose gradient softmax(z) - p is formed once, in the backward pass.

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
