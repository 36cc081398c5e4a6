"""A head and its loss in one, a chunk of rows at a time: the [rows, vocabulary] matrix is never whole.

The loss is a weighted sum over rows, so its gradient in the features and in the head is known as soon as a
chunk's logits are: both are formed in the forward pass and only scaled in the backward pass. Nothing is
computed twice, and what stays alive is [R, H] and one [Vd, H].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Rows whose logits are alive at a time: enough for a fast product, few enough for the logits of a reduced vocabulary
# to stay in a CPU's cache (4096 tokens: 4 MiB in fp32), where they are walked several times.
_CHUNK_ROWS = 256

# (logits of rows begin..end, begin, end) -> loss of each row, and whether its best guess was right.
RowLoss = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


def head_loss(features: Tensor, head: Tensor, weights: Tensor, row_loss: RowLoss) -> tuple[Tensor, Tensor, Tensor]:
    """sum_r weights[r] * row_loss(features[r] @ head.T).

    features: [R, H], after the final norm.  head: [Vd, H].  weights: [R].
    Returns the sum (a scalar with gradient), each row's own loss [R] and its hits [R] bool, both detached.
    """
    return _HeadLoss.apply(features, head, weights, row_loss)


def label_loss(features: Tensor, head: Tensor, weights: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`head_loss` of the cross-entropy against labels [R], for a frozen head, with the fewest walks over the logits:
    they become their exponentials in place, and what scales a whole row is applied after the product."""
    return _LabelLoss.apply(features, head, weights, labels)


class _LabelLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, features: Tensor, head: Tensor, weights: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = _work_dtype(features)
        rows, right = features.to(work), head.detach().to(work)
        grad = torch.empty_like(rows)
        losses, hits = weights.new_empty(len(rows)), torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        for begin, end in _chunks(len(rows)):
            logits = (rows[begin:end] @ right.T).to(weights.dtype)
            top = logits.amax(-1, keepdim=True)
            wanted = logits.gather(-1, labels[begin:end, None])
            exponents = logits.sub_(top).exp_()
            total = exponents.sum(-1, keepdim=True)
            losses[begin:end] = (total.log() + top - wanted).squeeze(-1)
            hits[begin:end] = (wanted == top).squeeze(-1)
            # total * (softmax - label), with the label taken off before a narrow dtype rounds it.
            exponents.scatter_add_(-1, labels[begin:end, None], -total)
            grad[begin:end] = (exponents.to(work) @ right) * (weights[begin:end, None] / total)
        ctx.save_for_backward(grad.to(features.dtype))
        ctx.mark_non_differentiable(losses, hits)
        return (losses * weights).sum(), losses, hits

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * grads[0], None, None, None


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, features: Tensor, head: Tensor, weights: Tensor, row_loss: RowLoss
    ) -> tuple[Tensor, Tensor, Tensor]:
        learns = head.requires_grad
        work = _work_dtype(features)
        rows, right = features.to(work), head.detach().to(work)
        grad_features = torch.empty_like(rows)
        grad_head = torch.zeros_like(head) if learns else head.new_empty(0)
        losses, hits = weights.new_empty(len(rows)), torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        for begin, end in _chunks(len(rows)):
            logits = (rows[begin:end] @ right.T).to(weights.dtype)
            with torch.enable_grad():
                logits.requires_grad_()
                chunk, hits[begin:end] = row_loss(logits, begin, end)
                (grad,) = torch.autograd.grad((chunk * weights[begin:end]).sum(), logits)
            losses[begin:end] = chunk.detach()
            grad = grad.to(work)
            torch.mm(grad, right, out=grad_features[begin:end])
            if learns:
                grad_head += grad.T @ rows[begin:end]
        ctx.save_for_backward(grad_features.to(features.dtype), grad_head)
        ctx.mark_non_differentiable(losses, hits)
        return (losses * weights).sum(), losses, hits

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grad_features, grad_head = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad_features * grads[0], grad_head * grads[0] if len(grad_head) else None, None, None


def _chunks(rows: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, rows, _CHUNK_ROWS):
        yield begin, min(begin + _CHUNK_ROWS, rows)


def _work_dtype(features: Tensor) -> torch.dtype:
    """The dtype of the products: autocast's where it is on."""
    kind = features.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features.dtype
