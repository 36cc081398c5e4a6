"""A drafter in training, spread over processes by torch's FSDP2.

    between steps    each process holds its rows of every weight, average and AdamW moment (DTensors)
    in a step        the weights are gathered once and are plain tensors, so an objective may read them piece by piece
    after it         one reduce-scatter sums the gradients; each process keeps its rows

A drafter is one layer (EAGLE) or a few (DFlash), so gathering it whole for a step costs little beside activations
and logits: what is saved is what stays, as in ZeRO-2 (arXiv 1910.02054). FSDP2 would average gradients, but a loss
here is already divided by what all processes' batches weigh, so they are summed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from draftloop.drafters.drafter import Drafter
from draftloop.drafters.spread import Spread


class Sharded(Spread):
    """Shards `drafter` in place over the mesh's one dimension: its parameters are DTensors from now on."""

    def __init__(self, drafter: Drafter, mesh: DeviceMesh) -> None:
        self._step = _Step(drafter)
        sharded: FSDPModule = fully_shard(self._step, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        # Gloo knows no scaled sum.
        sharded.set_force_sum_reduction_for_comms(True)
        # A process whose batches reach a weight not at all must bring zeros, or the others wait for it.
        sharded.set_reduce_scatter_unused_params(True)

    def accumulate(self, backward: Callable[[], None]) -> None:
        ticket = torch.zeros((), requires_grad=True)
        self._step(ticket, backward).backward()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def own_rows(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def laid_like(self, full: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return full
        return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


class _Step(nn.Module):
    """FSDP2 gathers before a forward and reduces in its output's backward: so the whole step is one forward. The
    drafter's own calls lie inside and pass no hook."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, ticket: Tensor, backward: Callable[[], None]) -> Tensor:
        backward()
        return ticket.clone()
