"""A head and its loss in one, a chunk of rows at a time: the [rows, vocabulary] matrix is never whole.

The loss is a weighted sum over rows, so its gradient in the features and in the head is known as soon as a
chunk's logits are: both are formed in the forward pass and only scaled in the backward pass. Nothing is
computed twice, and what stays alive is [R, H] and one [Vd, H].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Logits alive at a time: 16 MiB in fp32.
_CHUNK_LOGITS = 1 << 22

# (logits of rows begin..end, begin, end) -> loss of each row, and whether its best guess was right.
RowLoss = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


def head_loss(features: Tensor, head: Tensor, weights: Tensor, row_loss: RowLoss) -> tuple[Tensor, Tensor, Tensor]:
    """sum_r weights[r] * row_loss(features[r] @ head.T).

    features: [R, H], after the final norm.  head: [Vd, H].  weights: [R].
    Returns the sum (a scalar with gradient), each row's own loss [R] and its hits [R] bool, both detached.
    """
    return _HeadLoss.apply(features, head, weights, row_loss)


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
        width = max(1, _CHUNK_LOGITS // len(head))
        for begin in range(0, len(rows), width):
            end = min(begin + width, len(rows))
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


def _work_dtype(features: Tensor) -> torch.dtype:
    """The dtype of the products: autocast's where it is on."""
    kind = features.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features.dtype
